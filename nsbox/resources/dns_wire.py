"""DNS messages: the questions of a sandbox, read strictly by hand, and answers, read and written through dnslib.

A question is read without the library on purpose: its reader follows pointers and counts that a stranger chose, in a
loop that serves every sandbox.
"""

import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from nsbox.plan.address import V4, V6, Address, parse_address
from nsbox.plan.net import normal_name

A, NS, CNAME, SOA, MX, TXT, AAAA, SRV, OPT, SVCB, HTTPS, CAA = 1, 2, 5, 6, 15, 16, 28, 33, 41, 64, 65, 257
NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP = 0, 1, 2, 3, 4
TYPES = {
    1: "A",
    2: "NS",
    5: "CNAME",
    6: "SOA",
    12: "PTR",
    15: "MX",
    16: "TXT",
    28: "AAAA",
    33: "SRV",
    64: "SVCB",
    65: "HTTPS",
}
PASSED_ON = frozenset((MX, TXT, SRV, CAA))
_HEADER = struct.Struct("!HHHHHH")
_MOST_QUERY, _MOST_ADDRESSES, _MOST_RECORDS, _EDNS_SIZE = 512, 32, 256, 1232
_HINTS = frozenset((4, 5, 6))  # ipv4hint, ech, ipv6hint (RFC 9460)
_BLOCKED = 15  # extended error (RFC 8914)


class Question(NamedTuple):
    """What a sandbox asks."""

    ident: int
    flags: int
    name: str  #: normalised; empty if no host can be called so
    kind: int
    wire: bytes  #: the question section as it was asked
    edns: int  #: bytes of an answer over UDP that the asker takes; 0: it does not speak EDNS


class Malformed(Exception):
    """A query that can be answered with ``rcode`` only; None: not at all."""

    def __init__(self, rcode: int | None) -> None:
        super().__init__(rcode)
        self.rcode = rcode


def read_question(data: bytes) -> Question:
    """The one question of a query. Raises Malformed."""
    if len(data) < 12 or data[2] & 0x80:
        raise Malformed(None)
    ident, flags, questions, answers, authorities, extras = _HEADER.unpack_from(data)
    if flags & 0x7800:
        raise Malformed(NOTIMP)
    if len(data) > _MOST_QUERY or questions != 1 or answers or authorities or extras > 1:
        raise Malformed(FORMERR)
    labels, at = [], 12
    while True:
        length = data[at] if at < len(data) else 64
        if length > 63 or at + 1 + length > len(data):
            raise Malformed(FORMERR)
        at += 1 + length
        if not length:
            break
        labels.append(data[at - length : at])
    if at + 4 > len(data) or at - 12 > 255:
        raise Malformed(FORMERR)
    kind, family = struct.unpack_from("!HH", data, at)
    if family != 1:
        raise Malformed(NOTIMP)
    edns = 0
    if extras:
        if data[at + 4 : at + 7] != b"\0\0\x29" or at + 15 > len(data):
            raise Malformed(FORMERR)
        edns = max(512, struct.unpack_from("!H", data, at + 7)[0])
    return Question(ident, flags, _name(labels), kind, data[12 : at + 4], edns)


def _name(labels: Iterable[bytes]) -> str:
    """The normalised name of labels; empty if it is not one of a host."""
    try:
        if any(b"." in label for label in labels):
            return ""
        return normal_name(b".".join(labels).decode("ascii"))
    except ValueError:
        return ""


def answer(question: Question, rcode: int, *, blocked: bool = False, truncated: bool = False) -> bytes:
    """An answer without records."""
    flags = 0x8080 | (question.flags & 0x0110) | (0x0200 if truncated else 0) | rcode
    extra = b""
    if question.edns:
        option = struct.pack("!HHH", 15, 2, _BLOCKED) if blocked else b""
        extra = struct.pack("!BHHIH", 0, OPT, _EDNS_SIZE, 0, len(option)) + option
    return _HEADER.pack(question.ident, flags, 1, 0, 0, 1 if extra else 0) + question.wire + extra


def refusal(data: bytes, rcode: int) -> bytes:
    """The answer to a query that could not be read."""
    return _HEADER.pack(int.from_bytes(data[:2], "big"), 0x8080 | (data[2] & 0x79) << 8 | rcode, 0, 0, 0, 0)


def query(ident: int, name: str, kind: int) -> bytes:
    """A recursive query for an upstream resolver."""
    labels = b"".join(bytes((len(label),)) + label.encode() for label in name.split("."))
    extra = struct.pack("!BHHIH", 0, OPT, _EDNS_SIZE, 0, 0)
    return _HEADER.pack(ident, 0x0100, 1, 0, 0, 1) + labels + struct.pack("!BHH", 0, kind, 1) + extra


def matches(data: bytes, sent: bytes) -> bool:
    """Whether ``data`` is the answer to the query ``sent``: same number and same question."""
    end = len(sent) - 11
    return (
        len(data) >= end
        and data[:2] == sent[:2]
        and bool(data[2] & 0x80)
        and data[4:6] == b"\0\1"
        and data[12:end].lower() == sent[12:end].lower()
    )


def rcode_of(data: bytes) -> int:
    return data[3] & 15


def is_truncated(data: bytes) -> bool:
    return bool(data[2] & 2)


class Answer:
    """An upstream resolver's answer, reduced to the records that belong to what was asked."""

    def __init__(self, question: Question, data: bytes) -> None:
        """Raises ValueError for what cannot be read."""
        import dnslib

        counts = _HEADER.unpack_from(data)[2:]
        if sum(counts) > _MOST_RECORDS:
            raise ValueError("too many records")
        try:
            record = dnslib.DNSRecord.parse(data)
        except Exception as error:  # its reader raises what it likes
            raise ValueError(str(error)) from None
        self.question, self.rcode = question, rcode_of(data)
        self._chain, self._records = _chain(question, record.rr)
        self._soa = [row for row in record.auth if row.rtype == SOA][:1]

    @property
    def ttl(self) -> int:
        """Seconds that all of it holds."""
        return min((row.ttl for row in (*self._chain, *self._records)), default=0)

    def addresses(self) -> list[Address]:
        """Those it gives for the name, through its CNAMEs."""
        found = (parse_address(str(row.rdata)) for row in self._records if row.rtype in (A, AAAA))
        family = V4 if self.question.kind == A else V6
        return [address for address in found if address and address.family == family][:_MOST_ADDRESSES]

    def keep_addresses(self, good: Iterable[Address]) -> None:
        """Drop every address but these."""
        kept = set(good)
        self._records = [row for row in self._records if parse_address(str(row.rdata)) in kept]

    def strip_services(self, permitted: Callable[[str], bool]) -> None:
        """SVCB and HTTPS: no address hints, no encrypted ClientHello, no names that are not permitted (RFC 9460)."""
        rows = []
        for row in self._records:
            target = list(row.rdata.target)
            if target and not permitted(_name(map(bytes, target))):
                continue
            row.rdata.params = [(key, value) for key, value in row.rdata.params if key not in _HINTS]
            # "mandatory" may name what has just been taken out.
            if all(key != 0 for key, _ in row.rdata.params):
                rows.append(row)
        self._records = rows

    def pack(self, most: int | None) -> bytes:
        """The message for the sandbox, of at most ``most`` bytes or marked as truncated; TTLs as they are."""
        import dnslib

        rows = [*self._chain, *self._records]
        if not rows and not self._soa:
            return answer(self.question, self.rcode)
        flags = 0x8080 | (self.question.flags & 0x0110) | self.rcode
        record = dnslib.DNSRecord(dnslib.DNSHeader(id=self.question.ident, bitmap=flags))
        asked = dnslib.DNSRecord.parse(_HEADER.pack(0, 0, 1, 0, 0, 0) + self.question.wire).q
        record.add_question(asked)
        for row in rows:
            if row.rname == asked.qname:
                row.rname = asked.qname  # in the spelling that was asked (draft-vixie-dnsext-dns0x20)
            record.add_answer(row)
        for row in () if self._records else self._soa:
            record.add_auth(row)
        if self.question.edns:
            record.add_ar(dnslib.EDNS0(udp_len=_EDNS_SIZE))
        packed = bytes(record.pack())
        return answer(self.question, self.rcode, truncated=True) if most is not None and len(packed) > most else packed


def _chain(question: Question, rows: list[Any]) -> tuple[list[Any], list[Any]]:
    """(the CNAMEs that lead on from the name, in order; the records of the type asked at its end)."""
    at = question.name
    chain: list[Any] = []
    aliases = {_name(row.rname.label): row for row in reversed(rows) if row.rtype == CNAME}
    while at in aliases and len(chain) < 16:
        row = aliases.pop(at)
        chain.append(row)
        at = _name(row.rdata.label.label)
    return chain, [row for row in rows if row.rtype == question.kind and _name(row.rname.label) == at and at]
