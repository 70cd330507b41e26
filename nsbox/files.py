"""The files of a sandbox, from outside and without a process inside; see ``nsbox.rooted`` for what makes that safe."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

from nsbox.rooted import DIRECTORY, MAX_BYTES, MAX_DEPTH, MAX_ENTRIES, O_PATH, Entries, Entry, PathLike, Rooted, entry

if TYPE_CHECKING:
    from nsbox.archive import Skips
    from nsbox.find import Matches

__all__ = ["Entry", "Files"]


Names = list[str]


class Files(Rooted):
    """File operations inside, by the payload's rights. Paths are absolute, or start where the box's commands do.

    Every one raises the built-in errors: FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError,
    FileExistsError, or another OSError, with the path as it is inside.
    """

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
        """Write ``data`` (text: as UTF-8) to a file, replacing what it held; makes missing parents. A link at its place
        is followed as inside. ``mode`` is that of a new file.

        Raises PermissionError, IsADirectoryError, OSError (ENOSPC) at the disk limit."""
        full, content = self.full(path), data.encode() if isinstance(data, str) else data
        with self.as_payload():
            fd = self.create(full, mode)
            with os.fdopen(fd, "wb", buffering=0) as file:
                view = memoryview(content)
                while view:
                    view = view[file.write(view) :]

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
        """rename(2) of ``source`` to ``target``, whose missing parents are made. A directory that comes from a lower
        layer cannot be renamed: OSError (EXDEV)."""
        with (
            self.as_payload(),
            self.parent(self.full(source)) as (old, old_name),
            self.parent(self.full(target), make=True) as (new, new_name),
        ):
            os.rename(old_name, new_name, src_dir_fd=old, dst_dir_fd=new)

    def glob(self, pattern: str) -> Names:
        """Paths that fit ``pattern``, sorted; relative ones for a relative pattern.

        ``*`` and ``?`` stay within a name, ``**`` spans directories; hidden names are names like others. Links are not
        followed."""
        from nsbox import find

        return find.glob(self, pattern)

    def grep(self, pattern: str, path: PathLike = ".", **options: object) -> "Matches":
        """Lines that the regular expression ``pattern`` fits, of the file at ``path`` or those beneath it.

        ``options``: ``names``, a pattern that a file's name must fit; ``ignore_case``; ``max_matches`` (1000). Long and
        binary files are left out. Raises re.error."""
        from nsbox import find

        return find.grep(self, pattern, path, **options)  # type: ignore[arg-type]

    def upload(self, source: PathLike, target: PathLike = ".") -> "Skips":
        """Copy the host's file or directory ``source`` to ``target`` inside: the contents of one become the other's.

        Gives what was left out, special files, and why. Existing files are replaced. Raises OSError of either side."""
        from nsbox import archive

        return archive.upload(self, source, target)

    def download(self, source: PathLike, target: PathLike) -> "Skips":
        """Copy the tree or file ``source`` from inside into ``target``, a new or empty directory of the host.

        Gives what was left out, and why: special files, links that lead outside, what cannot be read. What comes out is
        the payload's work: look before anything of the host acts upon it. Raises FileExistsError, OSError."""
        from nsbox import archive

        return archive.download(self, source, target)

    def put_tar(self, stream: BinaryIO, target: PathLike = ".") -> "Skips":
        """Unpack an uncompressed tar ``stream`` into the directory ``target`` inside; gives what was left out, and why.

        Raises tarfile.TarError for what is no archive, OSError."""
        from nsbox import archive

        return archive.put_tar(self, stream, target)

    def get_tar(self, source: PathLike, stream: BinaryIO) -> "Skips":
        """Write the tree or file ``source`` to ``stream`` as an uncompressed tar archive; gives what was left out, and
        why. Raises OSError."""
        from nsbox import archive

        return archive.get_tar(self, source, stream)


def _members(fd: int, most: int) -> Iterator[tuple[str, os.stat_result]]:
    """Names in a directory, sorted, with what each is itself. Raises OSError (E2BIG) for more than ``most``."""
    names: list[str] = []
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
            below = os.open(name, DIRECTORY, dir_fd=fd)
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
        fd = os.open(name, DIRECTORY, dir_fd=folder)
        try:
            for child in os.listdir(fd):
                with contextlib.suppress(FileNotFoundError):
                    _remove(fd, child, True, depth + 1)
        finally:
            os.close(fd)
    os.rmdir(name, dir_fd=folder)
