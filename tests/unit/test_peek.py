"""Whom the first bytes of a connection are for; the ClientHellos are the standard library's own."""

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsbox.resources.peek import LIMIT, MORE, OTHER, Peek, peek


def client_hello(name: str | None, alpn: tuple[str, ...] = ("h2", "http/1.1")) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(list(alpn))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


def what_openssl_sees(hello: bytes) -> str | None:
    """The server name that a TLS server takes from these bytes."""
    seen: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def note(_connection: object, name: str | None, _context: object) -> int:
        seen.append(name)
        return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME

    context.sni_callback = note
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    incoming.write(hello)
    with pytest.raises(ssl.SSLError):
        context.wrap_bio(incoming, outgoing, server_side=True).do_handshake()
    return seen[0] if seen else None


def in_records(hello: bytes, size: int) -> bytes:
    """The same handshake message in records of ``size`` bytes."""
    body = hello[5:]
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in parts)


def with_extension(hello: bytes, kind: int, value: bytes) -> bytes:
    """The same ClientHello with one more extension at its end."""
    body = bytearray(hello[9:])
    at = 34
    at += 1 + body[at]
    at += 2 + int.from_bytes(body[at : at + 2], "big")
    at += 1 + body[at]
    extra = kind.to_bytes(2, "big") + len(value).to_bytes(2, "big") + value
    body[at : at + 2] = (int.from_bytes(body[at : at + 2], "big") + len(extra)).to_bytes(2, "big")
    body += extra
    handshake = b"\x01" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\x01" + len(handshake).to_bytes(2, "big") + handshake


@pytest.mark.parametrize("name", ["pypi.org", "a.b.c.example.org", "xn--bcher-kva.example"])
def test_server_name_is_what_a_server_sees(name: str) -> None:
    hello = client_hello(name)
    assert peek(hello) == Peek("tls", name)
    assert what_openssl_sees(hello) == name


@pytest.mark.parametrize("size", [1, 5, 40, 16384])
def test_every_prefix_needs_more(size: int) -> None:
    hello = in_records(client_hello("pypi.org"), size)
    assert all(peek(hello[:end]) == MORE for end in range(len(hello)))
    assert peek(hello) == Peek("tls", "pypi.org")
    assert peek(hello + b"\x14\x03\x03\x00\x01\x01") == Peek("tls", "pypi.org")


@pytest.mark.parametrize("kind", [0xFE0D, 0xFFCE])
def test_encrypted_hello_is_flagged(kind: int) -> None:
    found = peek(with_extension(client_hello("cover.example"), kind, b"\0" * 32))
    assert found.kind == "tls"
    assert "encrypted" in found.problem


def test_no_or_two_names() -> None:
    assert peek(client_hello(None)).problem == "no server name in the ClientHello"
    twice = with_extension(client_hello("pypi.org"), 0, b"\0\x0c\0\0\x09evil.test")
    assert peek(twice).problem == "an extension twice in the ClientHello"


def test_hello_of_absurd_size() -> None:
    assert peek(b"\x16\x03\x01\x40\x00\x01\xff\xff\xff").problem == "oversized ClientHello"
    assert peek(b"\x16\x03\x01\x00\x04\x02\0\0\0").problem == "not a ClientHello"
    assert peek(b"\x16\x03\x01\x00\x00").problem == "malformed TLS record"


GET = b"GET / HTTP/1.1\r\n"


@pytest.mark.parametrize(
    "head, name",
    [
        (GET + b"Host: pypi.org\r\n\r\n", "pypi.org"),
        (GET + b"User-Agent: x\r\nhost:PyPI.org.:8080\r\n\r\nbody", "pypi.org"),
        (b"\r\n" + GET + b"Host: pypi.org\r\n\r\n", "pypi.org"),
        (GET.replace(b"\r", b"") + b"Host: pypi.org\n\n", "pypi.org"),
        (b"M-SEARCH * HTTP/1.1\r\nHost: a.b\r\n\r\n", "a.b"),
        (b"GET http://pypi.org/x HTTP/1.1\r\nHost: pypi.org\r\n\r\n", "pypi.org"),
        (b"CONNECT pypi.org:443 HTTP/1.1\r\nHost: pypi.org:443\r\n\r\n", "pypi.org"),
    ],
)
def test_host(head: bytes, name: str) -> None:
    assert peek(head) == Peek("http", name)
    end = head.index(b"\n\n" if b"\r" not in head else b"\r\n\r\n", 2)
    assert all(peek(head[:cut]) == MORE for cut in range(end))


@pytest.mark.parametrize(
    "head, problem",
    [
        (GET + b"X: y\r\n\r\n", "no Host header"),
        (GET + b"Host: a.b\r\nHost: c.d\r\n\r\n", "more than one Host header"),
        (GET + b"Host : a.b\r\n\r\n", "malformed header"),
        (GET + b"Host: a.b\r\n c.d\r\n\r\n", "malformed header"),
        (GET + b"Host: a@b\r\n\r\n", "malformed Host header or target"),
        (GET + b"Host: 127.0.0.1\r\n\r\n", "malformed Host header or target"),
        (b"GET http://evil.test/ HTTP/1.1\r\nHost: a.b\r\n\r\n", "the target and the Host header differ"),
        (b"GET http://a.b@evil.test/ HTTP/1.1\r\nHost: a.b\r\n\r\n", "malformed Host header or target"),
        (b"CONNECT evil.test:443 HTTP/1.1\r\nHost: a.b\r\n\r\n", "the target and the Host header differ"),
        (b"GET /\r\n", "a request without version names no host"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/2 without TLS hides the host"),
    ],
)
def test_unclear_hosts(head: bytes, problem: str) -> None:
    found = peek(head)
    assert (found.kind, found.problem) == ("http", problem)


@pytest.mark.parametrize(
    "data", [b"SSH-2.0-x y\r\n", b"\0\0\0\x08\x04\xd2\x16\x2f", b"*1\r\n$4\r\nPING", b"EHLO a\r\n", b"\x16\x01\x02"]
)
def test_other_protocols(data: bytes) -> None:
    assert peek(data) == OTHER


@given(st.binary(max_size=600))
def test_no_bytes_break_it(data: bytes) -> None:
    assert peek(data).kind in ("more", "tls", "http", "other")
    assert peek(b"\x16\x03\x01\x00\xff" + data).kind in ("more", "tls")
    assert peek(b"GET / HTTP/1.1\r\n" + data).kind in ("more", "http")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the name callback decodes
@given(st.integers(0, 600), st.binary(min_size=1, max_size=4))
def test_no_change_of_a_hello_breaks_it(at: int, new: bytes) -> None:
    hello = client_hello("pypi.org")
    changed = hello[:at] + new + hello[at + len(new) :]
    found = peek(changed[:LIMIT])
    seen = what_openssl_sees(changed) if len(changed) == len(hello) else None
    if found.name and seen:
        assert found.name == seen.lower().rstrip(".")
