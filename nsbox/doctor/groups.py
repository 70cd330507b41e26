"""Where the cgroup file systems are, and in which of their groups this caller can make its own: cgroups(7)."""

import contextlib
import errno
import os
import signal
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

from nsbox.doctor import attempt as a
from nsbox.doctor.attempt import attempt
from nsbox.doctor.fact import read
from nsbox.resources.cgroup_fs import Mount

_LIMIT_FILES = {
    "memory": ("memory.max", "memory.limit_in_bytes"),
    "pids": ("pids.max", "pids.max"),
    "cpu": ("cpu.max", "cpu.cfs_quota_us"),
}
_CLONE_INTO_CGROUP = 0x200000000


class Group(NamedTuple):
    """A directory in which this caller made a group and put a process into it."""

    path: str
    controllers: tuple[str, ...]  #: those whose limit can be set on such a group
    kill: bool = False  #: there is a cgroup.kill
    swap: bool = False  #: swap can be limited there


def layout(mounted: list[Mount]) -> str:
    """v2, v1, hybrid or none."""
    v2 = any(one.version == 2 for one in mounted)
    v1 = any(one.controllers for one in mounted)
    return "hybrid" if v1 and v2 else "v2" if v2 else "v1" if v1 else "none"


# Attempts ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _made(parent: str) -> Iterator[str]:
    path = os.path.join(parent, f"nsbox-doctor-{os.getpid()}")
    os.mkdir(path)
    try:
        yield path
    finally:
        for _ in range(50):  # EBUSY until the kernel has forgotten the last process
            try:
                os.rmdir(path)
                break
            except OSError as error:
                if error.errno != errno.EBUSY:
                    break
                time.sleep(0.002)


def _born_in(group: str) -> None:
    """clone3(2) with CLONE_INTO_CGROUP: unlike moving a process in, it waits for no lock."""
    descriptor = os.open(group, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    arguments = struct.pack("11Q", _CLONE_INTO_CGROUP, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, descriptor)
    pid = a.syscall("clone3 into the group", a.CLONE3, arguments, len(arguments))
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _moved_into(group: str) -> None:
    a.write(os.path.join(group, "cgroup.procs"), "0")


def _try_v2(parent: str) -> Group | OSError:
    try:
        with _made(parent) as group:
            outcome = attempt(lambda: _born_in(group))
            if not outcome.ok:
                return OSError(outcome.errno, outcome.error, group)
            files = set(os.listdir(group))
    except OSError as error:
        return error
    enabled = {name for name, (file, _) in _LIMIT_FILES.items() if file in files}
    # What is not switched on for children yet can be, where the caller may write to the switch.
    if os.access(os.path.join(parent, "cgroup.subtree_control"), os.W_OK):
        enabled.update(set(read(os.path.join(parent, "cgroup.controllers")).split()) & set(_LIMIT_FILES))
    swap = "memory.swap.max" in files or "memory.max" not in files
    return Group(parent, tuple(sorted(enabled)), "cgroup.kill" in files, swap)


def _try_v1(parent: str, controllers: frozenset[str]) -> Group | OSError:
    try:
        with _made(parent) as group:
            outcome = attempt(lambda: _moved_into(group))
            if not outcome.ok:
                return OSError(outcome.errno, outcome.error, group)
            files = set(os.listdir(group))
    except OSError as error:
        return error
    usable = tuple(name for name in sorted(controllers) if _LIMIT_FILES.get(name, ("", ""))[1] in files)
    return Group(parent, usable, False, "memory.memsw.limit_in_bytes" in files)


class Survey(NamedTuple):
    """What the attempts came to."""

    layout: str
    v2: Group | None
    v1: dict[str, Group]  #: by controller
    refusals: dict[str, str]  #: why there is no group: by v1 controller, that of v2 under ""
    known: set[str]  #: controllers that the host has somewhere
    own: tuple[str, ...] = ()  #: the caller's own groups of v1 with a limit that sandboxes have


def survey(mounted: list[Mount], member: dict[str, str], privileged: bool) -> Survey:
    """Try to make groups: below the caller's own one, and for root at the top of v2 as well."""
    v2: Group | None = None
    v1: dict[str, Group] = {}
    refusals: dict[str, str] = {}
    known: set[str] = set()
    v1_groups: list[str] = []
    for one in mounted:
        own = one.directory(member.get(min(one.controllers, default=""), "/"))
        if one.version == 2:
            known.update(read(os.path.join(one.point, "cgroup.controllers")).split())
            # Below a group that holds processes no controller can be switched on, except at the top.
            parents = [one.point, own] if privileged else [own]
            results = [_try_v2(parent) for parent in parents if parent and v2 is None]
            groups = [result for result in results if isinstance(result, Group)]
            v2 = v2 or (groups[0] if groups else None)
        elif one.controllers & set(_LIMIT_FILES):
            known.update(one.controllers)
            v1_groups += [own] if own else []
            results = [_try_v1(own, one.controllers)] if own else []
            v1.update({name: r for r in results if isinstance(r, Group) for name in r.controllers})
        else:
            continue
        for result in results:
            if isinstance(result, OSError):
                where = os.path.dirname(os.fsdecode(result.filename or ""))
                reason = f"no group can be made in {where}: {result.strerror}"
                refusals.update(dict.fromkeys(one.controllers or ("",), reason))
    return Survey(layout(mounted), v2, v1, refusals, known, tuple(dict.fromkeys(v1_groups)))
