"""The files of a sandbox, from outside and without a process inside.

Every path is resolved by openat2(2) with the sandbox's root as the end of the world (RESOLVE_IN_ROOT, no magic links),
so that no link that the payload plants leads out. A privileged caller acts with the payload's ids while it does so: it
can read and write what the payload can, and nothing more. Special files are never opened."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from nsbox._native import lib
from nsbox.spec import path_text

RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 0x02, 0x10  # openat2(2)
O_PATH = os.O_PATH
MAX_BYTES = 100 << 20  #: default cap of one read or write


class Entry(NamedTuple):
    """One entry of a directory inside. ``kind`` is file, dir, symlink, fifo, socket, char or block."""

    name: str
    kind: str
    size: int
    mode: int
    mtime: float


_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}


def _entry(name: str, status: os.stat_result) -> Entry:
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "other")
    return Entry(name, kind, status.st_size, stat.S_IMODE(status.st_mode), status.st_mtime)


class Files:
    """File operations beneath ``root``, an O_PATH descriptor, of which this keeps a copy."""

    _root = -1

    def __init__(self, root: int, ids: tuple[int, int] | None, cwd: str) -> None:
        self._root = os.dup(root)
        self._ids = ids
        self._cwd = cwd

    def __del__(self) -> None:
        # Not earlier: another thread may be in the midst of an operation.
        if self._root >= 0:
            os.close(self._root)

    @contextlib.contextmanager
    def _as_payload(self) -> Iterator[None]:
        if self._ids is None:
            yield
            return
        own = os.geteuid(), os.getegid()
        if lib.nsb_act_as(*self._ids) < 0:
            lib.nsb_act_as(*own)
            raise PermissionError(errno.EPERM, "cannot act with the sandbox's ids")
        try:
            yield
        finally:
            lib.nsb_act_as(*own)

    def _full(self, path: str | os.PathLike[str]) -> str:
        text = path_text("path", path)
        return text if text.startswith("/") else f"{self._cwd.rstrip('/')}/{text}"

    def _open(self, path: str, flags: int, mode: int = 0) -> int:
        resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS
        if not flags & O_PATH:  # openat2(2) refuses what means nothing together
            flags |= os.O_NOCTTY
        fd = int(lib.nsb_open_in(self._root, os.fsencode(path), flags, mode, resolve))
        if fd < 0:
            raise OSError(-fd, os.strerror(-fd), path)
        return fd

    @contextlib.contextmanager
    def _parent(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """(descriptor of the directory, last name) of ``path``."""
        folder, name = os.path.split(path.rstrip("/") or "/")
        if name in ("", ".", ".."):
            raise OSError(errno.EINVAL, "the path does not name an entry", path)
        if make:
            self._make_folders(folder)
        fd = self._open(folder, O_PATH | os.O_DIRECTORY)
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
                os.close(self._open(done, O_PATH | os.O_DIRECTORY))
            except FileNotFoundError:
                fd = self._open(parent, O_PATH | os.O_DIRECTORY)
                try:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=fd)
                finally:
                    os.close(fd)

    def read_file(self, path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> bytes:
        """The bytes of a regular file. Raises FileNotFoundError, IsADirectoryError, PermissionError, or OSError (EFBIG)
        when it is longer than ``max_bytes``."""
        full = self._full(path)
        with self._as_payload():
            fd = self._open(full, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(fd, "rb", buffering=0) as file:
            status = os.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), full)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", full)
            chunks, size = [], 0
            while size <= max_bytes and (chunk := file.read(min(1 << 20, max_bytes + 1 - size))):
                chunks.append(chunk)
                size += len(chunk)
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"longer than {max_bytes} bytes", full)
        return b"".join(chunks)

    def write_file(self, path: str | os.PathLike[str], data: bytes | str, *, mode: int = 0o644) -> None:
        """Write a file, replacing what it held; makes missing parents. A link at its place is followed as inside."""
        full, content = self._full(path), data.encode() if isinstance(data, str) else data
        with self._as_payload():
            with self._parent(full, make=True):
                pass
            flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK
            fd = self._open(full, flags, mode & 0o777)
            with os.fdopen(fd, "wb", buffering=0) as file:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file", full)
                os.ftruncate(fd, 0)
                view = memoryview(content)
                while view:
                    view = view[file.write(view) :]

    def list(self, path: str | os.PathLike[str] = ".") -> list[Entry]:
        """What a directory holds, by name."""
        with self._as_payload():
            fd = self._open(self._full(path), os.O_RDONLY | os.O_DIRECTORY)
            try:
                found = []
                for name in sorted(os.listdir(fd)):
                    with contextlib.suppress(FileNotFoundError):
                        found.append(_entry(name, os.stat(name, dir_fd=fd, follow_symlinks=False)))
                return found
            finally:
                os.close(fd)

    def stat(self, path: str | os.PathLike[str]) -> Entry:
        """The entry that a path leads to, links followed as inside."""
        with self._as_payload():
            fd = self._open(self._full(path), O_PATH)
            try:
                return _entry(os.path.basename(os.fspath(path)), os.fstat(fd))
            finally:
                os.close(fd)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether a path leads to anything."""
        try:
            self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a directory and its missing parents; one that exists is no error."""
        with self._as_payload():
            self._make_folders(self._full(path))
            os.close(self._open(self._full(path), O_PATH | os.O_DIRECTORY))

    def remove(self, path: str | os.PathLike[str], *, recursive: bool = False) -> None:
        """Remove a file, a link (never what it points to), or a directory (an empty one unless ``recursive``)."""
        with self._as_payload(), self._parent(self._full(path)) as (fd, name):
            _remove(fd, name, recursive)

    def rename(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        """rename(2). A directory that comes from a lower layer cannot be renamed: OSError (EXDEV)."""
        with (
            self._as_payload(),
            self._parent(self._full(source)) as (old, old_name),
            self._parent(self._full(target), make=True) as (new, new_name),
        ):
            os.rename(old_name, new_name, src_dir_fd=old, dst_dir_fd=new)


def _remove(folder: int, name: str, recursive: bool) -> None:
    if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=folder)
        return
    if recursive:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            for child in os.listdir(fd):
                _remove(fd, child, True)
        finally:
            os.close(fd)
    os.rmdir(name, dir_fd=folder)
