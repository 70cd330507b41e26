"""Netlink messages as bytes, and the reading of what the kernel answers (netlink(7)).

A batch is built once, goes out in one send(2) and asks for one acknowledgement, on its last message: the kernel answers
every error anyway, and works off all of it before send returns.
"""

import errno
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator

from nsbox.errors import HostError
from nsbox.plan.net import LAST

REQUEST, ACK, ROOT_MATCH, EXCL, CREATE, APPEND = 0x1, 0x4, 0x300, 0x200, 0x400, 0x800
ERROR, DONE = 2, 3
_NESTED = 0x8000
_HEADER = struct.Struct("=IHHII")
_BUFFER = 1 << 16


def attribute(kind: int, payload: bytes) -> bytes:
    """One attribute, padded to 4 bytes."""
    return struct.pack("=HH", 4 + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)


def nested(kind: int, *attributes: bytes) -> bytes:
    """An attribute that holds attributes."""
    return attribute(kind | _NESTED, b"".join(attributes))


def message(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    """A message with its header; the port id is the kernel's to fill in."""
    return _HEADER.pack(16 + len(body), kind, REQUEST | flags, sequence, 0) + body


def attributes(body: bytes) -> dict[int, bytes]:
    """The attributes in ``body`` by number; the last of a kind wins."""
    return dict(attribute_list(body))


def attribute_list(body: bytes) -> Iterator[tuple[int, bytes]]:
    """The attributes in ``body`` in order."""
    at = 0
    while at + 4 <= len(body):
        length, kind = struct.unpack_from("=HH", body, at)
        if length < 4:
            return
        yield kind & 0x3FFF, body[at + 4 : at + length]
        at += (length + 3) & ~3


def messages(answer: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(type, sequence, body) of each message in what one recv(2) gave."""
    at = 0
    while at + 16 <= len(answer):
        length, kind, _, sequence, _ = _HEADER.unpack_from(answer, at)
        if length < 16:
            return
        yield kind, sequence, answer[at + 16 : at + length]
        at += (length + 3) & ~3


def numbered(parts: Iterable[tuple[int, int, bytes]]) -> bytes:
    """Messages of (type, flags, body) in a row, the last with the number ``LAST`` and a wish for an acknowledgement."""
    todo = list(parts)
    rows = [message(kind, flags, number, body) for number, (kind, flags, body) in enumerate(todo[:-1], 1)]
    kind, flags, body = todo[-1]
    return b"".join((*rows, message(kind, flags | ACK, LAST, body)))


def _error(body: bytes) -> int:
    """The errno that an error message carries; 0: it is an acknowledgement."""
    return -int.from_bytes(body[:4], sys.byteorder, signed=True)


def exchange(sock: socket.socket, batch: bytes) -> None:
    """Send a batch that ends in ``LAST`` and wait for the answer. Raises OSError of the first message that failed."""
    sock.send(batch)
    failed = 0
    while True:
        # Never blocks for long: the answers are queued before send(2) returns.
        for kind, sequence, body in messages(sock.recv(_BUFFER)):
            if kind == ERROR:
                failed = failed or _error(body)
                if failed or sequence == LAST:
                    _drain(sock)
                    if failed:
                        raise OSError(failed, os.strerror(failed))
                    return


def _drain(sock: socket.socket) -> None:
    try:
        while sock.recv(_BUFFER, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        pass


def dump(sock: socket.socket, kind: int, body: bytes) -> list[bytes]:
    """The bodies that a dump request answers."""
    sock.send(message(kind, ROOT_MATCH, 1, body))
    found: list[bytes] = []
    while True:
        for answer, _, content in messages(sock.recv(_BUFFER)):
            if answer == DONE:
                return found
            if answer == ERROR:
                code = _error(content)
                raise OSError(code, os.strerror(code))
            found.append(content)


def open_socket(protocol: int) -> socket.socket:
    """A netlink socket in the caller's network namespace. Raises HostError."""
    try:
        return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    except OSError as error:
        raise HostError(
            f"no netlink socket can be made: {error.strerror}",
            remedy="allow AF_NETLINK sockets in the filter around this process",
            errno=error.errno or errno.EPERM,
        ) from None
