"""Walking a tree that an adversary has written: only by directory descriptors, one name at a time, never a link.

Every function takes a descriptor and a single name. A name that turns out to be a link, or that changes under our
hands, gives an error, never a file outside of the tree.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence

#: Directories deeper than this are not entered: each level holds a descriptor.
MAX_DEPTH = 128
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a fifo that takes the place of a file must not hold us.
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
CHUNK = 1 << 20

KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}


def kind_of(mode: int) -> str:
    """``file``, ``dir``, ``symlink``, ``fifo``, ``socket``, ``char`` or ``block``."""
    return KINDS.get(stat.S_IFMT(mode), "unknown")


def look(at: int, name: str) -> os.stat_result | None:
    """What a name is, itself; None when it is not there."""
    try:
        return os.stat(name, dir_fd=at, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None


_lent: dict[int, int] = {}


def _open(at: int, name: str, flags: int, lend: bool) -> int:
    try:
        return os.open(name, flags, dir_fd=at)
    except PermissionError:
        if not lend:
            raise
    return _open_forbidden(at, name, flags)


def _open_forbidden(at: int, name: str, flags: int) -> int:
    """What the payload made unreadable belongs, for an ordinary user, to the user: lend it the bits meanwhile."""
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        status = os.fstat(handle)
        directory = bool(flags & os.O_DIRECTORY)
        wanted = stat.S_IFDIR if directory else stat.S_IFREG
        if stat.S_IFMT(status.st_mode) != wanted or status.st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        # The descriptor's own entry in /proc leads to that very inode, whatever the name means by now.
        path, mode = f"/proc/self/fd/{handle}", stat.S_IMODE(status.st_mode)
        os.chmod(path, mode | 0o700)
        fd = -1
        try:
            fd = os.open(path, flags & ~os.O_NOFOLLOW)
        finally:
            if fd >= 0 and directory:
                _lent[fd] = mode  # names in it are looked up until it is closed
            else:
                os.chmod(path, mode)
        return fd
    finally:
        os.close(handle)


def open_directory(at: int, name: str, *, lend: bool = False) -> int:
    """A directory by one name, to be given to ``close``. Raises OSError (ENOTDIR, ELOOP) for anything else.

    With ``lend``, what belongs to us and forbids it is opened all the same; never meant for the host's own files.
    """
    return _open(at, name, DIRECTORY, lend)


def open_file(at: int, name: str, *, lend: bool = False) -> tuple[int, os.stat_result]:
    """A regular file by one name, and its status. Raises OSError for anything else."""
    fd = _open(at, name, FILE, lend)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return fd, status


def close(directory: int) -> None:
    """Close a directory and take back what was lent to it."""
    mode = _lent.pop(directory, None)
    try:
        if mode is not None:
            os.fchmod(directory, mode)
    finally:
        os.close(directory)


def mode_of(directory: int) -> int:
    """The mode of an open directory as it was before it was lent anything."""
    lent = _lent.get(directory)
    return os.fstat(directory).st_mode if lent is None else lent


def set_mode(fd: int, mode: int) -> None:
    """Give a file or directory its mode; one that is lent to us gets it when it is closed."""
    if fd in _lent:
        _lent[fd] = mode
    else:
        os.fchmod(fd, mode)


def names(directory: int, most: int) -> tuple[list[str], bool]:
    """Up to ``most`` names of a directory, sorted, and whether these are all."""
    found: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if len(found) >= most:
                return sorted(found), False
            found.append(entry.name)
    return sorted(found), True


def xattr(fd: int, name: str) -> bytes | None:
    """The value of an extended attribute, None when there is none or the file system has no such thing."""
    try:
        return os.getxattr(fd, name)
    except OSError:
        return None


def overlay_xattr(fd: int, name: str) -> bytes | None:
    """An attribute of overlayfs, as written with and without ``userxattr``."""
    value = xattr(fd, f"user.overlay.{name}")
    return xattr(fd, f"trusted.overlay.{name}") if value is None else value


def user_xattrs(fd: int) -> dict[str, bytes]:
    """The ``user.*`` attributes but those of overlayfs: the only ones that a payload can set."""
    try:
        listed = os.listxattr(fd)
    except OSError:
        return {}
    wanted = [name for name in listed if name.startswith("user.") and not name.startswith("user.overlay.")]
    return {name: xattr(fd, name) or b"" for name in wanted}


def chunks(fd: int) -> Iterator[bytes]:
    """The rest of a file, piece by piece."""
    while piece := os.read(fd, CHUNK):
        yield piece


def exactly(fd: int, size: int) -> bytes:
    """Up to ``size`` bytes: a read can be short without being at the end."""
    pieces = []
    while size > 0 and (piece := os.read(fd, min(size, CHUNK))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def split(path: str) -> tuple[tuple[str, ...], str]:
    """The directories of a relative path, and its last name. Raises ValueError for a path that could lead elsewhere."""
    parts = path.split("/")
    if not path or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(f"{path!r} is not a plain relative path")
    return tuple(parts[:-1]), parts[-1]


class Walker:
    """Opens directories beneath a root, one name at a time, and keeps the last chain open for the next."""

    def __init__(self, root: int, *, make: int | None = None, lend: bool = False) -> None:
        self.root, self.lend = root, lend
        self.make = make  #: the mode for directories that are missing; None: they are an error
        self._names: list[str] = []
        self._fds: list[int] = []

    def directory(self, parts: Sequence[str]) -> int:
        """A descriptor of a directory beneath the root, valid until the next call. Raises OSError."""
        if len(parts) > MAX_DEPTH:
            raise OSError(errno.ENAMETOOLONG, f"more than {MAX_DEPTH} directories deep", "/".join(parts))
        same = 0
        while same < min(len(parts), len(self._names)) and parts[same] == self._names[same]:
            same += 1
        self._cut(same)
        for name in parts[same:]:
            at = self._fds[-1] if self._fds else self.root
            self._fds.append(self._open(at, name))
            self._names.append(name)
        return self._fds[-1] if self._fds else self.root

    def _open(self, at: int, name: str) -> int:
        try:
            return open_directory(at, name, lend=self.lend)
        except FileNotFoundError:
            if self.make is None:
                raise
        try:
            os.mkdir(name, self.make, dir_fd=at)
        except FileExistsError:
            return open_directory(at, name)
        made = open_directory(at, name)
        if os.geteuid() == 0:
            # Not root's, but of whoever owns the tree.
            owner = os.fstat(at)
            os.fchown(made, owner.st_uid, owner.st_gid)
        return made

    def _cut(self, keep: int) -> None:
        while len(self._fds) > keep:
            close(self._fds.pop())
            self._names.pop()

    def close(self) -> None:
        """Close what is kept open; the root stays the caller's."""
        self._cut(0)

    def __enter__(self) -> "Walker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
