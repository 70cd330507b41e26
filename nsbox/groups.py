"""A cgroup for each command of a sandbox that stays: see ``nsbox.resources.cgroup_child``.

A watcher moves into its group as its first act. On cgroup v2 that takes the kernel 10 milliseconds when nobody has
moved for a while. So a watcher is made ahead there when a sandbox has been quiet: a fork of init that has moved
already, and waits for its command.
"""

import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from nsbox import janitor
from nsbox._native import lib
from nsbox.encode import Command, command_blob, waiting
from nsbox.errors import HostError, SandboxUnavailable
from nsbox.resources.cgroup import Cgroup, Wanted
from nsbox.resources.cgroup_child import Child

if TYPE_CHECKING:
    from nsbox.handle import Handle

QUIET_S = 0.02  #: without a new command; a move that comes sooner is a matter of microseconds
IDLE = 3  #: groups that are kept for other commands


class _Spare(NamedTuple):
    control: int
    group: Child

    def lives(self) -> bool:
        """Whether it can be used: an earlier command, which was the same user, may have killed or stopped it. One that
        has not come into its group yet counts as alive."""
        return all(_state(pid) not in "TtZX" for pid in self.group.members())


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            stat = file.read(512)
    except OSError:
        return "X"
    return chr(stat[stat.rfind(b")") + 2])


class Groups:
    """The groups of the commands of one sandbox. ``start`` is for one thread at a time, the rest for any."""

    def __init__(self, cgroup: Cgroup, box: "Handle") -> None:
        self._cgroup, self._box = cgroup, box
        self._idle: list[Child] = []
        self._kept: list[Child] = []  #: with processes that were asked to stay
        self._spare: _Spare | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._slow = cgroup.on_v2
        #: when ``make_ahead`` wants to be called (time.monotonic())
        self.ahead_at: float | None = time.monotonic()

    @property
    def waits(self) -> bool:
        """Whether a watcher waits for a command."""
        return self._spare is not None

    def start(self, what: Command, fds: Sequence[int], wanted: Wanted | None = None) -> tuple[int, Child]:
        """Have a command started in a group of its own: (the socket to its watcher, the group). ``wanted`` are limits
        of its own. Raises HostError, SandboxUnavailable."""
        self.ahead_at = time.monotonic() + QUIET_S if self._slow else None
        try:
            if wanted is None and (made := self._start_in_spare(what, fds)):
                return made
            group = (None if wanted else self._reuse()) or Child(self._cgroup, wanted)
            return self._ask(what, fds, group), group
        except OSError as error:
            if isinstance(error, HostError):
                raise
            raise HostError(
                f"cannot make a cgroup for a command: {error.strerror}", remedy="run: nsbox doctor", errno=error.errno
            ) from None

    def _start_in_spare(self, what: Command, fds: Sequence[int]) -> tuple[int, Child] | None:
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is None:
            return None
        if spare.lives():
            blob = command_blob(what)
            control = int(lib.nsb_run(spare.control, blob, len(blob), fds, len(fds)))
            if control >= 0:
                os.close(spare.control)
                return control, spare.group
        self._drop(spare)
        return None

    def _ask(self, what: Command, fds: Sequence[int], group: Child) -> int:
        """Have init fork a watcher that moves into the group. Raises SandboxUnavailable, OSError; then the group is
        gone."""
        joins: list[int] = []
        try:
            joins = group.joins()
            blob = command_blob(what._replace(n_join=len(joins)))
            all_fds = [*fds, *joins]
            with self._box.borrowed("control") as init:
                control = int(lib.nsb_run(init, blob, len(blob), all_fds, len(all_fds)))
            if control < 0:
                raise SandboxUnavailable(
                    f"the sandbox does not answer: {os.strerror(-control)}", remedy="start another"
                )
            return control
        except BaseException:
            group.release(0)
            raise
        finally:
            for fd in joins:
                os.close(fd)

    def _reuse(self) -> Child | None:
        with self._lock:
            idle, self._idle = self._idle, []
        found = next((group for group in idle if not group.members()), None)
        with self._lock:
            self._idle += [group for group in idle if group is not found]
        if found is not None:
            found.again()
        return found

    def make_ahead(self, now: float) -> None:
        """Make a group for the next command, and its watcher where that helps, if it is time to (``ahead_at``)."""
        if self.ahead_at is None or now < self.ahead_at:
            return
        self.ahead_at = None
        null = -1
        try:
            group = self._reuse() or Child(self._cgroup, None)
            if not self._slow:
                self.give_back(group, empty=True, kill=False)
                return
            null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            spare = _Spare(self._ask(waiting(), [null, null], group), group)
        except OSError:
            return  # the next command will say so
        finally:
            if null >= 0:
                os.close(null)
        with self._lock:
            if not self._closed and self._spare is None:
                self._spare = spare
                return
        os.close(spare.control)
        spare.group.close()

    def _drop(self, spare: _Spare) -> None:
        os.close(spare.control)
        self._remove(spare.group, kill=True)

    def give_back(self, group: Child, *, empty: bool, kill: bool) -> None:
        """A command is over. ``empty``: its watcher has said that nothing is left of it; else ``kill`` what is left,
        unless it was asked to stay."""
        done: list[Child] = []
        with self._lock:
            if self._closed:
                group.close()
                return
            if empty and not group.limited and len(self._idle) < IDLE:
                self._idle.append(group)
                return
            if not empty and not kill:
                done = [old for old in self._kept if not old.members()]
                self._kept = [old for old in self._kept if old not in done] + [group]
            else:
                done = [group]
        for old in done:
            self._remove(old, kill=kill and not empty)

    def _remove(self, group: Child, *, kill: bool) -> None:
        def job() -> None:
            if kill:
                group.kill()
            group.release()

        janitor.later(job)

    def close(self) -> None:
        """Close every descriptor; the groups go with the sandbox. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle, self._kept = self._idle + self._kept, [], []
            spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare.control)
            spare.group.close()
        for group in idle:
            group.close()
