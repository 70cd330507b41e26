"""Which files of a change set the host would later act upon by itself; the table is ``profiles/trust.toml``."""

import functools
import os
import re
from typing import Any

from nsbox.places import read_table
from nsbox.profiles import profiles_dir

SECTIONS = ("paths", "keys")
#: A file whose keys matter is looked into up to this size; a larger one is marked.
MAX_PARSED = 1 << 20
#: The time that tomllib takes grows with the square of the parts of a key: more than this, and a file is marked.
MAX_WORK = 1 << 20
_WHY_KEYS = "its {} decides what is run when the project is installed, built or tested"


class Trust:
    """The table, ready for matching."""

    def __init__(self, paths: dict[str, str], keys: dict[str, str]) -> None:
        self.whys = tuple(paths.values())
        self.pattern = re.compile("|".join(f"({_expression(path)})" for path in paths) or "(?!)", re.DOTALL)
        self.keys = {name.casefold(): tuple(value.split()) for name, value in keys.items()}

    def why(self, path: str, kind: str) -> str:
        """Why a changed path is marked, empty when it is not. A directory by itself does nothing."""
        if kind == "dir":
            return ""
        match = self.pattern.search("/" + path.casefold() + "/")
        return self.whys[(match.lastindex or 1) - 1] if match else ""

    def keys_of(self, path: str) -> tuple[str, ...]:
        """The keys that matter in a file of this name; empty when none does."""
        return self.keys.get(path.rpartition("/")[2].casefold(), ())


def _expression(path: str) -> str:
    # A search in "/path/to/file/": the end of the path for a file, anywhere in it for a directory.
    body = re.escape(path.casefold().rstrip("/")).replace(r"\*", "[^/]*")
    return f"/{body}/" if path.endswith("/") else f"/{body}/$"


@functools.cache
def trust(home: str = "") -> Trust:
    """The shipped table with what the administrator and the user added. Raises SpecError for a bad file."""
    home = home or os.path.expanduser("~")
    tables: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    added = ("/etc/nsbox/trust.toml", os.path.join(home, ".config/nsbox/trust.toml"))
    for path in (os.path.join(profiles_dir(), "trust.toml"), *(path for path in added if os.path.isfile(path))):
        for section, entries in read_table(path, SECTIONS).items():
            tables[section].update(entries)
    return Trust(tables["paths"], tables["keys"])


def changed_key(name: str, keys: tuple[str, ...], before: bytes | None, after: bytes) -> str:
    """Why a file whose ``keys`` matter is marked: the first that differs. Empty when none does."""
    new = _parse(name, after)
    if new is None:
        return "it cannot be parsed, so that nobody knows what it would do"
    old = (None if before is None else _parse(name, before)) or {}
    for key in keys:
        if _dig(old, key) != _dig(new, key):
            return _WHY_KEYS.format(repr(key))
    return ""


def _parse(name: str, data: bytes) -> dict[str, Any] | None:
    if len(data) > MAX_PARSED:
        return None
    try:
        if name.casefold().endswith(".toml"):
            import tomllib

            if sum(line.count(b".") ** 2 for line in data.splitlines()) > MAX_WORK:
                return None
            return tomllib.loads(data.decode())
        import json

        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _dig(document: dict[str, Any], key: str) -> Any:
    value: Any = document
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
