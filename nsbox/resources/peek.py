"""What the first bytes of a connection say about whom it is for: the ClientHello's server name, or HTTP's Host.

Pure functions over bytes that a stranger sent. Each answers ``MORE`` for every prefix that could still become a name;
the caller bounds how many bytes and how much time that may take.
"""

import re
import struct
from typing import NamedTuple

from nsbox.plan.net import normal_name

LIMIT = 32 << 10  #: bytes of a ClientHello or a request head that are looked at
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _ECH, _ESNI = 22, 1, 0, 0xFE0D, 0xFFCE
_METHODS = re.compile(rb"(GET|HEAD|POST|PUT|DELETE|OPTIONS|TRACE|PATCH|CONNECT|PRI|PROPFIND|MKCOL|COPY|MOVE|LOCK) ")
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}")
_REQUEST = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+)[ \t]+(\S+)[ \t]+HTTP/")


class Peek(NamedTuple):
    """``kind`` is more (bytes wanted), tls, http, or other: a protocol that does not say whom it is for.

    For tls and http ``name`` is the host that was asked for, or ``problem`` says why it cannot be known.
    """

    kind: str
    name: str = ""
    problem: str = ""


MORE, OTHER = Peek("more"), Peek("other")


class _Short(Exception):
    """The message goes on beyond the bytes at hand."""


class _Reader:
    """Takes numbers and vectors off a message; raises ``_Short`` at its end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise _Short
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        return self.take(self.number(size))


def _handshake(data: bytes) -> tuple[bytes, bool]:
    """(bytes of the handshake layer, whether all the records are records of a handshake)."""
    found, at = b"", 0
    while at + 5 <= len(data):
        kind, major, _, length = struct.unpack_from("!BBBH", data, at)
        if kind != _HANDSHAKE or major != 3 or not 0 < length <= 16384 + 256:
            return found, False
        found += data[at + 5 : at + 5 + length]
        at += 5 + length
    return found, True


def _server_name(value: bytes) -> str:
    """The host_name of a server_name extension (RFC 6066). Raises ValueError, _Short."""
    names = _Reader(_Reader(value).vector(2))
    if names.number(1) != 0:
        raise ValueError
    text = names.vector(2).decode("ascii")
    if names.at != len(names.data):
        raise ValueError
    return normal_name(text)


def _hello(body: bytes) -> Peek:
    """A complete ClientHello without its handshake header (RFC 8446, 4.1.2)."""
    reader = _Reader(body)
    try:
        reader.take(2 + 32)
        reader.vector(1), reader.vector(2), reader.vector(1)
        extensions = _Reader(reader.vector(2)) if reader.at < len(body) else _Reader(b"")
        if reader.at != len(body):
            return Peek("tls", problem="malformed ClientHello")
        found: dict[int, bytes] = {}
        while extensions.at < len(extensions.data):
            kind = extensions.number(2)
            if kind in found:
                return Peek("tls", problem="an extension twice in the ClientHello")
            found[kind] = extensions.vector(2)
        if _ECH in found or _ESNI in found:
            return Peek("tls", problem="encrypted ClientHello hides the server name")
        if _SERVER_NAME not in found:
            return Peek("tls", problem="no server name in the ClientHello")
        return Peek("tls", _server_name(found[_SERVER_NAME]))
    except (_Short, ValueError):
        return Peek("tls", problem="malformed ClientHello")


def _tls(data: bytes) -> Peek:
    if len(data) > 1 and data[1] != 3:
        return OTHER
    handshake, proper = _handshake(data)
    if handshake and handshake[0] != _CLIENT_HELLO:
        return Peek("tls", problem="not a ClientHello")
    if len(handshake) >= 4:
        length = int.from_bytes(handshake[1:4], "big")
        if length > LIMIT:
            return Peek("tls", problem="oversized ClientHello")
        if len(handshake) >= 4 + length:
            return _hello(handshake[4 : 4 + length])
    return MORE if proper else Peek("tls", problem="malformed TLS record")


def _authority(text: bytes) -> str:
    """The host of ``host[:port]``. Raises ValueError."""
    found = re.fullmatch(rb"([^:@/?#\s]+)(?::\d{0,5})?", text)
    if not found:
        raise ValueError
    return normal_name(found[1].decode("ascii"))


def _target(method: bytes, target: bytes) -> str | None:
    """The host that the request line itself names (RFC 9112, 3.2): None when it leaves that to Host."""
    if method == b"CONNECT":
        return _authority(target)
    if target.startswith(b"/") or target == b"*":
        return None
    found = re.match(rb"[a-zA-Z][a-zA-Z0-9+.-]*://([^/?#]*)", target)
    if not found:
        raise ValueError
    return _authority(found[1])


def _http_head(lines: list[bytes]) -> Peek:
    request = _REQUEST.match(lines[0])
    if not request:
        return Peek("http", problem="a request without version names no host")
    if request[1] == b"PRI":
        return Peek("http", problem="HTTP/2 without TLS hides the host")
    hosts = []
    for line in lines[1:]:
        field, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(field[:32]) or field != field.strip():
            return Peek("http", problem="malformed header")
        if field.lower() == b"host":
            hosts.append(value.strip(b" \t"))
    if len(hosts) != 1:
        return Peek("http", problem="no Host header" if not hosts else "more than one Host header")
    try:
        name = _authority(hosts[0])
        target = _target(request[1], request[2])
    except ValueError:
        return Peek("http", problem="malformed Host header or target")
    if target is not None and target != name:
        return Peek("http", target, problem="the target and the Host header differ")
    return Peek("http", name)


def _http(data: bytes) -> Peek:
    text = data.lstrip(b"\r\n")
    if not text:
        return MORE
    method = _TOKEN.match(text)
    if not method or (len(text) > method.end() and text[method.end()] not in b" \t"):
        return OTHER
    line, ended, _ = text.partition(b"\n")
    if not ended:
        return MORE
    if not _REQUEST.match(line) and not _METHODS.match(line):
        return OTHER
    # Some servers take a bare line feed for the end of a line.
    lines = [part.removesuffix(b"\r") for part in text.split(b"\n")]
    if not _REQUEST.match(line):
        return _http_head(lines[:1])
    if b"" not in lines[:-1]:
        return MORE
    return _http_head(lines[: lines.index(b"")])


def peek(data: bytes) -> Peek:
    """What the first bytes that a client sent say."""
    if not data:
        return MORE
    return _tls(data) if data[0] == _HANDSHAKE else _http(data)
