"""Looking for files inside, by name and by content, from outside and without a process there."""

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from nsbox.files import Files

MAX_MATCHES = 1000
MAX_FILE = 4 << 20  #: longer files are not searched
MAX_LINE = 2000  #: characters of a line that a match gives
_MAGIC = frozenset("*?[")


class Match(NamedTuple):
    """A line that matches. ``line`` counts from 1; ``text`` is without its end, undecodable bytes replaced."""

    path: str
    line: int
    text: str


Matches = list[Match]


def _fits(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether the names of a path fit the parts of a pattern. ``reached``: how many parts the names so far can fill."""
    reached = {0}
    for name in names:
        following = set()
        for at in _over_stars(reached, parts):
            if at < len(parts) and parts[at] == "**":
                following.add(at)
            elif at < len(parts) and fnmatchcase(name, parts[at]):
                following.add(at + 1)
        reached = following
    return len(parts) in _over_stars(reached, parts)


def _over_stars(reached: set[int], parts: Sequence[str]) -> set[int]:
    """``**`` also stands for no directory at all."""
    out = set(reached)
    for at in sorted(reached):
        while at < len(parts) and parts[at] == "**":
            at += 1
            out.add(at)
    return out


def glob(files: Files, pattern: str) -> list[str]:
    """Paths that fit, sorted; relative ones for a relative pattern.

    ``*`` and ``?`` stay within a name, ``**`` spans any number of directories, ``[…]`` is as in fnmatch; hidden names
    are names like others. Links are not followed. A directory that is missing has nothing that fits."""
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    fixed = 0
    while fixed < len(parts) and not _MAGIC & set(parts[fixed]):
        fixed += 1
    base = ("/" if pattern.startswith("/") else "") + "/".join(parts[:fixed])
    if fixed == len(parts):
        return [base] if parts and files.exists(base) else []
    prefix = f"{base.rstrip('/')}/" if base else ""
    try:
        found = files.walk(base or ".")
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(prefix + item.name for item in found if _fits(item.name.split("/"), parts[fixed:]))


def grep(
    files: Files,
    pattern: str,
    path: str | os.PathLike[str] = ".",
    *,
    names: str = "*",
    ignore_case: bool = False,
    max_matches: int = MAX_MATCHES,
) -> Matches:
    """Lines of regular files beneath a directory (or of one file) that the regular expression fits.

    ``names`` is what the last name of a file must fit. Files that are longer than MAX_FILE, hold a NUL byte or cannot
    be read are left out. Ends after ``max_matches``. The time that an expression takes depends on the text, which is
    the payload's: choose one that does not backtrack. Raises re.error for a bad expression."""
    expression = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    top = os.fspath(path)
    if files.stat(top).kind == "file":
        paths = [top]
    else:
        found = [item for item in files.walk(top) if item.kind == "file" and item.size <= MAX_FILE]
        paths = [os.path.join(top, item.name) for item in found if fnmatchcase(os.path.basename(item.name), names)]
    out: Matches = []
    for file in paths:
        try:
            data = files.read_file(file, max_bytes=MAX_FILE)
        except OSError:
            continue
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
            if expression.search(line):
                out.append(Match(os.path.normpath(file), number, line.rstrip("\r")[:MAX_LINE]))
                if len(out) >= max_matches:
                    return out
    return out
