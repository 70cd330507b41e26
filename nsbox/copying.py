"""Copies of what a payload made: plain contents and permission bits, nothing that could act by itself.

No owner, no attributes, no set-id or sticky bit, nothing that everybody may write; symbolic links only where they
cannot leave the tree that they are put in.
"""

import errno
import hashlib
import os
import secrets
import stat

from nsbox import tree

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Differs(OSError):
    """A file is no longer what the scan saw."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.ESTALE, "it changed after it was looked at", name)


def plain_mode(mode: int, *, directory: bool = False) -> int:
    """The permission bits that may cross."""
    # We must be able to fill a directory.
    return mode & 0o775 | (0o700 if directory else 0)


def stays_inside(path: str, target: str) -> bool:
    """Whether a link at ``path`` (relative to a root) leads to somewhere beneath the root, whatever else is there.

    ``..`` is safe only at the start, where it climbs real directories; after a name it would climb from wherever a link
    of that name leads. Names only descend, through links that are held to the same rule.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    climbs = 0
    while climbs < len(parts) and parts[climbs] == "..":
        climbs += 1
    return bool(target) and not target.startswith("/") and climbs <= path.count("/") and ".." not in parts[climbs:]


def copy_file(source: int, at: int, name: str, mode: int, expected: str | None, most: int) -> int:
    """Copy an open file to a new name, holes and all; its size. Raises OSError, and then leaves nothing behind.

    ``expected`` is the SHA-256 that the scan saw; ``most`` bytes are copied at the utmost.
    """
    target = os.open(name, _NEW, 0o600, dir_fd=at)
    try:
        try:
            size, digest = _copy(source, target, most)
            if expected is not None and digest != expected:
                raise Differs(name)
            os.fchmod(target, plain_mode(mode))
        finally:
            os.close(target)
    except BaseException:
        os.unlink(name, dir_fd=at)
        raise
    return size


def _copy(source: int, target: int, most: int) -> tuple[int, str]:
    size = os.fstat(source).st_size
    if size > most:
        raise OSError(errno.EFBIG, "larger than what may be copied")
    digest, at = hashlib.sha256(), 0
    while at < size:
        start = _next_data(source, at, size)
        _hash_zeros(digest, start - at)
        os.lseek(source, start, os.SEEK_SET)
        os.lseek(target, start, os.SEEK_SET)
        at = start
        end = _next_hole(source, start, size)
        while at < end:
            piece = os.read(source, min(tree.CHUNK, end - at))
            if not piece:
                raise OSError(errno.ESTALE, "it became shorter meanwhile")
            digest.update(piece)
            _write_all(target, piece)
            at += len(piece)
    os.ftruncate(target, size)
    return size, digest.hexdigest()


def _next_data(fd: int, at: int, size: int) -> int:
    try:
        return min(os.lseek(fd, at, os.SEEK_DATA), size)
    except OSError as error:
        # lseek(2): ENXIO says that there is no data up to the end. File systems without holes answer something else.
        return size if error.errno == errno.ENXIO else at


def _next_hole(fd: int, at: int, size: int) -> int:
    if at >= size:
        return size
    try:
        return min(os.lseek(fd, at, os.SEEK_HOLE), size)
    except OSError:
        return size
    finally:
        os.lseek(fd, at, os.SEEK_SET)


def _hash_zeros(digest: "hashlib._Hash", count: int) -> None:
    zeros = bytes(min(count, tree.CHUNK))
    while count > 0:
        digest.update(zeros[: min(count, len(zeros))])
        count -= len(zeros)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def temporary_name() -> str:
    """A name that nobody else uses, for what is renamed into place."""
    return f".nsbox-{secrets.token_hex(8)}"


def give_to(at: int, name: str, owner: os.stat_result) -> None:
    """Let a new file of a privileged caller belong to whoever owned the one before it, or its directory."""
    if os.geteuid() == 0:
        os.chown(name, owner.st_uid, owner.st_gid, dir_fd=at, follow_symlinks=False)


def change_mode(at: int, name: str, mode: int) -> None:
    """chmod(2) that follows no link, which the kernel has no flag for (fchmodat(2), before fchmodat2)."""
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        status = os.fstat(handle)
        if stat.S_ISLNK(status.st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
        os.chmod(f"/proc/self/fd/{handle}", plain_mode(mode, directory=stat.S_ISDIR(status.st_mode)))
    finally:
        os.close(handle)
