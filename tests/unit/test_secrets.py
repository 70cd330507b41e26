"""Secrets before they reach a sandbox: what is taken, what is refused, and that no value is ever shown."""

import os
import signal
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from nsbox import secrets
from nsbox._native import lib
from nsbox.errors import SpecError
from nsbox.secrets import MAX_FDS, MAX_TOTAL, Lent, Secret, Values, filled, parse, resolve, revoke
from nsbox.spec import Spec

VALUE = b"correct-horse-battery"


@pytest.fixture
def folder(tmp_path: Path) -> int:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd  # type: ignore[misc]
    os.close(fd)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_pipe_ends_though_another_thread_forks_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []
    set_blocking = os.set_blocking

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        children.append(pid)

    thread = threading.Thread(target=fork)

    def meanwhile(fd: int, blocking: bool) -> None:
        thread.start()
        thread.join(0.3)
        set_blocking(fd, blocking)

    monkeypatch.setattr(os, "set_blocking", meanwhile)
    reader = secrets.filled(b"value")
    try:
        thread.join()
        set_blocking(reader, False)
        assert [os.read(reader, 100), os.read(reader, 100)] == [b"value", b""]
    finally:
        os.close(reader)
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


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
        (Secret("A", value=VALUE, deliver="argv"), "deliver is file, env or fd"),
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
    assert values.given().variables == {"B": "2"}
    assert values.given({"B"}).variables == {}
    assert values.given().without({"B"}).environment({"B": "mine", "C": "c"}) == {"B": "mine", "C": "c"}
    assert values.given().environment({"B": "mine", "C": "c"}) == {"C": "c"}
    assert values.given().packed() == b"B=2\0"
    assert values.by_name() == {"A": b"1", "B": b"2"}
    with pytest.raises(SpecError, match="NUL byte cannot be a variable"):
        resolve([Secret("B", value=b"a\0b", deliver="env")])


def test_as_descriptors() -> None:
    with pytest.raises(SpecError, match="secret_fd: all secrets are variables"):
        Spec(secrets="A=env:B", secret_env=True, secret_fd=True)
    assert Spec(secrets="A=env:B", secret_fd=True).secrets[0].deliver == "fd"
    with pytest.raises(SpecError, match="A_FD: that variable has the number"):
        Spec(secrets=[Secret("A", value=b"1", deliver="fd"), Secret("A_FD", value=b"2", deliver="env")])
    one, two = Secret("A", value=b"1", deliver="fd"), Secret("B", value=b"2", deliver="fd")
    values = resolve([one, Secret("F", value=b"file"), two])
    assert values.files
    assert not resolve([one]).files
    assert b"file" in values.packed()
    assert len(values.packed()) == 16 + len("Ffile"), "what is a descriptor is no file"
    given = values.given()
    assert given.numbers == {"A_FD": "3", "B_FD": "4"}
    assert given.pipes == ((one, b"1"), (two, b"2"))
    # A number stays what it is when the time of one before it is over.
    later = values.given({"A"})
    assert later.numbers == {"B_FD": "4"}
    assert later.pipes == ((one, b""), (two, b"2"))
    assert MAX_FDS == lib.NSB_MAX_GIVE


def test_a_pipe_that_is_emptied() -> None:
    reader = filled(VALUE)
    try:
        lent = Lent("A", reader)
        assert os.read(reader, 7) == VALUE[:7]
        assert lent.empty()
        assert os.read(reader, 99) == b""
        assert lent.empty()
        lent.close()
        lent.close()
        assert lent.empty()
    finally:
        os.close(reader)
    with pytest.raises(SpecError, match="more than a pipe takes"):
        filled(bytes(1 << 20))


def test_what_is_kept_for_the_next_launch_has_no_values() -> None:
    spec = Spec(secrets=[Secret("A", value=VALUE), Secret("B", call=lambda: VALUE), Secret("C", env="D")])
    assert hash(spec)
    kept = spec.without_values()
    assert [(item.name, item.value, item.call, item.env) for item in kept.secrets] == [
        *(("A", None, None, None), ("B", None, None, None), ("C", None, None, "D")),
    ]
    assert spec.secrets[0].value == VALUE
    other = Spec(secrets=[Secret("A", value=b"another"), Secret("B", call=bytes), Secret("C", env="D")])
    assert kept == other.without_values()
    assert hash(kept) == hash(other.without_values())
    assert kept != Spec(secrets="A=env:B").without_values()


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
