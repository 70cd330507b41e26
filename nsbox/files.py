"""The files of a sandbox, from outside and without a process inside.

Every path is resolved by openat2(2) with the sandbox's root as the end of the world (RESOLVE_IN_ROOT, no magic links),
so that no link that the payload plants leads out. A privileged caller acts with the payload's ids while it does so: it
can read and write what the payload can, and nothing more. Only regular files are read or written, and none of /proc,
where what a file is depends on who reads it."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from nsbox._native import lib
from nsbox.spec import path_text

if TYPE_CHECKING:
    from nsbox.archive import Skipped
    from nsbox.find import Match

RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 0x02, 0x10  # openat2(2)
O_PATH = os.O_PATH
MAX_BYTES = 100 << 20  #: default cap of one read
MAX_ENTRIES = 100_000  #: of one directory, or of one walk
MAX_DEPTH = 128  #: of a walk: each level holds a descriptor
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
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


class Files:
    """File operations beneath ``root``, an O_PATH descriptor, of which this keeps a copy."""

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
        own = os.geteuid(), os.getegid()
        if lib.nsb_act_as(*self._ids) < 0:
            lib.nsb_act_as(*own)
            raise PermissionError(errno.EPERM, "cannot act with the sandbox's ids")
        try:
            yield
        finally:
            lib.nsb_act_as(*own)

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

    def read_file(self, path: PathLike, *, max_bytes: int = MAX_BYTES) -> bytes:
        """The bytes of a regular file. Raises FileNotFoundError, IsADirectoryError, PermissionError, or OSError (EFBIG)
        when it is longer than ``max_bytes``."""
        full = self.full(path)
        with self.as_payload():
            fd = self.open_regular(full, os.O_RDONLY)
        with os.fdopen(fd, "rb", buffering=0) as file:
            chunks, size = [], 0
            while size <= max_bytes and (chunk := file.read(min(1 << 20, max_bytes + 1 - size))):
                chunks.append(chunk)
                size += len(chunk)
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"longer than {max_bytes} bytes", full)
        return b"".join(chunks)

    def write_file(self, path: PathLike, data: bytes | str, *, mode: int = 0o644) -> None:
        """Write a file, replacing what it held; makes missing parents. A link at its place is followed as inside.

        Raises PermissionError, IsADirectoryError, OSError (ENOSPC) at the disk limit."""
        full, content = self.full(path), data.encode() if isinstance(data, str) else data
        with self.as_payload():
            fd = self.create(full, mode)
            with os.fdopen(fd, "wb", buffering=0) as file:
                view = memoryview(content)
                while view:
                    view = view[file.write(view) :]

    def create(self, path: str, mode: int, flags: int = 0) -> int:
        """An empty regular file at an absolute path, open for writing; makes missing parents."""
        with self.parent(path, make=True):
            pass
        fd = self.open_regular(path, os.O_WRONLY | os.O_CREAT | flags, mode & 0o777)
        os.ftruncate(fd, 0)
        return fd

    def list(self, path: PathLike = ".") -> Entries:
        """What a directory holds, by name. Raises OSError (E2BIG) for more than MAX_ENTRIES entries."""
        with self.as_payload():
            fd = self.open(self.full(path), os.O_RDONLY | os.O_DIRECTORY)
            try:
                return [entry(name, status) for name, status in _members(fd, MAX_ENTRIES)]
            finally:
                os.close(fd)

    def stat(self, path: PathLike) -> Entry:
        """The entry that a path leads to, links followed as inside."""
        with self.as_payload():
            fd = self.open(self.full(path), O_PATH)
            try:
                return entry(os.path.basename(os.fspath(path)), os.fstat(fd))
            finally:
                os.close(fd)

    def readlink(self, path: PathLike) -> str:
        """Where a symbolic link points, as it is written."""
        with self.as_payload(), self.parent(self.full(path)) as (fd, name):
            return os.readlink(name, dir_fd=fd)

    def walk(self, path: PathLike = ".", *, max_entries: int = MAX_ENTRIES) -> Entries:
        """Everything beneath a directory, parents first, with ``name`` relative to it; no link is followed.

        Raises OSError (E2BIG) for more than ``max_entries`` entries; what lies deeper than MAX_DEPTH is left out."""
        found: Entries = []
        with self.as_payload():
            fd = self.open(self.full(path), os.O_RDONLY | os.O_DIRECTORY)
            try:
                _walk(fd, "", found, max_entries, 0)
            finally:
                os.close(fd)
        return found

    def exists(self, path: PathLike) -> bool:
        """Whether a path leads to anything."""
        try:
            self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def mkdir(self, path: PathLike) -> None:
        """Make a directory and its missing parents; one that exists is no error."""
        with self.as_payload():
            self._make_folders(self.full(path))
            os.close(self.open(self.full(path), O_PATH | os.O_DIRECTORY))

    def remove(self, path: PathLike, *, recursive: bool = False) -> None:
        """Remove a file, a link (never what it points to), or a directory (an empty one unless ``recursive``)."""
        with self.as_payload(), self.parent(self.full(path)) as (fd, name):
            _remove(fd, name, recursive)

    def rename(self, source: PathLike, target: PathLike) -> None:
        """rename(2). A directory that comes from a lower layer cannot be renamed: OSError (EXDEV)."""
        with (
            self.as_payload(),
            self.parent(self.full(source)) as (old, old_name),
            self.parent(self.full(target), make=True) as (new, new_name),
        ):
            os.rename(old_name, new_name, src_dir_fd=old, dst_dir_fd=new)

    def glob(self, pattern: str) -> "list[str]":
        """See ``nsbox.find.glob``."""
        from nsbox import find

        return find.glob(self, pattern)

    def grep(self, pattern: str, path: PathLike = ".", **options: object) -> "list[Match]":
        """See ``nsbox.find.grep``."""
        from nsbox import find

        return find.grep(self, pattern, path, **options)  # type: ignore[arg-type]

    def upload(self, source: PathLike, target: PathLike = ".") -> "list[Skipped]":
        """See ``nsbox.archive.upload``."""
        from nsbox import archive

        return archive.upload(self, source, target)

    def download(self, source: PathLike, target: PathLike) -> "list[Skipped]":
        """See ``nsbox.archive.download``."""
        from nsbox import archive

        return archive.download(self, source, target)

    def put_tar(self, stream: BinaryIO, target: PathLike = ".") -> "list[Skipped]":
        """See ``nsbox.archive.put_tar``."""
        from nsbox import archive

        return archive.put_tar(self, stream, target)

    def get_tar(self, source: PathLike, stream: BinaryIO) -> "list[Skipped]":
        """See ``nsbox.archive.get_tar``."""
        from nsbox import archive

        return archive.get_tar(self, source, stream)


def _members(fd: int, most: int) -> Iterator[tuple[str, os.stat_result]]:
    """Names in a directory, sorted, with what each is itself. Raises OSError (E2BIG) for more than ``most``."""
    names = []
    with os.scandir(fd) as found:
        for item in found:
            if len(names) >= most:
                raise OSError(errno.E2BIG, f"more than {most} entries")
            names.append(item.name)
    for name in sorted(names):
        with contextlib.suppress(FileNotFoundError):
            yield name, os.stat(name, dir_fd=fd, follow_symlinks=False)


def _walk(fd: int, prefix: str, found: Entries, most: int, depth: int) -> None:
    for name, status in _members(fd, most - len(found)):
        if len(found) >= most:
            raise OSError(errno.E2BIG, f"more than {most} entries")
        found.append(entry(prefix + name, status))
        if not stat.S_ISDIR(status.st_mode) or depth >= MAX_DEPTH:
            continue
        try:
            below = os.open(name, _DIRECTORY, dir_fd=fd)
        except OSError:  # it has gone or become a link meanwhile, or is not the payload's to read
            continue
        try:
            _walk(below, f"{prefix}{name}/", found, most, depth + 1)
        finally:
            os.close(below)


def _remove(folder: int, name: str, recursive: bool, depth: int = 0) -> None:
    if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=folder)
        return
    if recursive:
        if depth > MAX_DEPTH:
            raise OSError(errno.ENAMETOOLONG, f"more than {MAX_DEPTH} directories deep: use a command", name)
        fd = os.open(name, _DIRECTORY, dir_fd=folder)
        try:
            for child in os.listdir(fd):
                with contextlib.suppress(FileNotFoundError):
                    _remove(fd, child, True, depth + 1)
        finally:
            os.close(fd)
    os.rmdir(name, dir_fd=folder)
