"""A workspace that cannot be shown under other ids, as in a container whose root is overlayfs: it is copied instead.

The copy belongs to the ids of the one sandbox that it is made for, lies beneath that sandbox's overlay as the directory
itself would, and goes with it. Only root callers need it: an ordinary user's sandbox has the user's own id. Changes are
still told, exported and applied against the directory itself.
"""

from __future__ import annotations

import os
import stat
import time

from nsbox import watch
from nsbox._native import lib
from nsbox.encode import compile_plan
from nsbox.errors import HostError
from nsbox.handle import Handle
from nsbox.light import TYPE_CHECKING
from nsbox.plan.ops import IDMAP_OWNER, READ_ONLY, Op
from nsbox.prepared import Prepared, program_of
from nsbox.resources import scratch

if TYPE_CHECKING:
    from collections.abc import Callable

_AT_FDCWD, _RESOLVE_NO_SYMLINKS = -100, 0x04
_NAME = "copy"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_file_systems: set[int] = set()  #: st_dev of those that have refused


def possible(op: Op) -> bool:
    """Whether a copy can stand for the source of this operation: it is the workspace's layer, under its owner's id."""
    return op.kind == "lower" and bool(op.flags & IDMAP_OWNER)


def remember(path: str) -> None:
    """The file system of ``path`` takes no idmapped mounts."""
    _file_systems.add(os.stat(path).st_dev)


def wanted(prepared: Prepared) -> bool:
    """Whether the workspace is on a file system that is remembered."""
    if not _file_systems:
        return False
    return any(possible(op) and os.stat(op.src).st_dev in _file_systems for op in prepared.plan.ops)


def copy(handle: Handle, first: int) -> Prepared:
    """The sandbox with a copy in place of its workspace; ``handle`` owns the copy, ``first`` is the host id of root
    inside. Raises HostError for a directory that is larger than the disk limit, or cannot be copied."""
    prepared = handle.prepared
    plan = prepared.plan
    number = next(number for number, op in enumerate(plan.ops) if possible(op))
    path = plan.ops[number].src
    place = plan.staging if plan.scratch == "tmpfs" else plan.scratch
    source = lib.nsb_open_in(_AT_FDCWD, os.fsencode(path), _DIRECTORY, 0, _RESOLVE_NO_SYMLINKS)
    try:
        if source < 0:
            raise OSError(-source, os.strerror(-source))
        _check(prepared, path, source)
        handle.copy, handle.copied_at = scratch.Scratch(place, plan.staging, None), time.time()
        _fill(source, handle.copy.fd, first, plan.uid)
    except HostError:
        raise
    except OSError as error:
        raise HostError(
            f"workspace: {path!r} cannot be copied to {place}: {error.strerror}",
            remedy="use --scratch DIR, of a file system with room",
            errno=error.errno,
        ) from error
    finally:
        if source >= 0:
            os.close(source)
    lower = plan.ops[number]._replace(src=f"{handle.copy.path}/{_NAME}", flags=READ_ONLY)
    overlay = dict(plan.enforced["overlay"])
    overlay["how"] += "; the workspace is a copy, for its file system takes no idmapped mounts"
    plan = plan._replace(
        ops=(*plan.ops[:number], lower, *plan.ops[number + 1 :]), enforced={**plan.enforced, "overlay": overlay}
    )
    compiled = compile_plan(plan, prepared.skeleton, program_of(prepared.spec, plan), net=prepared.net)
    return prepared._replace(plan=plan, compiled=compiled)


def _check(prepared: Prepared, path: str, source: int) -> None:
    """A copy is written for the sandbox, and so is held to what it may write."""
    disk = prepared.spec.limits.disk
    size, whole = watch.tree_size(source)
    if disk is None or (whole and size <= disk):
        return
    holds = f"{size >> 20} MiB" if whole else "too much to be counted"
    raise HostError(
        f"workspace: {path!r} must be copied, for its file system takes no idmapped mounts, and holds {holds}, more"
        f" than the disk limit of {disk >> 20} MiB",
        remedy="raise --disk, or keep it on ext4, xfs, btrfs or tmpfs (in a container: on a volume)",
    )


def _fill(source: int, at: int, first: int, uid: int) -> None:
    """Copy everything; what the directory's owner or group has is the payload's, all else nobody's."""
    from nsbox.layers import NOBODY, Copier  # not on the way of those who copy nothing

    status = os.fstat(source)

    def for_host(mine: int) -> Callable[[int], int]:
        return lambda host: first + (uid if host == mine else NOBODY)

    os.mkdir(_NAME, 0o700, dir_fd=at)
    target = os.open(_NAME, _DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
    try:
        Copier().layer(source, target, for_host(status.st_uid), for_host(status.st_gid))
        os.fchown(target, first + uid, first + uid)
        os.fchmod(target, stat.S_IMODE(status.st_mode))
    finally:
        os.close(target)
