"""How much one transfer may carry, whoever made what is carried."""

import errno
from typing import BinaryIO

MAX_ENTRIES = 100_000
MAX_BYTES = 1 << 30


class Budget:
    """What is left of it."""

    def __init__(self) -> None:
        self.bytes, self.entries = MAX_BYTES, MAX_ENTRIES

    def take(self, size: int = 0, *, entries: int = 1) -> None:
        """So many entries and bytes more. Raises OSError (E2BIG, EFBIG) where they are too many."""
        self.entries -= entries
        self.bytes -= size
        if self.entries < 0:
            raise OSError(errno.E2BIG, f"more than {MAX_ENTRIES} entries")
        if self.bytes < 0:
            raise OSError(errno.EFBIG, f"more than {MAX_BYTES} bytes")


class Limited:
    """A stream that may be read as far as a budget goes: what parses it keeps headers in memory."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._budget = stream, Budget()

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes."""
        data = self._stream.read(size)
        self._budget.take(len(data), entries=0)
        return data
