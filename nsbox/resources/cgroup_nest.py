"""A group in one hierarchy: what is wanted of it, where it is made, and the mark of the process that owns it."""

from __future__ import annotations

import errno
import fcntl
import os

from nsbox.errors import HostError
from nsbox.light import TYPE_CHECKING, NamedTuple, functools, threading
from nsbox.resources import cgroup_fs as fs

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

PARENT = "nsbox"  #: the one group of ours in a hierarchy; everything else of ours is below it
V1_NAME = {"io": "blkio"}  #: controllers that were called otherwise
LIMITS: tuple[Limit, ...] = ("memory", "pids", "cpu", "io")
COUNTERS = (
    *("memory_peak_bytes", "oom_kills", "pids_peak", "pids_events"),
    *("cpu_usage_us", "cpu_user_us", "cpu_system_us", "cpu_throttled_count", "cpu_throttled_us"),
    *("io_read_bytes", "io_write_bytes", "pressure_cpu_us", "pressure_io_us", "pressure_memory_us"),
)

if TYPE_CHECKING:
    Limit = Literal["memory", "pids", "cpu", "io"]
else:
    Limit = str


class IoMax(NamedTuple):
    """Limits for one block device, a second each; None is unlimited."""

    device: str  #: major:minor
    read_bytes: int | None = None
    write_bytes: int | None = None
    read_operations: int | None = None
    write_operations: int | None = None


class Wanted(NamedTuple):
    """The limits of one group; None is unlimited."""

    memory: int | None  #: bytes
    pids: int | None
    cpus: float | None
    io_max: tuple[IoMax, ...] = ()
    nested: bool = False  #: whether there will be groups below it: its limits hold for all of them together


def needed(wanted: Wanted) -> list[Limit]:
    """The limits that ``wanted`` sets."""
    values: list[tuple[Limit, object]] = [("memory", wanted.memory), ("pids", wanted.pids), ("cpu", wanted.cpus)]
    return [limit for limit, value in values if value is not None] + (["io"] if wanted.io_max else [])


def start_time(pid: int | str) -> str:
    """When a process started, in clock ticks since boot (proc_pid_stat(5)); "" for none, and for a zombie."""
    fields = fs.read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return "" if len(fields) < 20 or fields[0] in "ZX" else fields[19]


def owner_name() -> str:
    """The mark of this process: its pid and start time, which together are never reused."""
    return _owner_name(os.getpid())


@functools.lru_cache(maxsize=1)
def _owner_name(pid: int) -> str:
    return f"{pid}-{start_time('self')}"


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
        self.live: set[str] = set()  #: names of the groups that are not removed yet
        self._closing = False
        self._lock = threading.Lock()

    def open(self, name: str = "") -> int:
        """The descriptor of the directory, made on first use, and kept while ``name`` is live. Raises HostError."""
        with self._lock:
            self._closing = False
            for attempt in range(4):
                if self.fd >= 0:
                    break
                try:
                    self.fd = self._open()
                except OSError as error:
                    # Another process that ends, or a sweep, may just have removed it: begin again.
                    if attempt < 3 and isinstance(error, FileNotFoundError) and os.path.isdir(self.base):
                        continue
                    raise HostError(
                        f"cannot make the cgroup {self.path}: {error.strerror}",
                        remedy="run: nsbox doctor",
                        errno=error.errno,
                    ) from None
            if name:
                self.live.add(name)  # before it exists, or another thread's close() would come between
            return self.fd

    def _open(self) -> int:
        fd = os.open(self.base, os.O_PATH | fs.DIRECTORY)
        try:
            self._enable(self.base)
            for path in (self.parent_path, self.path):
                name = os.path.basename(path)
                try:
                    os.mkdir(name, 0o755, dir_fd=fd)
                except FileExistsError:
                    pass
                mode = os.O_RDONLY if path == self.path else os.O_PATH
                below = os.open(name, mode | fs.DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = below
                self._enable(path)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return fd
        except BaseException:
            os.close(fd)
            raise

    def remove(self, name: str, deadline: float) -> bool:
        """Remove a group, trying until ``deadline`` (time.monotonic()). Never raises."""
        if self.fd >= 0 and not fs.remove_dir(self.fd, name, deadline):
            return False
        self.live.discard(name)
        if self._closing:
            self.close()
        return True

    def close(self) -> None:
        """Remove the own directory, and the parent unless others use it; now, or with the last group."""
        with self._lock:
            self._closing = True
            if self.fd < 0 or self.live:
                return
            for path in (self.path, self.parent_path):
                try:
                    os.rmdir(path)
                except OSError:  # in use by another process, or through another object of this one
                    pass
            self.drop()

    def drop(self) -> None:
        """Close the descriptor and leave the directory, which is another's to remove."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Below:
    """Where the groups below a group of ours are made: the same face as a Nest, but nobody else is there."""

    def __init__(self, group: BaseGroup) -> None:
        self.path: str = group.path
        self._group = group
        self.live: set[str] = set()

    def open(self, name: str = "") -> int:
        """The descriptor of the group's directory, which stays the group's."""
        return self._group.fd

    def remove(self, name: str, deadline: float) -> bool:
        """As ``Nest.remove``; once the group above is closed, what is below goes with it."""
        return self._group.fd < 0 or fs.remove_dir(self._group.fd, name, deadline)


class BaseGroup:
    """One directory in one hierarchy. Subclasses know what its control files mean."""

    def __init__(self, nest: Nest | Below, name: str) -> None:
        self.nest, self.name = nest, name
        self.path = f"{nest.path}/{name}"
        parent = nest.open(name)
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
            self.fd = os.open(name, os.O_PATH | fs.DIRECTORY, dir_fd=parent)
        except OSError:
            nest.live.discard(name)
            raise
        self.files: dict[str, int] = {}  #: control files that are kept open

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """The descriptor of a control file, kept open. Raises OSError."""
        fd = self.files.get(name, -1)
        if fd < 0:
            fd = self.files[name] = os.open(name, flags | os.O_CLOEXEC, dir_fd=self.fd)
        return fd

    def text(self, name: str) -> str | None:
        """What a control file says, None where the kernel has no such file. Its descriptor is kept: the second reading,
        which is mostly the one at the end of a run, is one system call."""
        try:
            fd = self.files[name] if name in self.files else self.open(name)
            return os.pread(fd, 16384, 0).decode() if fd >= 0 else None
        except OSError:
            self.files.setdefault(name, -1)
            return None

    def number(self, name: str) -> int | None:
        """A control file that holds one number; None where there is none, or it says "max"."""
        text = (self.text(name) or "").strip()
        return int(text) if text.isdigit() else None

    def shut(self, name: str) -> None:
        """Close what ``open`` keeps."""
        fd = self.files.pop(name, -1)
        if fd >= 0:
            os.close(fd)

    def write(self, name: str, value: str | int, *, optional: bool = False) -> None:
        """Write a control file; ``optional`` ones may be missing. Raises HostError that names it."""
        try:
            fs.write_at(self.fd, name, str(value))
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
        fds, self.fd = (*self.files.values(), self.fd), -1
        self.files.clear()
        for fd in fds:
            if fd >= 0:
                os.close(fd)
