"""Watching a sandbox from the host side, where no cgroup controller can be had: processes, memory, processor time.

Everything inside is a descendant of its init (orphans are handed to it: pid_namespaces(7)), or of an interpreter that
came in from outside, so a walk from those sees all of it. What is read is text of the kernel's, never of a process's;
entries of processes that end meanwhile vanish, which is no error.
"""

from __future__ import annotations

import os
import stat

from nsbox.light import TYPE_CHECKING, NamedTuple, contextlib

if TYPE_CHECKING:
    from collections.abc import Iterator

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PF_EXITING = 4  #: of the flags in /proc/PID/stat
_MAX_PENDING = 256  #: descriptors of directories that are still to be looked into


class Sample(NamedTuple):
    """What all processes of a sandbox use together."""

    processes: tuple[int, ...]  #: host pids, init's first
    threads: int
    cpu_s: float  #: user and system, of the living and of those they have waited for
    resident: int  #: bytes, shared pages counted once per process


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 1 << 16)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _children(pid: int) -> Iterator[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        yield from map(int, _read(f"/proc/{pid}/task/{thread}/children").split())


def processes(*roots: int) -> list[int]:
    """``roots``, of which init is the first, and every process below them, by host pid."""
    found = list(roots)
    for pid in found:
        found += _children(pid)
    return found


def inside_pid(pid: int) -> int:
    """The number of a process in its innermost pid namespace; 0 when it is gone."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"NSpid:"):
            return int(line.split()[-1])
    return 0


def parent(pid: int) -> int:
    """The process above it, by host pid; 0 when it is gone."""
    stat = _read(f"/proc/{pid}/stat")
    fields = stat[stat.rfind(b")") + 2 :].split()
    return int(fields[1]) if len(fields) > 1 else 0


def ending(pid: int) -> bool:
    """Whether a process has begun to end, though it may still wait for others to be gone (pid_namespaces(7))."""
    stat = _read(f"/proc/{pid}/stat")
    fields = stat[stat.rfind(b")") + 2 :].split()
    return len(fields) < 7 or bool(int(fields[6]) & _PF_EXITING)


def cpu_ticks(stat: bytes) -> tuple[int, int]:
    """(clock ticks used, threads) from the text of /proc/PID/stat; the name in it may contain anything."""
    fields = stat[stat.rfind(b")") + 2 :].split()
    if len(fields) < 18:
        return 0, 0
    return sum(int(fields[i]) for i in (11, 12, 13, 14)), int(fields[17])


def cpu_time(pid: int) -> tuple[float, float]:
    """(user, system) seconds of one process and those that it has waited for."""
    stat = _read(f"/proc/{pid}/stat")
    fields = stat[stat.rfind(b")") + 2 :].split()
    if len(fields) < 18:
        return 0.0, 0.0
    user, system, waited_user, waited_system = (int(fields[i]) / _TICKS for i in (11, 12, 13, 14))
    return user + waited_user, system + waited_system


def sample(*roots: int) -> Sample:
    """One look at all of it; ``roots`` as for ``processes``."""
    found = processes(*roots)
    ticks = threads = pages = 0
    for pid in found:
        used, count = cpu_ticks(_read(f"/proc/{pid}/stat"))
        ticks += used
        threads += count
        statm = _read(f"/proc/{pid}/statm").split()
        pages += int(statm[1]) if len(statm) > 1 else 0
    return Sample(tuple(found), threads, ticks / _TICKS, pages * _PAGE)


def proportional(pids: tuple[int, ...]) -> int:
    """Bytes resident with shared pages divided among those that share them (smaps_rollup; slow, so only when it
    matters)."""
    total = 0
    for pid in pids:
        for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def unmapped_memory(pids: tuple[int, ...]) -> int:
    """Bytes in memfds that are held by descriptor: resident, but in no process's statm while they are not mapped."""
    seen: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{number}"
                with contextlib.suppress(OSError):
                    if os.readlink(path).startswith("/memfd:"):
                        status = os.stat(path)
                        seen[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(seen.values())


def removed_files(pids: tuple[int, ...]) -> int:
    """Bytes of files that have no name any more and are held by descriptor: on disk, but in no directory."""
    seen: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{number}"
                with contextlib.suppress(OSError):
                    status = os.stat(path)
                    if status.st_nlink or not stat.S_ISREG(status.st_mode):
                        continue
                    if not os.readlink(path).startswith("/memfd:"):
                        seen[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(seen.values())


def tree_size(folder: int, budget: int = 200_000) -> tuple[int, bool]:
    """Bytes allocated below a directory descriptor, links not followed, and whether that is all of it: it stops
    counting after ``budget`` entries, and cannot enter what the payload has closed to its own user."""
    whole = True
    total, pending = 0, [os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)]
    while pending:
        fd = pending.pop()
        with os.scandir(fd) as entries:
            for entry in entries:
                budget -= 1
                try:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False) and budget > 0 and len(pending) < _MAX_PENDING:
                        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                        pending.append(os.open(entry.name, flags, dir_fd=fd))
                    elif entry.is_dir(follow_symlinks=False):
                        whole = False
                except FileNotFoundError:
                    pass
                except OSError:
                    whole = False
        os.close(fd)
    return total, whole


def free_space(fd: int) -> int:
    """Bytes that are free on a descriptor's file system."""
    status = os.fstatvfs(fd)
    return status.f_bfree * status.f_frsize
