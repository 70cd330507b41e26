"""Directories that belong to one process: named after it, locked by it, and removed by whoever finds it gone.

The name carries the owner's pid and start time, which together are never reused. A shared flock(2) on the directory
tells a sweep in another pid namespace, which cannot look the pid up, that the owner lives; the kernel lets go of it
however the owner ends.
"""

from __future__ import annotations

import fcntl
import os
import stat

from nsbox.light import TYPE_CHECKING
from nsbox.resources.cgroup_nest import owner_is_gone, owner_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make(parent: int, prefix: str) -> tuple[str, int]:
    """A new directory of mode 0700 for this process below a directory descriptor: its name, and the descriptor that
    holds it until it is closed. Raises OSError."""
    while True:
        name = f"{prefix}{owner_name()}-{os.urandom(6).hex()}"
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            continue
        fd = -1
        try:
            fd = os.open(name, _OPEN, dir_fd=parent)
            fcntl.flock(fd, fcntl.LOCK_SH)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            os.rmdir(name, dir_fd=parent)
            raise
        return name, fd


def sweep(parent: str, prefix: str, trusted: Callable[[int], bool]) -> list[str]:
    """Remove the directories with ``prefix`` whose owners are gone; their paths. Never raises.

    ``trusted`` says whether a directory of this user id may be ours: anybody can make one with such a name in /tmp.
    """
    try:
        at = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        names = [name for name in os.listdir(at) if name.startswith(prefix)]
        gone = [name for name in sorted(names) if owner_is_gone(name.removeprefix(prefix).rpartition("-")[0])]
        return [f"{parent}/{name}" for name in gone if _sweep_one(at, name, trusted)]
    except OSError:
        return []
    finally:
        os.close(at)


def _sweep_one(at: int, name: str, trusted: Callable[[int], bool]) -> bool:
    try:
        fd = os.open(name, _OPEN, dir_fd=at)
    except OSError:
        return False
    try:
        if not trusted(os.fstat(fd).st_uid):
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return remove(at, name)
    except OSError:  # held by an owner in another pid namespace, or by another sweep
        return False
    finally:
        os.close(fd)


def remove(parent: int, name: str) -> bool:
    """Remove a tree that an adversary has filled; no link is followed, whatever it holds. False if some of it stays.

    A directory that is not empty has its own directories moved up to the top, where they are dealt with in turn: so the
    depth of a tree costs neither the stack nor descriptors.
    """
    try:
        top = _enter(parent, name)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    number = 0
    try:
        while names := os.listdir(top):
            for entry in names:
                if _unlink(top, entry):
                    continue
                number = _hoist(top, entry, number)
                os.rmdir(entry, dir_fd=top)
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:  # another sweep is faster
        return True
    except OSError:
        return False
    finally:
        os.close(top)
    return True


def _enter(at: int, name: str) -> int:
    """Open a directory, whatever its mode: the payload sets that, and overlayfs makes some of mode 0."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(handle)


def _unlink(at: int, name: str) -> bool:
    """Remove a name; False for a directory that is not empty."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=at)
        return True
    try:
        os.rmdir(name, dir_fd=at)
    except OSError:
        return False
    return True


def _hoist(top: int, name: str, number: int) -> int:
    """Empty a directory: its files go, its directories move to ``top`` under numbers that are not in use."""
    fd = _enter(top, name)
    try:
        for entry in os.listdir(fd):
            if _unlink(fd, entry):
                continue
            os.close(_enter(fd, entry))  # a directory can change its parent only if it may be written
            number = _free(top, number)
            os.rename(entry, f"n{number}", src_dir_fd=fd, dst_dir_fd=top)
    finally:
        os.close(fd)
    return number


def _free(top: int, number: int) -> int:
    while True:
        number += 1
        try:
            os.stat(f"n{number}", dir_fd=top, follow_symlinks=False)
        except FileNotFoundError:
            return number


def remember(state: str, name: str, add: Iterable[str], exists: Callable[[str], bool]) -> list[str]:
    """Add paths to the list that sweeps of later processes visit; all of it that still ``exists``.

    Where this process makes things says nothing about where a former one did.
    """
    try:
        fd = os.open(os.path.join(state, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return [*add]
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        old = os.fsdecode(os.read(fd, 1 << 20)).split("\0")[:-1]
        new = [path for path in dict.fromkeys([*old, *add]) if exists(path)]
        if new != old:
            os.ftruncate(fd, 0)
            os.pwrite(fd, os.fsencode("".join(path + "\0" for path in new)), 0)
        return new
    finally:
        os.close(fd)
