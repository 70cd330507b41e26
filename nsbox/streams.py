"""What a command writes: kept as far as it may be, masked, handed on."""

from __future__ import annotations

import time

from nsbox.light import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsbox.masking import Masker


class Stream:
    """One output stream, kept up to ``cap`` bytes; what comes after is read, counted and dropped."""

    def __init__(
        self, cap: int | None, callback: Callable[[bytes], object] | None, masker: Masker | None = None
    ) -> None:
        self._masker = masker
        self.chunks: list[bytes] = []
        self.kept = self.total = 0
        self.cut_at: float | None = None
        self._cap = cap
        self._callback = callback

    def divert(self, callback: Callable[[bytes], object]) -> None:
        """Hand all that was kept, and all that comes, to ``callback``."""
        kept, self.chunks, self._callback = self.chunks, [], callback
        for chunk in kept:
            callback(chunk)

    def add(self, data: bytes) -> None:
        """Take what was read; values of secrets that are in it are masked."""
        self._keep(self._masker.feed(data) if self._masker else data)

    def finish(self) -> None:
        """The stream is at its end: what was held back, for it could have been the start of a secret, comes now."""
        masker, self._masker = self._masker, None
        if masker:
            self._keep(masker.flush())

    def _keep(self, data: bytes) -> None:
        self.total += len(data)
        room = len(data) if self._cap is None else max(0, self._cap - self.kept)
        if room < len(data) and self.cut_at is None:
            self.cut_at = time.time()
        data = data[:room]
        self.kept += len(data)
        if data and self._callback:
            self._callback(data)
        elif data:
            self.chunks.append(data)

    @property
    def data(self) -> bytes:
        """Everything kept."""
        return b"".join(self.chunks)

    @property
    def truncated(self) -> bool:
        """Whether something was dropped."""
        return self.total > self.kept
