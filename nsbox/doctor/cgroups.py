"""Which limits the kernel can enforce for this caller, and where: cgroups(7), v2, v1 or both."""

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
from nsbox.doctor.fact import Fact, as_root, read
from nsbox.doctor.filesystems import unescape
from nsbox.doctor.host import is_privileged

#: Names of v1 controllers, as they stand among the mount options.
CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "pids", "blkio", "devices", "freezer", "hugetlb", "io")
#: What a limit is worth where no controller can be had.
WITHOUT = {"memory": "watched", "pids": "watched", "cpu": "none"}
_LIMIT_FILES = {
    "memory": ("memory.max", "memory.limit_in_bytes"),
    "pids": ("pids.max", "pids.max"),
    "cpu": ("cpu.max", "cpu.cfs_quota_us"),
}
_CLONE_INTO_CGROUP = 0x200000000
_DELEGATE = "systemd-run --user --scope -p Delegate=yes"
_DROP_IN = "/etc/systemd/system/user@.service.d/nsbox.conf"


class Hierarchy(NamedTuple):
    """One mounted cgroup file system."""

    version: int
    point: str  #: mount point
    root: str  #: which of its groups is mounted there
    controllers: tuple[str, ...]  #: v1 only; those of v2 are in cgroup.controllers
    options: tuple[str, ...]


class Group(NamedTuple):
    """A directory in which this caller made a group and put a process into it."""

    path: str
    controllers: tuple[str, ...]  #: those whose limit can be set on such a group
    kill: bool = False  #: there is a cgroup.kill
    swap: bool = False  #: swap can be limited there


def hierarchies(mountinfo: str) -> list[Hierarchy]:
    """The cgroup file systems in /proc/self/mountinfo."""
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 6 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        options = tuple(kind[2].split(","))
        version = 2 if kind[0] == "cgroup2" else 1
        controllers = tuple(name for name in CONTROLLERS if name in options) if version == 1 else ()
        found.append(Hierarchy(version, unescape(fields[4]), unescape(fields[3]), controllers, options))
    return found


def memberships(text: str) -> dict[str, str]:
    """Path of the group by controller, from /proc/self/cgroup; that of v2 is under ""."""
    found = {}
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            found.update(dict.fromkeys(fields[1].split(","), fields[2]))
    return found


def layout(mounted: list[Hierarchy]) -> str:
    """v2, v1, hybrid or none."""
    v2 = any(one.version == 2 for one in mounted)
    v1 = any(one.controllers for one in mounted)
    return "hybrid" if v1 and v2 else "v2" if v2 else "v1" if v1 else "none"


def directory(hierarchy: Hierarchy, path: str) -> str | None:
    """Where a group shows in a mounted hierarchy; None where it is outside of what is mounted."""
    if path.startswith("/.."):
        return None
    inner = path
    if hierarchy.root != "/":
        if path != hierarchy.root and not path.startswith(hierarchy.root + "/"):
            return None
        inner = path[len(hierarchy.root) :]
    return os.path.normpath(hierarchy.point + "/" + inner)


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
                return OSError(outcome.errno, outcome.error, parent)
            files = set(os.listdir(group))
    except OSError as error:
        return error
    enabled = {name for name, (file, _) in _LIMIT_FILES.items() if file in files}
    # What is not switched on for children yet can be, where the caller may write to the switch.
    if os.access(os.path.join(parent, "cgroup.subtree_control"), os.W_OK):
        enabled.update(set(read(os.path.join(parent, "cgroup.controllers")).split()) & set(_LIMIT_FILES))
    swap = "memory.swap.max" in files or os.path.exists("/sys/fs/cgroup/memory.swap.max")
    return Group(parent, tuple(sorted(enabled)), "cgroup.kill" in files, swap or not files & {"memory.max"})


def _try_v1(parent: str, controllers: tuple[str, ...]) -> Group | OSError:
    try:
        with _made(parent) as group:
            outcome = attempt(lambda: _moved_into(group))
            if not outcome.ok:
                return OSError(outcome.errno, outcome.error, parent)
            files = set(os.listdir(group))
    except OSError as error:
        return error
    usable = tuple(name for name in controllers if _LIMIT_FILES.get(name, ("", ""))[1] in files)
    return Group(parent, usable, False, "memory.memsw.limit_in_bytes" in files)


class Survey(NamedTuple):
    """What the attempts came to."""

    layout: str
    v2: Group | None
    v1: dict[str, Group]  #: by controller
    refusal: str  #: why there is no v2 group, or no v1 group of some controller
    known: set[str]  #: controllers that the host has somewhere


def survey(mounted: list[Hierarchy], member: dict[str, str], privileged: bool) -> Survey:
    """Try to make groups: below the caller's own one, and for root at the top of v2 as well."""
    v2, v1, refusal = None, {}, ""
    known: set[str] = set()
    for one in mounted:
        own = directory(one, member.get("" if one.version == 2 else (one.controllers or ("",))[0], "/"))
        if one.version == 2:
            known.update(read(os.path.join(one.point, "cgroup.controllers")).split())
            # Below a group that holds processes no controller can be switched on, except at the top.
            parents = [one.point, own] if privileged else [own]
            results = [_try_v2(parent) for parent in parents if parent and v2 is None]
            groups = [result for result in results if isinstance(result, Group)]
            v2 = v2 or (groups[0] if groups else None)
        elif set(one.controllers) & set(_LIMIT_FILES):
            known.update(one.controllers)
            results = [_try_v1(own, one.controllers)] if own else []
            v1.update({name: r for r in results if isinstance(r, Group) for name in r.controllers})
        else:
            continue
        for result in results:
            if isinstance(result, OSError):
                refusal = refusal or f"no group can be made in {result.filename}: {os.strerror(result.errno or 0)}"
    return Survey(layout(mounted), v2, v1, refusal, known)


# Facts ------------------------------------------------------------------------------------------------------------


def describe(mounted: list[Hierarchy]) -> str:
    """The layout in words: which controllers are where."""
    kind = layout(mounted)
    parts = []
    for one in mounted:
        if one.version == 2:
            parts.append(f"v2 at {one.point}: {' '.join(read(one.point + '/cgroup.controllers').split()) or 'no controllers'}")
    names = sorted({name for one in mounted for name in one.controllers})
    if names:
        parts.append(f"v1: {' '.join(names)}")
    return f"{kind} ({'; '.join(parts)})" if parts else kind


def delegation(found: Survey, privileged: bool, systemd: bool) -> tuple[str, str]:
    """Reason and remedy where the caller has no writable group."""
    if found.layout == "none":
        return "no cgroup file system is mounted", as_root("mount -t cgroup2 none /sys/fs/cgroup")
    reason = found.refusal or "no group of this process shows below /sys/fs/cgroup"
    if privileged:
        return reason, "mount cgroups writable (in a container: --cgroupns=private and -v /sys/fs/cgroup:/sys/fs/cgroup:rw)"
    if systemd and found.layout == "v2":
        return reason, f"start it with: {_DELEGATE} nsbox ..."
    if systemd:
        return reason, (
            "the controllers are on cgroup v1, which cannot be delegated: boot with systemd.unified_cgroup_hierarchy=1,"
            f" then {_DELEGATE} nsbox ..."
        )
    return reason, as_root(f"mkdir -p /sys/fs/cgroup/nsbox && chown -R {os.geteuid()} /sys/fs/cgroup/nsbox") + (
        " and start the program inside that group"
    )


def strength(name: str, found: Survey, privileged: bool, systemd: bool) -> Fact:
    """The fact for one limit: kernel, watched or none."""
    if name in found.v1 or (found.v2 and name in found.v2.controllers):
        return Fact(f"{name}_limit", True, "kernel")
    value = WITHOUT[name]
    if found.v2 is None and not found.v1 and (found.layout == "none" or name in found.known):
        reason, remedy = delegation(found, privileged, systemd)
    elif name not in found.known:
        reason = f"the kernel has no {name} controller, or it was switched off at boot"
        remedy = f"boot without cgroup_disable={name}" + (" and with cgroup_enable=memory" if name == "memory" else "")
    elif found.layout == "v2" and not privileged:
        reason = f"the {name} controller is not delegated to this user"
        remedy = as_root(
            f"mkdir -p {os.path.dirname(_DROP_IN)} && printf '[Service]\\nDelegate=cpu io memory pids\\n' > {_DROP_IN}"
            " && systemctl daemon-reload"
        ) + f", log in again, then: {_DELEGATE} nsbox ..."
    else:
        reason, remedy = delegation(found, privileged, systemd)
    return Fact(f"{name}_limit", False, value, reason, remedy)


def swap(found: Survey, swaps: str) -> Fact:
    """Whether swap counts against --memory. ``swaps`` is the text of /proc/swaps, one line of it a heading."""
    if len(swaps.splitlines()) < 2:
        return Fact("swap_accounting", True, "no swap")
    group = found.v1.get("memory") or (found.v2 if found.v2 and "memory" in found.v2.controllers else None)
    if group and group.swap:
        return Fact("swap_accounting", True, True)
    if group is None:
        reason = "without a memory controller, memory that was swapped out is not counted"
        return Fact("swap_accounting", False, False, reason, "as for memory_limit, or " + as_root("swapoff -a"))
    reason = "the kernel does not count swap: a sandbox may use more than --memory"
    return Fact("swap_accounting", False, False, reason, "boot with swapaccount=1, or " + as_root("swapoff -a"))


def favordynmods(mounted: list[Hierarchy], found: Survey) -> Fact:
    """Processes are born in a v2 group; into one of v1 they are moved, which waits for a lock of the whole system.

    The option of any hierarchy makes that lock cheap for all of them.
    """
    name = "cgroup_favordynmods"
    if not found.v1:
        return Fact(name, True, "not needed: no process is moved between groups")
    if any("favordynmods" in one.options for one in mounted):
        return Fact(name, True, True)
    v2 = next((one for one in mounted if one.version == 2), None)
    remedy = "boot with cgroup_favordynmods=1 (Linux 6.7 and later)"
    if v2:
        # A remount takes back what it does not name.
        options = ",".join(["remount", *(word for word in v2.options if word not in ("rw", "ro")), "favordynmods"])
        remedy = as_root(f"mount -o {options} {v2.point}")
    return Fact(name, False, False, "moving a process into a v1 group may take 10 ms", remedy)


def facts() -> list[Fact]:
    """All facts of this module."""
    mounted = hierarchies(read("/proc/self/mountinfo"))
    privileged = is_privileged()
    systemd = os.path.isdir("/run/systemd/system")
    found = survey(mounted, memberships(read("/proc/self/cgroup")), privileged)
    paths = dict.fromkeys(group.path for group in (found.v2, *found.v1.values()) if group)
    reason, remedy = ("", "") if paths else delegation(found, privileged, systemd)
    kill = bool(found.v2 and found.v2.kill)
    no_kill = "" if kill else "there is no cgroup.kill for this caller: the end of pid 1 inside ends everything instead"
    how = remedy or "mount cgroup v2 and use Linux 5.14 or later"
    return [
        Fact("cgroup_layout", found.layout != "none", describe(mounted), *delegation(found, privileged, systemd))
        if found.layout == "none"
        else Fact("cgroup_layout", True, describe(mounted)),
        Fact("cgroup_subtree", bool(paths), " ".join(paths) or "none", reason, remedy),
        *(strength(name, found, privileged, systemd) for name in WITHOUT),
        swap(found, read("/proc/swaps")),
        Fact("cgroup_kill", kill, kill, no_kill, "" if kill else how),
        favordynmods(mounted, found),
    ]
