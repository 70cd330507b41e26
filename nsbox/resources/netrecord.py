"""What the rulesets inside have counted, as rows of the report."""

import socket
from collections.abc import Iterable, Mapping
from typing import Any

from nsbox.plan.address import V4, V6, Address
from nsbox.resources import nft
from nsbox.resources.netrules import TABLE

Names = Mapping[Address, Iterable[str]]


def row(
    address: Address | None, port: int, protocol: str, verdict: str, connections: int, tx: int, rx: int, names: Names
) -> dict[str, Any]:
    """A destination as the report has it."""
    known = list(names.get(address, ())) if address else []
    return {
        **({"host": known[-1]} if known else {}),
        "address": str(address) if address else "",
        "port": port,
        "protocol": protocol,
        "verdict": verdict,
        "connections": connections,
        "tx_bytes": tx,
        "rx_bytes": rx,
    }


def _place(key: bytes) -> tuple[Address, int, str]:
    """What an element's key says: address, port, protocol."""
    width = len(key) - 8
    address = Address(V4 if width == 4 else V6, int.from_bytes(key[:width], "big"))
    protocol = "tcp" if key[width] == socket.IPPROTO_TCP else "udp"
    return address, int.from_bytes(key[width + 4 : width + 6], "big"), protocol


def refused(sock: socket.socket, names: Names) -> list[dict[str, Any]]:
    """What the rules refused: exact until the sets are full, then in a row without address. Raises OSError."""
    found = []
    for name in nft.sets_of(sock, TABLE):
        if name.startswith("den"):
            for key, packets, _ in nft.counted(sock, TABLE, name):
                found.append(row(*_place(key), "denied", packets, 0, 0, names))
    if others := nft.counters(sock, TABLE).get("other"):
        found.append(row(None, 0, "other", "denied", others, 0, 0, names))
    return found


def routed(sock: socket.socket, names: Names) -> list[dict[str, Any]]:
    """What went through a veth pair; bytes with their IP headers, UDP as one connection. Raises OSError."""
    tried, begun, sent, got = (
        {key: (packets, size) for key, packets, size in nft.counted(sock, TABLE, name)}
        for name in ("con4", "est4", "tx4", "rx4")
    )
    found, none = [], (0, 0)
    for key in sent:
        address, port, protocol = _place(key)
        # A SYN may have to be sent again; where none was answered, each counts as a try.
        connections = (begun.get(key) or tried.get(key, none))[0] if protocol == "tcp" else 1
        found.append(row(address, port, protocol, "allowed", connections, sent[key][1], got.get(key, none)[1], names))
    return found
