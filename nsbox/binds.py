"""What of the host is shown inside, and where, as callers write it."""

from __future__ import annotations

import os

from nsbox import units
from nsbox.errors import SpecError
from nsbox.frozen import frozen
from nsbox.light import re

_TARGET_HINT = r"write SRC:DST with an absolute DST, and \: for a colon inside a path"


def path_text(name: str, value: object) -> str:
    """A path as str; refuses the empty path and NUL, which no system call can take."""
    if not isinstance(value, str | bytes | os.PathLike):
        raise SpecError(f"{name}: wants a path, not {value!r}")
    text = os.fsdecode(value)
    if not text:
        raise SpecError(f"{name}: the path is empty")
    if "\0" in text:
        raise SpecError(f"{name}: {text!r} contains a NUL byte, which no path can hold")
    return text


def target_text(name: str, value: object) -> str:
    """An absolute, normalised place inside the sandbox; ``..`` and the root itself are refused."""
    text = path_text(name, value)
    if not text.startswith("/"):
        raise SpecError(f"{name}: the place inside must be absolute, not {text!r}; {_TARGET_HINT}")
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise SpecError(f"{name}: {text!r} contains '..'; name the place inside without it")
    if not parts:
        raise SpecError(f"{name}: cannot mount over the root itself; use root=DIR for another root file system")
    return "/" + "/".join(parts)


def split_pair(name: str, text: str) -> tuple[str, str | None]:
    r"""``SRC[:DST]`` into its parts; ``\:`` is a colon and ``\\`` a backslash inside either."""
    parts = [re.sub(r"\\([:\\])", r"\1", part) for part in re.findall(r"(?:\\[:\\]|[^:])+|(?<=:)(?=$)|^(?=:)", text)]
    separators = len(re.sub(r"\\[:\\]", "", text).split(":")) - 1
    if separators > 1 or len(parts) != separators + 1 or not all(parts):
        raise SpecError(f"{name}: {text!r} is not SRC or SRC:DST; {_TARGET_HINT}")
    return parts[0], parts[1] if separators else None


def escaped(path: str) -> str:
    return path.replace("\\", "\\\\").replace(":", "\\:")


@frozen
class Bind:
    """A host path, ``source``, shown inside at ``target`` (None: at its own absolute path)."""

    source: str
    target: str | None = None

    @classmethod
    def parse(cls, name: str, value: object, default: str | None = None) -> Bind:
        if isinstance(value, Bind):
            return value
        if isinstance(value, tuple | list) and len(value) == 2:
            source, target = value
        elif isinstance(value, str):
            source, target = split_pair(name, value)
        else:
            source, target = value, None
        target = default if target is None else target_text(name, target)
        return cls(path_text(name, source), target)


@frozen
class Tmpfs:
    """An empty file system in memory at ``target`` inside, of at most ``size`` bytes (None: the disk limit's)."""

    target: str
    size: int | None = None

    @classmethod
    def parse(cls, name: str, value: object) -> Tmpfs:
        if isinstance(value, Tmpfs):
            return value
        target, size = split_pair(name, value) if isinstance(value, str) else (value, None)
        return cls(target_text(name, target), None if size is None else units.size(name, size))
