"""Holds the limits that the kernel does not hold by itself, and tells which were touched.

One object per sandbox, driven by the supervisor's loop: it says when it next wants to look, looks, and answers the
limit that has been exceeded. What costs (walking processes, proportional sizes) is done only as often as it can matter:
a limit on processor time cannot be reached sooner than the rest of it divided by the number of processors."""

from __future__ import annotations

import os
import time

from nsbox import watch
from nsbox._native import lib
from nsbox.light import TYPE_CHECKING, signal
from nsbox.spec import Limits

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from nsbox.handle import Handle
    from nsbox.resources.cgroup import Cgroup

MEMORY_PERIOD = 0.05  #: seconds between two looks at memory where it is watched
DISK_PERIOD = 1.0  #: the longest; a small tree is looked at more often
CPU_PERIOD = 0.02  #: seconds; the shortest time between two looks at processor time
FIRST_LOOK = 0.2  #: seconds after the start of a command in a sandbox that stays
START_S = 5.0  #: seconds that a command with limits that are looked at gets to tell which processes are its own
BURST = 0.02  #: seconds of processor time that may be used ahead of one's share


class Enforcer:
    """The limits of one sandbox while it runs."""

    def __init__(self, limits: Limits, watch_for: Collection[str], handle: Handle, cgroup: Cgroup | None) -> None:
        """``watch_for``: of memory, pids, cpus, cpu_time, disk, those that are looked at here."""
        self.hits: dict[str, dict[str, Any]] = {}
        self._limits, self._watch, self._handle, self._cgroup = limits, watch_for, handle, cgroup
        self._events = {fd: (kind, events) for fd, events, kind in cgroup.event_fds()} if cgroup else {}
        self._processors = len(os.sched_getaffinity(0))
        self._oom_until = 0.0
        self._stopped_until: float | None = None
        # What was free beside a scratch directory: see _scratch.
        self._free = watch.free_space(handle.scratch.fd) if handle.scratch else 0
        self._next: dict[str, float] = {}
        # What is alone in a sandbox, but not first, is charged from its first look on.
        self.begin(None if handle.is_command and not handle.is_part else 0.0)

    def begin(self, used: float | None) -> None:
        """Count from now on. ``used``: processor time until now, in seconds; None: until the first look."""
        now = time.monotonic()
        # What was used before is no debt.
        self._began, self._used = now - (used or 0.0) / (self._limits.cpus or 1.0), 0.0
        self._base: float | None = used
        self._next.clear()
        for name, first in (("memory", 0.02), ("cpus", CPU_PERIOD), ("disk", 0.05)):
            if name in self._watch:
                self._next[name] = now + first
        if "pids" in self._watch and ("memory" not in self._watch or self._handle.is_part):
            self._next["pids"] = now + MEMORY_PERIOD
        if self._watch and self._handle.is_part and self._cgroup is None:
            self._next["start"] = now + START_S
        if "cpu_time" in self._watch:
            # Most commands in a sandbox that stays are over before.
            self._next["cpu_time"] = now + (FIRST_LOOK if self._handle.is_command else self._until_cpu_time(0.0))

    def interests(self) -> dict[int, int]:
        """Descriptor → poll events of the cgroup's own news."""
        return {fd: events for fd, (_, events) in self._events.items()}

    def next_time(self) -> float | None:
        """When ``on_time`` wants to be called (time.monotonic())."""
        times = [*self._next.values(), *((self._stopped_until,) if self._stopped_until else ())]
        return min(times) if times else None

    def hit(self, limit: str, value: float | None, count: int = 1) -> None:
        """Note that a limit was touched; the first time counts as its time."""
        entry = self.hits.setdefault(limit, {"limit": limit, "value": value, "count": 0, "first_at": time.time()})
        entry["count"] = max(entry["count"], count)

    def on_event(self, fd: int) -> str | None:
        """News from the cgroup: the limit that has ended the run, if it has."""
        kind = self._events[fd][0]
        assert self._cgroup is not None
        self._cgroup.drain(fd)
        counters = self._cgroup.counters(pressure=False)
        if kind == "pids" and counters["pids_events"]:
            self.hit("pids", self._limits.pids, int(counters["pids_events"]))
        if kind != "memory":
            return None
        # Version 1 announces that memory is out before it kills and counts: look again, for as long as that may take.
        now = time.monotonic()
        self._oom_until = now + 2
        return "memory" if self._look_at_oom(now) else None

    def on_time(self, now: float) -> str | None:
        """Look at what is due: the limit that has been exceeded, if one has."""
        if self._stopped_until is not None and now >= self._stopped_until:
            self._stopped_until = None
            self._handle.tell(lib.NSB_MSG_SIGNAL, signal.SIGCONT, 1)
        due = [name for name, at in self._next.items() if now >= at]
        for name in due:
            if getattr(self, f"_look_at_{name}")(now):
                return {"oom": "memory", "start": "error"}.get(name, name)  # timers that are no limits
        return None

    def _look_at_start(self, _now: float) -> bool:
        """Whether what would tell, a process of the payload's own user, was stopped by it: then no limit would hold."""
        self._next.pop("start", None)
        return not self._handle.payload

    def _look_at_oom(self, now: float) -> bool:
        assert self._cgroup is not None
        kills = self._cgroup.counters(pressure=False)["oom_kills"]
        self._next.pop("oom", None)
        if kills:
            self.hit("memory", self._limits.memory, int(kills))
        elif now < self._oom_until:
            self._next["oom"] = now + 0.005
        return bool(kills)

    def _until_cpu_time(self, used: float) -> float:
        rate = min(self._processors, self._limits.cpus or self._processors)
        return max(CPU_PERIOD, ((self._limits.cpu_time or 0.0) - used) / max(1.0, rate))

    def used(self) -> float:
        """Processor time of all that ever ran inside, in seconds."""
        measured = self._cgroup.cpu_usage_us() if self._cgroup else None
        return measured / 1e6 if measured is not None else watch.sample(*self._handle.roots).cpu_s

    def _look_at_cpu_time(self, now: float) -> bool:
        now_used = self.used()
        if self._base is None:
            self._base = now_used
        self._used = used = max(self._used, now_used - self._base)
        self._next["cpu_time"] = now + self._until_cpu_time(used)
        if self._limits.cpu_time is None or used < self._limits.cpu_time:
            return False
        self.hit("cpu_time", self._limits.cpu_time)
        return True

    def _look_at_cpus(self, now: float) -> bool:
        """Stop everything inside when it is ahead of its share, until it is not: a duty cycle for shares of one."""
        self._next["cpus"] = now + CPU_PERIOD
        share = self._limits.cpus or 0.0
        self._used = used = max(self._used, self.used())
        ahead = used - (now - self._began) * share
        if ahead < -BURST:
            # What was not used is not saved up: a sandbox that slept may not run at full speed later.
            self._began = now - used / share
        if ahead > BURST and self._stopped_until is None:
            self.hit("cpu", share, self.hits.get("cpu", {}).get("count", 0) + 1)
            self._stopped_until = now + ahead / share
            self._handle.tell(lib.NSB_MSG_SIGNAL, signal.SIGSTOP, 1)
        return False

    def _look_at_pids(self, now: float, threads: int | None = None) -> bool:
        """RLIMIT_NPROC refuses and says nothing of it: being at the limit is all that can be seen. It knows of no
        single command, which is ended when it is over its limit."""
        if threads is None:
            self._next["pids"] = now + MEMORY_PERIOD
            threads = watch.sample(*self._handle.roots).threads
        most = self._limits.pids
        if "pids" not in self._watch or most is None or threads <= most + self._handle.is_part:
            return False
        self.hit("pids", most)
        return self._handle.is_part

    def _look_at_memory(self, now: float) -> bool:
        self._next["memory"] = now + MEMORY_PERIOD
        limit = self._limits.memory or 0
        seen = watch.sample(*self._handle.roots)
        scratch = 0
        if not self._handle.is_part:
            self._look_at_pids(now, seen.threads)
            scratch = self._scratch()[0]
        hidden = watch.unmapped_memory(seen.processes)
        if seen.resident + scratch + hidden <= limit:
            return False
        if watch.proportional(seen.processes) + scratch + hidden <= limit:
            return False
        self.hit("memory", limit)
        return True

    def _look_at_disk(self, now: float) -> bool:
        began = time.monotonic()
        _, over = self._scratch(watch.removed_files(tuple(watch.processes(*self._handle.roots))))
        self._next["disk"] = now + min(DISK_PERIOD, 0.05 + 20 * (time.monotonic() - began))
        if over:
            self.hit("disk", self._limits.disk)
        return over

    def _scratch(self, removed: int = 0) -> tuple[int, bool]:
        """(bytes in the scratch file system, whether it is full, or a directory over the limit)."""
        if self._handle.scratch_fd < 0:
            return 0, False
        if "disk" in self._watch:
            used, whole = watch.tree_size(self._handle.scratch_fd)
            if not whole and self._free:
                # Others may write there as well, but a payload that hides what it writes has to bear with that.
                used = max(used, self._free - watch.free_space(self._handle.scratch_fd))
            return used + removed, self._limits.disk is not None and used + removed > self._limits.disk
        status = os.fstatvfs(self._handle.scratch_fd)
        full = status.f_blocks > 0 and (status.f_bfree == 0 or (status.f_files > 0 and status.f_ffree == 0))
        return (status.f_blocks - status.f_bfree) * status.f_frsize, full

    def conclude(self, usage: dict[str, float]) -> str | None:
        """After the end: complete ``usage`` and the hits from the kernel's counters; "memory" if that ended the run."""
        used, full = self._scratch()
        usage["disk_used_bytes"] = used
        if full:
            self.hit("disk", self._limits.disk)
        if self._cgroup is None:
            return None
        counters = self._cgroup.counters(times="cpu_user_s" not in usage)
        for name in ("cpu", "io", "memory"):
            waited = counters[f"pressure_{name}_us"]
            if waited is not None:
                usage[f"pressure_{name}_s"] = waited / 1e6
        for name in ("memory_peak_bytes", "pids_peak", "io_read_bytes", "io_write_bytes"):
            value = counters[name]
            if value is not None:
                # One process is init. Memory is what is charged here; pages that others had read before are not.
                usage[name] = max(0, value - 1) if name == "pids_peak" else value
        user, system = counters["cpu_user_us"], counters["cpu_system_us"]
        if user is not None and system is not None and "cpu_user_s" not in usage:
            usage["cpu_user_s"], usage["cpu_system_s"] = user / 1e6, system / 1e6
        if counters["pids_events"]:
            self.hit("pids", self._limits.pids, counters["pids_events"])
        if counters["cpu_throttled_count"]:
            self.hit("cpu", self._limits.cpus, counters["cpu_throttled_count"])
        if counters["oom_kills"]:
            self.hit("memory", self._limits.memory, counters["oom_kills"])
            return "memory"
        return None
