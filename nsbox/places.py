"""Where a host keeps what nobody should mount by accident: the table of the guard, made concrete for one caller.

``profiles/guard.toml`` names the places; ``/etc/nsbox/guard.toml`` and ``~/.config/nsbox/guard.toml`` add to them. A
``Table`` knows them by path and by identity (device and inode), since a bind mount gives a place a second path.
"""

import functools
import os
import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from nsbox.errors import SpecError
from nsbox.profiles import profiles_dir

SECTIONS = ("home", "host", "sockets", "whole", "environment", "names", "harmless", "variables")
#: Second paths to a place (links, bind mounts) are looked for anew after this time; paths themselves always hold.
IDENTITY_LIFETIME_S = 5.0
_FIRST_ORDINARY_UID, _NOBODY = 1000, 65534
#: File systems that are the host's kernel, wherever they are mounted.
KERNEL_FILE_SYSTEMS = frozenset(
    ("proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "securityfs", "debugfs", "tracefs", "configfs", "bpf")
)

Identity = tuple[int, int]


class Facts(NamedTuple):
    """What the guard must know of the caller; ``facts()`` asks the system."""

    home: str  #: of the caller, canonical
    homes: tuple[str, ...]  #: of every ordinary user and of root, canonical, the caller's among them
    own: tuple[str, ...]  #: nsbox's own state and cache directories
    environ: tuple[tuple[str, str], ...]  #: the variables that the table may ask for


def facts(state: str = "", environ: Mapping[str, str] | None = None) -> Facts:
    """The facts for this process. ``state`` is nsbox's run-time state directory."""
    env = os.environ if environ is None else environ
    home = os.path.realpath(env.get("HOME") or "/nonexistent")
    cache = os.path.join(env.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "nsbox")
    own = {os.path.realpath(path) for path in ("/run/nsbox", state, cache) if path}
    wanted = raw_table(home)["environment"]
    named = tuple((name, env[name]) for name in wanted if env.get(name))
    homes = _homes(_stamp("/etc/passwd"), _stamp("/home"))
    if os.path.isdir(home) and home != "/" and home not in homes:
        homes = (*homes, home)
    return Facts(home, homes, tuple(sorted(own)), named)


@functools.lru_cache(maxsize=4)
def _homes(*_stamps: str) -> tuple[str, ...]:
    """Every home directory that is there; asked again when the files that know them have changed."""
    homes = {"/root", *(entry[1] for entry in _passwd() if _ordinary(entry[0]))}
    try:
        homes.update(f"/home/{name}" for name in os.listdir("/home"))
    except OSError:
        pass
    return tuple(sorted({os.path.realpath(path) for path in homes if os.path.isdir(path)} - {"/"}))


def _ordinary(uid: int) -> bool:
    return uid == 0 or (uid >= _FIRST_ORDINARY_UID and uid != _NOBODY)


def _passwd() -> Iterator[tuple[int, str]]:
    """(uid, home) from the file itself: asking NSS for everybody can take minutes where users come from a network."""
    try:
        with open("/etc/passwd", encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.split(":") for line in file]
    except OSError:
        return
    for fields in lines:
        if len(fields) > 5 and fields[2].isdigit() and fields[5].startswith("/"):
            yield int(fields[2]), fields[5]


_raw: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}


def raw_table(home: str) -> dict[str, dict[str, str]]:
    """The shipped table with what the host's administrator and the user added. Raises SpecError for a bad file."""
    added = ("/etc/nsbox/guard.toml", os.path.join(home, ".config/nsbox/guard.toml"))
    stamps = tuple(_stamp(path) for path in added)
    key = (home, *stamps)
    if key not in _raw:
        merged: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
        for path in (os.path.join(profiles_dir(), "guard.toml"), *(p for p, s in zip(added, stamps, strict=True) if s)):
            for section, entries in read_table(path, SECTIONS).items():
                merged[section].update(entries)
        _raw.clear()
        _raw[key] = merged
    return _raw[key]


def _stamp(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:  # not there; or in the home of another user, whose table is not ours (sudo -u keeps HOME at times)
        return ""
    return f"{status.st_ino} {status.st_mtime_ns} {status.st_size}"


def read_table(path: str, sections: Iterable[str]) -> dict[str, dict[str, str]]:
    """A TOML file of sections of ``name = "why"``. Raises SpecError that names the file."""
    import tomllib

    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise SpecError(f"guard: {path}: {error.strerror}; make it readable or remove it") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"guard: {path}: not valid TOML: {error}") from None
    known = tuple(sections)
    for section, entries in document.items():
        if section not in known:
            raise SpecError(f"guard: {path}: unknown section {section!r}; the sections are {', '.join(known)}")
        if not isinstance(entries, dict) or not all(isinstance(why, str) and name for name, why in entries.items()):
            raise SpecError(f'guard: {path}: [{section}] wants lines of the form "name" = "why it matters"')
        if section in ("host", "sockets", "whole") and not all(name.startswith("/") for name in entries):
            raise SpecError(f"guard: {path}: [{section}] wants absolute paths")
    return document


def lineage(path: str) -> list[str]:
    """An absolute path and every directory above it, the deepest first, ``/`` last."""
    out = [path]
    while len(path) > 1:
        path = path[: path.rfind("/")] or "/"
        out.append(path)
    return out


def paths_in(value: str) -> list[str]:
    """The absolute paths in the value of a variable: plain, a list, a URL or an address of D-Bus."""
    plain = [re.sub("^[a-z]+://", "", chunk) for chunk in value.split(",")]
    parts = [part.rpartition("=")[2] for chunk in plain for part in chunk.split(":")]
    return [os.path.normpath(part) for part in parts if part.startswith("/") and part.strip("/")]


def identity(path: str) -> Identity | None:
    """Device and inode of what a path leads to, None when it leads nowhere that we may see."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def name_pattern(names: Iterable[str]) -> "re.Pattern[str]":
    """One expression for many shell patterns; the number of the group that matched tells which."""
    # Not fnmatch.translate: its expression cannot be joined with others in every version of Python.
    parts = [re.escape(name).replace(r"\*", ".*").replace(r"\?", ".") for name in names]
    return re.compile("|".join(f"({part})" for part in parts) or "(?!)", re.DOTALL)


class Table:
    """The places for one caller: ``places`` with everything beneath, ``whole`` only by themselves."""

    def __init__(self, known: Facts, raw: Mapping[str, Mapping[str, str]]) -> None:
        self.places = dict.fromkeys(known.own, "nsbox's own state")
        for home in known.homes:
            self.places.update((f"{home}/{name}", why) for name, why in raw["home"].items())
        self.places.update(raw["host"])
        self.places.update(raw["sockets"])
        for name, value in known.environ:
            self.places.update((path, raw["environment"][name]) for path in paths_in(value))
        self.whole = dict.fromkeys(known.homes, "a whole home directory: every credential and project in it")
        self.whole.update(raw["whole"])
        for home in known.homes:
            for above in lineage(home)[1:]:
                self.whole.setdefault(above, f"it contains the home directory {home}")
        self.names = {name: why for name, why in raw["names"].items() if "*" not in name}
        globs = {name: why for name, why in raw["names"].items() if "*" in name}
        self.glob_whys, self.globs = tuple(globs.values()), name_pattern(globs)
        self.harmless = frozenset(raw["harmless"])
        self.variable_whys, self.variables = tuple(raw["variables"].values()), name_pattern(raw["variables"])
        self.refresh()

    def refresh(self) -> None:
        """Look for second paths to the places: where a link among them leads, and what each is by device and inode."""
        for path, why in list(self.places.items()):
            real = os.path.realpath(path) if os.path.lexists(path) else path
            if real != path and real != "/":
                self.places.setdefault(real, why)
        self.ordered = sorted(self.places)
        self.aliases: dict[Identity, str] = {}
        for step in dict.fromkeys(step for path in (*self.whole, *self.places) for step in lineage(path)):
            known = identity(step)
            if known is not None:
                self.aliases.setdefault(known, step)
        self.refreshed_at = time.monotonic()

    def original(self, path: str) -> str:
        """The path by which the table knows what ``path`` leads to, where a bind mount has given it another."""
        for step in lineage(path):
            known = identity(step)
            if known is not None and known in self.aliases:
                return (self.aliases[known].rstrip("/") + path[len(step.rstrip("/")) :]) or "/"
        return path

    def beneath(self, path: str) -> Iterator[tuple[str, str]]:
        """(place, why) for each known place below ``path`` that is there."""
        prefix = path.rstrip("/") + "/"
        for place in self.ordered[bisect_left(self.ordered, prefix) :]:
            if not place.startswith(prefix):
                return
            if os.path.lexists(place):
                yield place, self.places[place]


_tables: dict[int, tuple[Facts, Mapping[str, Mapping[str, str]], Table]] = {}


def table(known: Facts) -> Table:
    """The table for a caller, from the cache while it is fresh."""
    raw = raw_table(known.home)
    cached = _tables.get(0)
    if cached is None or cached[0] != known or cached[1] is not raw:
        cached = _tables[0] = (known, raw, Table(known, raw))
    if time.monotonic() - cached[2].refreshed_at > IDENTITY_LIFETIME_S:
        cached[2].refresh()
    return cached[2]


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo."""

    point: str
    kind: str


_mounts: dict[int, tuple[bytes, tuple[Mount, ...]]] = {}


def mounts() -> tuple[Mount, ...]:
    """What is mounted where in this process's namespace; parsed anew only when it changed."""
    with open("/proc/self/mountinfo", "rb", buffering=0) as file:
        raw = file.readall() or b""
    cached = _mounts.get(0)
    if cached is None or cached[0] != raw:
        found = []
        for line in raw.splitlines():
            left, _, right = line.partition(b" - ")
            point = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), left.split()[4])
            found.append(Mount(os.fsdecode(point), right.split(maxsplit=1)[0].decode("ascii", "replace")))
        cached = _mounts[0] = (raw, tuple(found))
    return cached[1]
