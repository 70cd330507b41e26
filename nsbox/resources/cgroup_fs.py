"""What cgroup v1 and v2 have in common: where they are mounted, how its files are read and written.

Everything goes by directory descriptor: a launch must not walk paths, and a descriptor cannot be renamed away.
"""

from __future__ import annotations

import errno
import os
import time

from nsbox.light import NamedTuple, contextlib, signal

DIRECTORY = os.O_DIRECTORY | os.O_CLOEXEC


class Mount(NamedTuple):
    """One mounted cgroup file system."""

    version: int
    point: str
    root: str  #: the group that shows at ``point``
    controllers: frozenset[str]  #: v1 only: those of v2 are in cgroup.controllers
    options: tuple[str, ...] = ()  #: of the mount, as they are written

    def directory(self, path: str) -> str | None:
        """Where the group ``path`` shows; None where it lies outside of what is mounted."""
        root = self.root.rstrip("/")
        if path.startswith("/..") or not (path == root or path.startswith(root + "/")):
            return None
        return os.path.normpath(self.point + "/" + path[len(root) :])


#: Words among the options of a v1 mount that name no controller.
_FLAGS = frozenset(("rw", "ro", "none", "xattr", "noprefix", "clone_children", "cpuset_v2_mode", "favordynmods"))


def unescape(text: str) -> str:
    """A path of mountinfo as it is: space, tab, newline and backslash stand there in octal."""
    for code, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        text = text.replace(code, character)
    return text


def mounts(mountinfo: str) -> list[Mount]:
    """The cgroup file systems of /proc/self/mountinfo (proc_pid_mountinfo(5))."""
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 6 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if kind[0] == "cgroup2" else 1
        options = tuple(kind[2].split(","))
        names = frozenset(option for option in options if "=" not in option) - _FLAGS
        controllers = names if version == 1 else frozenset()
        found.append(Mount(version, unescape(fields[4]), unescape(fields[3]), controllers, options))
    return found


def memberships(text: str) -> dict[str, str]:
    """The caller's group by controller, from /proc/self/cgroup; that of v2 is under ""."""
    found = {}
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            found.update(dict.fromkeys(fields[1].split(","), fields[2]))
    return found


def writable(path: str) -> bool:
    """Whether the caller's effective ids may write ``path``."""
    return os.access(path, os.W_OK, effective_ids=True)


def read_text(path: str) -> str:
    """The content of a small file, "" where there is none to be had."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def read_at(directory: int, name: str) -> str | None:
    """The content of a control file, None where the kernel has no such file (or will not tell)."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None
    try:
        return os.read(fd, 16384).decode()
    except OSError:
        return None
    finally:
        os.close(fd)


def write_at(directory: int | None, name: str, text: str) -> None:
    """Write a control file, by one write(2); no file is ever made. Raises OSError."""
    fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def flat(text: str | None) -> dict[str, int]:
    """A "flat keyed" control file: one name and one number a line."""
    pairs = (line.split() for line in (text or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def below(directory: int, name: str = ".") -> list[str]:
    """The names of the groups below a group."""
    try:
        fd = os.open(name, os.O_RDONLY | DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    except OSError:
        return []
    try:
        with os.scandir(fd) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    finally:
        os.close(fd)


def _remove_below(parent: int, name: str) -> bool:
    """Remove the groups below a group, as far as they are empty; whether any was."""
    removed = False
    for child in below(parent, name):
        with contextlib.suppress(OSError):
            os.rmdir(f"{name}/{child}", dir_fd=parent)
            removed = True
    return removed


def remove_dir(parent: int, name: str, deadline: float) -> bool:
    """rmdirat, the groups below it first, until ``deadline`` (time.monotonic()): EBUSY lasts until the last process is
    wholly gone."""
    pause = 0.0002
    while True:
        try:
            os.rmdir(name, dir_fd=parent)
            return True
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno != errno.EBUSY:
                return False
        if _remove_below(parent, name):
            continue
        if time.monotonic() + pause > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.02)


def kill_members(directory: int, deadline: float) -> bool:
    """SIGKILL whatever is in a group until nothing is, for kernels without cgroup.kill."""
    while (text := read_at(directory, "cgroup.procs")) and time.monotonic() < deadline:
        for pid in map(int, text.split()):
            try:
                fd = os.pidfd_open(pid)
            except OSError:  # ended meanwhile; 0 stands for a process of a pid namespace that is not ours
                continue
            try:
                # The number may have been reused before the descriptor pinned it: look again.
                if str(pid) in (read_at(directory, "cgroup.procs") or "").split():
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            finally:
                os.close(fd)
        time.sleep(0.001)
    return not text
