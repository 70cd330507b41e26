"""Looking for files inside, by name and by content, from outside and without a process there."""

import os
import re
from fnmatch import translate
from typing import NamedTuple

from nsbox.files import Files

MAX_MATCHES = 1000
MAX_FILE = 4 << 20  #: longer files are not searched
MAX_LINE = 2000  #: characters of a line that a match gives


class Match(NamedTuple):
    """A line that matches. ``line`` counts from 1; ``text`` is without its end, undecodable bytes replaced."""

    path: str
    line: int
    text: str


def _expression(pattern: str) -> re.Pattern[str]:
    """A relative pattern as one expression over whole paths: ``*`` and ``?`` stay within a name, ``**`` spans any
    number of directories, ``[…]`` as in fnmatch. Hidden names match like others."""
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    out = ""
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            out += ".*" if last else "(?:[^/]+/)*"
            continue
        # fnmatch's "any character" must not reach into the next name.
        body = translate(part).replace("(?s:", "", 1).removesuffix(r")\Z").removesuffix(r")\z")
        out += re.sub(r"(?<!\\)\.(?=[*]|$|\()|(?<!\\)\.(?![*])(?=[^\]]*(?:\[|$))", "[^/]", body) + ("" if last else "/")
    return re.compile(out + r"\Z", re.DOTALL)
