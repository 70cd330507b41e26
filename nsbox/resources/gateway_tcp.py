"""One relayed TCP connection: dials the address that was checked, and passes on.

Back-pressure: a side is read only while the other takes what it sends, so a connection holds at most one receive.
End of stream and reset travel on as they are. A connection that a name let through is looked into before the first of
its bytes leaves (``peek``); what the server says meanwhile passes, since some speak first.
"""

import errno
import socket
import struct
from typing import TYPE_CHECKING

from nsbox.plan.address import Address
from nsbox.resources.loop import READ, WRITE, Loop, Timer
from nsbox.resources.peek import LIMIT, peek
from nsbox.resources.traffic import Row

if TYPE_CHECKING:
    from nsbox.resources.gateway_session import GatewaySession

_DIAL_S, _PEEK_S = 30.0, 15.0
_RESET = struct.pack("ii", 1, 0)


def reset(loop: Loop, sock: socket.socket) -> None:
    """Close so that the other side gets a RST."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    except OSError:
        pass
    loop.close(sock)


class _Side:
    """One of the two sockets of a relay, and what it still has to send."""

    __slots__ = ("ended", "out", "shut", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.out = memoryview(b"")
        self.ended = False  # its end of stream was read
        self.shut = False  # we have sent ours


class Relay:
    """One connection. ``row`` counts it."""

    __slots__ = (
        "_client",
        "_connected",
        "_dialling",
        "_held",
        "_looking",
        "_server",
        "_session",
        "address",
        "host",
        "port",
        "row",
    )

    def __init__(
        self, session: "GatewaySession", client: socket.socket, address: Address, port: int, host: str
    ) -> None:
        self._session = session
        self.address, self.port, self.host = address, port, host
        self.row: Row | None = None
        self._held: bytearray | None = None
        self._connected = False
        self._client = _Side(client)
        family, where = session.dial(address, port)
        server = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._server = _Side(server)
        self._dialling = session.loop.later(_DIAL_S, self.abort)
        self._looking: Timer | None = None
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        session.traffic.open += 1
        session.relays.add(self)
        code = server.connect_ex(where)
        if code not in (0, errno.EINPROGRESS):
            self._count("denied" if code in (errno.EACCES, errno.EPERM) else "allowed")
            self.abort()
            return
        session.loop.watch(server, WRITE, self._on_server)
        session.loop.watch(client, 0, self._on_client)

    def look_first(self) -> None:
        """Hold back what the client sends until it has said whom it is for."""
        if self.row is None:
            self._held = bytearray()
            self._session.loop.change(self._client.sock, READ)

    def pass_on(self) -> None:
        """Nothing to look for: an address rule lets it through."""
        self._count("allowed")

    def _count(self, verdict: str, reason: str = "") -> None:
        if self.row is None:
            self.row = self._session.traffic.connect(self.host, str(self.address), self.port, "tcp", verdict, reason)

    # Events

    def _on_server(self, events: int) -> None:
        if not self._connected:
            self._dialled()
            return
        if events & WRITE:
            self._flush(self._server, self._client)
        if events & ~WRITE:
            self._pump(self._server, self._client)

    def _on_client(self, events: int) -> None:
        if events & WRITE:
            self._flush(self._client, self._server)
        if events & ~WRITE:
            if self._held is not None:
                self._look()
            else:
                self._pump(self._client, self._server)

    def _dialled(self) -> None:
        if self._server.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._count("allowed")
            self.abort()
            return
        self._connected = True
        self._dialling.cancel()
        self._interests()

    def _look(self) -> None:
        """Read on until the first bytes say whom the connection is for, then let them through or reset."""
        held = self._held
        assert held is not None
        try:
            data = self._client.sock.recv(LIMIT + 1 - len(held))
        except BlockingIOError:
            return
        except OSError:
            self._count("allowed")
            self.abort()
            return
        if data and self._looking is None:
            self._looking = self._session.loop.later(
                _PEEK_S, lambda: self._refuse("did not say in time whom it is for")
            )
        held += data
        self._client.ended = not data
        found = peek(bytes(held))
        if found.kind == "more" and data and len(held) <= LIMIT:
            return
        # A client that ends without a word only listens.
        reason = self._session.objection(self, found) if held else ""
        if reason:
            self._refuse(reason)
        else:
            self._let_go()

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if self._looking:
            self._looking.cancel()
        self._count("allowed")
        assert self.row is not None
        if held and not self._session.traffic.sent(self.row, len(held)):
            self.abort()
            return
        self._server.out = memoryview(bytes(held or b""))
        if self._connected:
            self._flush(self._server, self._client)
        else:
            self._interests()

    def _refuse(self, reason: str) -> None:
        self.row = None  # what a server that spoke first sent stays counted as allowed
        self._count("denied", reason)
        self.abort()

    # The relay proper

    def _pump(self, source: _Side, target: _Side) -> None:
        scratch = self._session.loop.scratch
        try:
            count = source.sock.recv_into(scratch)
        except BlockingIOError:
            return
        except OSError:
            self.abort()
            return
        if not count:
            source.ended = True
            self._interests()
            return
        traffic, row = self._session.traffic, self.row
        if source is self._client:
            if row is None or not traffic.sent(row, count):
                self.abort()
                return
        else:
            # A server that speaks first has not been counted as allowed yet.
            self._count("allowed")
            traffic.received(self.row or Row(), count)
        try:
            done = target.sock.send(memoryview(scratch)[:count])
        except BlockingIOError:
            done = 0
        except OSError:
            self.abort()
            return
        if done < count:
            target.out = memoryview(bytes(memoryview(scratch)[done:count]))
            self._interests()

    def _flush(self, side: _Side, other: _Side) -> None:
        if side.out:
            try:
                side.out = side.out[side.sock.send(side.out) :]
            except BlockingIOError:
                return
            except OSError:
                self.abort()
                return
        if not side.out:
            side.out = memoryview(b"")
        self._interests()

    def _interests(self) -> None:
        """What to wait for next, from the state of both sides; the end when both have ended."""
        client, server, loop = self._client, self._server, self._session.loop
        if self._connected:
            for source, target in ((client, server), (server, client)):
                if source.ended and not target.out and not target.shut and self._held is None:
                    target.shut = True
                    try:
                        target.sock.shutdown(socket.SHUT_WR)
                    except OSError:
                        self.abort()
                        return
            if client.shut and server.shut:
                self._finish()
                return
            loop.change(server.sock, self._wants(server, client))
        ready = self._connected or self._held is not None
        loop.change(client.sock, self._wants(client, server) if ready else 0)

    @staticmethod
    def _wants(side: _Side, other: _Side) -> int:
        return (0 if side.ended or other.out else READ) | (WRITE if side.out else 0)

    def _finish(self) -> None:
        if self in self._session.relays:
            self._session.relays.discard(self)
            self._session.traffic.open -= 1
            self._dialling.cancel()
            if self._looking:
                self._looking.cancel()
            self._session.loop.close(self._client.sock)
            self._session.loop.close(self._server.sock)

    def abort(self) -> None:
        """Reset both sides."""
        if self in self._session.relays:
            self._count("allowed")
            for side in (self._client, self._server):
                reset(self._session.loop, side.sock)
            self._finish()
