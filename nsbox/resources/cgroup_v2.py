"""cgroup v2: one tree for all controllers; a process is born in its group (CLONE_INTO_CGROUP).

A group that shares controllers out to its children may have no processes of its own, the real root excepted ("no
internal processes", cgroups(7)). So the base is the root of the host's tree, a group that has children with
controllers already, or the caller's own group once the caller has moved itself out of it into a leaf.
"""

from __future__ import annotations

import errno
import os
import time

from nsbox.errors import HostError
from nsbox.light import TYPE_CHECKING, NamedTuple
from nsbox.resources import cgroup_fs as fs
from nsbox.resources.cgroup_nest import BaseGroup, Below, Wanted
from nsbox.resources.cgroup_nest import Nest as BaseNest
from nsbox.resources.cgroup_v1 import PERIOD_US, quota_us

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

INIT = "init"  #: of a sandbox with groups below its own, where its pid 1 is
LEAF = "nsbox-self"  #: where the caller moves itself when it was the only one in its delegated group
_USED = frozenset(("cpu", "io", "memory", "pids"))
_FROZEN_WITHIN_S = 0.5


class Place(NamedTuple):
    """A group below which the caller may make its own."""

    base: str
    controllers: frozenset[str]
    move: bool  #: the caller has to leave ``base`` for a leaf first


def _words(path: str, name: str) -> list[str]:
    return fs.read_text(f"{path}/{name}").split()


def _name_of(pid: str) -> str:
    return fs.read_text(f"/proc/{pid}/comm").strip() or "of another pid namespace"


def _limited(path: str) -> str:
    """The first limit of a group that must not be evaded by going above it, "" if it has none."""
    for name in ("memory.max", "cpu.max"):
        if (words := _words(path, name)) and words[0] != "max":
            return name
    return ""


class Refusal(NamedTuple):
    """Why there is no such group."""

    reason: str
    crowded: str = ""  #: the group that would do if others did not live in it


def find(mount: fs.Mount, own: str, ours: Collection[int]) -> Place | Refusal:
    """Where groups can be made, or why nowhere. ``own`` is the caller's group; ``ours`` are pids that may be moved."""
    # Only the real root has no cgroup.type: a container's is an ordinary group (cgroups(7)).
    if mount.root == "/" and not os.path.exists(mount.point + "/cgroup.type"):
        if fs.writable(mount.point) and fs.writable(mount.point + "/cgroup.subtree_control"):
            return Place(mount.point, _USED & {*_words(mount.point, "cgroup.controllers")}, False)
    path = mount.directory(own)
    if path is None:
        return Refusal(f"cgroup v2: the group {own} of this process does not show in {mount.point}")
    if os.path.basename(path) == LEAF:
        path = os.path.dirname(path)  # where this process, or the one that started it, came from
    bare: Place | None = None
    first: Refusal | None = None
    while True:
        found = _usable(path, ours)
        if isinstance(found, Place):
            if found.controllers:
                return found
            bare = bare or found  # good for killing and counting, unless there is better above
        else:
            first = first or found
        if limit := _limited(path):
            first = first and first._replace(reason=f"{first.reason}; going above {path} would evade its {limit}")
            break
        if path in (mount.point, "/"):
            break
        path = os.path.dirname(path)
    return bare or first or Refusal(f"cgroup v2: nothing can be made in {mount.point}")


def _usable(path: str, ours: Collection[int]) -> Place | Refusal:
    if not all(fs.writable(f"{path}/{name}") for name in ("", "cgroup.procs", "cgroup.subtree_control")):
        return Refusal(f"cgroup v2: {path} cannot be written")
    if fs.read_text(path + "/cgroup.type").strip() not in ("domain", ""):
        return Refusal(f"cgroup v2: {path} is of the threaded kind")
    controllers = _USED & {*_words(path, "cgroup.controllers")}
    processes = _words(path, "cgroup.procs")
    if _words(path, "cgroup.subtree_control") or not processes:
        return Place(path, controllers, False)
    others = [pid for pid in processes if int(pid) not in ours]
    if not others:
        return Place(path, controllers, True)
    return Refusal(
        f"cgroup v2: {path} has other processes in it (such as {others[0]}, {_name_of(others[0])}), so it cannot share"
        " its controllers out to groups below",
        crowded=path,
    )


_REMEDIES = {
    errno.EBUSY: "move the processes in that group into one below it",
    errno.EINVAL: "the cpu controller cannot be enabled while real-time processes run outside of the root group",
}


class Nest(BaseNest):
    """The owner's directory, with the controllers shared out on the way to it."""

    def __init__(self, place: Place, ours: Callable[[], Collection[int]]) -> None:
        super().__init__(place.base, self._share_out)
        self.place, self._ours = place, ours
        self.refused: dict[str, tuple[str, str]] = {}  #: controller → (why it could not be had after all, remedy)

    def _share_out(self, path: str) -> None:
        control = path + "/cgroup.subtree_control"
        missing = self.place.controllers - {*_words(path, "cgroup.subtree_control")} - self.refused.keys()
        if not missing:
            return
        if self.place.move and path == self.base:
            self._leave()
        for name in sorted(missing):  # one by one: a list is taken as a whole or not at all
            try:
                fs.write_at(None, control, "+" + name)
            except OSError as error:
                remedy = _REMEDIES.get(error.errno or 0, "see cgroups(7), or run: nsbox doctor")
                self.refused[name] = (f"cannot write '+{name}' to {control}: {error.strerror}", remedy)

    def _leave(self) -> None:
        leaf = f"{self.base}/{LEAF}"
        try:
            os.mkdir(leaf, 0o755)
        except FileExistsError:
            pass
        ours = self._ours()
        for pid in _words(self.base, "cgroup.procs"):
            if int(pid) in ours:
                fs.write_at(None, leaf + "/cgroup.procs", pid)


class Group(BaseGroup):
    """A group for one sandbox in the v2 tree, with limits for ``controllers``."""

    def __init__(self, nest: BaseNest | Below, name: str, controllers: frozenset[str]) -> None:
        super().__init__(nest, name)
        self.controllers = controllers
        self.leaf = -1  #: the directory of INIT

    def split(self) -> None:
        """Share the controllers out to groups below; from now on no process may be in this one. Raises OSError,
        HostError."""
        os.mkdir(INIT, 0o755, dir_fd=self.fd)
        self.leaf = os.open(INIT, os.O_PATH | fs.DIRECTORY, dir_fd=self.fd)
        if self.controllers:
            self.write("cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(self.controllers)))

    def close(self) -> None:
        super().close()
        if self.leaf >= 0:
            os.close(self.leaf)
        self.leaf = -1

    def set(self, wanted: Wanted, fresh: bool = False) -> None:
        """Write the limits. ``fresh``: the group is new, so what is unlimited is so already."""
        if "memory" in self.controllers and not (fresh and wanted.memory is None):
            limited = wanted.memory is not None
            self.write("memory.swap.max", 0 if limited else "max", optional=True)
            # Half a sandbox is of no use to anybody: when memory is out, all of it ends, or all of one command.
            self.write("memory.oom.group", int(limited and not wanted.nested), optional=True)
            self.write("memory.max", "max" if wanted.memory is None else wanted.memory)
        if "pids" in self.controllers and not (fresh and wanted.pids is None):
            self.write("pids.max", "max" if wanted.pids is None else wanted.pids)
        if "cpu" in self.controllers and not (fresh and wanted.cpus is None):
            quota = "max" if wanted.cpus is None else quota_us(wanted.cpus)
            self.write("cpu.max", f"{quota} {PERIOD_US}")
        if "io" in self.controllers:
            for one in wanted.io_max:
                pairs = zip(("rbps", "wbps", "riops", "wiops"), one[1:], strict=True)
                self.write("io.max", " ".join([one.device, *(f"{k}={'max' if v is None else v}" for k, v in pairs)]))

    def counters(self, *, pressure: bool = True, times: bool = True) -> dict[str, int | None]:
        """What this tree knows; the time processes waited for a resource is under ``pressure_*_us``. Processor time is
        surely there only with ``times``."""
        found: dict[str, int | None] = {}
        if "memory" in self.controllers:
            events = fs.flat(self.text("memory.events"))
            found["memory_peak_bytes"] = self.number("memory.peak")  # Linux 5.19
            found["oom_kills"] = events.get("oom_kill")
        if "pids" in self.controllers:
            found["pids_peak"] = self.number("pids.peak")  # Linux 6.11
            found["pids_events"] = fs.flat(self.text("pids.events")).get("max")
        stat = fs.flat(self.text("cpu.stat")) if times or "cpu" in self.controllers else {}
        for name in ("usage", "user", "system"):
            found[f"cpu_{name}_us"] = stat.get(f"{name}_usec")
        if "cpu" in self.controllers:
            found["cpu_throttled_count"], found["cpu_throttled_us"] = (
                stat.get("nr_throttled"),
                stat.get("throttled_usec"),
            )
        if "io" in self.controllers and (text := self.text("io.stat")) is not None:
            pairs = [pair.partition("=") for pair in text.split() if "=" in pair]
            found["io_read_bytes"] = sum(int(value) for key, _, value in pairs if key == "rbytes")
            found["io_write_bytes"] = sum(int(value) for key, _, value in pairs if key == "wbytes")
        for name in ("cpu", "io", "memory") if pressure else ():
            found[f"pressure_{name}_us"] = _stalled_us(self.text(f"{name}.pressure"))
        return found

    def cpu_usage_us(self) -> int:
        """CPU time of all processes ever in the group, in microseconds; one system call. Raises OSError."""
        return int(os.pread(self.open("cpu.stat"), 32, 0).split()[1])

    def freeze(self, frozen: bool) -> bool:
        """Stop or continue everything in the group; whether it has come to pass in time. Linux 5.2."""
        self.write("cgroup.freeze", int(frozen))
        deadline = time.monotonic() + _FROZEN_WITHIN_S
        while fs.flat(fs.read_at(self.fd, "cgroup.events")).get("frozen") != int(frozen):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def kill(self, timeout_s: float) -> bool:
        """SIGKILL everything at once, also what is being forked just now (cgroup.kill, Linux 5.14)."""
        deadline = time.monotonic() + timeout_s
        try:
            self.write("cgroup.kill", 1)
        except HostError:
            try:
                self.freeze(True)  # unlike on v1, what is frozen can be killed
            except HostError:
                pass
            return fs.kill_members(self.fd, deadline)
        return True


def _stalled_us(text: str | None) -> int | None:
    """The total of the "some" line of a pressure file."""
    for line in (text or "").splitlines():
        words = line.split()
        if words[0] == "some" and words[-1].startswith("total="):
            return int(words[-1].removeprefix("total="))
    return None
