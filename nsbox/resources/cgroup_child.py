"""The groups of one command, below those of its sandbox: a part of the limits, an end for its whole tree at once, and
its own figures.

A group of a command without limits of its own is used again for the next one. A group that was removed stays in the
kernel, and counts against the sandbox, as long as memory is charged to it, and a file that a command has written is
such memory: a new group for each command would fill up the sandbox with the remains of old ones.
"""

import itertools
import os
import time

from nsbox.resources import cgroup_fs as fs
from nsbox.resources import cgroup_v1 as v1
from nsbox.resources import cgroup_v2 as v2
from nsbox.resources.cgroup import RELEASE_S, Cgroup, Event, Group
from nsbox.resources.cgroup_nest import COUNTERS, Below, Wanted

_ALWAYS = frozenset(("memory", "cpuacct", "freezer"))  #: v1: what a group without limits is for
_LIMITED = _ALWAYS | {"pids", "cpu"}
_ANY = Wanted(None, None, None)
_number = itertools.count(1)


class Child(Cgroup):
    """The groups of a command. ``wanted``: its own limits, or None. Raises HostError, OSError."""

    def __init__(self, parent: Cgroup, wanted: Wanted | None) -> None:
        self.limited = wanted is not None
        self._before = dict[str, int]()  #: the counters as they were when the group was last used
        self._last = dict[str, int]()
        self._resets = self._no_peak = False  #: whether the peak counts from the last ``again`` on, or cannot
        name, groups = f"c{next(_number)}", list[Group]()
        try:
            for above in parent._groups:
                if isinstance(above, v2.Group):
                    groups.append(v2.Group(Below(above), name, above.controllers))
                elif above.controllers & (_LIMITED if wanted else _ALWAYS):
                    groups.append(v1.Group(Below(above), name, above.controllers))
                else:
                    continue
                groups[-1].set(wanted or _ANY, fresh=True)
                if isinstance(above, v2.Group) and "memory" in above.controllers:
                    groups[-1].write("memory.oom.group", 1, optional=True)
        except BaseException:
            _remove(groups, 0)
            raise
        super().__init__(parent._owner, wanted or _ANY, groups, joins=False)

    def joins(self) -> list[int]:
        """Descriptors to which a process writes "0" to move into the groups; the caller closes them. Raises OSError."""
        found: list[int] = []
        try:
            for group in self._groups:
                name = "tasks" if isinstance(group, v1.Group) else "cgroup.procs"
                found.append(os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=group.fd))
        except BaseException:
            for fd in found:
                os.close(fd)
            raise
        return found

    def members(self) -> list[int]:
        """The processes in it, by host pid, the dying ones too."""
        procs = fs.read_at(self._groups[0].fd, "cgroup.procs") if self._groups else None
        return [int(pid) for pid in (procs or "").split()]

    def again(self) -> None:
        """It is going to be used for another command: count from here."""
        self._before = dict(self._last)
        for group in self._groups:
            if "memory" in group.controllers:
                self._reset_peak(group)

    def _reset_peak(self, group: Group) -> None:
        self._before.pop("memory_peak_bytes", None)
        name = "memory.peak" if isinstance(group, v2.Group) else "memory.max_usage_in_bytes"
        try:
            if not self._resets:
                group.shut(name)
            self._resets = True
            fd = group.open(name, os.O_RDWR)
            os.pwrite(fd, b"0", 0)  # of v2 since Linux 6.12, and for this descriptor alone
            self._before["memory_peak_bytes"] = int(os.pread(fd, 32, 0))  # what is in use now
        except OSError:
            self._no_peak = True

    def counters(self, *, pressure: bool = True, times: bool = True) -> dict[str, int | None]:
        """As ``Cgroup.counters``, of this command alone; of a group without limits only what is cheap."""
        if self.limited:
            return super().counters(pressure=pressure, times=times)
        found: dict[str, int | None] = dict.fromkeys(COUNTERS)
        for group in self._groups:
            found |= _of_v2(group) if isinstance(group, v2.Group) else _of_v1(group)
        if self._no_peak:  # it would be that of all commands that have used the group
            found["memory_peak_bytes"] = None
        self._last = {name: value for name, value in found.items() if value is not None}
        return found | {name: max(0, value - self._before.get(name, 0)) for name, value in self._last.items()}

    def cpu_usage_us(self) -> int | None:
        """CPU time of the command, in microseconds."""
        return super().cpu_usage_us() if self.limited else self.counters(pressure=False)["cpu_usage_us"]

    def event_fds(self) -> list[Event]:
        """As ``Cgroup.event_fds``; none where there are no limits of its own."""
        return super().event_fds() if self.limited else []

    def release(self, timeout_s: float = RELEASE_S) -> bool:
        """Remove the groups; what is not empty in time goes with the sandbox. Idempotent, never raises."""
        groups, self._groups = self._groups, []
        self._v2 = self._clock = None
        return _remove(groups, timeout_s)

    def close(self) -> None:
        """Close the descriptors; the groups go with the sandbox."""
        for group in self._groups:
            group.close()


def _remove(groups: list[Group], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    for group in groups:
        group.close()
    left = [group for group in groups if not group.nest.remove(group.name, deadline)]
    return not left


def _of_v1(group: v1.Group) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    if "memory" in group.controllers:
        found["oom_kills"] = fs.flat(group.text("memory.oom_control")).get("oom_kill")
        found["memory_peak_bytes"] = group.number("memory.max_usage_in_bytes")
    if "cpuacct" in group.controllers:
        found["cpu_usage_us"] = (group.number("cpuacct.usage") or 0) // 1000
    return found


def _of_v2(group: v2.Group) -> dict[str, int | None]:
    stat = fs.flat(group.text("cpu.stat"))
    found = {f"cpu_{name}_us": stat.get(f"{name}_usec") for name in ("usage", "user", "system")}
    if "memory" in group.controllers:
        found["oom_kills"] = fs.flat(group.text("memory.events")).get("oom_kill")
        found["memory_peak_bytes"] = group.number("memory.peak")
    return found
