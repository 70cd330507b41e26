"""DNS messages: strict with questions, and answers reduced to what was asked."""

import socket
import struct
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsbox.plan.address import Address, parse_address
from nsbox.resources import dns_wire as wire
from nsbox.resources.dns_upstream import read_resolv_conf
from nsbox.resources.dns_wire import Answer, Malformed, Question, read_question

dnslib = pytest.importorskip("dnslib")


def ask(name: str, kind: int = wire.A, **header: int) -> bytes:
    record = dnslib.DNSRecord(dnslib.DNSHeader(id=7, **header), q=dnslib.DNSQuestion(name, kind))
    return bytes(record.pack())


def answered(question: Question, zone: str, rcode: int = 0) -> Answer:
    """What an upstream resolver says, from the lines of a zone file."""
    record = dnslib.DNSRecord.question(question.name or "x", wire.TYPES[question.kind]).reply()
    record.header.rcode = rcode
    record.add_answer(*dnslib.RR.fromZone(textwrap.dedent(zone)))
    return Answer(question, bytes(record.pack()))


def addresses(*texts: str) -> list[Address]:
    return [address for text in texts if (address := parse_address(text))]


def test_question_is_normalised_and_kept_as_asked() -> None:
    question = read_question(ask("WWW.Example.ORG", wire.AAAA))
    assert question[:4] == (7, 0x0100, "www.example.org", wire.AAAA)
    assert question.wire == b"\x03WWW\x07Example\x03ORG\0\0\x1c\0\x01"
    assert question.edns == 0


def test_edns() -> None:
    record = dnslib.DNSRecord.question("a.b")
    record.add_ar(dnslib.EDNS0(udp_len=4096))
    assert read_question(bytes(record.pack())).edns == 4096
    record.ar[0].rclass = 100
    assert read_question(bytes(record.pack())).edns == 512


@pytest.mark.parametrize("labels", [(b"a.b", b"c"), (b"a b",), (b"\xff",), (b"\0",), (), (b"a", b"1")])
def test_names_that_no_host_has(labels: tuple[bytes, ...]) -> None:
    data = struct.pack("!HHHHHH", 1, 0x100, 1, 0, 0, 0) + b"".join(bytes((len(x),)) + x for x in labels) + b"\0\0\1\0\1"
    assert read_question(data).name == ""


GOOD = ask("example.org")


@pytest.mark.parametrize(
    "data, rcode",
    [
        (b"", None),
        (GOOD[:11], None),
        (GOOD[:2] + b"\x81" + GOOD[3:], None),  # an answer
        (GOOD[:2] + b"\x29" + GOOD[3:], wire.NOTIMP),  # an update
        (GOOD[:-1] + b"\x03", wire.NOTIMP),  # class CHAOS
        (GOOD[:-1], wire.FORMERR),
        (GOOD[:4] + b"\0\2" + GOOD[6:], wire.FORMERR),
        (GOOD[:6] + b"\0\1" + GOOD[8:], wire.FORMERR),
        (GOOD[:12] + b"\xc0\x0c\0\1\0\1", wire.FORMERR),  # a pointer to itself
        (GOOD[:12] + b"\x40" + bytes(400), wire.FORMERR),
        (GOOD + bytes(600), wire.FORMERR),
    ],
)
def test_malformed_questions(data: bytes, rcode: int | None) -> None:
    with pytest.raises(Malformed) as caught:
        read_question(data)
    assert caught.value.rcode == rcode
    if rcode is not None:
        assert dnslib.DNSRecord.parse(wire.refusal(data, rcode)).header.rcode == rcode


@given(st.binary(max_size=600))
def test_no_query_breaks_the_reader(data: bytes) -> None:
    for query in (data, GOOD[:12] + data):
        try:
            read_question(query)
        except Malformed as problem:
            if problem.rcode is not None:
                wire.refusal(query, problem.rcode)


def test_refused_names_get_an_answer_that_every_library_takes() -> None:
    question = read_question(ask("evil.test"))
    record = dnslib.DNSRecord.parse(wire.answer(question, wire.NXDOMAIN, blocked=True))
    assert (record.header.rcode, record.header.id, str(record.q.qname)) == (3, 7, "evil.test.")
    record = dnslib.DNSRecord.parse(wire.answer(question._replace(edns=1232), wire.NXDOMAIN, blocked=True))
    assert (record.ar[0].rdata[0].code, record.ar[0].rdata[0].data) == (15, b"\0\x0f")


def test_only_the_chain_from_the_name_counts() -> None:
    zone = """
        other.test. 60 A 198.51.100.66
        cdn.test. 40 A 198.51.100.2
        cdn.test. 40 A 198.51.100.3
        www.test. 300 CNAME mid.test.
        mid.test. 50 CNAME cdn.test.
        www.test. 5 TXT no
    """
    found = answered(read_question(ask("WWW.test")), zone)
    assert found.addresses() == addresses("198.51.100.2", "198.51.100.3")
    assert found.ttl == 40
    found.keep_addresses(addresses("198.51.100.3"))
    record = dnslib.DNSRecord.parse(found.pack(512))
    assert [(str(row.rname), str(row.rdata)) for row in record.rr] == [
        ("WWW.test.", "mid.test."),
        ("mid.test.", "cdn.test."),
        ("cdn.test.", "198.51.100.3"),
    ]


def test_loop_of_aliases() -> None:
    found = answered(
        read_question(ask("a.test")), "a.test. 1 CNAME b.test.\nb.test. 1 CNAME a.test.\na.test. 1 A 1.2.3.4"
    )
    assert len(dnslib.DNSRecord.parse(found.pack(None)).rr) <= 4


def test_negative_answers_keep_their_soa() -> None:
    question = read_question(ask("no.test"))
    record = dnslib.DNSRecord.question("no.test").reply()
    record.header.rcode = 3
    record.add_auth(*dnslib.RR.fromZone("test. 60 SOA ns.test. host.test. 1 2 3 4 5"))
    packed = dnslib.DNSRecord.parse(Answer(question, bytes(record.pack())).pack(512))
    assert (packed.header.rcode, len(packed.auth)) == (3, 1)


def test_https_loses_hints_ech_and_foreign_targets() -> None:
    question = read_question(ask("www.test", wire.HTTPS))
    zone = """
        www.test. 60 HTTPS 1 . alpn=h2 ipv4hint=10.0.0.1 ipv6hint=::1 echconfig=Z2FyYmFnZQ==
        www.test. 60 HTTPS 2 foreign.test. alpn=h2
    """
    found = answered(question, zone)
    found.strip_services(lambda name: name == "www.test")
    rows = dnslib.DNSRecord.parse(found.pack(512)).rr
    assert [str(row.rdata) for row in rows] == ["1 . alpn=h2"]


def test_what_does_not_fit_is_marked_truncated() -> None:
    zone = "\n".join(f"big.test. 60 A 198.51.100.{number}" for number in range(1, 60))
    found = answered(read_question(ask("big.test")), zone)
    assert dnslib.DNSRecord.parse(found.pack(512)).header.tc == 1
    assert len(dnslib.DNSRecord.parse(found.pack(None)).rr) == 59
    assert len(found.addresses()) == 32, "bounded"


@given(st.binary(max_size=300))
def test_no_answer_breaks_the_reader(data: bytes) -> None:
    question = read_question(GOOD)
    reply = GOOD[:2] + b"\x81\x80" + GOOD[4:6] + b"\0\2\0\1\0\1" + GOOD[12:]
    for answer in (data, reply + data, reply + b"\xc0\x0c\0\1\0\1\0\0\0\1" + data):
        try:
            Answer(question, answer).pack(512)
        except (ValueError, struct.error):
            pass


def test_answers_belong_to_their_query() -> None:
    query = wire.query(0x1234, "example.org", wire.A)
    reply = bytes(dnslib.DNSRecord.parse(query).reply().pack())
    assert wire.matches(reply, query)
    assert wire.matches(reply.replace(b"example", b"EXAMPLE"), query)
    assert not wire.matches(b"\x12\x35" + reply[2:], query)
    assert not wire.matches(reply.replace(b"example", b"exbmple"), query)
    assert not wire.matches(query, query), "an answer has QR set"
    assert not wire.matches(b"", query)


def test_resolv_conf() -> None:
    text = "# x\nnameserver 192.0.2.1\nnameserver\t2001:db8::1\nsearch a\nnameserver 192.0.2.3\nnameserver 192.0.2.4\n"
    assert read_resolv_conf(text) == (("192.0.2.1", 53), ("2001:db8::1", 53), ("192.0.2.3", 53))
    assert read_resolv_conf("") == (("127.0.0.1", 53),)
    assert socket.inet_aton(read_resolv_conf("")[0][0])
