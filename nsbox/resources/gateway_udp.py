"""UDP of one sandbox: datagrams to a destination that the policy permits go through a socket of their own.

Answers go back by a raw socket made inside the namespace: they have to come from the address and port that was asked,
and a socket bound there would take the port away from the sandbox's own servers.
"""

import errno
import socket
import struct
import time
from typing import TYPE_CHECKING

from nsbox.plan.address import Address, parse_address
from nsbox.resources.loop import READ

if TYPE_CHECKING:
    from nsbox.resources.gateway_session import GatewaySession

_TURN = 64  # datagrams a turn of the loop
_IDLE_S = 60.0
_IP_ORIGDSTADDR, _IPV6_ORIGDSTADDR = 20, 74
_MOST = 256  # flows of one sandbox; the one that was quiet for longest makes room
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Peer = tuple[str, int]


def original(ancillary: list[tuple[int, int, bytes]]) -> tuple[Address, int] | None:
    """Where a datagram was going, from what IP_RECVORIGDSTADDR gives (struct sockaddr_in, sockaddr_in6)."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_IP, _IP_ORIGDSTADDR) and len(data) >= 8:
            text = socket.inet_ntop(socket.AF_INET, data[4:8])
        elif (level, kind) == (socket.IPPROTO_IPV6, _IPV6_ORIGDSTADDR) and len(data) >= 24:
            text = socket.inet_ntop(socket.AF_INET6, data[8:24])
        else:
            continue
        address = parse_address(text)
        return (address, int.from_bytes(data[2:4], "big")) if address else None
    return None


def packet(source: Peer, target: Peer, data: bytes) -> bytes:
    """A datagram with its UDP and IP headers (RFC 768, 791, 8200); the kernel fills in IPv4's own checksum."""
    length = 8 + len(data)
    ports = struct.pack("!HHH", source[1], target[1], length)
    family = socket.AF_INET6 if ":" in source[0] else socket.AF_INET
    ends = socket.inet_pton(family, source[0]) + socket.inet_pton(family, target[0])
    if family == socket.AF_INET:
        return struct.pack("!BBHHHBBH", 0x45, 0, 20 + length, 0, 0, 64, 17, 0) + ends + ports + bytes(2) + data
    # The one's complement sum of 16-bit words is the number modulo 65535.
    total = int.from_bytes(ends + struct.pack("!II", length, 17) + ports + data + bytes(len(data) % 2), "big") % 0xFFFF
    checksum = struct.pack("!H", (0xFFFF - total) or 0xFFFF)
    return struct.pack("!IHBB", 6 << 28, length, 17, 64) + ends + ports + checksum + data


class Flow:
    """Datagrams between one socket inside and one destination."""

    def __init__(self, listener: "UdpListener", client: Peer, address: Address, port: int, host: str) -> None:
        self._listener, self._client = listener, client
        self.address, self.port = address, port
        session = listener.session
        family, where = session.dial(address, port)
        self._sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._sock.connect(where)
        except OSError:
            self._sock.close()
            raise
        self.used_at = time.monotonic()
        self.row = session.traffic.connect(host, str(address), port, "udp", "allowed")
        self.key = (client, address, port)
        session.flows[self.key] = self
        session.traffic.open += 1
        session.loop.watch(self._sock, READ, self._on_answer)
        self._timer = session.loop.later(_IDLE_S, self._check)

    def send(self, data: bytes) -> None:
        session = self._listener.session
        self.used_at = time.monotonic()
        if session.traffic.sent(self.row, len(data)):
            try:
                self._sock.send(data)
            except OSError:
                pass  # datagrams get lost

    def _on_answer(self, _: int) -> None:
        session, scratch = self._listener.session, self._listener.session.loop.scratch
        for _turn in range(_TURN):
            try:
                count = self._sock.recv_into(scratch)
            except BlockingIOError:
                return
            except OSError:
                continue  # an ICMP answer, taken off by the call
            self.used_at = time.monotonic()
            session.traffic.received(self.row, count)
            self._listener.answer((str(self.address), self.port), self._client, bytes(memoryview(scratch)[:count]))

    def _check(self) -> None:
        quiet = time.monotonic() - self.used_at
        if quiet >= _IDLE_S:
            self.end()
        else:
            self._timer = self._listener.session.loop.later(_IDLE_S - quiet, self._check)

    def end(self) -> None:
        session = self._listener.session
        if session.flows.pop(self.key, None):
            session.traffic.open -= 1
            self._timer.cancel()
            session.loop.close(self._sock)


class UdpListener:
    """A transparent socket that every datagram of a family comes to."""

    def __init__(self, session: "GatewaySession", sock: socket.socket, raw: socket.socket) -> None:
        self.session, self._sock, self._raw = session, sock, raw
        session.loop.watch(sock, READ, self._on_ready)

    def _on_ready(self, _: int) -> None:
        for _turn in range(_TURN):
            try:
                data, ancillary, _flags, client = self._sock.recvmsg(65536, 64)
            except OSError:
                return
            found = original(ancillary)
            if found:
                self._datagram(data, client[:2], *found)

    def _datagram(self, data: bytes, client: Peer, address: Address, port: int) -> None:
        session = self.session
        flow = session.flows.get((client, address, port))
        if flow is None:
            verdict = session.judge(address, port, "udp")
            if not verdict.allowed:
                session.traffic.connect("", str(address), port, "udp", "denied", verdict.reason)
                return
            flow = self._begin(client, address, port, verdict.names[0] if verdict.names else "")
        if flow:
            flow.send(data)

    def _begin(self, client: Peer, address: Address, port: int, host: str) -> Flow | None:
        session = self.session
        if session.traffic.wait():
            return None
        if len(session.flows) >= _MOST:
            min(session.flows.values(), key=lambda flow: flow.used_at).end()
        if not session.traffic.room():
            session.traffic.connect(host, str(address), port, "udp", "denied", "too many connections")
            return None
        try:
            return Flow(self, client, address, port, host)
        except OSError as error:
            if error.errno in _SHORT_OF:
                session.traffic.touch("descriptors", 0)
            return None

    def answer(self, source: Peer, target: Peer, data: bytes) -> None:
        """Give the sandbox a datagram that comes from ``source``."""
        try:
            self._raw.sendto(packet(source, target, data), (target[0], 0))
        except OSError:
            pass  # its buffer is full, or its socket gone

    def close(self) -> None:
        """Its sockets are the session's."""
