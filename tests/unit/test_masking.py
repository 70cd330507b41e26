"""Secrets are masked however the stream is cut."""

import base64
import json
import time
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsbox.masking import Masker

SECRET = b'hunter2-\xc3\xbc/+? "x'


def stream(masker: Masker, data: bytes, sizes: list[int]) -> bytes:
    out, at = b"", 0
    for size in sizes:
        out += masker.feed(data[at : at + size])
        at += size
    return out + masker.feed(data[at:]) + masker.flush()


def test_S05_a_value_is_masked_by_name() -> None:
    masker = Masker({"TOKEN": b"abcdefgh", "OTHER": b"zzzzzz"})
    assert masker.mask(b"<abcdefgh>") == b"<***TOKEN***>"
    assert masker.seen == {"TOKEN"}


@pytest.mark.parametrize(
    "spelling",
    [
        SECRET,
        SECRET.hex().encode(),
        SECRET.hex().upper().encode(),
        base64.b64encode(SECRET),
        base64.urlsafe_b64encode(SECRET),
        base64.b64encode(b"user:" + SECRET),
        base64.b64encode(b"use:" + SECRET + b"\n"),
        base64.b64encode(b"user12:" + SECRET + b"!!"),
        quote(SECRET.decode()).encode(),
        quote(SECRET.decode(), safe="").encode(),
        json.dumps(SECRET.decode()).encode(),
    ],
)
def test_S05_usual_spellings(spelling: bytes) -> None:
    whole = b"before " + spelling + b" after"
    masker = Masker({"S": SECRET})
    for cut in range(len(whole)):
        out = stream(masker, whole, [cut])
        assert b"***S***" in out
        assert SECRET not in out
        assert spelling.strip(b'"') not in out
        assert out.startswith(b"before ")
        assert out.endswith(b" after")


def test_encodings_can_be_left_out() -> None:
    masker = Masker([b"abcdefgh"], encoded=False)
    assert masker.mask(b"abcdefgh " + b"abcdefgh".hex().encode()) == b"*** " + b"abcdefgh".hex().encode()


WORDS = st.sampled_from([b"abab", b"ababab", b"babac", b"cccc", b"ccccc"])
PIECES = st.lists(st.sampled_from([b"a", b"b", b"c", b"ab", b"abab", b"ababab", b"ccc", b"\n", b"x"]), max_size=40)


@given(secrets=st.lists(WORDS, min_size=1, max_size=3, unique=True), pieces=PIECES)
def test_S05_no_cut_changes_anything(secrets: list[bytes], pieces: list[bytes]) -> None:
    masker = Masker(secrets, encoded=False)
    whole = b"".join(pieces)
    out = b"".join(masker.feed(piece) for piece in pieces) + masker.flush()
    assert not any(secret in out for secret in secrets)
    if len(secrets) == 1:
        assert out == whole.replace(secrets[0], b"***")
    byte_wise = b"".join(masker.feed(bytes([byte])) for byte in whole) + masker.flush()
    assert byte_wise == masker.mask(whole) == out


@given(
    secret=st.binary(min_size=4, max_size=30),
    noise=st.binary(max_size=60),
    sizes=st.lists(st.integers(1, 9), max_size=30),
)
def test_S05_any_bytes(secret: bytes, noise: bytes, sizes: list[int]) -> None:
    masker = Masker({"": secret})
    if b"*" not in secret:
        assert secret not in stream(masker, noise + secret + noise, sizes)


def test_what_is_held_back_is_bounded() -> None:
    masker = Masker([b"x" * 100], encoded=False)
    given_out = len(masker.feed(b"x" * 99))
    assert given_out == 0
    assert len(masker.feed(b"y" * 1000)) == 1099
    total = sum(len(masker.feed(b"x" * 10)) for _ in range(100))
    assert masker.flush() in (b"", b"***")
    assert total == 3 * 10 or total == 3 * 9


def test_an_ordinary_line_is_not_held_back() -> None:
    masker = Masker([b"correct horse"])
    assert masker.feed(b"a line\n") == b"a line\n"


def test_short_values_are_named_and_left() -> None:
    masker = Masker({"PIN": b"12"})
    assert masker.too_short == ("PIN",)
    assert masker.feed(b"1234") == b"1234"


def test_no_secrets_cost_nothing() -> None:
    data = b"x" * 10
    assert Masker({}).feed(data) is data


def test_mask_text_keeps_what_is_not_utf8() -> None:
    assert Masker({"K": b"abcdefgh"}).mask_text("\udcff abcdefgh\n") == "\udcff ***K***\n"


def test_throughput() -> None:
    masker = Masker({"A": b"correct horse battery staple", "B": b"another one 123456"})
    chunk = bytes(range(256)) * 256
    began = time.perf_counter()
    for _ in range(64):
        masker.feed(chunk)
    # 4 MiB; 0.4 s on an idle machine.
    assert time.perf_counter() - began < 60
