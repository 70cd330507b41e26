"""Secrets for one sandbox: where their values come from, how they get inside, when they are gone.

A value is read at the launch, goes through a pipe (memory of the kernel's that is never swapped) into a ramfs that only
the payload's user can read, and is never an argument, a log entry or part of the report. The host side keeps a way to
that ramfs: a secret whose time is over is emptied and removed there while the sandbox runs on.
"""

import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from nsbox import units
from nsbox.errors import SpecError

DIRECTORY = "/run/secrets"
MAX_TOTAL = 60_000  #: bytes of all values together: what a pipe takes without a reader
MIN_MASKED = 4  #: bytes; shorter values are not masked
_HEAD = struct.Struct("=IIII")  # struct nsb_secret
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class Secret(NamedTuple):
    """One secret; one of ``value``, ``env`` (a variable of this process), ``file`` and ``call`` says what it is.

    ``deliver`` is ``file`` (/run/secrets/NAME) or ``env`` (a variable NAME as well, inherited by all that runs inside).
    ``ttl`` in seconds counts from the launch; None: until the sandbox ends. ``mode`` is that of the file.
    """

    name: str
    value: bytes | None = None
    env: str | None = None
    file: str | None = None
    call: Callable[[], bytes | str] | None = None
    ttl: float | None = None
    deliver: str = "file"
    mode: int = 0o400

    def __repr__(self) -> str:
        named = (f"{kind}:{where}" for kind, where in (("env", self.env), ("file", self.file)) if where)
        source = next(named, "call" if self.value is None else "value")
        return f"Secret({self.name!r}, {source}, deliver={self.deliver!r}, ttl={self.ttl})"

    def written(self) -> dict[str, Any]:
        """Plain values for a profile. Raises SpecError for one that holds its value, which is written nowhere."""
        if self.env is None and self.file is None:
            raise SpecError(f"secret {self.name}: holds its value, which is not written out; use env or file")
        return {key: value for key, value in self._asdict().items() if value is not None}

    def read(self) -> bytes:
        """The value. Raises SpecError that names the secret, never the value."""
        try:
            if self.value is not None:
                return self.value
            if self.env is not None:
                return os.environb[os.fsencode(self.env)]
            if self.file is not None:
                with open(self.file, "rb") as file:
                    return file.read(MAX_TOTAL + 1)
            assert self.call is not None
            made = self.call()
            return made.encode() if isinstance(made, str) else bytes(made)
        except KeyError:
            raise SpecError(
                f"secret {self.name}: the variable {self.env!r} is not set; set it or use file:PATH"
            ) from None
        except OSError as error:
            raise SpecError(f"secret {self.name}: {self.file!r}: {error.strerror}; name a readable file") from None


def parse(item: object) -> Secret:
    """A Secret from one, from a mapping of its fields, or from ``NAME=env:VAR``, ``NAME=file:PATH``, ``NAME=stdin``."""
    if isinstance(item, str):
        name, _, source = item.partition("=")
        kind, _, rest = source.partition(":")
        if kind == "env" and rest:
            item = Secret(name, env=rest)
        elif kind == "file" and rest:
            item = Secret(name, file=rest)
        elif source == "stdin":
            item = Secret(name, file="/dev/stdin")
        else:
            raise SpecError(
                f"secret: {name!r}: write NAME=env:VAR, NAME=file:PATH or NAME=stdin, never the value itself"
            )
    elif isinstance(item, Mapping):
        item = Secret(**item)
    if not isinstance(item, Secret):
        raise SpecError(f"secret: wants a Secret or a text such as NAME=env:VAR, not a {type(item).__name__}")
    return _checked(item)


def _checked(item: Secret) -> Secret:
    if not isinstance(item.name, str) or not _NAME.fullmatch(item.name):
        raise SpecError(f"secret: {item.name!r} cannot be a file's name; use letters, digits, '_', '.' and '-'")
    if sum(source is not None for source in (item.value, item.env, item.file, item.call)) != 1:
        raise SpecError(f"secret {item.name}: give exactly one of value, env, file and call")
    if item.deliver not in ("file", "env"):
        raise SpecError(f"secret {item.name}: deliver is file or env, not {item.deliver!r}")
    if not isinstance(item.mode, int) or item.mode & ~0o700:
        raise SpecError(f"secret {item.name}: mode {item.mode!r} must give rights to the owner alone, as 0o400 does")
    value = item.value.encode() if isinstance(item.value, str) else item.value
    return item._replace(ttl=None if item.ttl is None else units.seconds("ttl", item.ttl), value=value)


class Values(NamedTuple):
    """Secrets as they are for one launch."""

    secrets: tuple[Secret, ...]
    values: tuple[bytes, ...]

    def __repr__(self) -> str:
        return f"Values({[secret.name for secret in self.secrets]})"

    def by_name(self) -> dict[str, bytes]:
        """name → value, for masking."""
        return {secret.name: value for secret, value in zip(self.secrets, self.values, strict=True)}

    def environment(self) -> dict[str, str]:
        """The variables of those that are delivered so."""
        pairs = zip(self.secrets, self.values, strict=True)
        return {secret.name: os.fsdecode(value) for secret, value in pairs if secret.deliver == "env"}

    def packed(self) -> bytes:
        """What goes through the pipe: struct nsb_secret, name, value, one after the other."""
        out = bytearray()
        for secret, value in zip(self.secrets, self.values, strict=True):
            name = os.fsencode(secret.name)
            out += _HEAD.pack(len(name), len(value), secret.mode, 0) + name + value
        if len(out) > MAX_TOTAL:
            raise SpecError(f"secrets: {len(out)} bytes in all, more than {MAX_TOTAL}; mount a file with --ro instead")
        return bytes(out)


def resolve(secrets: Iterable[Secret]) -> Values:
    """Read every value. Raises SpecError."""
    wanted = tuple(secrets)
    values = Values(wanted, tuple(secret.read() for secret in wanted))
    for secret, value in zip(values.secrets, values.values, strict=True):
        if secret.deliver == "env" and b"\0" in value:
            raise SpecError(f"secret {secret.name}: a value with a NUL byte cannot be a variable; deliver it as a file")
    return values


def revoke(folder: int, name: str) -> bool:
    """Empty and remove one secret, by a descriptor of the ramfs; also where it is held open. False when it is gone."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, os.O_RDONLY | flags, dir_fd=folder)
        try:
            os.fchmod(fd, 0o600)  # its owner, whom an ordinary caller is, made it read-only for himself
        finally:
            os.close(fd)
        os.close(os.open(name, os.O_WRONLY | os.O_TRUNC | flags, dir_fd=folder))
        os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    return True


def describe(values: Values, revoked_at: Mapping[str, float]) -> list[dict[str, Any]]:
    """The report's ``boundary.secrets``. ``masked`` is false for a value so short that it is in every text."""
    return [
        {
            "name": secret.name,
            "delivered_as": secret.deliver,
            "revoked_at": revoked_at.get(secret.name),
            "masked": len(value) >= MIN_MASKED,
        }
        for secret, value in zip(values.secrets, values.values, strict=True)
    ]
