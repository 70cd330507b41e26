"""Secrets before they reach a sandbox: what is taken, what is refused, and that no value is ever shown."""

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from nsbox import secrets
from nsbox.errors import SpecError
from nsbox.secrets import MAX_TOTAL, Secret, Values, parse, resolve, revoke
from nsbox.spec import Spec

VALUE = b"correct-horse-battery"


@pytest.fixture
def folder(tmp_path: Path) -> int:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd  # type: ignore[misc]
    os.close(fd)


def test_what_the_command_line_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", VALUE.decode())
    (tmp_path / "key").write_bytes(VALUE + b"\n")
    assert parse("API=env:TOKEN").read() == VALUE
    assert parse(f"API=file:{tmp_path}/key").read() == VALUE + b"\n"
    assert parse("API=stdin") == Secret("API", file="/dev/stdin")


def test_every_source() -> None:
    assert parse(Secret("A", value=VALUE)).read() == VALUE
    assert parse({"name": "A", "value": VALUE.decode()}).read() == VALUE
    assert parse(Secret("A", call=lambda: VALUE.decode())).read() == VALUE
    assert parse(Secret("A", call=lambda: bytearray(VALUE))).read() == VALUE  # type: ignore[arg-type,return-value]
    assert parse(Secret("A", value=b"x", ttl="2m")).ttl == 120.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("TOKEN", "never the value itself"),
        (f"TOKEN={VALUE.decode()}", "never the value itself"),
        ("TOKEN=env:", "never the value itself"),
        ("../x=env:A", "cannot be a file's name"),
        ("=env:A", "cannot be a file's name"),
        (".hidden=env:A", "cannot be a file's name"),
        ("a/b=env:A", "cannot be a file's name"),
        (7, "not a int"),
        (Secret("A"), "exactly one of value, env, file and call"),
        (Secret("A", value=VALUE, env="B"), "exactly one of"),
        (Secret("A", value=VALUE, deliver="argv"), "deliver is file or env"),
        (Secret("A", value=VALUE, mode=0o444), "rights to the owner alone"),
        (Secret("A", value=VALUE, ttl=-1), "ttl"),
    ],
)
def test_refused_without_showing_the_value(item: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        parse(item)
    assert VALUE.decode() not in str(caught.value)


def test_what_cannot_be_read_is_named() -> None:
    with pytest.raises(SpecError, match="secret A: the variable 'NO_SUCH_VARIABLE' is not set"):
        parse("A=env:NO_SUCH_VARIABLE").read()
    with pytest.raises(SpecError, match="secret A: '/no/such': No such file"):
        parse("A=file:/no/such").read()


def test_a_value_shows_nowhere() -> None:
    secret = Secret("A", value=VALUE)
    spec = Spec(secrets=[secret])
    for text in (repr(secret), str(secret), f"{secret}", repr([secret]), repr(spec)):
        assert VALUE.decode() not in text
    with pytest.raises(SpecError, match="holds its value, which is not written out"):
        spec.to_dict()
    assert Spec.from_dict(Spec(secrets="A=env:B").to_dict()) == Spec(secrets="A=env:B")
    assert "secrets" in Spec(secrets="A=env:B").to_toml()


def test_two_of_one_name() -> None:
    with pytest.raises(SpecError, match="same name"):
        Spec(secrets=["A=env:B", "A=env:C"])


def test_as_variables_only_when_asked() -> None:
    assert Spec(secrets="A=env:B").secrets[0].deliver == "file"
    assert Spec(secrets="A=env:B", secret_env=True).secrets[0].deliver == "env"
    values = resolve([Secret("A", value=b"1"), Secret("B", value=b"2", deliver="env")])
    assert values.environment() == {"B": "2"}
    assert values.by_name() == {"A": b"1", "B": b"2"}
    with pytest.raises(SpecError, match="NUL byte cannot be a variable"):
        resolve([Secret("B", value=b"a\0b", deliver="env")])


def test_packed() -> None:
    data = resolve([Secret("A", value=VALUE), Secret("LONG", value=b"", mode=0o600)]).packed()
    head = struct.Struct("=IIII")
    assert head.unpack_from(data) == (1, len(VALUE), 0o400, 0)
    assert data[16:17] + data[17 : 17 + len(VALUE)] == b"A" + VALUE
    assert head.unpack_from(data, 17 + len(VALUE)) == (4, 0, 0o600, 0)


def test_more_than_a_pipe_takes() -> None:
    with pytest.raises(SpecError, match="more than 60000; mount a file"):
        resolve([Secret("A", value=bytes(MAX_TOTAL))]).packed()


def test_a_file_is_read_no_further_than_needed(tmp_path: Path) -> None:
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(SpecError, match="more than 60000"):
        resolve([parse(f"A=file:{big}")]).packed()


def test_revoke_empties_what_is_held_open(folder: int, tmp_path: Path) -> None:
    (tmp_path / "A").write_bytes(VALUE)
    os.chmod(tmp_path / "A", 0o400)
    with (tmp_path / "A").open("rb") as held:
        assert revoke(folder, "A")
        assert held.read() == b""
    assert not os.listdir(tmp_path)
    assert not revoke(folder, "A")


def test_revoke_follows_no_link(folder: int, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(VALUE)
    (tmp_path / "A").symlink_to("target")
    assert not revoke(folder, "A")
    assert target.read_bytes() == VALUE


def test_described_by_name_alone() -> None:
    values = Values((Secret("A", value=VALUE), Secret("B", value=VALUE, deliver="env")), (VALUE, b"123"))
    told = secrets.describe(values, {"A": 5.0})
    assert told == [
        {"name": "A", "delivered_as": "file", "revoked_at": 5.0, "masked": True},
        {"name": "B", "delivered_as": "env", "revoked_at": None, "masked": False},
    ]
    assert VALUE.decode() not in repr(told) + repr(values)
