"""Asks the host's resolvers for a sandbox: UDP from a fresh port for every query, TCP where the answer was cut."""

import os
import socket
import struct
import time
from collections.abc import Callable

from nsbox.resources.dns_wire import NXDOMAIN, is_truncated, matches, query, rcode_of
from nsbox.resources.loop import READ, WRITE, Loop

_TRY_S, _TCP_S, _ROUNDS = 1.5, 3.0, 2
_AGE_S = 5.0
_MOST_TCP = 16 << 10
_CONF = "/etc/resolv.conf"
Server = tuple[str, int]
Done = Callable[[bytes | None], None]


def read_resolv_conf(text: str) -> tuple[Server, ...]:
    """The first three name servers (resolv.conf(5)); the local one where none is named."""
    found = [words[1] for line in text.splitlines() if (words := line.split())[:1] == ["nameserver"] and len(words) > 1]
    return tuple((address, 53) for address in found[:3]) or (("127.0.0.1", 53),)


class _Lookup:
    """One question, tried at one server after the other. Calls ``done`` once, with the answer or None."""

    def __init__(self, upstream: "Upstream", name: str, kind: int, done: Done) -> None:
        self._upstream, self._loop, self._done = upstream, upstream.loop, done
        self._sent = query(int.from_bytes(os.urandom(2), "big"), name, kind)
        self._server: Server = ("", 0)
        self._servers = [*upstream.servers()] * _ROUNDS
        self._sock: socket.socket | None = None
        self._last: bytes | None = None  # an answer that says no more than that the server could not
        self._answer = b""
        self._next()

    def _open(self, kind: socket.SocketKind, seconds: float) -> bool:
        host, port = self._server
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            self._sock.connect((host, port))
        except BlockingIOError:
            pass
        except OSError:
            self._drop()
            return False
        self._timer = self._loop.later(seconds, self._next)
        return True

    def _drop(self) -> None:
        if self._sock:
            self._loop.close(self._sock)
            self._sock = None

    def _next(self) -> None:
        if self._sock:
            self._timer.cancel()
            self._drop()
        while self._servers:
            self._server = self._servers.pop(0)
            if self._open(socket.SOCK_DGRAM, _TRY_S) and self._sock:
                self._loop.watch(self._sock, READ, self._on_datagram)
                try:
                    self._sock.send(self._sent)
                except OSError:
                    self._timer.cancel()
                    self._drop()
                    continue
                return
        self._done(self._last)

    def _on_datagram(self, _: int) -> None:
        assert self._sock
        try:
            data = self._sock.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            self._next()
            return
        if not matches(data, self._sent):
            return
        if is_truncated(data):
            self._timer.cancel()
            self._drop()
            self._answer = b""
            if self._open(socket.SOCK_STREAM, _TCP_S) and self._sock:
                self._loop.watch(self._sock, WRITE, self._on_stream)
            else:
                self._next()
            return
        self._take(data)

    def _on_stream(self, events: int) -> None:
        assert self._sock
        try:
            if events & WRITE:
                self._sock.send(struct.pack("!H", len(self._sent)) + self._sent)
                self._loop.change(self._sock, READ)
                return
            data = self._sock.recv(_MOST_TCP)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._answer += data
        length = int.from_bytes(self._answer[:2], "big") if len(self._answer) > 1 else 0
        if not data or length > _MOST_TCP:
            self._next()
        elif length and len(self._answer) >= 2 + length:
            answer = self._answer[2 : 2 + length]
            if matches(answer, self._sent):
                self._take(answer)
            else:
                self._next()

    def _take(self, data: bytes) -> None:
        if rcode_of(data) not in (0, NXDOMAIN):
            self._last = data
            self._next()
            return
        self._timer.cancel()
        self._drop()
        self._done(data)


class Upstream:
    """The resolvers of the host, or those given."""

    def __init__(self, loop: Loop, servers: tuple[Server, ...] | None) -> None:
        self.loop = loop
        self._given = servers
        self._read: tuple[float, tuple[Server, ...]] = (-_AGE_S, ())

    def servers(self) -> tuple[Server, ...]:
        """(address, port) in the order they are tried."""
        if self._given is not None:
            return self._given
        if time.monotonic() - self._read[0] > _AGE_S:
            try:
                with open(_CONF, encoding="utf-8", errors="replace") as file:
                    self._read = (time.monotonic(), read_resolv_conf(file.read()))
            except OSError:
                self._read = (time.monotonic(), read_resolv_conf(""))
        return self._read[1]

    def ask(self, name: str, kind: int, done: Done) -> None:
        """Look ``name`` up; ``done`` is called once, with a message that matches the query or None."""
        _Lookup(self, name, kind, done)
