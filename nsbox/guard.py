"""The words for "no": what is refused, or covered, when a caller mounts something of the host.

Three answers. A *refusal* for what was named and is sensitive by its place: a home directory, a folder of credentials,
a socket, the host's kernel, nsbox's own state; also when it is only inside of what was named. A *mask* for a small file
of credentials that happens to lie in a project (``.env``, ``id_rsa``): an empty file covers it, the job goes on, and
the record says so. *Let through* is what the caller named by ``--allow-sensitive``. Nothing here raises for a mount:
the caller decides. Not seen: secrets inside of ordinary files, and names deeper than the scan goes.
"""

import os
import stat
import time
from collections.abc import Collection, Iterable
from typing import NamedTuple

from nsbox.places import KERNEL_FILE_SYSTEMS, Facts, Table, facts, lineage, mounts, table

__all__ = ["Facts", "LetThrough", "Mask", "Refusal", "Verdict", "check", "facts", "sensitive", "variable"]

#: How far the names in a mounted tree are looked at, breadth first.
SCAN_DEPTH, SCAN_ENTRIES = 3, 5000
#: So many masks are a mount each; a tree with more credentials than that is refused as a whole.
MAX_MASKS = 64
# An image is not anybody's own tree, and has thousands of names.
_NOT_SCANNED = ("root",)
# A bind mount takes the mounts beneath along; the layers of an overlay do not.
_RECURSIVE = ("ro", "rw")


class Refusal(NamedTuple):
    """A mount that must not be made. ``word`` is the option that lets it through."""

    option: str
    source: str  #: what was asked for, canonical
    path: str  #: the sensitive place: the source itself, or what is above or beneath it
    why: str
    word: str

    def __str__(self) -> str:
        where = "" if self.path == self.source else f" ({_shown(self.path)})"
        return f"{self.option}: {_shown(self.source)} is refused: {self.why}{where}; to let it through: {self.word}"


class Mask(NamedTuple):
    """Something inside of a mounted tree that is to be covered: by an empty file, or by an empty directory."""

    option: str
    source: str  #: the mount that it lies in
    path: str  #: on the host; inside it is at the mount's target with what follows ``source``
    directory: bool
    why: str

    @property
    def relative(self) -> str:
        """The path below the mount."""
        return self.path[len(self.source.rstrip("/")) + 1 :]


class LetThrough(NamedTuple):
    """A sensitive place that the caller lets through by name."""

    option: str
    source: str
    path: str
    why: str


class Verdict(NamedTuple):
    """What the guard says about all mounts of one sandbox."""

    refusals: tuple[Refusal, ...] = ()
    masks: tuple[Mask, ...] = ()
    let_through: tuple[LetThrough, ...] = ()
    truncated: tuple[str, ...] = ()  #: sources with more names than were looked at


def check(binds: Iterable[tuple[str, str, bool]], allow: Collection[str], known: Facts) -> Verdict:
    """Judge mounts: (option, canonical host path, writable). ``allow`` are canonical paths let through by name.

    Raises SpecError only when the caller's own guard.toml cannot be read.
    """
    wanted = tuple(binds)
    if not wanted:
        return Verdict()
    judge = _Judge(table(known), frozenset(allow))
    for option, source, _writable in wanted:
        judge.look_at(option, source)
    if len(judge.masks) > MAX_MASKS:
        first = judge.masks[0]
        why = f"more than {MAX_MASKS} files of credentials are inside"
        judge.refuse(first.option, first.source, first.source, why)
    return Verdict(tuple(judge.refusals), tuple(judge.masks), tuple(judge.let_through), tuple(judge.truncated))


def sensitive(path: str, known: Facts | None = None) -> str | None:
    """Why a canonical path is sensitive by its place, None when it is not."""
    places = table(known or facts())
    real = places.original(path)
    found = _place_above(places, real)
    return found[1] if found else places.whole.get(real)


def variable(name: str, known: Facts | None = None) -> str | None:
    """Why a variable of this name usually holds a credential, None when it does not."""
    places = table(known or facts())
    match = places.variables.fullmatch(name)
    return places.variable_whys[(match.lastindex or 1) - 1] if match else None


def _place_above(places: Table, path: str) -> tuple[str, str] | None:
    for step in lineage(path):
        if step in places.places:
            return step, places.places[step]
    return None


def _shown(path: str) -> str:
    """A path for people: quoted, control characters escaped."""
    return repr(path)


def _word(path: str) -> str:
    import shlex

    plain = path.isprintable()
    return f"--allow-sensitive {shlex.quote(path)}" if plain else f"allow_sensitive=[{path!r}]"


class _Judge:
    """Collects what is said about one sandbox's mounts."""

    def __init__(self, places: Table, allow: frozenset[str]) -> None:
        self.places, self.allow = places, allow
        self.refusals: list[Refusal] = []
        self.masks: list[Mask] = []
        self.let_through: list[LetThrough] = []
        self.truncated: list[str] = []

    def refuse(self, option: str, source: str, path: str, why: str) -> None:
        self.refusals.append(Refusal(option, source, path, why, _word(path)))

    def look_at(self, option: str, source: str) -> None:
        original = self.places.original(source)
        found = _place_above(self.places, original)
        if found is None and _is_socket(source):
            found = original, "a socket: whoever answers on it is outside of the sandbox"
        if found is not None:
            self._named(option, source, original, *found)
            return
        opened = original in self.places.whole
        if opened:
            if source not in self.allow and original not in self.allow:
                self.refuse(option, source, source, self.places.whole[original])
                return
            self.let_through.append(LetThrough(option, source, source, self.places.whole[original]))
        self._inside(option, source, original, opened)
        if option in _RECURSIVE:
            self._mounts_inside(option, source, opened)
        if option not in _NOT_SCANNED:
            self._names_inside(option, source)

    def _named(self, option: str, source: str, original: str, place: str, why: str) -> None:
        # Naming a home directory does not let its .ssh through: the word must lie at the place or beneath it.
        words = {*lineage(original), source}
        if any(word in self.allow and (word == source or _within(word, place)) for word in words):
            self.let_through.append(LetThrough(option, source, place, why))
        else:
            self.refuse(option, source, source, why)

    def _inside(self, option: str, source: str, original: str, opened: bool) -> None:
        """Known places beneath the source. Under a home that was let through they are covered instead of refused."""
        for place, why in self.places.beneath(original):
            here = source.rstrip("/") + place[len(original.rstrip("/")) :]
            self._found(option, source, here, place, why, opened)

    def _mounts_inside(self, option: str, source: str, opened: bool) -> None:
        prefix = source.rstrip("/") + "/"
        for mount in mounts():
            if not mount.point.startswith(prefix):
                continue
            if mount.kind in KERNEL_FILE_SYSTEMS:
                why = f"the host's {mount.kind} is mounted there"
                self._found(option, source, mount.point, mount.point, why, opened)
                continue
            original = self.places.original(mount.point)
            if original != mount.point:
                found = _place_above(self.places, original)
                reason = found[1] if found else self.places.whole.get(original)
                if reason:
                    self._found(option, source, mount.point, original, reason, opened)

    def _found(self, option: str, source: str, here: str, place: str, why: str, cover: bool) -> None:
        if here in self.allow or place in self.allow:
            self.let_through.append(LetThrough(option, source, here, why))
        elif cover:
            self.masks.append(Mask(option, source, here, os.path.isdir(here), why))
        else:
            self.refuse(option, source, here, why)

    def _names_inside(self, option: str, source: str) -> None:
        found, complete = scan(self.places, source)
        known = {mask.path for mask in self.masks}
        for path, directory, why in found:
            if any(
                word == path or (word != source and _within(path, word)) for word in self.allow if _within(word, source)
            ):
                self.let_through.append(LetThrough(option, source, path, why))
            elif path not in known:
                self.masks.append(Mask(option, source, path, directory, why))
        if not complete:
            self.truncated.append(source)


def _within(path: str, place: str) -> bool:
    return path == place or path.startswith(place.rstrip("/") + "/")


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


Found = tuple[str, bool, str]
Stamps = list[tuple[str, int, int]]
# A name can only come or go with its directory's time stamp, so a scan stays true while those of all directories do,
# unless it came within the same tick of the clock that file systems stamp by.
_scans: dict[str, tuple[Table, Stamps, list[Found], bool]] = {}
_MAX_SCANS, _TICK_NS = 64, 20_000_000


def scan(places: Table, source: str) -> tuple[list[Found], bool]:
    """Sensitive names and sockets in a tree: ((path, is a directory, why), …), and whether all was looked at."""
    cached = _scans.get(source)
    if cached and cached[0] is places and all(_stamp(path) == (ino, mtime) for path, ino, mtime in cached[1]):
        return cached[2], cached[3]
    now = time.time_ns()
    seen, found, complete = _walk(places, source)
    if len(_scans) >= _MAX_SCANS:
        _scans.clear()
    if all(mtime < now - _TICK_NS for _, _, mtime in seen):
        _scans[source] = (places, seen, found, complete)
    return found, complete


def _stamp(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return -1, -1
    return status.st_ino, status.st_mtime_ns


def _walk(places: Table, source: str) -> tuple[Stamps, list[Found], bool]:
    seen: Stamps = []
    found: list[Found] = []
    level, left = [source], SCAN_ENTRIES
    for _ in range(SCAN_DEPTH):
        deeper: list[str] = []
        for directory in level:
            seen.append((directory, *_stamp(directory)))
            try:
                entries = os.scandir(directory)
            except OSError:  # a file, or nothing that we may read
                continue
            with entries:
                for entry in entries:
                    left -= 1
                    if left < 0:
                        return seen, found, False
                    _judge_entry(places, entry, found, deeper)
        level = deeper
    return seen, found, True


def _judge_entry(places: Table, entry: "os.DirEntry[str]", found: list[Found], deeper: list[str]) -> None:
    name = entry.name
    if entry.is_dir(follow_symlinks=False):
        why = places.names.get(name + "/")
        if why:
            found.append((entry.path, True, why))
        else:
            deeper.append(entry.path)
    elif entry.is_symlink():
        return  # leads somewhere inside, or nowhere
    elif not entry.is_file(follow_symlinks=False):
        if _is_socket(entry.path):
            found.append((entry.path, False, "a socket: whoever answers on it is outside of the sandbox"))
    elif name not in places.harmless:
        match = None if name in places.names else places.globs.fullmatch(name)
        why = places.glob_whys[(match.lastindex or 1) - 1] if match else places.names.get(name)
        if why:
            found.append((entry.path, False, why))
