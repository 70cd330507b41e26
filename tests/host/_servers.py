"""Servers on loopback that stand for the rest of the world, and a gateway that dials them for public addresses."""

import socket
import threading
from collections.abc import Callable
from typing import Any

from nsbox.plan.address import Address
from nsbox.resources.gateway import Gateway

WORLD = ("198.51.100.", "203.0.113.", "2001:db8:")


def dial(address: Address, port: int) -> tuple[int, tuple[str, int]]:
    """Addresses for documentation are servers of ours on loopback; nothing else is ever dialled."""
    if not str(address).startswith((*WORLD, "127.")):
        raise OSError(101, f"the test dialled {address}")
    return socket.AF_INET, ("127.0.0.1", port)


class Server:
    """Accepts on a free port of ``host``; ``serve(connection)`` runs in a thread for each."""

    def __init__(self, serve: Callable[[socket.socket], None], host: str = "127.0.0.1") -> None:
        self._serve = serve
        self._sock = socket.create_server((host, 0), backlog=512)
        self.port: int = self._sock.getsockname()[1]
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._sock.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._one, args=(connection,)))
            self._threads[-1].start()

    def _one(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(5)
            try:
                self._serve(connection)
            except OSError as error:
                self.errors.append(type(error).__name__)

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for thread in self._threads:
            thread.join(10)


def http(connection: socket.socket) -> None:
    """One request, answered with what it asked."""
    head = b""
    while b"\r\n\r\n" not in head and (data := connection.recv(4096)):
        head += data
    body = head.split(b"\r\n")[0]
    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


def echo(connection: socket.socket) -> None:
    """Everything back, then the end of the stream."""
    while data := connection.recv(1 << 16):
        connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


class Datagrams:
    """A thread that answers datagrams on a free port of ``host``."""

    def __init__(self, answer: Callable[[bytes], bytes | None], host: str = "127.0.0.1") -> None:
        self._answer = answer
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.bind((host, 0))
        self.port: int = self._sock.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            data, peer = self._sock.recvfrom(65536)
            if data == b"end" and peer == self._sock.getsockname():
                return
            reply = self._answer(data)
            if reply is not None:
                self._sock.sendto(reply, peer)

    def close(self) -> None:
        self._sock.sendto(b"end", self._sock.getsockname())
        self._thread.join(5)
        self._sock.close()


class Zone:
    """A name server: ``records`` holds lines of a zone file by name, or what makes them; ``asked`` what came."""

    def __init__(self, records: "dict[str, list[str] | Callable[[], list[str]]]", host: str = "127.0.0.1") -> None:
        self.records, self.asked = records, list[tuple[str, str]]()
        self._server = Datagrams(self._reply, host)
        self.address = (host, self._server.port)

    def _reply(self, data: bytes) -> bytes | None:
        import dnslib

        query = dnslib.DNSRecord.parse(data)
        name, kind = str(query.q.qname).lower(), dnslib.QTYPE[query.q.qtype]
        self.asked.append((name, kind))
        reply = query.reply()
        found = self.records.get(name)
        lines = found() if callable(found) else found
        if lines is None:
            reply.header.rcode = 3
        for line in lines or []:
            row = dnslib.RR.fromZone(line)[0]
            if row.rtype in (query.q.qtype, dnslib.QTYPE.CNAME) or str(row.rname) != name:
                reply.add_answer(row)
        return bytes(reply.pack())

    def close(self) -> None:
        self._server.close()


def gateway(zone: Zone | None = None, **options: Any) -> Gateway:
    return Gateway(resolvers=[zone.address] if zone else [("127.0.0.1", 9)], dial=dial, **options)
