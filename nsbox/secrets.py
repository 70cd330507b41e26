"""Secrets for one sandbox: where their values come from, how they get inside, when they are gone.

A value is read at the launch and goes through a pipe: memory of the kernel's that is never swapped. It ends in a ramfs
that only the payload's user can read, in a variable, or stays in a pipe that a command inherits. It is never an
argument, a log entry or part of the report. The host side keeps a way to the ramfs and to such pipes: a secret whose
time is over is emptied and removed there while the sandbox runs on.
"""

from __future__ import annotations

import os
import struct
from _collections_abc import Mapping

from nsbox import units
from nsbox.errors import SpecError
from nsbox.light import TYPE_CHECKING, NamedTuple, re, threading

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import Any

DIRECTORY = "/run/secrets"
MAX_TOTAL = 60_000  #: bytes of all values together: what a pipe takes without a reader
MIN_MASKED = 4  #: bytes; shorter values are not masked
MAX_FDS = 8  #: secrets that are descriptors: NSB_MAX_GIVE of native/nsbox.h
FIRST_FD = 3  #: the number of the first of them
DELIVER = ("file", "env", "fd")
#: held while a pipe has a writer: a child that another thread forks would keep it, and the pipe would never end
_no_fork = threading.RLock()
os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_no_fork.release)
_HEAD = struct.Struct("=IIII")  # struct nsb_secret
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"


class Secret(NamedTuple):
    """One secret; one of ``value``, ``env`` (a variable of this process), ``file`` and ``call`` says what it is.

    ``deliver`` is ``file`` (/run/secrets/NAME), ``env`` (a variable NAME as well, inherited by all that runs inside) or
    ``fd``: no file, but an open descriptor that each command can read once; NAME_FD has its number, from 3 up in the
    order of the secrets. ``ttl`` in seconds counts from the launch; None: until the sandbox ends. ``mode`` is that of
    the file.
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
    if not isinstance(item.name, str) or not re.fullmatch(_NAME, item.name):
        raise SpecError(f"secret: {item.name!r} cannot be a file's name; use letters, digits, '_', '.' and '-'")
    if sum(source is not None for source in (item.value, item.env, item.file, item.call)) != 1:
        raise SpecError(f"secret {item.name}: give exactly one of value, env, file and call")
    if item.deliver not in DELIVER:
        raise SpecError(f"secret {item.name}: deliver is file, env or fd, not {item.deliver!r}")
    if not isinstance(item.mode, int) or item.mode & ~0o700:
        raise SpecError(f"secret {item.name}: mode {item.mode!r} must give rights to the owner alone, as 0o400 does")
    value = item.value.encode() if isinstance(item.value, str) else item.value
    return item._replace(ttl=None if item.ttl is None else units.seconds("ttl", item.ttl), value=value)


def parse_all(items: Iterable[object], *, env: bool = False, fd: bool = False) -> tuple[Secret, ...]:
    """Several; with ``env`` or ``fd`` all are delivered so. Raises SpecError where two cannot be told apart."""
    if env and fd:
        raise SpecError("secret_fd: all secrets are variables by secret_env; give one of the two")
    found = tuple(map(parse, items))
    if env or fd:
        found = tuple(item._replace(deliver="env" if env else "fd") for item in found)
    names = [item.name for item in found]
    if len(set(names)) < len(names):
        raise SpecError("secrets: two have the same name; give each its own")
    numbered = [item.name for item in found if item.deliver == "fd"]
    if len(numbered) > MAX_FDS:
        raise SpecError(f"secrets: {len(numbered)} are to be descriptors, more than {MAX_FDS}; deliver some as files")
    for name in numbered:
        if any(item.name == f"{name}_FD" and item.deliver == "env" for item in found):
            raise SpecError(f"secret {name}_FD: that variable has the number of the descriptor of {name}; rename one")
    return found


class Given(NamedTuple):
    """What one command gets besides the files in /run/secrets."""

    variables: Mapping[str, str] = {}  #: the secrets that are variables  # noqa: RUF012 - a NamedTuple
    numbers: Mapping[str, str] = {}  #: NAME_FD → the number of a descriptor  # noqa: RUF012 - a NamedTuple
    pipes: tuple[tuple[Secret, bytes], ...] = ()  #: what each descriptor from FIRST_FD up holds

    def __repr__(self) -> str:
        return f"Given({list(self.variables)}, {dict(self.numbers)})"

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The variables that are no secret: ``base``, and the numbers of descriptors."""
        return {name: value for name, value in {**base, **self.numbers}.items() if name not in self.variables}

    def without(self, names: Collection[str]) -> Given:
        """The same less the secrets whose variables the caller has set otherwise."""
        return self._replace(variables={name: value for name, value in self.variables.items() if name not in names})

    def packed(self) -> bytes:
        """The secret variables as they go through their pipe: NAME=value and NUL, one after the other."""
        return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in self.variables.items())


NOTHING_GIVEN = Given()


class Values(NamedTuple):
    """Secrets as they are for one launch."""

    secrets: tuple[Secret, ...]
    values: tuple[bytes, ...]

    def __repr__(self) -> str:
        return f"Values({[secret.name for secret in self.secrets]})"

    def by_name(self) -> dict[str, bytes]:
        """name → value, for masking."""
        return {secret.name: value for secret, value in zip(self.secrets, self.values, strict=True)}

    @property
    def files(self) -> bool:
        """Whether any is a file inside."""
        return any(secret.deliver != "fd" for secret in self.secrets)

    def given(self, over: Collection[str] = ()) -> Given:
        """For a command that starts now; ``over`` names those whose time is over. Numbers never move: in the place of
        such a one there is a pipe with nothing in it, and no variable that tells of it."""
        if not self.secrets:
            return NOTHING_GIVEN
        pairs = tuple(zip(self.secrets, self.values, strict=True))
        pipes = [(secret, b"" if secret.name in over else value) for secret, value in pairs if secret.deliver == "fd"]
        numbers = {
            f"{secret.name}_FD": str(number)
            for number, (secret, _) in enumerate(pipes, FIRST_FD)
            if secret.name not in over
        }
        variables = {
            secret.name: os.fsdecode(value)
            for secret, value in pairs
            if secret.deliver == "env" and secret.name not in over
        }
        return Given(variables, numbers, tuple(pipes))

    def packed(self) -> bytes:
        """What goes through the pipe to the ramfs: struct nsb_secret, name, value, one after the other."""
        out = bytearray()
        for secret, value in zip(self.secrets, self.values, strict=True):
            if secret.deliver == "fd":
                continue
            name = os.fsencode(secret.name)
            out += _HEAD.pack(len(name), len(value), secret.mode, 0) + name + value
        return bytes(out)


def resolve(secrets: Iterable[Secret]) -> Values:
    """Read every value. Raises SpecError."""
    wanted = tuple(secrets)
    values = Values(wanted, tuple(secret.read() for secret in wanted))
    size = sum(_HEAD.size + len(secret.name) + len(value) for secret, value in zip(wanted, values.values, strict=True))
    if size > MAX_TOTAL:
        raise SpecError(f"secrets: {size} bytes in all, more than {MAX_TOTAL}; mount a file with --ro instead")
    for secret, value in zip(values.secrets, values.values, strict=True):
        if secret.deliver == "env" and b"\0" in value:
            raise SpecError(f"secret {secret.name}: a value with a NUL byte cannot be a variable; deliver it as a file")
    return values


def filled(data: bytes) -> int:
    """The read end of a pipe that holds ``data``, at most ``MAX_TOTAL`` bytes, and ends there: memory of the kernel's,
    never swapped, gone with its last reader. Raises SpecError where this user may have no such pipe (pipe(7))."""
    with _no_fork:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            os.set_blocking(writer, False)
            if data and os.write(writer, data) < len(data):
                raise SpecError("secrets: more than a pipe takes here; mount a file with --ro instead")
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
    return reader


class Lent:
    """The host side's way to a pipe that a command has, to empty it when the secret's time is over. Any thread."""

    def __init__(self, name: str, reader: int) -> None:
        self.name = name
        self._fd = os.dup(reader)
        self._lock = threading.Lock()

    def empty(self) -> bool:
        """Throw away what nobody has read, whoever holds the pipe. False where that fails."""
        with self._lock:
            if self._fd < 0:
                return True
            try:
                with open("/dev/null", "wb", buffering=0) as null:
                    # One call, without waiting: a command can open its pipe for writing and fill it for ever, with
                    # what it knows by then.
                    os.splice(self._fd, null.fileno(), 1 << 20, flags=os.SPLICE_F_NONBLOCK)
            except BlockingIOError:
                return True
            except OSError:
                return False
            return True

    def close(self) -> None:
        """The command has ended. Idempotent."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


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
