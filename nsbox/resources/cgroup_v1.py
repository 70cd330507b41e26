"""cgroup v1: one hierarchy for each controller, or for some that are mounted together.

A process cannot be born in a v1 group that another chose. It writes "0" to ``tasks`` as its first act instead: one
thread that moves itself needs none of the locks that make moving another process take milliseconds.
"""

from __future__ import annotations

import errno
import os
import time

from nsbox.errors import HostError
from nsbox.light import TYPE_CHECKING, NamedTuple
from nsbox.resources import cgroup_fs as fs
from nsbox.resources.cgroup_nest import BaseGroup, Below, Nest, Wanted

if TYPE_CHECKING:
    from collections.abc import Mapping

PERIOD_US = 100_000
_UNLIMITED = -1
_PAGE = os.sysconf("SC_PAGE_SIZE")
_USED = frozenset(("memory", "pids", "cpu", "cpuacct", "freezer", "blkio"))
_FROZEN_WITHIN_S = 0.5
#: sysconf(SC_CLK_TCK) is what cpuacct.stat counts in
_TICK_US = 1_000_000 // os.sysconf("SC_CLK_TCK")


class Place(NamedTuple):
    """A hierarchy in which the caller may make groups, directly below ``base``."""

    base: str
    controllers: frozenset[str]


def find(mounts: list[fs.Mount], own: Mapping[str, str]) -> tuple[list[Place], dict[str, str]]:
    """Where groups can be made, and for each controller without such a place the reason.

    The root of a hierarchy where it may be written, so that nobody else's limits or processes are touched; else the
    caller's own group, which an administrator may have given to it.
    """
    places: list[Place] = []
    refusals: dict[str, str] = {}
    for mount in mounts:
        controllers = mount.controllers & _USED
        if mount.version != 1 or not controllers or any(controllers & place.controllers for place in places):
            continue
        inside = mount.directory(next((own[name] for name in controllers if name in own), "/.."))
        candidates = [mount.point] if inside in (None, mount.point) else [mount.point, str(inside)]
        base = next((path for path in candidates if fs.writable(path)), None)
        if base:
            places.append(Place(base, controllers))
        else:
            refusals |= dict.fromkeys(controllers, f"cgroup v1: {' and '.join(candidates)} cannot be written")
    return places, refusals


class Group(BaseGroup):
    """A group for one sandbox in one v1 hierarchy."""

    def __init__(self, nest: Nest | Below, name: str, controllers: frozenset[str]) -> None:
        super().__init__(nest, name)
        self.controllers = controllers

    def set(self, wanted: Wanted, fresh: bool = False) -> None:
        """Write the limits. ``fresh``: the group is new, so what is unlimited is so already."""
        if "memory" in self.controllers and not (fresh and wanted.memory is None):
            self._set_memory(_UNLIMITED if wanted.memory is None else wanted.memory)
        if "pids" in self.controllers and not (fresh and wanted.pids is None):
            self.write("pids.max", "max" if wanted.pids is None else wanted.pids)
        if "cpu" in self.controllers and not (fresh and wanted.cpus is None):
            self.write("cpu.cfs_quota_us", _UNLIMITED if wanted.cpus is None else quota_us(wanted.cpus))
        if "blkio" in self.controllers:
            for one in wanted.io_max:
                for name, value in zip(("read_bps", "write_bps", "read_iops", "write_iops"), one[1:], strict=True):
                    if value is not None:
                        self.write(f"blkio.throttle.{name}_device", f"{one.device} {value}")

    def _set_memory(self, limit: int) -> None:
        plain, both = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
        values = [(plain, limit)]
        if fs.read_at(self.fd, both) is not None:
            # One page of swap: the kernel looks at the sum first, and does not count it when an equal sum is reached.
            values.append((both, limit if limit == _UNLIMITED else limit + _PAGE))
        elif limit != _UNLIMITED:
            # Without swap accounting, at least nothing of the group is swapped by its own choice.
            self.write("memory.swappiness", 0, optional=True)
        try:
            for name, value in values:
                self.write(name, value)
        except HostError as error:
            # The limit may never exceed that of the sum, which is lowered after it and raised before it.
            if error.errno != errno.EINVAL or len(values) < 2:
                raise
            for name, value in reversed(values):
                self.write(name, value)

    def counters(self, *, pressure: bool = True, times: bool = True) -> dict[str, int | None]:
        """What this hierarchy knows; of ``pressure`` it knows nothing. Processor time only with ``times``."""
        found: dict[str, int | None] = {}
        if "memory" in self.controllers:
            found["memory_peak_bytes"] = self.number("memory.max_usage_in_bytes")
            # oom_kill came with Linux 4.13
            found["oom_kills"] = fs.flat(self.text("memory.oom_control")).get("oom_kill")
        if "pids" in self.controllers:
            found["pids_peak"] = self.number("pids.peak")  # Linux 6.11
            found["pids_events"] = fs.flat(self.text("pids.events")).get("max")
        if "cpu" in self.controllers:
            stat = fs.flat(self.text("cpu.stat"))
            found["cpu_throttled_count"] = stat.get("nr_throttled")
            found["cpu_throttled_us"] = stat["throttled_time"] // 1000 if "throttled_time" in stat else None
        if times and "cpuacct" in self.controllers:
            found |= self._cpu_time()
        if "blkio" in self.controllers:
            text = self.text("blkio.throttle.io_service_bytes_recursive")
            rows = [row for row in (line.split() for line in (text or "").splitlines()) if len(row) == 3]
            for name, kind in (("io_read_bytes", "Read"), ("io_write_bytes", "Write")):
                found[name] = sum(int(row[2]) for row in rows if row[1] == kind) if text is not None else None
        return found

    def _cpu_time(self) -> dict[str, int | None]:
        stat = fs.flat(self.text("cpuacct.stat"))
        found: dict[str, int | None] = {"cpu_usage_us": self.cpu_usage_us()}
        for name, kind in (("cpu_user_us", "user"), ("cpu_system_us", "system")):
            found[name] = stat[kind] * _TICK_US if kind in stat else None
        return found

    def cpu_usage_us(self) -> int:
        """CPU time of all processes ever in the group, in microseconds; one system call. Raises OSError."""
        return int(os.pread(self.open("cpuacct.usage"), 32, 0)) // 1000

    def freeze(self, frozen: bool) -> bool:
        """Stop or continue everything in the group (freezer); whether it has come to pass in time."""
        goal = "FROZEN" if frozen else "THAWED"
        deadline = time.monotonic() + _FROZEN_WITHIN_S
        while True:
            # Writing again catches processes that were forked while the first round went on.
            self.write("freezer.state", goal)
            if (fs.read_at(self.fd, "freezer.state") or "").strip() == goal:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)

    def kill(self, timeout_s: float) -> bool:
        """SIGKILL everything; with the freezer nothing can fork away meanwhile. Whether the group is empty."""
        deadline = time.monotonic() + timeout_s
        if "freezer" not in self.controllers:
            return fs.kill_members(self.fd, deadline)
        self.freeze(True)
        try:
            # A frozen process takes the signal when it thaws.
            fs.kill_members(self.fd, time.monotonic())
        finally:
            self.freeze(False)
        return fs.kill_members(self.fd, deadline)

    def oom_event(self) -> int:
        """An eventfd(2) that counts the times the group ran out of memory, -1 where there is none."""
        if "oom" in self.files:
            return self.files["oom"]
        try:
            event = self.files["oom"] = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            control = self.open("memory.oom_control")
            fs.write_at(self.fd, "cgroup.event_control", f"{event} {control}")
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL, errno.EACCES, errno.EPERM):
                raise
            self.shut("oom")
            return -1
        return event


def quota_us(cpus: float) -> int:
    """The CPU time that ``cpus`` processors give in one period; the kernel takes no less than a millisecond."""
    return max(1000, round(cpus * PERIOD_US))
