"""The resolver that a sandbox sees: names that the policy permits are looked up at the host's resolvers, no others.

A name off the list is answered NXDOMAIN at once, with the extended error "blocked" (RFC 8914): some C libraries take
REFUSED for no answer at all and wait. An address that is special is dropped from the answer, and what is left is opened
before the program hears of it.
"""

import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from nsbox.resources import dns_wire as wire
from nsbox.resources.dns_upstream import Upstream
from nsbox.resources.dns_wire import Answer, Malformed, Question
from nsbox.resources.loop import READ, WRITE, Timer

if TYPE_CHECKING:
    from nsbox.resources.gateway_session import GatewaySession

__all__ = ["DnsServer", "Upstream"]

_TURN, _MOST_PENDING, _MOST_STREAMS, _IDLE_S = 64, 64, 32, 10.0
_MOST_UDP = 1232  # bytes; what crosses every path without fragments (dnsflagday.net/2020)
_MOST_OUT = 256 << 10
Send = Callable[[bytes], None]


class DnsServer:
    """Serves the two sockets at the resolver's address inside."""

    def __init__(self, session: "GatewaySession", datagrams: socket.socket, listener: socket.socket) -> None:
        self.session = session
        self._datagrams, self._listener = datagrams, listener
        self._pending = 0
        self.streams: dict[_Stream, None] = {}  # in the order they began
        session.loop.watch(datagrams, READ, self._on_datagram)
        session.loop.watch(listener, READ, self._on_connection)
        if session.policy.by_name:
            session.loop.soon(_import_ahead)

    def _on_datagram(self, _: int) -> None:
        for _turn in range(_TURN):
            try:
                data, client = self._datagrams.recvfrom(4096)
            except OSError:
                return
            self.handle(data, lambda message, client=client: self._send(message, client), datagram=True)  # type: ignore[misc]

    def _send(self, message: bytes, client: tuple[str, int]) -> None:
        try:
            self._datagrams.sendto(message, client)
        except OSError:
            pass  # the asker is gone

    def _on_connection(self, _: int) -> None:
        for _turn in range(_TURN):
            try:
                sock, _peer = self._listener.accept()
            except OSError:
                return
            if len(self.streams) >= _MOST_STREAMS:
                next(iter(self.streams)).close()
            self.streams[_Stream(self, sock)] = None

    def handle(self, data: bytes, send: Send, *, datagram: bool) -> None:
        """Answer a query through ``send``, now or later."""
        try:
            question = wire.read_question(data)
        except Malformed as problem:
            if problem.rcode is not None:
                send(wire.refusal(data, problem.rcode))
            return
        session = self.session
        kind = wire.TYPES.get(question.kind, f"TYPE{question.kind}")
        if not question.name or not session.policy.names(question.name):
            name = question.name or "?"
            session.traffic.row(name, "", 53, "dns", "denied").connections += 1
            session.traffic.event("dns.query", name=name, type=kind, verdict="denied")
            send(wire.answer(question, wire.NXDOMAIN, blocked=True))
            return
        session.traffic.event("dns.query", name=question.name, type=kind, verdict="allowed")
        self._look_up(question, send, min(question.edns or 512, _MOST_UDP) if datagram else None)

    def _look_up(self, question: Question, send: Send, most: int | None) -> None:
        known = (
            question.kind in (wire.A, wire.AAAA, wire.CNAME, wire.HTTPS, wire.SVCB) or question.kind in wire.PASSED_ON
        )
        if not known or (question.kind == wire.AAAA and not self.session.ipv6):
            send(wire.answer(question, wire.NOERROR))
            return
        if self._pending >= _MOST_PENDING:
            self.session.traffic.touch("dns_queries", _MOST_PENDING)
            send(wire.answer(question, wire.SERVFAIL))
            return
        self._pending += 1

        def done(data: bytes | None) -> None:
            self._pending -= 1
            if self._datagrams.fileno() >= 0 and not self.session.ended:
                send(self._answer(question, data, most))

        self.session.upstream.ask(question.name, question.kind, done)

    def _answer(self, question: Question, data: bytes | None, most: int | None) -> bytes:
        """What the sandbox gets of an upstream answer."""
        try:
            found = Answer(question, data or b"")
        except (ValueError, struct.error):
            return wire.answer(question, wire.SERVFAIL)
        if question.kind in (wire.A, wire.AAAA) and not self._open(question, found):
            return wire.answer(question, wire.SERVFAIL)
        if question.kind in (wire.HTTPS, wire.SVCB):
            found.strip_services(self.session.policy.names)
        return found.pack(most)

    def _open(self, question: Question, found: Answer) -> bool:
        """Let the sandbox reach the addresses of an answer that it may reach, and drop the others."""
        session, good = self.session, []
        # The policy may have changed while the answer was under way.
        permitted = session.policy.names(question.name)
        for address in found.addresses():
            why = session.policy.why_special(address, session.own) if permitted else "no rule"
            if why:
                session.traffic.connect(question.name, str(address), 0, "dns", "denied", why)
            else:
                good.append(address)
        found.keep_addresses(good)
        return not good or session.learn(question.name, good, found.ttl)

    def close(self) -> None:
        """End the streams; the sockets are the session's."""
        for stream in list(self.streams):
            stream.close()


def _import_ahead() -> None:
    import dnslib  # noqa: F401 - 15 ms, while the sandbox starts


class _Stream:
    """A connection of DNS over TCP (RFC 7766): queries with two bytes of length before them, any number."""

    def __init__(self, server: DnsServer, sock: socket.socket) -> None:
        self._server, self._sock = server, sock
        self._loop = server.session.loop
        self._in, self._out = b"", b""
        sock.setblocking(False)
        self._loop.watch(sock, READ, self._on_ready)
        self._timer: Timer = self._loop.later(_IDLE_S, self.close)

    def _on_ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if not events & ~WRITE or self not in self._server.streams:
            return
        try:
            data = self._sock.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._in += data
        self._timer.cancel()
        self._timer = self._loop.later(_IDLE_S, self.close)
        while len(self._in) >= 2 and len(self._in) >= 2 + (length := int.from_bytes(self._in[:2], "big")):
            query, self._in = self._in[2 : 2 + length], self._in[2 + length :]
            self._server.handle(query, self._send, datagram=False)

    def _send(self, message: bytes) -> None:
        if self not in self._server.streams:
            return
        self._out += struct.pack("!H", len(message)) + message
        if len(self._out) > _MOST_OUT:
            self.close()  # asks and never reads
        else:
            self._flush()

    def _flush(self) -> None:
        try:
            self._out = self._out[self._sock.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        self._loop.change(self._sock, READ | (WRITE if self._out else 0))

    def close(self) -> None:
        if self in self._server.streams:
            del self._server.streams[self]
            self._timer.cancel()
            self._loop.close(self._sock)
