"""Paths of a sandbox resolved from outside, by openat2(2) with the sandbox's root as the end of the world.

RESOLVE_IN_ROOT without magic links: no link that the payload plants leads out. A privileged caller takes the payload's
ids for the time of an operation: it can read and write what the payload can, and nothing more. Only regular files are
read or written, and none of /proc, where what a file is depends on who reads it.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from nsbox._native import lib
from nsbox.binds import path_text

RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 0x02, 0x10  # openat2(2)
O_PATH = os.O_PATH
MAX_BYTES = 100 << 20  #: default cap of one read
MAX_ENTRIES = 100_000  #: of one directory, or of one walk
MAX_DEPTH = 128  #: of a walk: each level holds a descriptor
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
PathLike = str | os.PathLike[str]


class Entry(NamedTuple):
    """One entry of a directory inside. ``kind`` is file, dir, symlink, fifo, socket, char or block."""

    name: str
    kind: str
    size: int
    mode: int
    mtime: float


Entries = list[Entry]

_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}


def entry(name: str, status: os.stat_result) -> Entry:
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "other")
    return Entry(name, kind, status.st_size, stat.S_IMODE(status.st_mode), status.st_mtime)


class Rooted:
    """Opens what lies beneath ``root``, an O_PATH descriptor, of which this keeps a copy."""

    _root = -1

    def __init__(self, root: int, ids: tuple[int, int] | None, cwd: str) -> None:
        self._root = os.dup(root)
        self._ids = ids
        self._cwd = cwd
        self._proc = self._device("/proc")

    def __del__(self) -> None:
        # Not earlier: another thread may be in the midst of an operation.
        if self._root >= 0:
            os.close(self._root)

    def _device(self, path: str) -> int:
        try:
            fd = self.open(path, O_PATH)
        except OSError:
            return -1
        try:
            return os.fstat(fd).st_dev
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def as_payload(self) -> Iterator[None]:
        """This thread acts with the payload's ids meanwhile."""
        if self._ids is None:
            yield
            return
        if lib.nsb_act_as(*self._ids) < 0:
            lib.nsb_act_back()
            raise PermissionError(errno.EPERM, "cannot act with the sandbox's ids")
        try:
            yield
        finally:
            lib.nsb_act_back()

    def full(self, path: PathLike) -> str:
        """The absolute path inside; a relative one starts where the box's commands do."""
        text = path_text("path", path)
        return text if text.startswith("/") else f"{self._cwd.rstrip('/')}/{text}"

    def open(self, path: str, flags: int, mode: int = 0) -> int:
        """openat2(2) of an absolute path inside. The caller closes the descriptor."""
        resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS
        if not flags & O_PATH:  # openat2(2) refuses what means nothing together
            flags |= os.O_NOCTTY
        fd = int(lib.nsb_open_in(self._root, os.fsencode(path), flags, mode, resolve))
        if fd < 0:
            raise OSError(-fd, os.strerror(-fd), path)
        return fd

    @contextlib.contextmanager
    def parent(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """(descriptor of the directory, last name) of ``path``."""
        folder, name = os.path.split(path.rstrip("/") or "/")
        if name in ("", ".", ".."):
            raise OSError(errno.EINVAL, "the path does not name an entry", path)
        if make:
            self._make_folders(folder)
        fd = self.open(folder, O_PATH | os.O_DIRECTORY)
        try:
            yield fd, name
        finally:
            os.close(fd)

    def _make_folders(self, path: str) -> None:
        done = ""
        for part in path.split("/"):
            if part in ("", "."):
                continue
            parent, done = done or "/", f"{done}/{part}"
            try:
                os.close(self.open(done, O_PATH | os.O_DIRECTORY))
            except FileNotFoundError:
                fd = self.open(parent, O_PATH | os.O_DIRECTORY)
                try:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=fd)
                finally:
                    os.close(fd)

    def open_regular(self, path: str, flags: int, mode: int = 0) -> int:
        """A regular file, opened. Raises IsADirectoryError, or OSError (EINVAL) for what else is no file."""
        fd = self.open(path, flags | os.O_NONBLOCK, mode)
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_dev != self._proc:
            return fd
        os.close(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise OSError(errno.EINVAL, "not a regular file, or one of /proc: use a command", path)

    def create(self, path: str, mode: int, flags: int = 0) -> int:
        """An empty regular file at an absolute path, open for writing; makes missing parents."""
        with self.parent(path, make=True):
            pass
        fd = self.open_regular(path, os.O_WRONLY | os.O_CREAT | flags, mode & 0o777)
        os.ftruncate(fd, 0)
        return fd
