"""Profiles: named sets of options in ``profiles/*.toml`` or in files of the caller's. The only reader of that folder.

A profile is a TOML file of options by their names in ``Spec``, with a ``description`` and, optionally, ``extends`` for
the profile that it changes. Options of a higher level win: lists of mounts and layers, and variables, add up; all else
replaces. Relative paths mean what they mean on the command line.

Imported early, for ``profiles_dir``: so ``nsbox.spec`` and what else costs is imported where it is used.
"""

from __future__ import annotations

import os
from _collections_abc import Mapping

from nsbox.errors import SpecError
from nsbox.light import TYPE_CHECKING, re

if TYPE_CHECKING:
    from typing import Any

#: The shipped profiles, the most restrictive first. The folder holds tables of other modules as well.
NAMES = ("strict", "default", "permissive")
#: Those for a kind of job.
JOBS = ("coding-agent", "data-analysis", "documents")
_ADD_UP = ("require", "degrade")
_MOUNTS = ("ro", "rw", "tmpfs")


def profiles_dir() -> str:
    """Where the shipped profiles are: in the package when installed, beside it in a source tree."""
    package = os.path.dirname(os.path.abspath(__file__))
    inside = os.path.join(package, "_profiles")
    return inside if os.path.isdir(inside) else os.path.join(os.path.dirname(package), "profiles")


def names() -> list[str]:
    """The shipped profiles: the most restrictive first, then those for a kind of job."""
    return [*NAMES, *JOBS]


def path_of(name_or_path: str | os.PathLike[str]) -> str:
    """The file of a profile: a plain word is the name of a shipped one, anything else a path."""
    text = os.fspath(name_or_path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise SpecError(f"profile: {text!r} is neither the name of a profile nor a path")
    if "/" in text or text.endswith(".toml"):
        return text
    if text not in names():
        raise SpecError(
            f"profile: {text!r} is not known; the shipped ones are {', '.join(names())}; a file is a path: ./{text}"
        )
    return os.path.join(profiles_dir(), f"{text}.toml")


def text_of(name_or_path: str | os.PathLike[str]) -> str:
    """The file of a profile as it is, comments and all. Raises SpecError."""
    path = path_of(name_or_path)
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise SpecError(f"profile: {path}: not UTF-8 at byte {error.start}; TOML is UTF-8") from None
    except OSError as error:
        raise SpecError(
            f"profile: {path}: {error.strerror}; name a file that you may read, or one of {', '.join(names())}"
        ) from None


def description(name_or_path: str | os.PathLike[str]) -> str:
    """The one line that says what a profile is for."""
    path = path_of(name_or_path)
    return str(_document(path).get("description", ""))


def load(name_or_path: str | os.PathLike[str]) -> dict[str, Any]:
    """The options of a profile, those of the profiles that it extends included. Raises SpecError, naming the file."""
    return _load(path_of(name_or_path), ())


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The options ``below`` with those ``above`` laid over them. Of two mounts on one place the upper one stays."""
    out = dict(below)
    for name, value in above.items():
        if name == "env" and isinstance(value, Mapping) and isinstance(out.get("env"), Mapping):
            out[name] = {**out[name], **value}
        elif name in _ADD_UP and name in out:
            out[name] = [*_listed(out[name]), *(item for item in _listed(value) if item not in _listed(out[name]))]
        elif name in _MOUNTS and name in out:
            out[name] = [*_listed(out[name]), *_listed(value)]
        else:
            out[name] = value
    return _without_covered(out, below, above)


def _without_covered(out: dict[str, Any], below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the mounts from ``below`` whose place one from ``above`` takes, whatever their kinds."""
    taken = {_place(name, item) for name in _MOUNTS for item in _listed(above.get(name, ()))}
    for name in _MOUNTS if taken else ():
        if name in below:
            kept = [item for item in _listed(below[name]) if _place(name, item) not in taken]
            out[name] = [*kept, *_listed(above.get(name, ()))]
    return out


def _listed(value: Any) -> list[Any]:
    single = isinstance(value, str | bytes | os.PathLike)
    return [value] if single or not hasattr(value, "__iter__") else list(value)


def _place(name: str, item: object) -> str:
    from nsbox.binds import Bind, Tmpfs

    try:
        if name == "tmpfs":
            return Tmpfs.parse(name, item).target
        bind = Bind.parse(name, item)
    except SpecError:  # said better when the Spec is made
        return ""
    return bind.target or os.path.abspath(bind.source)


def _document(path: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text_of(path))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"profile: {path}: not valid TOML: {error}") from None


def _load(path: str, above: tuple[str, ...]) -> dict[str, Any]:
    from nsbox.spec import FIELDS, Spec

    document = _document(path)
    for key in ("description", "extends"):
        if not isinstance(document.get(key, ""), str):
            raise SpecError(f"profile: {path}: {key!r} must be text")
    document.pop("description", None)
    extends = document.pop("extends", None)
    for key in document:
        if key not in FIELDS:
            known = ", ".join(sorted(FIELDS))
            raise SpecError(f"profile: {path}: unknown key {key!r}{_line_of(path, key)}; the options are {known}")
    base = {}
    if extends is not None:
        below = path_of(
            os.path.join(os.path.dirname(path), extends) if "/" in extends or extends.endswith(".toml") else extends
        )
        chain = (*above, os.path.realpath(path))
        if os.path.realpath(below) in chain:
            raise SpecError(f"profile: {path}: 'extends' leads back to {extends!r}; a profile cannot extend itself")
        base = _load(below, chain)
    options = merged(base, document)
    try:
        Spec.from_dict(options)
    except SpecError as error:
        raise SpecError(f"profile: {path}: {error}") from None
    return options


def _line_of(path: str, key: str) -> str:
    """Where a key stands, for people; empty when it is written in an unusual way."""

    for number, line in enumerate(text_of(path).splitlines(), 1):
        if re.match(rf"\s*\[*\s*[\"']?{re.escape(key)}\b", line):
            return f" in line {number}"
    return ""
