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
    found = []
    for source in prepared.plan.sources:
        try:
            status = os.stat(source.path, follow_symlinks=False)
            size = status.st_size if stat.S_ISREG(status.st_mode) else None
        except OSError:
            size = None
        mode = _MODES.get(source.option, "ro")
        found.append({"path": source.path, "kind": source.option, "mode": mode, "bytes": size})
    return found


def of(handle: Handle) -> list[dict[str, Any]]:
    """The same for a sandbox, whose sources may have been looked at when it was made."""
    return describe(handle.prepared) if handle.inputs is None else [dict(entry) for entry in handle.inputs]


def with_hashes(inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with ``sha256`` where the input is a file of at most ``HASH_MOST`` bytes that can be read."""
    for entry in inputs:
        if entry["bytes"] is not None and entry["bytes"] <= HASH_MOST:
            with contextlib.suppress(OSError):
                entry["sha256"] = _hash(entry["path"])
    return inputs


def _hash(path: str) -> str:
    """Others may write to what is mounted read-write: a link or a fifo in its place does not lead or hold us, nor does
    a file that grows."""
    import hashlib

    digest, left = hashlib.sha256(), HASH_MOST
    fd = lib.nsb_open_in(_AT_FDCWD, os.fsencode(path), _FLAGS, 0, _RESOLVE_NO_SYMLINKS)
    if fd < 0:
        raise OSError(-fd, os.strerror(-fd))
    try:
        while left > 0 and (piece := os.read(fd, min(left, 1 << 20))):
            digest.update(piece)
            left -= len(piece)
    finally:
        os.close(fd)
    return digest.hexdigest()
