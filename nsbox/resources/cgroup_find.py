"""Where the caller can make cgroups, why not elsewhere and what mends that; and what dead callers left there."""

from __future__ import annotations

import fcntl
import os
import time

from nsbox.light import TYPE_CHECKING, NamedTuple
from nsbox.resources import cgroup_fs as fs
from nsbox.resources import cgroup_v1 as v1
from nsbox.resources import cgroup_v2 as v2
from nsbox.resources import owned
from nsbox.resources.cgroup_nest import LIMITS, PARENT, V1_NAME, Limit, owner_is_gone

if TYPE_CHECKING:
    from collections.abc import Iterable

_SCOPE = "systemd-run --user --scope -p Delegate=yes"
_DELEGATE_ALL = (
    "run as root: mkdir -p /etc/systemd/system/user@.service.d; printf '[Service]\\nDelegate=cpu io memory pids\\n' >"
    f" /etc/systemd/system/user@.service.d/delegate.conf; log in again, then start it with: {_SCOPE}"
)
_SWEEP_S = 1.0  #: for the groups of one dead owner


class Found(NamedTuple):
    """The places for groups, and for each limit without one (reason, remedy)."""

    v1: tuple[v1.Place, ...]  #: without the controllers that v2 offers
    v2: v2.Place | None
    refusals: dict[Limit, tuple[str, str]]
    points: tuple[str, ...]  #: where cgroup file systems are mounted, each with a slash at its end

    def strength(self, limit: Limit) -> tuple[bool, str, str]:
        """(whether the kernel can enforce the limit, by what or why not, what would mend that)."""
        if limit in self.refusals:
            return False, *self.refusals[limit]
        if self.v2 and limit in self.v2.controllers:
            return True, f"cgroup v2 {limit} at {self.v2.base}/{PARENT}", ""
        name = V1_NAME.get(limit, limit)
        base = next(place.base for place in self.v1 if name in place.controllers)
        return True, f"cgroup v1 {name} at {base}/{PARENT}", ""


def own_pids() -> frozenset[int]:
    """The processes that may be moved: this one and its helper. Others are never touched."""
    from nsbox import _native

    helper = _native._zygote
    return frozenset((os.getpid(), helper.pid) if helper else (os.getpid(),))


def look() -> Found:
    """What there is for this caller. Reads a few files, changes nothing."""
    mounted = fs.mounts(fs.read_text("/proc/self/mountinfo"))
    own = fs.memberships(fs.read_text("/proc/self/cgroup"))
    places, refused = v1.find(mounted, own)
    tree = next((mount for mount in mounted if mount.version == 2), None)
    found = v2.find(tree, own.get("", "/"), own_pids()) if tree else v2.Refusal("no cgroup v2 is mounted")
    place = found if isinstance(found, v2.Place) else None
    offered = place.controllers if place else frozenset()
    places = [one._replace(controllers=one.controllers - offered) for one in places]
    on_v1 = frozenset[str]().union(*(one.controllers for one in places))
    refusals: dict[Limit, tuple[str, str]] = {}
    for limit in LIMITS:
        name = V1_NAME.get(limit, limit)
        if limit not in offered and name not in on_v1:
            refusals[limit] = _refusal(limit, mounted, tree, found, refused.get(name, ""))
    points = tuple(mount.point + "/" for mount in mounted)
    return Found(tuple(one for one in places if one.controllers), place, refusals, points)


def _refusal(
    limit: Limit, mounted: list[fs.Mount], tree: fs.Mount | None, found: v2.Place | v2.Refusal, on_v1: str
) -> tuple[str, str]:
    """Why the kernel cannot enforce ``limit`` for this caller, and what mends it."""
    if not mounted:
        return "no cgroup file system is mounted", "run as root: mount -t cgroup2 none /sys/fs/cgroup"
    if on_v1:
        return on_v1, _on_v1_remedy(mounted)
    if tree is None or limit not in fs.read_text(tree.point + "/cgroup.controllers").split():
        remedy = f"boot a kernel that has it, without cgroup_disable={limit}"
        return f"no cgroup hierarchy here has the {limit} controller", remedy + (
            " and with cgroup_enable=memory" if limit == "memory" else ""
        )
    systemd = os.path.isdir("/run/systemd/system")
    if isinstance(found, v2.Place):
        reason = f"cgroup v2: the {limit} controller is not delegated to {found.base}"
        return reason, _DELEGATE_ALL if systemd else _give(tree)
    if found.crowded and os.geteuid() == 0:
        leaf = found.crowded + "/init"
        move = f"mkdir {leaf}; for p in $(cat {found.crowded}/cgroup.procs); do echo $p > {leaf}/cgroup.procs; done"
        return found.reason, f"move them into a group below it: {move}"
    if os.geteuid() == 0:
        return found.reason, "mount cgroups writable (a container: --cgroupns=private and /sys/fs/cgroup read-write)"
    return found.reason, f"start it with: {_SCOPE}" if systemd else _give(tree)


def _on_v1_remedy(mounted: list[fs.Mount]) -> str:
    if os.geteuid() == 0:
        return "mount cgroups writable (a container: /sys/fs/cgroup read-write)"
    points = [mount.point for mount in mounted if mount.controllers & {"memory", "pids", "cpu", "cpuacct", "freezer"}]
    group = f"$d/user-{os.geteuid()}"
    return _in_a_shell(
        f"for d in {' '.join(points)}; do mkdir -p {group}; chown -R {os.geteuid()} {group};"
        f" echo $0 > {group}/cgroup.procs; done"
    )


def _give(tree: fs.Mount) -> str:
    group = f"{tree.point}/user-{os.geteuid()}"
    return _in_a_shell(
        f"echo +cpu +memory +pids > {tree.point}/cgroup.subtree_control; mkdir -p {group}/shell;"
        f" chown -R {os.geteuid()} {group}; echo $0 > {group}/shell/cgroup.procs"
    )


def _in_a_shell(command: str) -> str:
    """Words for a command by which root gives a group to the shell that it is typed in."""
    return f"run in your shell, then start it again from there: sudo sh -c '{command}' $$"


# What was left ----------------------------------------------------------------------------------------------------


def remember(state: str, parents: Iterable[str]) -> list[str]:
    """Add to the list of directories that a sweep visits, and answer all that still exist.

    A user's delegated groups are other ones in each session.
    """
    return owned.remember(state, "cgroups", parents, lambda path: os.path.isdir(os.path.dirname(path)))


def sweep_places(state: str, found: Found) -> list[str]:
    """Remove what dead owners left in the places of ``found``, and in those of former sessions; a line for each."""
    bases = [place.base for place in found.v1] + ([found.v2.base] if found.v2 else [])
    lines: list[str] = []
    known: dict[str, bool] = {}  # an owner has groups in each hierarchy, and is looked at once
    for parent in remember(state, [f"{base}/{PARENT}" for base in bases]):
        if parent.startswith(found.points) and os.path.basename(parent) == PARENT:
            lines += _sweep_parent(parent, known)
    return lines


def _sweep_parent(parent: str, known: dict[str, bool]) -> list[str]:
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return []
    known.update((name, owner_is_gone(name)) for name in names if name not in known)
    owners = [name for name in names if known[name]]
    lines = []
    for owner in owners:
        path = f"{parent}/{owner}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = _remove_owner(fd, path)
            pid = owner.partition("-")[0]
            lines.append(f"cgroup {path} of process {pid}, which is gone: {'removed' if gone else 'still in use'}")
        except OSError:  # held by an owner in another pid namespace, or by another sweep
            pass
        finally:
            os.close(fd)
    try:
        os.rmdir(parent)  # refused while any owner is in it
    except OSError:
        pass
    return lines


def _remove_owner(fd: int, path: str) -> bool:
    deadline = time.monotonic() + _SWEEP_S
    with os.scandir(fd) as entries:
        groups = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for name in groups:
        try:
            group = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=fd)
        except OSError:  # somebody else was faster
            continue
        try:
            _end(group, deadline)
        finally:
            os.close(group)
        fs.remove_dir(fd, name, deadline)
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def _end(group: int, deadline: float) -> None:
    """Kill what is in a group, frozen or not."""
    try:
        fs.write_at(group, "cgroup.kill", "1")
        return
    except OSError:
        pass
    if fs.read_at(group, "cgroup.procs"):
        for name, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            try:
                fs.write_at(group, name, value)
            except OSError:
                pass
        fs.kill_members(group, deadline)
    for name in fs.below(group):
        child = os.open(name, os.O_PATH | fs.DIRECTORY | os.O_NOFOLLOW, dir_fd=group)
        try:
            _end(child, deadline)
        finally:
            os.close(child)
