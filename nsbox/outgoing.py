"""What export and apply have in common: one change after the other, each with its own outcome."""

import os
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from nsbox import copying, tree
from nsbox.change import Change

Allowed = Collection[str] | bool


class Caps(NamedTuple):
    """How much may be taken out in one go."""

    entries: int = 100_000
    bytes: int = 1 << 30


class Held(NamedTuple):
    """A change that did not cross, and why."""

    path: str
    change: str
    why: str


class Exported(NamedTuple):
    """What ``export`` did. ``manifest`` lists every change, those without a file too: deletions, fifos, sockets."""

    copied: tuple[str, ...]
    held_back: tuple[Held, ...]  #: trusted by the host and not allowed by name
    skipped: tuple[Held, ...]
    manifest: tuple[dict[str, Any], ...]


class Applied(NamedTuple):
    """What ``apply`` did, by path: written back, held back, left alone because of a conflict, or skipped."""

    applied: tuple[str, ...]
    held_back: tuple[Held, ...]  #: trusted by the host and not allowed by name
    conflicts: tuple[Held, ...]  #: the host's file is another than the one that the payload started from
    skipped: tuple[Held, ...]


def listed(path: str, allowed: Iterable[str]) -> bool:
    return any(path == name or path.startswith(name.rstrip("/") + "/") for name in allowed)


def is_allowed(entry: Change, allowed: Allowed) -> bool:
    """Whether a change may cross although the host would act upon it: everything, or by its name or a directory's."""
    if not entry.trusted_by_host or allowed is True:
        return True
    return not isinstance(allowed, bool) and listed(entry.path, allowed)


class Conflict(ValueError):
    """The host's file is another than the one that the payload started from."""


class Job:
    """Takes changes across, one after the other."""

    def __init__(self, source: tree.Walker, target: tree.Walker, allowed: Allowed, caps: Caps) -> None:
        self.source, self.target, self.allowed = source, target, allowed
        self.entries_left, self.bytes_left = caps.entries, caps.bytes
        self.done: list[str] = []
        self.held_back: list[Held] = []
        self.conflicts: list[Held] = []
        self.skipped: list[Held] = []

    def take(self, entry: Change, act: Callable[[Change], None]) -> None:
        """Do one change, and note what came of it."""
        if not is_allowed(entry, self.allowed):
            self.held_back.append(Held(entry.path, entry.change, entry.trusted_by_host))
            return
        if self.entries_left <= 0:
            self.skipped.append(Held(entry.path, entry.change, "more changes than may be taken out"))
            return
        try:
            act(entry)
        except Conflict as error:
            self.conflicts.append(Held(entry.path, entry.change, str(error)))
            return
        except (OSError, ValueError) as error:
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            self.skipped.append(Held(entry.path, entry.change, why))
            return
        self.entries_left -= 1
        self.done.append(entry.path)

    def copy(self, entry: Change, at: int, name: str) -> None:
        """The content of a changed file or link, to a new name in the directory ``at``."""
        parents, own = tree.split(entry.path)
        directory = self.source.directory(parents)
        if entry.kind == "symlink":
            os.symlink(self.checked_target(entry, os.readlink(own, dir_fd=directory)), name, dir_fd=at)
            return
        fd, _ = tree.open_file(directory, own, lend=True)
        try:
            self.bytes_left -= copying.copy_file(fd, at, name, entry.mode, entry.sha256, self.bytes_left)
        finally:
            os.close(fd)

    def checked_target(self, entry: Change, target: str) -> str:
        if target != entry.target:
            raise copying.Differs(entry.path)
        if not copying.stays_inside(entry.path, target):
            raise ValueError(f"the link leads outside: {target!r}")
        return target
