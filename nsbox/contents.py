"""One pass over a changed file: its hash, whether it is what was there before, and which values are inside."""

import hashlib
from collections.abc import Mapping

from nsbox import tree


def read(fd: int, old: int = -1, look_for: Mapping[str, bytes] | None = None) -> tuple[str, tuple[str, ...], bool]:
    """(SHA-256, names of the values found, whether ``old`` has the same content). ``old`` -1 compares with nothing."""
    wanted = {name: value for name, value in (look_for or {}).items() if value}
    overlap = max(map(len, wanted.values()), default=1) - 1
    digest, same, tail = hashlib.sha256(), True, b""
    found: set[str] = set()
    for piece in tree.chunks(fd):
        digest.update(piece)
        if old >= 0 and same:
            same = tree.exactly(old, len(piece)) == piece
        if wanted:
            # A value can lie across the border of two pieces.
            window = tail + piece
            found.update(name for name, value in wanted.items() if value in window)
            tail = window[-overlap:] if overlap else b""
    return digest.hexdigest(), tuple(sorted(found)), same
