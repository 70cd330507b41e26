"""A directory of the caller's choice in place of the scratch tmpfs: one fresh directory in it for each sandbox."""

import os

from nsbox.errors import SpecError
from nsbox.resources import ids, owned

PREFIX = "nsbox-"
_LIST = "scratch"  #: file of the state directory with every DIR ever used
_remembered: set[tuple[int, str, str]] = set()


class Scratch:
    """The directory of one sandbox, on whatever file system ``folder`` is; ``fd`` holds it."""

    def __init__(self, folder: str, state: str, owner: int | None) -> None:
        """``owner``: the host id that is root inside, None for the caller itself. Raises SpecError."""
        key = (os.getpid(), state, folder)
        if key not in _remembered:
            owned.remember(state, _LIST, [folder], os.path.isdir)
            _remembered.add(key)
        self._parent = self.fd = -1
        try:
            self._parent = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self.name, self.fd = owned.make(self._parent, PREFIX)
            if owner is not None:
                os.fchown(self.fd, owner, owner)
        except OSError as error:
            self.release()
            raise SpecError(
                f"scratch: {folder!r}: {error.strerror}; name a directory that you may write, or 'tmpfs'"
            ) from None
        self.path = f"{folder}/{self.name}"

    def release(self) -> None:
        """Remove it with all that is in it. Only once nothing runs in it any more. Idempotent."""
        if self.fd >= 0:
            owned.remove(self._parent, self.name)
        for fd in (self.fd, self._parent):
            if fd >= 0:
                os.close(fd)
        self.fd = self._parent = -1


def _ours(uid: int) -> bool:
    """Whether a directory of this owner can be a sandbox's of this caller."""
    return uid == os.geteuid() or (os.geteuid() == 0 and ids.FIRST <= uid < ids.FIRST + ids.SLOTS * ids.SIZE)


def sweep(state: str) -> list[str]:
    """Remove the directories of owners that are gone; one line for each. Never raises."""
    folders = owned.remember(state, _LIST, [], os.path.isdir)
    return [f"scratch directory {path}: removed" for folder in folders for path in owned.sweep(folder, PREFIX, _ours)]
