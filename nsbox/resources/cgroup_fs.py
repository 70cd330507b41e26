"""What cgroup v1 and v2 have in common: where they are mounted, how one group is made, marked with its owner, removed.

Everything goes by directory descriptor: a launch must not walk paths, and a descriptor cannot be renamed away.
"""

import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from nsbox.errors import HostError

PARENT = "nsbox"  #: the one group of ours in a hierarchy; everything else of ours is below it
_DIRECTORY = os.O_DIRECTORY | os.O_CLOEXEC


class Mount(NamedTuple):
    """One mounted cgroup file system."""

    version: int
    point: str
    root: str  #: the group that shows at ``point``
    controllers: frozenset[str]  #: v1 only: those of v2 are in cgroup.controllers

    def directory(self, path: str) -> str | None:
        """Where the group ``path`` shows; None where it lies outside of what is mounted."""
        root = self.root.rstrip("/")
        if path.startswith("/..") or not (path == root or path.startswith(root + "/")):
            return None
        return os.path.normpath(self.point + "/" + path[len(root) :])


def _unescape(text: str) -> str:
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
        options = [option for option in kind[2].split(",") if "=" not in option and option not in ("rw", "ro")]
        controllers = frozenset(options if version == 1 else ())
        found.append(Mount(version, _unescape(fields[4]), _unescape(fields[3]), controllers))
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


def write_at(directory: int, name: str, text: str) -> None:
    """Write a control file; no file is ever made. Raises OSError."""
    fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def number_at(directory: int, name: str) -> int | None:
    """A control file that holds one number."""
    text = read_at(directory, name)
    return int(text) if text and text.strip().isdigit() else None


def flat(text: str | None) -> dict[str, int]:
    """A "flat keyed" control file: one name and one number a line."""
    pairs = (line.split() for line in (text or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def make_dir(parent: int, name: str) -> None:
    """mkdirat(2), by a name of its own so that a test can stand in for the kernel."""
    os.mkdir(name, 0o755, dir_fd=parent)


def remove_dir(parent: int, name: str, deadline: float) -> bool:
    """rmdirat until ``deadline`` (time.monotonic()): EBUSY lasts until the last process is wholly gone."""
    pause = 0.0002
    while True:
        try:
            os.rmdir(name, dir_fd=parent)
            return True
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() + pause > deadline:
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


# Owners -----------------------------------------------------------------------------------------------------------


def start_time(pid: int | str) -> str:
    """When a process started, in clock ticks since boot; "" when there is none, or only its zombie (proc_pid_stat(5))."""
    fields = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return "" if len(fields) < 20 or fields[0] in "ZX" else fields[19]


def owner_name() -> str:
    """The mark of this process: its pid and start time, which together are never reused."""
    return f"{os.getpid()}-{start_time('self')}"


def owner_is_gone(name: str) -> bool:
    """Whether ``name`` is an owner's mark, and that owner does not run."""
    pid, _, started = name.partition("-")
    return pid.isdigit() and started.isdigit() and start_time(pid) != started


class Nest:
    """``nsbox/<pid>-<start time>`` below ``base``: where all groups of this process in one hierarchy are.

    While it is open, its directory is held by a shared flock(2): that tells a sweep in another pid namespace, which
    cannot look the pid up, that the owner lives. The kernel lets go of it however the owner ends.
    """

    def __init__(self, base: str, enable: Callable[[str], None] | None = None) -> None:
        self.base = base
        self.parent_path = os.path.join(base, PARENT)
        self.path = os.path.join(self.parent_path, owner_name())
        self.fd = -1
        self._enable = enable or (lambda _: None)

    def open(self) -> int:
        """The descriptor of the directory, made on first use. Raises HostError."""
        for _ in range(4):
            if self.fd >= 0:
                break
            try:
                self.fd = self._open()
            except FileNotFoundError as error:  # another process that ends, or a sweep, has just removed it
                last = error
            except OSError as error:
                raise HostError(
                    f"cannot make the cgroup {self.path}: {error.strerror}",
                    remedy="run: nsbox doctor",
                    errno=error.errno,
                ) from None
        else:
            raise HostError(f"cannot make the cgroup {self.path}: {last.strerror}", remedy="run: nsbox doctor")
        return self.fd

    def _open(self) -> int:
        fd = os.open(self.base, os.O_PATH | _DIRECTORY)
        try:
            self._enable(self.base)
            for path in (self.parent_path, self.path):
                name = os.path.basename(path)
                try:
                    make_dir(fd, name)
                except FileExistsError:
                    pass
                mode = os.O_RDONLY if path == self.path else os.O_PATH
                below = os.open(name, mode | _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = below
                self._enable(path)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return fd
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Remove what is empty: the own directory, and the parent unless others use it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            for path in (self.path, self.parent_path):
                try:
                    os.rmdir(path)
                except OSError:
                    break


class Group:
    """One directory in one hierarchy. Subclasses know what its control files mean."""

    def __init__(self, nest: Nest, name: str) -> None:
        self.nest, self.name = nest, name
        self.path = f"{nest.path}/{name}"
        parent = nest.open()
        make_dir(parent, name)
        self.fd = os.open(name, os.O_PATH | _DIRECTORY, dir_fd=parent)
        self.files: dict[str, int] = {}  #: control files that are kept open

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """The descriptor of a control file, kept open. Raises OSError."""
        fd = self.files.get(name, -1)
        if fd < 0:
            fd = self.files[name] = os.open(name, flags | os.O_CLOEXEC, dir_fd=self.fd)
        return fd

    def shut(self, name: str) -> None:
        """Close what ``open`` keeps."""
        fd = self.files.pop(name, -1)
        if fd >= 0:
            os.close(fd)

    def write(self, name: str, value: str | int, *, optional: bool = False) -> None:
        """Write a control file; ``optional`` ones may be missing. Raises HostError that names it."""
        try:
            write_at(self.fd, name, str(value))
        except FileNotFoundError:
            if not optional:
                raise HostError(
                    f"the kernel has no {name} in {self.path}",
                    remedy="use a kernel that was built with this controller, or degrade the limit",
                    errno=errno.ENOENT,
                ) from None
        except OSError as error:
            raise HostError(
                f"cannot write {str(value)!r} to {self.path}/{name}: {error.strerror}",
                remedy="see cgroups(7), or run: nsbox doctor",
                errno=error.errno,
            ) from None

    def close(self) -> None:
        """Close every descriptor; the group stays."""
        for fd in (*self.files.values(), self.fd):
            if fd >= 0:
                os.close(fd)
        self.files.clear()
        self.fd = -1
