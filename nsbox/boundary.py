"""The boundary log: what crossed the wall of a sandbox, one JSON document a line, written by the host side only.

An event is written by one write(2) to a file opened for appending, so that writers do not mix. Whatever a payload could
put into it (names, hosts, arguments) is escaped and bounded, and values of secrets are masked. A log that was asked for
and cannot be written raises ``LogError``: the caller ends the run. docs/boundary-log.schema.json has the fields.
"""

import base64
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from nsbox.errors import NsboxError

if TYPE_CHECKING:
    import logging

    from nsbox.masking import Masker

SCHEMA = 1
MAX_LINE = 64 << 10
_NAMED = 5  # paths that an error names
EVENTS = (
    *("sandbox.start", "input", "secret.deliver", "secret.revoke", "dns.query", "connect", "limit", "output"),
    *("sandbox.end", "command", "policy", "refusal", "coverage"),
)
# Bounds for one string and one list, tried in turn until a line fits.
_BOUNDS = ((4096, 512), (1024, 64), (200, 16), (60, 4), (20, 0))
#: Rules that let through whatever there is.
MATCH_ALL = frozenset(("*", "*:*", "0.0.0.0/0", "::/0", "[::]/0", "0/0"))


class LogError(NsboxError, OSError):
    """The boundary log was asked for and cannot be written. The run it belongs to must not go on.

    ``crossed`` says what had left the sandbox by then though the log does not tell all of it: "applied" and "exported"
    to paths."""

    def __init__(self, where: str, why: str, *, errno: int | None = None) -> None:
        super().__init__(f"the boundary log {where} cannot be written: {why}; name a file that you may append to")
        self.where, self.why, self.errno = where, why, errno
        self.crossed: dict[str, tuple[str, ...]] = {}

    def after(self, action: str, paths: Iterable[str]) -> "LogError":
        """Itself, once ``paths`` had been ``applied`` or ``exported``; without any nothing is said."""
        found = tuple(dict.fromkeys((*self.crossed.get(action, ()), *paths)))
        if found:
            self.crossed[action] = found
        return self

    def __str__(self) -> str:
        # Names are the payload's: repr leaves nothing in them that a terminal acts upon.
        told = (
            f"; by then {len(paths)} {'change was' if len(paths) == 1 else 'changes were'} {action}:"
            f" {', '.join(map(ascii, paths[:_NAMED]))}{', ...' if len(paths) > _NAMED else ''}"
            for action, paths in self.crossed.items()
        )
        return str(self.args[0]) + "".join(told)


class Sink(Protocol):
    """Where events go. ``write`` raises OSError when it cannot."""

    def write(self, event: dict[str, Any], line: bytes) -> None: ...

    def close(self) -> None: ...


class FileSink:
    """A file, made with mode 0600, appended to. It is opened anew when it was renamed or removed (log rotation)."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.fd = self._open()

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
        fd = os.open(self.path, flags, 0o600)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise OSError(22, "it is not a regular file")
        if status.st_mode & 0o022:
            os.close(fd)
            raise OSError(1, "others may write to it (chmod go-w)")
        return fd

    def write(self, event: dict[str, Any], line: bytes) -> None:
        if event["event"] == "sandbox.start":
            self._follow()
        if os.write(self.fd, line) != len(line):
            raise OSError(28, "only a part of the event could be written")

    def _follow(self) -> None:
        mine = os.fstat(self.fd)
        try:
            there = os.stat(self.path, follow_symlinks=False)
            if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
                return
        except FileNotFoundError:
            pass
        fd, self.fd = self.fd, self._open()
        os.close(fd)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class FdSink:
    """A descriptor of the caller's. Up to 4096 bytes a pipe takes in one piece (pipe(7), PIPE_BUF)."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        os.fstat(fd)

    def write(self, event: dict[str, Any], line: bytes) -> None:
        view = memoryview(line)
        while view:
            view = view[os.write(self.fd, view) :]

    def close(self) -> None:
        """It stays the caller's."""


class CallSink:
    """A Python callable, given each event as a dictionary. What it raises ends the run."""

    def __init__(self, function: Callable[[dict[str, Any]], object]) -> None:
        self.function = function

    def write(self, event: dict[str, Any], line: bytes) -> None:
        try:
            self.function(event)
        except OSError:
            raise
        except Exception as error:
            raise OSError(5, f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Nothing to close."""


class LoggerSink:
    """stdlib logging: the line as message, the event in ``record.nsbox``. It keeps errors of its handlers to itself."""

    def __init__(self, logger: "logging.Logger") -> None:
        self.logger = logger

    def write(self, event: dict[str, Any], line: bytes) -> None:
        loud = event["event"] in ("refusal", "limit") or event.get("verdict") == "denied"
        text = line.decode("ascii").rstrip("\n")
        # The text is an argument: what looks like a format in it is none.
        self.logger.log(30 if loud else 20, "%s", text, extra={"nsbox": event})

    def close(self) -> None:
        """It stays the caller's."""


def make_sink(target: Any) -> Sink:
    """A sink for a path, a descriptor, ``"otel"``, a callable or a ``logging.Logger``. Raises LogError."""
    try:
        if isinstance(target, int) and not isinstance(target, bool):
            return FdSink(target)
        if isinstance(target, str) and target == "otel":
            from nsbox.telemetry import SpanSink

            return SpanSink()
        if isinstance(target, str | os.PathLike):
            return FileSink(os.fspath(target))
    except OSError as error:
        raise LogError(repr(target), error.strerror or str(error), errno=error.errno) from None
    if hasattr(target, "makeRecord"):
        return LoggerSink(target)
    if callable(target):
        return CallSink(target)
    if hasattr(target, "write") and hasattr(target, "close"):
        sink: Sink = target
        return sink
    raise LogError(repr(target), "it is neither a path, a descriptor, a callable nor a logger")


class Log:
    """One or more sinks, opened when it is made. Usable from any thread."""

    def __init__(self, *targets: Any) -> None:
        self.sinks: list[Sink] = []
        try:
            self.sinks += [make_sink(target) for target in targets]
        except BaseException:
            self.close()
            raise

    def emit(self, sandbox: str, event: str, fields: Mapping[str, Any], masker: "Masker | None" = None) -> None:
        """Write one event. Raises LogError when a sink cannot take it."""
        if event not in EVENTS:
            raise ValueError(f"{event!r} is no event; the events are {', '.join(EVENTS)}")
        document, line = encode(sandbox, event, fields, masker)
        for sink in self.sinks:
            try:
                sink.write(document, line)
            except OSError as error:
                where = repr(getattr(sink, "path", type(sink).__name__))
                raise LogError(where, error.strerror or str(error), errno=error.errno) from error

    def close(self) -> None:
        """Close what was opened here. Idempotent."""
        for sink in self.sinks:
            sink.close()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def timestamp(now_ns: int | None = None) -> str:
    """RFC 3339, UTC, microseconds."""
    seconds, rest = divmod(time.time_ns() if now_ns is None else now_ns, 1_000_000_000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest // 1000:06}Z"


def encode(
    sandbox: str, event: str, fields: Mapping[str, Any], masker: "Masker | None" = None
) -> tuple[dict[str, Any], bytes]:
    """An event as document and as line: ASCII, at most ``MAX_LINE`` bytes, cut where it must be, and marked then."""
    head = {"schema": SCHEMA, "ts": timestamp(), "sandbox": sandbox, "event": event}
    for most_text, most_items in _BOUNDS:
        cut: list[str] = []
        document = head | _object(fields, most_text, most_items, masker, cut) | head
        if cut:
            document["truncated"] = sorted(set(cut))[:32]
        # json escapes all but ASCII, yet not DEL, which some terminals act upon.
        line = json.dumps(document, ensure_ascii=True, separators=(",", ":")).replace("\x7f", "\\u007f")
        if len(line) < MAX_LINE:
            break
    else:
        document = head | {"truncated": ["*"]}
        line = json.dumps(document, ensure_ascii=True, separators=(",", ":"))
    return document, line.encode("ascii") + b"\n"


def _object(
    fields: Mapping[str, Any], most_text: int, most_items: int, masker: "Masker | None", cut: list[str]
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None:
            continue
        name = name if _is_utf8(name) else "".join(map(_visible, name))
        out[name] = _value(value, most_text, most_items, masker, cut, name)
        if isinstance(value, str) and not _is_utf8(value) and len(value) <= most_text:
            # The exact bytes, for programs: half a surrogate pair is no text for most parsers of JSON.
            raw = os.fsencode(masker.mask_text(value) if masker else value)
            out[f"{name}_base64"] = base64.b64encode(raw).decode("ascii")
    return out


def _value(value: Any, most_text: int, most_items: int, masker: "Masker | None", cut: list[str], name: str) -> Any:
    if isinstance(value, bool | int | float) or value is None:
        return value
    if isinstance(value, bytes):
        value = os.fsdecode(value)
    if isinstance(value, str):
        text = masker.mask_text(value) if masker else value
        if len(text) > most_text:
            cut.append(name)
            text = text[:most_text]
        return text if _is_utf8(text) else "".join(map(_visible, text))
    if isinstance(value, Mapping):
        return _object(value, most_text, most_items, masker, cut)
    items = list(value)
    if len(items) > most_items:
        cut.append(name)
    return [_value(item, most_text, most_items, masker, cut, name) for item in items[:most_items]]


def _is_utf8(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _visible(char: str) -> str:
    number = ord(char)
    if 0xDC80 <= number <= 0xDCFF:  # a byte that is not UTF-8, by surrogateescape
        return f"\\x{number - 0xDC00:02x}"
    return f"\\u{number:04x}" if 0xD800 <= number <= 0xDFFF else char


def open_egress(net: str, allow: Iterable[str] = ()) -> bool:
    """Whether a sandbox may talk to everybody: the host's network, or a rule that matches all."""
    return net == "host" or (net == "filtered" and any(rule.removesuffix("/udp") in MATCH_ALL for rule in allow))


def exposed_by(path: str, writable: Iterable[str]) -> str | None:
    """The writable mount (a canonical host path) that would show the log inside of the sandbox, None when none does."""
    real = os.path.realpath(path)
    return next((source for source in writable if real == source or real.startswith(source.rstrip("/") + "/")), None)
