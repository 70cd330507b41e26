"""Copies of overlay layers: what a sandbox has written, frozen so that other sandboxes can have it beneath their own.

The source may be hostile and is read by directory descriptors only (see ``nsbox.tree``). A layer keeps what overlayfs
needs: whiteouts (character device 0:0), the marks on directories that hide what is beneath them, owners as ids inside.
Set-id bits of files are dropped: they are without effect inside, and the layer lies on the host.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable

from nsbox import tree
from nsbox.resources import ids, owned

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_KEPT = ("user.overlay.opaque", "user.overlay.whiteout")
NOBODY = 65534


#: what the owner of a copy is, by that of the original; None: everything belongs to the caller
Owner = Callable[[int], int] | None
Path = tuple[str, ...]  #: names of directories from the root of a layer


def inside_of(first: int | None) -> Owner:
    """Host ids of a sandbox whose 0 is ``first`` → ids inside."""
    if first is None:
        return None
    return lambda host: host - first if 0 <= host - first < ids.SIZE else NOBODY


def outside_of(first: int | None) -> Owner:
    """Ids inside → host ids of a sandbox whose 0 is ``first``."""
    return None if first is None else lambda inside: inside + first


class Copier:
    """Copies layers into a directory, later ones over earlier ones. Raises OSError."""

    def __init__(self) -> None:
        self._owner: Owner = None
        self._group: Owner = None
        self._root = -1
        self._links: dict[tuple[int, int], tuple[Path, str]] = {}  #: a file of many names → where its copy is

    def layer(self, source: int, target: int, owner: Owner, group: Owner = None) -> None:
        """Copy all that is in one layer. ``group`` is for the groups what ``owner`` is for the owners; without it both
        are alike."""
        self._owner, self._group, self._root = owner, group or owner, target
        try:
            self._directory(source, target, ())
        finally:
            self._links = {}

    def _directory(self, source: int, target: int, path: Path) -> None:
        if len(path) > tree.MAX_DEPTH:
            raise OSError(errno.ENAMETOOLONG, f"more than {tree.MAX_DEPTH} directories deep")
        for name in os.listdir(source):
            status = tree.look(source, name)
            if status is not None:
                self._entry(source, target, name, status, path)

    def _entry(self, source: int, target: int, name: str, status: os.stat_result, path: Path) -> None:
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR:
            self._subdirectory(source, target, name, (*path, name))
            return
        if kind == stat.S_IFSOCK:
            return  # whoever listened on it is not there any more
        _clear(target, name)
        if kind == stat.S_IFREG:
            self._file(source, target, name, status, path)
            return
        if kind == stat.S_IFLNK:
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif kind == stat.S_IFIFO:
            os.mkfifo(name, 0o600, dir_fd=target)
            os.chmod(name, stat.S_IMODE(status.st_mode), dir_fd=target)
        elif kind == stat.S_IFCHR and status.st_rdev == 0:
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)
        else:
            return
        if self._owner is not None and self._group is not None:
            os.chown(name, self._owner(status.st_uid), self._group(status.st_gid), dir_fd=target, follow_symlinks=False)
        os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=target, follow_symlinks=False)

    def _subdirectory(self, source: int, target: int, name: str, path: Path) -> None:
        below = tree.open_directory(source, name, lend=self._owner is None)
        try:
            there = tree.look(target, name)
            if there is not None and (not stat.S_ISDIR(there.st_mode) or tree.overlay_xattr(below, "opaque") == b"y"):
                _clear(target, name)
                there = None
            if there is None:
                os.mkdir(name, 0o700, dir_fd=target)
            made = tree.open_directory(target, name, lend=self._owner is None)
            try:
                status = os.fstat(below)
                self._directory(below, made, path)
                self._attributes(below, made, status, stat.S_IMODE(tree.mode_of(below)))
            finally:
                tree.close(made)
        finally:
            tree.close(below)

    def _link(self, path: Path, other: str, target: int, name: str) -> None:
        """Give a copy in the directory ``path`` another name. The directory is opened anew, for there may be many."""
        folder = os.dup(self._root)
        try:
            for part in path:
                below = tree.open_directory(folder, part, lend=self._owner is None)
                folder, above = below, folder
                tree.close(above)
            os.link(other, name, src_dir_fd=folder, dst_dir_fd=target, follow_symlinks=False)
        finally:
            tree.close(folder)

    def _file(self, source: int, target: int, name: str, status: os.stat_result, path: Path) -> None:
        key = (status.st_dev, status.st_ino)
        if key in self._links:
            self._link(*self._links[key], target, name)
            return
        fd, status = tree.open_file(source, name, lend=self._owner is None)
        try:
            made = os.open(name, _NEW, 0o600, dir_fd=target)
            try:
                _copy_data(fd, made, status.st_size)
                self._attributes(fd, made, status, status.st_mode & 0o1777)
            finally:
                os.close(made)
        finally:
            os.close(fd)
        if status.st_nlink > 1:
            self._links[key] = path, name

    def _attributes(self, source: int, made: int, status: os.stat_result, mode: int) -> None:
        for name, value in tree.user_xattrs(source).items():
            with contextlib.suppress(OSError):
                os.setxattr(made, name, value)
        for name in _KEPT:
            mark = tree.xattr(source, name)
            if mark is not None:
                os.setxattr(made, name, mark)
        if self._owner is not None and self._group is not None:
            os.fchown(made, self._owner(status.st_uid), self._group(status.st_gid))
        tree.set_mode(made, mode)
        os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns))


def _clear(target: int, name: str) -> None:
    """Remove what an earlier layer has put there."""
    status = tree.look(target, name)
    if status is None:
        return
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=target)
    elif not owned.remove(target, name):
        raise OSError(errno.EBUSY, "cannot be removed", name)


def _copy_data(source: int, target: int, size: int) -> None:
    """The data of a file; holes stay holes."""
    at = 0
    while at < size:
        try:
            start = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # lseek(2): nothing but a hole is left
                break
            start = at
        end = _hole(source, start, size)
        os.lseek(target, start, os.SEEK_SET)
        at = start
        while at < end:
            sent = os.sendfile(target, source, at, end - at)
            if sent == 0:
                break
            at += sent
        at = max(at, end)
    os.ftruncate(target, size)


def _hole(source: int, start: int, size: int) -> int:
    try:
        return min(size, os.lseek(source, start, os.SEEK_HOLE))
    except OSError:
        return size
