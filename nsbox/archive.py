"""Whole trees into a sandbox and out of it, as directories or tar streams, without a process inside.

Inside, everything is done with the payload's ids and beneath its root. What comes out is plain contents and permission
bits; links only where they cannot leave the tree. What is left out is told, never silently dropped.
"""

import contextlib
import os
import stat
import tarfile
from typing import BinaryIO, NamedTuple

from nsbox import copying, tree
from nsbox.budget import Budget, Limited
from nsbox.files import Files
from nsbox.rooted import Entry, PathLike

CHUNK = 1 << 20


class Skipped(NamedTuple):
    """What a transfer left out, and why."""

    path: str
    why: str


Skips = list[Skipped]


def _pour(source: int, target: int, budget: Budget) -> None:
    while data := os.read(source, CHUNK):
        budget.take(len(data), entries=0)
        view = memoryview(data)
        while view:
            view = view[os.write(target, view) :]


def upload(files: Files, source: PathLike, target: PathLike = ".") -> Skips:
    """Copy a file or directory of the host to ``target`` inside: a directory's contents become that of ``target``.

    Links are made as they are, special files left out. Existing files are replaced. Raises OSError of either side."""
    top, goal, skipped, budget = os.fspath(source), files.full(target), Skips(), Budget()
    if not os.path.isdir(top):
        _upload_one(files, top, goal, os.stat(top), budget)
        return skipped
    files.mkdir(goal)
    for folder, names, others in os.walk(top, onerror=_raise):
        below = os.path.join(goal, os.path.relpath(folder, top))
        for name in sorted([*names, *others]):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if stat.S_IFMT(status.st_mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                skipped.append(Skipped(os.path.relpath(path, top), tree.kind_of(status.st_mode)))
            else:
                _upload_one(files, path, os.path.join(below, name), status, budget)
    return skipped


def _raise(error: OSError) -> None:
    raise error


def _upload_one(files: Files, source: str, target: str, status: os.stat_result, budget: Budget) -> None:
    budget.take()
    if stat.S_ISDIR(status.st_mode):
        files.mkdir(target)
    elif stat.S_ISLNK(status.st_mode):
        _link(files, target, os.readlink(source))
    else:
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _store(files, target, status.st_mode, fd, budget)
        finally:
            os.close(fd)


def _store(files: Files, target: str, mode: int, source: int, budget: Budget) -> None:
    with files.as_payload():
        _clear(files, target)
        fd = files.create(target, mode, os.O_EXCL)
        try:
            os.fchmod(fd, mode & 0o777)
            _pour(source, fd, budget)
        finally:
            os.close(fd)


def _clear(files: Files, target: str) -> None:
    """Remove what stands in the way of a new file or link, a link itself rather than what it leads to."""
    with contextlib.suppress(FileNotFoundError), files.parent(target) as (fd, name):
        os.unlink(name, dir_fd=fd)


def _link(files: Files, target: str, text: str) -> None:
    with files.as_payload():
        _clear(files, target)
        with files.parent(target, make=True) as (fd, name):
            os.symlink(text, name, dir_fd=fd)


def _open(files: Files, path: str) -> int:
    with files.as_payload():
        return files.open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)


def _listing(files: Files, source: PathLike) -> list[tuple[str, Entry]]:
    """(full path inside, entry) of a tree, or of one file."""
    top, what = files.full(source), files.stat(source)
    if what.kind == "dir":
        return [(f"{top}/{item.name}", item) for item in files.walk(top)]
    return [(top, what._replace(name=os.path.basename(top)))]


def download(files: Files, source: PathLike, target: PathLike) -> Skips:
    """Copy a tree from inside into ``target``, a new or empty directory of the host; a single file goes into it, too.

    What comes out is the payload's work: look at it before anything of the host acts upon it. Raises FileExistsError
    for a directory that is not empty, OSError of either side."""
    goal = os.fspath(target)
    os.makedirs(goal, exist_ok=True)
    dest = os.open(goal, tree.DIRECTORY & ~os.O_NOFOLLOW)
    try:
        if tree.names(dest, 1)[0]:
            raise FileExistsError(f"{goal!r} is not empty; name a new or empty directory")
        skipped, budget, modes = Skips(), Budget(), list[tuple[str, int]]()
        with tree.Walker(dest, make=0o755) as walker:
            for path, item in _listing(files, source):
                try:
                    _download_one(files, path, item, walker, budget)
                except (PermissionError, FileNotFoundError, ValueError, NotADirectoryError) as error:
                    skipped.append(Skipped(item.name, getattr(error, "strerror", None) or str(error)))
                if item.kind == "dir":
                    modes.append((item.name, item.mode))
            for name, mode in reversed(modes):
                parents, own = tree.split(name)
                with contextlib.suppress(OSError):
                    copying.change_mode(walker.directory(parents), own, mode)
        return skipped
    finally:
        os.close(dest)


def _download_one(files: Files, path: str, item: Entry, walker: tree.Walker, budget: Budget) -> None:
    parents, name = tree.split(item.name)
    budget.take()
    if item.kind == "dir":
        walker.directory((*parents, name))
    elif item.kind == "symlink":
        text = files.readlink(path)
        if not copying.stays_inside(item.name, text):
            raise ValueError(f"the link leads outside: {text!r}")
        os.symlink(text, name, dir_fd=walker.directory(parents))
    elif item.kind == "file":
        fd = _open(files, path)
        try:
            size = copying.copy_file(fd, walker.directory(parents), name, item.mode, None, budget.bytes)
            budget.take(size, entries=0)
        finally:
            os.close(fd)
    else:
        raise ValueError(f"a {item.kind}")


def get_tar(files: Files, source: PathLike, stream: BinaryIO) -> Skips:
    """Write a tree, or one file, to ``stream`` as an uncompressed tar archive (pax). Links are stored as they are."""
    skipped, budget = Skips(), Budget()
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for path, item in _listing(files, source):
            info = tarfile.TarInfo(item.name)
            info.mode, info.mtime = item.mode & 0o777, int(item.mtime)
            try:
                _add(files, path, item, info, archive, budget)
            except (PermissionError, FileNotFoundError, ValueError) as error:
                skipped.append(Skipped(item.name, getattr(error, "strerror", None) or str(error)))
    return skipped


def _add(files: Files, path: str, item: Entry, info: tarfile.TarInfo, archive: tarfile.TarFile, budget: Budget) -> None:
    if item.kind == "dir":
        info.type = tarfile.DIRTYPE
        archive.addfile(info)
    elif item.kind == "symlink":
        info.type, info.linkname = tarfile.SYMTYPE, files.readlink(path)
        archive.addfile(info)
    elif item.kind == "file":
        with os.fdopen(_open(files, path), "rb") as file:
            info.size = os.fstat(file.fileno()).st_size
            budget.take(info.size, entries=0)
            archive.addfile(info, _Exactly(file, info.size))  # type: ignore[arg-type]
    else:
        raise ValueError(f"a {item.kind}")


class _Exactly:
    """A file as long as its header says, whatever the payload does to it meanwhile: cut off, or filled with zeros."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes."""
        size = min(size, self._left)
        data = self._file.read(size)
        self._left -= size
        return data + bytes(size - len(data))


def put_tar(files: Files, stream: BinaryIO, target: PathLike = ".") -> Skips:
    """Unpack an uncompressed tar stream into a directory inside. Raises tarfile.TarError for what is none.

    Names cannot lead out of the sandbox; ones that lead out of ``target`` (absolute, or by ``..``) are left out, and so
    are devices, fifos and hard links to what is not in the archive before them."""
    goal, skipped, budget = files.full(target), Skips(), Budget()
    files.mkdir(goal)
    with tarfile.open(fileobj=Limited(stream), mode="r|") as archive:  # type: ignore[call-overload]
        for info in archive:
            budget.take()
            try:
                _unpack(files, goal, archive, info, budget)
            except (ValueError, NotADirectoryError, IsADirectoryError, PermissionError, FileNotFoundError) as error:
                skipped.append(Skipped(info.name, getattr(error, "strerror", None) or str(error)))
    return skipped


def _unpack(files: Files, goal: str, archive: tarfile.TarFile, info: tarfile.TarInfo, budget: Budget) -> None:
    name = info.name.removeprefix("./").rstrip("/")
    if name in ("", "."):
        return
    tree.split(name)  # refuses what leads elsewhere
    path = f"{goal}/{name}"
    if info.isdir():
        files.mkdir(path)
    elif info.issym():
        _link(files, path, info.linkname)
    elif info.islnk():
        tree.split(info.linkname.removeprefix("./"))
        fd = _open(files, f"{goal}/{info.linkname.removeprefix('./')}")
        try:
            _store(files, path, info.mode, fd, budget)
        finally:
            os.close(fd)
    elif info.isfile():
        content = archive.extractfile(info)
        assert content is not None
        with files.as_payload():
            _clear(files, path)
            fd = files.create(path, info.mode, os.O_EXCL)
            with os.fdopen(fd, "wb") as file:
                os.fchmod(fd, info.mode & 0o777)
                while data := content.read(CHUNK):
                    budget.take(len(data), entries=0)
                    file.write(data)
    else:
        raise ValueError("a special file")
