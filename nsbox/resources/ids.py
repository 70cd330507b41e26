"""A private range of 65536 host ids for each sandbox of a privileged caller.

Ranges lie above those that systemd gives to containers (systemd.io, "Users, Groups, UIDs and GIDs") and are taken by
locking one byte of a file: an open file description lock is gone when its holder is, even by SIGKILL, so nothing has
to be cleaned up, and taking one costs a single fcntl(2).
"""

from __future__ import annotations

import fcntl
import os

from nsbox.errors import HostError
from nsbox.light import threading
from nsbox.resources import ofd

FIRST, SIZE, SLOTS = 0x70000000, 65536, 4095


class IdRanges:
    """The ranges of one process. Thread-safe; a forked child must make its own."""

    def __init__(self, state: str) -> None:
        self._file = ofd.open_file(os.path.join(state, "ids"))
        self._taken: set[int] = set()
        self._next = int.from_bytes(os.urandom(4)) % SLOTS
        self._lock = threading.Lock()

    def take(self) -> int:
        """The first host id of a range that no living sandbox on this host uses."""
        with self._lock:
            for _ in range(SLOTS):
                slot, self._next = self._next, (self._next + 1) % SLOTS
                if slot in self._taken or not ofd.lock(self._file, fcntl.F_WRLCK, slot):
                    continue
                self._taken.add(slot)
                return FIRST + slot * SIZE
        raise HostError(f"all {SLOTS} id ranges are in use", remedy="close sandboxes that are not needed any more")

    def give_back(self, first: int) -> None:
        """Let others have the range that starts at ``first``."""
        slot = (first - FIRST) // SIZE
        with self._lock:
            self._taken.discard(slot)
            ofd.lock(self._file, fcntl.F_UNLCK, slot)

    def close(self) -> None:
        """Give everything back."""
        os.close(self._file)
