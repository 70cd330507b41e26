"""An encoder of nftables rulesets into netlink batches (linux/netfilter/nf_tables.h), for what nsbox needs of them.

The tests compare every rule with what ``nft list ruleset`` says of it. Comparisons and loads are expressions that work
on 32-bit registers; a rule is a list of expressions that goes on as long as each of them matches.
"""

import socket
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nsbox.errors import SpecError
from nsbox.plan.address import V4, Address, Network
from nsbox.resources.netlink import (
    APPEND,
    CREATE,
    attribute,
    attribute_list,
    attributes,
    dump,
    message,
    nested,
    numbered,
)

_SUBSYSTEM = 10 << 8
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
NEWTABLE, NEWCHAIN, GETCHAIN, NEWRULE, DELRULE, NEWSET, GETSET, NEWSETELEM, GETSETELEM, DELSETELEM, NEWOBJ, GETOBJ = (
    *(0, 3, 4, 6, 8, 9, 10, 12, 13, 14, 18, 19),
)
INET = 1
ACCEPT, DROP, _JUMP = 1, 0, -3
PREROUTING, INPUT, FORWARD, OUTPUT, POSTROUTING = 0, 1, 2, 3, 4
_VERDICT_REGISTER, FIRST = 0, 8  # NFT_REG_VERDICT, NFT_REG32_00
_TYPES = {"ipv4": 7, "ipv6": 8, "proto": 12, "port": 13}  # datatypes.h of nft(8), in 6 bits each
_SIZES = {"ipv4": 4, "ipv6": 16, "proto": 4, "port": 4}
_MOST_BYTES = 160 << 10  # of net.core.wmem_default, 208 KiB; the kernel counts its own overhead in
_TIMEOUT_FLAG, _DYNAMIC_FLAG = 0x10, 0x10 | 0x20


class Message(NamedTuple):
    """One message of a batch, not yet numbered."""

    kind: int
    flags: int
    body: bytes


def _text(kind: int, text: str) -> bytes:
    return attribute(kind, text.encode() + b"\0")


def _word(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("!I", value & 0xFFFFFFFF))


def _long(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("!Q", value))


def _make(kind: int, flags: int, *parts: bytes, family: int = INET) -> Message:
    return Message(_SUBSYSTEM | kind, flags, struct.pack("!BBH", family, 0, 0) + b"".join(parts))


def batch(parts: Iterable[Message]) -> bytes:
    """One transaction: all of it holds, or nothing. Raises SpecError for more than one send(2) takes."""
    edge = struct.pack("!BBH", 0, 0, 10)
    whole = message(_BATCH_BEGIN, 0, 0, edge) + numbered(parts) + message(_BATCH_END, 0, 0, edge)
    if len(whole) > _MOST_BYTES:
        raise SpecError("allow: too many rules by address; write wider blocks, or names")
    return whole


def _expression(name: str, *parts: bytes) -> bytes:
    return nested(1, _text(1, name), nested(2, *parts))


def meta(key: int, register: int = FIRST) -> bytes:
    """Load a property of the packet: 15 nfproto, 16 l4proto, 6 and 7 the names of the interfaces."""
    return _expression("meta", _word(2, key), _word(1, register))


def payload(base: int, offset: int, length: int, register: int = FIRST) -> bytes:
    """Load bytes of the network (1) or transport (2) header."""
    return _expression("payload", _word(1, register), _word(2, base), _word(3, offset), _word(4, length))


def compare(value: bytes, register: int = FIRST, *, equal: bool = True) -> bytes:
    """Go on if the register holds ``value``."""
    return _expression("cmp", _word(1, register), _word(2, not equal), nested(3, attribute(1, value)))


def mask(bits: bytes, register: int = FIRST) -> bytes:
    """And the register with ``bits``."""
    size, none = _word(3, len(bits)), nested(5, attribute(1, bytes(len(bits))))
    return _expression("bitwise", _word(1, register), _word(2, register), size, nested(4, attribute(1, bits)), none)


def verdict(code: int, chain: str = "") -> bytes:
    """Accept, drop, or jump to a chain."""
    parts = (_word(1, _JUMP), _text(2, chain)) if chain else (_word(1, code),)
    return _expression("immediate", _word(1, _VERDICT_REGISTER), nested(2, nested(2, *parts)))


def load(value: bytes, register: int) -> bytes:
    """Put a constant into a register."""
    return _expression("immediate", _word(1, register), nested(2, attribute(1, value)))


def member(name: str) -> bytes:
    """Go on if the key that starts in the first register is in the set."""
    return _expression("lookup", _text(1, name), _word(2, FIRST))


def remember(name: str) -> bytes:
    """Put the key into the set or count it there once more; go on if there was room (update @set)."""
    return _expression("dynset", _text(1, name), _word(3, 1), _word(4, FIRST))


def count(name: str) -> bytes:
    """Count in a named counter."""
    return _expression("objref", _word(1, 1), _text(2, name))


def reject(kind: int, code: int = 0) -> bytes:
    """1: a TCP reset; 2: an ICMP answer of either family, code 1 port unreachable, 3 administratively prohibited."""
    return _expression("reject", _word(1, kind), attribute(2, bytes((code,))))


def beyond_rate(rate: float) -> bytes:
    """Go on if this happens more often than ``rate`` times a second, after one second's worth at once."""
    unit = 1 if rate == int(rate) else 60
    times = max(1, round(rate * unit))
    burst = max(1, round(rate))
    return _expression("limit", _long(1, times), _long(2, unit), _word(3, burst), _word(4, 0), _word(5, 1))


def beyond_bytes(most: int) -> bytes:
    """Go on if the packets that came here are more than so many bytes together, this one among them."""
    return _expression("quota", _long(1, most), _word(2, 1))


def beyond_connections(most: int) -> bytes:
    """Go on if more connections than that came here and are still known."""
    return _expression("connlimit", _word(1, most), _word(2, 1))


def first_packet() -> tuple[bytes, ...]:
    """Go on if the packet begins a connection: conntrack has made an entry, and not confirmed it (IPS_CONFIRMED)."""
    load_status = _expression("ct", _word(2, 2), _word(1, FIRST))
    return load_status, mask(struct.pack("=I", 0x8)), compare(bytes(4))


def masquerade() -> bytes:
    """The source becomes the address of the interface that the packet leaves by."""
    return _expression("masq")


def established() -> tuple[bytes, ...]:
    """Go on if the packet belongs to a connection that the host knows."""
    load_state = _expression("ct", _word(2, 0), _word(1, FIRST))
    return load_state, mask(struct.pack("=I", 0x6)), compare(bytes(4), equal=False)


def tproxy(family: int, address: str, port: int) -> tuple[bytes, ...]:
    """Hand the packet to the socket at ``address`` and ``port`` without changing it."""
    where = socket.inet_pton(family, address)
    ip = 2 if family == V4 else 10
    use = _expression("tproxy", _word(1, ip), _word(2, FIRST), _word(3, FIRST + 4))
    return load(where, FIRST), load(struct.pack("!H", port), FIRST + 4), use


def family_is(family: int) -> tuple[bytes, ...]:
    """Go on if the packet is of IPv4 or IPv6 (meta nfproto)."""
    return meta(15), compare(bytes((2 if family == V4 else 10,)))


def protocol_is(number: int) -> tuple[bytes, ...]:
    """Go on if the packet's transport protocol is this one."""
    return meta(16), compare(bytes((number,)))


def interface_is(name: str, *, output: bool, prefix: bool = False) -> tuple[bytes, ...]:
    """Go on if the packet comes in or goes out by an interface of this name, or one that starts so."""
    value = name.encode() if prefix else name.encode().ljust(16, b"\0")
    return meta(7 if output else 6), compare(value)


def to_network(network: Network, *, source: bool = False, inverted: bool = False) -> tuple[bytes, ...]:
    """Go on if the packet goes to (comes from) this block; ``inverted``: to any other of its family."""
    size, offset = (4, 12 if source else 16) if network.family == V4 else (16, 8 if source else 24)
    found = (*family_is(network.family), payload(1, offset, size))
    value = network.value.to_bytes(size, "big")
    if network.prefix < size * 8:
        bits = ((1 << network.prefix) - 1 << (size * 8 - network.prefix)).to_bytes(size, "big")
        return (*found, mask(bits), compare(value, equal=not inverted)) if network.prefix else found[:2]
    return (*found, compare(value, equal=not inverted))


def destination(family: int, *, port: bool) -> tuple[bytes, ...]:
    """Load address . protocol [. port] of where the packet goes, as the key of a set."""
    size, offset = (4, 16) if family == V4 else (16, 24)
    after = FIRST + size // 4
    loads = (*family_is(family), payload(1, offset, size), meta(16, after))
    return (*loads, payload(2, 2, 2, after + 1)) if port else loads


def source(family: int) -> tuple[bytes, ...]:
    """Load address . protocol . port of where the packet comes from."""
    size, offset = (4, 12) if family == V4 else (16, 8)
    after = FIRST + size // 4
    return *family_is(family), payload(1, offset, size), meta(16, after), payload(2, 0, 2, after + 1)


class Table:
    """Makes the messages for one table."""

    def __init__(self, name: str, family: int = INET) -> None:
        self.name, self._family = name, family

    def _make(self, kind: int, flags: int, *parts: bytes) -> Message:
        return _make(kind, flags, _text(1, self.name), *parts, family=self._family)

    def create(self, *, owned: bool = False) -> Message:
        """The table; ``owned``: it is gone with the socket that sends this (NFT_TABLE_F_OWNER)."""
        return self._make(NEWTABLE, CREATE, *((_word(2, 0x2),) if owned else ()))

    def chain(
        self, name: str, hook: int | None = None, priority: int = 0, policy: int = DROP, kind: str = "filter"
    ) -> Message:
        """A chain; with ``hook`` one that packets enter by themselves."""
        if hook is None:
            return self._make(NEWCHAIN, CREATE, _text(3, name))
        where = nested(4, _word(1, hook), _word(2, priority))
        return self._make(NEWCHAIN, CREATE, _text(3, name), where, _word(5, policy), _text(7, kind))

    def rule(self, chain: str, *expressions: bytes) -> Message:
        """A rule at the end of a chain."""
        return self._make(NEWRULE, CREATE | APPEND, _text(2, chain), nested(4, *expressions))

    def flush(self, chain: str) -> Message:
        """All rules of a chain go."""
        return self._make(DELRULE, 0, _text(2, chain))

    def counter(self, name: str) -> Message:
        return self._make(NEWOBJ, CREATE, _text(2, name), _word(3, 1), nested(4))

    def set(self, name: str, number: int, fields: Sequence[str], size: int, *, counted_for: int = 0) -> Message:
        """A set of concatenated ``fields``; ``counted_for``: seconds that elements stay which rules add and count."""
        kind = 0
        for field in fields:
            kind = kind << 6 | _TYPES[field]
        width = sum(_SIZES[field] for field in fields)
        parts = [_text(2, name), _word(3, _DYNAMIC_FLAG if counted_for else _TIMEOUT_FLAG), _word(4, kind)]
        parts += [_word(5, width), nested(9, _word(1, size)), _word(10, number)]
        if counted_for:
            parts += [_long(11, counted_for * 1000), nested(17, _text(1, "counter"), nested(2))]
        return self._make(NEWSET, CREATE, *parts)

    def elements(self, name: str, keys: Iterable[bytes], seconds: float = 0) -> Message:
        """Put keys into a set; 0 seconds: for good."""
        extra = _long(4, max(1, int(seconds * 1000))) if seconds else b""
        rows = (nested(1, nested(1, attribute(1, key)), extra) for key in keys)
        return self._make(NEWSETELEM, CREATE, _text(2, name), nested(3, *rows))

    def without(self, name: str, keys: Iterable[bytes]) -> Message:
        """Take keys out of a set; one that is not there fails the batch."""
        rows = (nested(1, nested(1, attribute(1, key))) for key in keys)
        return self._make(DELSETELEM, 0, _text(2, name), nested(3, *rows))


def key(address: Address, protocol: str, port: int | None = None) -> bytes:
    """The key of an element as ``destination`` loads it."""
    where = address.value.to_bytes(4 if address.family == V4 else 16, "big")
    number = socket.IPPROTO_TCP if protocol == "tcp" else socket.IPPROTO_UDP
    head = where + bytes((number, 0, 0, 0))
    return head if port is None else head + struct.pack("!Hxx", port)


def counted(sock: socket.socket, table: str, name: str) -> list[tuple[bytes, int, int]]:
    """(key, packets, bytes) of every element of a set whose elements count."""
    body = struct.pack("!BBH", INET, 0, 0) + _text(1, table) + _text(2, name)
    found = []
    for content in dump(sock, _SUBSYSTEM | GETSETELEM, body):
        for _, row in attribute_list(attributes(content[4:]).get(3, b"")):
            element = attributes(row)
            counter = attributes(attributes(element.get(7, b"")).get(2, b""))
            packets, size = (int.from_bytes(counter.get(field, b""), "big") for field in (2, 1))
            found.append((attributes(element.get(1, b"")).get(1, b""), packets, size))
    return found


def dropping_tables(sock: socket.socket, hook: int) -> list[str]:
    """Names of the tables whose chain at a hook drops what no rule of theirs accepts."""
    found = []
    for content in dump(sock, _SUBSYSTEM | GETCHAIN, struct.pack("!BBH", 0, 0, 0)):
        row = attributes(content[4:])
        at = attributes(row.get(4, b"")).get(1)
        if content[0] in (INET, 2) and at == struct.pack("!I", hook) and row.get(5) == struct.pack("!I", DROP):
            found.append(row.get(1, b"").rstrip(b"\0").decode(errors="replace"))
    return found


def sets_of(sock: socket.socket, table: str) -> list[str]:
    """The names of a table's sets."""
    rows = dump(sock, _SUBSYSTEM | GETSET, struct.pack("!BBH", INET, 0, 0) + _text(1, table))
    return [attributes(content[4:]).get(2, b"").rstrip(b"\0").decode(errors="replace") for content in rows]


def counters(sock: socket.socket, table: str) -> dict[str, int]:
    """Packets that each named counter of a table has seen."""
    body = struct.pack("!BBH", INET, 0, 0) + _text(1, table)
    rows = [attributes(content[4:]) for content in dump(sock, _SUBSYSTEM | GETOBJ, body)]
    return {
        row.get(2, b"").rstrip(b"\0").decode(errors="replace"): int.from_bytes(
            attributes(row.get(4, b"")).get(2, b""), "big"
        )
        for row in rows
    }
