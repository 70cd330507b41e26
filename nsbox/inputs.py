"""What of the host goes into a sandbox, for the report and the log: each source, its size and its hash."""

from __future__ import annotations

import os
import stat

from nsbox._native import lib
from nsbox.light import TYPE_CHECKING, contextlib
from nsbox.prepared import Prepared

if TYPE_CHECKING:
    from typing import Any

    from nsbox.handle import Handle

HASH_MOST = 16 << 20  #: bytes of a file that is hashed; more would be felt at the start
_AT_FDCWD, _RESOLVE_NO_SYMLINKS = -100, 0x04  # openat2(2); sources are canonical
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MODES = {"rw": "rw", "workspace": "cow"}


def describe(prepared: Prepared) -> list[dict[str, Any]]:
    """Path, option, mode and, of a regular file, bytes of each source; of a directory ``bytes`` is None."""
    return [
        {"path": one.path, "kind": one.option, "mode": _MODES.get(one.option, "ro"), "bytes": _size(one.path)}
        for one in prepared.plan.sources
    ]


def _size(path: str) -> int | None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def of(handle: Handle) -> list[dict[str, Any]]:
    """The same for a sandbox, whose sources may have been looked at when it was made: of those only files are again."""
    if handle.inputs is None:
        return describe(handle.prepared)
    return [
        {**entry, "bytes": _size(entry["path"])} if entry["bytes"] is not None else dict(entry)
        for entry in handle.inputs
    ]


def with_hashes(inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with ``sha256`` where the input is a file of at most ``HASH_MOST`` bytes that can be read, and the size
    that it has by then."""
    for entry in inputs:
        if entry["bytes"] is not None:
            with contextlib.suppress(OSError):
                entry |= _hashed(entry["path"])
    return inputs


def _hashed(path: str) -> dict[str, Any]:
    """Others may write to what is mounted read-write: a link or a fifo in its place does not lead or hold us, nor does
    a file that grows."""
    import hashlib

    digest = hashlib.sha256()
    fd = lib.nsb_open_in(_AT_FDCWD, os.fsencode(path), _FLAGS, 0, _RESOLVE_NO_SYMLINKS)
    if fd < 0:
        raise OSError(-fd, os.strerror(-fd))
    try:
        size = left = os.fstat(fd).st_size
        if size > HASH_MOST:
            return {"bytes": size}
        while left > 0 and (piece := os.read(fd, min(left, 1 << 20))):
            digest.update(piece)
            left -= len(piece)
    finally:
        os.close(fd)
    return {"bytes": size, "sha256": digest.hexdigest()}
