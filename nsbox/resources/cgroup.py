"""A cgroup for each sandbox: limits that the kernel enforces, and counters of what was used.

One face over cgroup v2 and v1, chosen for each controller by itself, so that hybrid hosts work. What is where, and what
an ordinary user needs: docs/cgroups.md.
"""

from __future__ import annotations

import atexit
import itertools
import os
import select
import time

from nsbox.errors import HostError
from nsbox.light import threading
from nsbox.resources import cgroup_v1 as v1
from nsbox.resources import cgroup_v2 as v2
from nsbox.resources.cgroup_find import Found, look, own_pids, remember, sweep_places
from nsbox.resources.cgroup_nest import COUNTERS, V1_NAME, IoMax, Limit, Nest, Wanted, needed

__all__ = ["COUNTERS", "Cgroup", "Hierarchy", "IoMax", "Limit", "Wanted", "discover", "sweep"]

Group = v1.Group | v2.Group
Event = tuple[int, int, str]

READY = 2  #: kept made ahead
RELEASE_S = 0.5  #: how long ``release`` waits for processes that are about to be gone
_number = itertools.count(1)


class Cgroup:
    """The groups of one sandbox in all hierarchies that are used for it."""

    def __init__(self, owner: Hierarchy, wanted: Wanted, groups: list[Group], *, joins: bool = True) -> None:
        self.wanted = wanted
        self.paths = tuple(group.path for group in groups)
        self._owner = owner
        self._groups = groups
        self._v2 = next((group for group in groups if isinstance(group, v2.Group)), None)
        self._clock = self._v2 or next((group for group in groups if "cpuacct" in group.controllers), None)
        #: v1: a descriptor of each ``tasks`` file, to which pid 1 writes "0" before it executes anything
        self.join = tuple(group.open("tasks", os.O_WRONLY) for group in groups if joins and isinstance(group, v1.Group))
        #: v2: the group's directory for CLONE_INTO_CGROUP, or -1
        self.into = (self._v2.leaf if self._v2.leaf >= 0 else self._v2.fd) if self._v2 else -1

    def doors(self) -> tuple[int, ...]:
        """What ``join`` was, for another process. ``joined`` closes it again."""
        return tuple(group.open("tasks", os.O_WRONLY) for group in self._groups if isinstance(group, v1.Group))

    def joined(self) -> None:
        """Close the descriptors of ``join`` and of ``doors``; they are of no more use once the sandbox runs."""
        self.join = ()
        for group in self._groups:
            group.shut("tasks")

    @property
    def on_v2(self) -> bool:
        """Whether one of the groups is in the v2 tree."""
        return self._v2 is not None

    def holds(self, limit: str) -> bool:
        """Whether there is a group with the controller of a limit."""
        return any({limit, V1_NAME.get(limit, limit)} & group.controllers for group in self._groups)

    def set(self, wanted: Wanted) -> None:
        """Change the limits of a sandbox that runs. Raises HostError where a limit has no group to set it on."""
        for limit in needed(wanted):
            if not self.holds(limit):
                raise HostError(
                    f"the {limit} limit cannot be added: {' '.join(self.paths)} were made without it",
                    remedy=f"start the sandbox with a limit for {limit}, which can then be changed",
                )
        for group in self._groups:
            group.set(wanted)
        self.wanted = wanted

    def counters(self, *, pressure: bool = True, times: bool = True) -> dict[str, int | None]:
        """Everything in COUNTERS; None where the kernel does not tell. Costs some tens of microseconds, half of them
        for the ``pressure`` of PSI; processor ``times`` some more."""
        found: dict[str, int | None] = dict.fromkeys(COUNTERS)
        # On a hybrid host both trees count processor time, from slightly different moments on: v2 has the last word, as
        # in ``cpu_usage_us``.
        for group in sorted(self._groups, key=lambda group: group is self._v2):
            found |= {
                name: value
                for name, value in group.counters(pressure=pressure, times=times).items()
                if value is not None
            }
        return found

    def cpu_usage_us(self) -> int | None:
        """CPU time of everything that ever ran inside, in microseconds, by one system call."""
        try:
            return self._clock.cpu_usage_us() if self._clock else None
        except OSError:
            return None

    def event_fds(self) -> list[Event]:
        """(descriptor, poll events, "memory" or "pids"): ready when memory ran out, or a process was refused.

        Answer each event with ``drain``. ``release`` closes the descriptors.
        """
        found: list[Event] = []
        for group in self._groups:
            if isinstance(group, v1.Group):  # whose pids.events is not announced since Linux 6.11
                if "memory" in group.controllers and (event := group.oom_event()) >= 0:
                    found.append((event, select.POLLIN, "memory"))
                continue
            for name in sorted({"memory", "pids"} & group.controllers):
                fd = group.open(f"{name}.events")
                self.drain(fd)  # a change counts from the last time that the file was read
                found.append((fd, select.POLLPRI, name))
        return found

    @staticmethod
    def drain(fd: int) -> None:
        """Make an event descriptor wait for the next event."""
        try:
            os.lseek(fd, 0, os.SEEK_SET)
        except OSError:  # an eventfd
            pass
        try:
            os.read(fd, 4096)
        except OSError:
            pass

    def kill(self) -> bool:
        """SIGKILL everything inside. False when it cannot be done here, or takes longer than half a second."""
        group = self._v2 or self._with("freezer") or self._with("pids") or self._with("memory")
        try:
            return group.kill(RELEASE_S) if group else False
        except (HostError, OSError):
            return False

    def freeze(self) -> bool:
        """Stop everything inside; whether all has stopped within half a second. Raises HostError."""
        return self._freezer().freeze(True)

    def thaw(self) -> bool:
        """Continue what ``freeze`` stopped. Raises HostError."""
        return self._freezer().freeze(False)

    def _with(self, controller: str) -> Group | None:
        return next((group for group in self._groups if controller in group.controllers), None)

    def _freezer(self) -> Group:
        group = self._v2 or self._with("freezer")
        if group is None:
            raise HostError(
                "a sandbox cannot be frozen here: neither cgroup v2 nor the v1 freezer can be used",
                remedy="run: nsbox doctor",
            )
        return group

    def release(self, timeout_s: float = RELEASE_S) -> bool:
        """Remove the groups; False when processes are still in one after ``timeout_s``. Idempotent, never raises."""
        deadline = time.monotonic() + timeout_s
        self.join, self.into = (), -1
        groups, self._groups = self._groups, []
        self._v2 = self._clock = None
        for group in groups:
            group.close()
        left = [group for group in groups if not group.nest.remove(group.name, deadline)]
        self._owner.left += left
        return not left


class Hierarchy:
    """Where this process can make groups. The facts never change; the groups below it do. Thread-safe."""

    def __init__(self, state: str, found: Found) -> None:
        self.state, self.found = state, found
        self._v1 = [(Nest(one.base), one.controllers) for one in found.v1]
        self._v2 = v2.Nest(found.v2, own_pids) if found.v2 else None
        self._nests = [*(nest for nest, _ in self._v1), *([self._v2] if self._v2 else [])]
        self._ready: list[Cgroup] = []
        self._last: Wanted | None = None
        self.left: list[Group] = []  #: could not be removed yet
        self._lock = threading.Lock()
        self._remembered = False
        self._making = 0  #: groups that are being made ahead

    def strength(self, limit: Limit) -> tuple[bool, str, str]:
        """(whether the kernel can enforce it, by what or why not, what would mend that)."""
        return self.found.strength(limit)

    def make(self, wanted: Wanted, name: str) -> Cgroup:
        """Groups with these limits set, empty: one made ahead when there is one. Raises HostError."""
        with self._lock:
            self._last = wanted
            for index, ready in enumerate(self._ready):
                if ready.wanted == wanted:
                    return self._ready.pop(index)
        return self._fresh(wanted, name)

    def refill(self) -> None:
        """Make groups ahead for a launch like the last, and try again what could not be removed. Never raises."""
        with self._lock:
            wanted, left = self._last, self.left
            self.left = []
            stale = [ready for ready in self._ready if ready.wanted != wanted]
            self._ready = [ready for ready in self._ready if ready.wanted == wanted]
            missing = max(0, READY - len(self._ready) - self._making) if wanted else 0
            self._making += missing
        self.left += [group for group in left if not group.nest.remove(group.name, 0)]
        for ready in stale:
            ready.release()
        try:
            for _ in range(missing):
                self._add(wanted)  # type: ignore[arg-type]
        except HostError:
            return  # the next launch will say so
        finally:
            with self._lock:
                self._making -= missing

    def _add(self, wanted: Wanted) -> None:
        fresh = self._fresh(wanted, "ready")
        fresh.counters(times=False)  # opens what will be read at the end
        with self._lock:
            closed = self._last is None
            if not closed:
                self._ready.append(fresh)
        if closed:  # meanwhile, by the end of the process: nobody else would remove this one
            fresh.release()
            self.close()

    def close(self) -> None:
        """Remove what was made ahead, and our directories, at the latest with the last group. It can be used again."""
        with self._lock:
            ready, self._ready = self._ready, []
            self._last = None
        for one in ready:
            one.release()
        for group in self.left:
            group.nest.remove(group.name, 0)
        for nest in self._nests:
            nest.close()

    def forget(self) -> None:
        """In a forked child: close what belongs to the parent, which goes on using it."""
        for ready in self._ready:
            for group in ready._groups:
                group.close()
        self._ready = []
        for nest in self._nests:
            nest.drop()

    def _fresh(self, wanted: Wanted, name: str) -> Cgroup:
        for limit in needed(wanted):
            available, reason, remedy = self.strength(limit)
            if not available:
                raise HostError(f"the {limit} limit cannot be enforced: {reason}", remedy=remedy)
        unique = f"{next(_number)}-{name}"
        if not self._remembered:
            self._remembered = True
            remember(self.state, [nest.parent_path for nest in self._nests])
        groups: list[Group] = []
        try:
            try:
                self._make_groups(groups, wanted, unique)
            except FileNotFoundError:  # somebody removed our empty directories: make them again
                self._undo(groups)
                for nest in self._nests:
                    nest.close()
                self._make_groups(groups, wanted, unique)
            return Cgroup(self, wanted, groups)
        except HostError:
            self._undo(groups)
            raise
        except OSError as error:
            self._undo(groups)
            where = " and ".join(nest.path for nest in self._nests)
            raise HostError(
                f"cannot make a cgroup in {where}: {error.strerror}", remedy="run: nsbox gc", errno=error.errno
            ) from None

    def _make_groups(self, groups: list[Group], wanted: Wanted, name: str) -> None:
        limits = needed(wanted)
        use = {"memory", "pids", *(V1_NAME.get(limit, limit) for limit in limits)}  # the first two for their counters
        # Where the limits are on v1, so are the groups below: a process moves into them in no time (see cgroup_v1).
        bare = wanted.nested and self._v2 is not None and not self._v2.place.controllers and self._v1
        if self._v2 and not bare:
            self._v2.open()
            for limit in limits:
                if limit in self._v2.refused:
                    reason, remedy = self._v2.refused[limit]
                    raise HostError(f"the {limit} limit cannot be enforced: {reason}", remedy=remedy)
            groups.append(v2.Group(self._v2, name, self._v2.place.controllers - self._v2.refused.keys()))
        else:
            use |= {"cpuacct", "freezer"}  # v2 measures and freezes without any controller
        for nest, controllers in self._v1:
            if controllers & use:
                groups.append(v1.Group(nest, name, controllers))
        for group in groups:
            group.set(wanted, fresh=True)
            if wanted.nested and isinstance(group, v2.Group):
                group.split()

    @staticmethod
    def _undo(groups: list[Group]) -> None:
        for group in groups:
            group.close()
            group.nest.remove(group.name, 0)
        groups.clear()


_hierarchies: dict[tuple[int, int, str], Hierarchy] = {}
_lock = threading.Lock()


def discover(state: str) -> Hierarchy:
    """What this process can do with cgroups as this user, looked up once. ``state``: directory for run-time state."""
    key = (os.getpid(), os.geteuid(), state)
    with _lock:
        hierarchy = _hierarchies.get(key)
        if hierarchy is None:
            hierarchy = _hierarchies[key] = Hierarchy(state, look())
            atexit.register(hierarchy.close)
        return hierarchy


def sweep(state: str) -> list[str]:
    """Remove the groups of owners that are gone, and end what still runs in them; one line for each. Never raises."""
    return sweep_places(state, discover(state).found)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for hierarchy in _hierarchies.values():
        atexit.unregister(hierarchy.close)
        hierarchy.forget()
    _hierarchies.clear()


os.register_at_fork(after_in_child=_after_fork)
