"""Attempts to reach something: an address, a socket by its name, a host name. What to reach comes after a colon."""

from __future__ import annotations

import os
import socket

from .calls import ATTACKS, TOLD


def _address(text: str) -> tuple[int, tuple[str, int]]:
    host, _, port = text.rpartition(":")
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, int(port))


def connect(text: str) -> object:
    """TCP to HOST:PORT."""
    family, address = _address(text)
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.settimeout(3)
        one.connect(address)
        return one.recv(8) and "done"


def datagram(text: str) -> object:
    """A datagram to HOST:PORT, and its answer."""
    family, address = _address(text)
    with socket.socket(family, socket.SOCK_DGRAM) as one:
        one.settimeout(1)
        one.sendto(b"x", address)
        one.recv(8)
    return "done"


def unix(text: str) -> object:
    """A unix socket: @NAME for an abstract one, else a path."""
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(3)
        one.connect("\0" + text[1:] if text.startswith("@") else text)
    return "done"


def resolve(text: str) -> object:
    """A host name."""
    try:
        return "done" if socket.getaddrinfo(text, 80) else "nothing"
    except socket.gaierror:
        return "refused"


TOLD.update({"connect": connect, "datagram": datagram, "unix": unix, "resolve": resolve})


def links() -> object:
    """Network links other than loopback."""
    with open("/proc/net/dev") as table:
        names = {line.partition(":")[0].strip() for line in table.readlines()[2:]}
    return "done" if names - {"lo"} else "none"


def _own_loopback() -> object:
    """Not an attack: that there is a network at all."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with socket.create_connection(server.getsockname(), 3):
            return "done"


ATTACKS.update({"other_links": links, "own_loopback": _own_loopback})


def memory_file(text: str) -> object:
    """A file in shared memory, by name."""
    return os.open(f"/dev/shm/{text}", os.O_RDONLY)


TOLD["memory_file"] = memory_file
