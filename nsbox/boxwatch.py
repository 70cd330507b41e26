"""Holds what has to be looked at in a sandbox that stays, whether anybody waits for a command in it or not: limits that
no cgroup holds, and the time limits of commands.

Whoever waits for a command takes a look when it is due; while nobody does, the alarm's thread, one for all sandboxes.
A sandbox in which nothing runs can use no more than it has: nobody looks at it.
"""

import threading
import time
import weakref
from typing import TYPE_CHECKING

from nsbox import alarm, watch
from nsbox.enforce import Enforcer

if TYPE_CHECKING:
    from nsbox.commands import Commands
    from nsbox.handle import Handle

LAYERS = frozenset(("memory", "pids", "cpus", "disk"))
_AGAIN_S = 0.05
_SLACK_S = 0.005  #: an alarm that is so much too late is not worth another


class BoxWatch:
    """Looks at one sandbox and its commands."""

    def __init__(self, handle: "Handle", box: "Commands") -> None:
        self._handle, self._box = handle, weakref.ref(box)  # a box that nobody has any more must not be kept by this
        layers = handle.watch_for & LAYERS
        self._enforcer = Enforcer(handle.limits, layers, handle, None) if layers else None
        self._looking = threading.Lock()
        self._ticking = threading.RLock()
        self._alarm, self._at = 0, 0.0
        self._ended = False

    def next_time(self) -> float | None:
        """When ``look`` wants to be called (time.monotonic())."""
        return self._enforcer.next_time() if self._enforcer else None

    def _ahead(self) -> float | None:
        return self._handle.groups.ahead_at if self._handle.groups else None

    def look(self, now: float) -> None:
        """Look at the limits of the whole sandbox that are due, unless another thread does so just now."""
        exceeded = None
        if self._enforcer is not None and self._looking.acquire(blocking=False):
            try:
                exceeded = None if self._ended else self._enforcer.on_time(now)
            finally:
                self._looking.release()
        box = self._box()
        if exceeded is not None and self._enforcer is not None and box is not None:
            box.exceeded(exceeded, self._enforcer.hits[exceeded]["value"])

    def arm(self, at: float | None) -> None:
        """Look at ``at`` (time.monotonic()), or before: something runs for which perhaps nobody waits."""
        times = [when for when in (at, self.next_time(), self._ahead()) if when is not None]
        if not times:
            return
        with self._ticking:
            if self._ended or (self._alarm and self._at <= min(times) + _SLACK_S):
                return
            if self._alarm:
                alarm.cancel(self._alarm)
            self._at = min(times)
            self._alarm = alarm.at(self._at, self._tick)

    def _waiting(self) -> bool:
        return self._handle.groups is not None and self._handle.groups.waits

    def _tick(self) -> None:
        box = self._box()
        with self._ticking:
            self._alarm = 0
            if self._ended or box is None:
                return
            now = time.monotonic()
            try:
                self.look(now)
                if self._handle.groups is not None:
                    self._handle.groups.make_ahead(now)
                times = [process.tick(now) for process in box.running()]
            except Exception:
                # Of one that ended while it was looked at, say: an alarm drops what is raised, and nobody would look
                # again.
                times = [now + _AGAIN_S]
            at = min((when for when in (*times, self._ahead()) if when is not None), default=None)
            # Besides init there may be the watcher that waits for the next command.
            if at is not None or len(watch.processes(self._handle.pid)) > 1 + self._waiting():
                self.arm(at)

    def end(self) -> None:
        """Look no more; no look is under way when this returns."""
        with self._ticking, self._looking:
            self._ended = True
            if self._alarm:
                alarm.cancel(self._alarm)
            self._alarm = 0
