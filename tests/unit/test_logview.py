"""The log as people see it: whole, bounded, and never obeyed by a terminal."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsbox import boundary, logview
from nsbox.boundary import Log
from nsbox.errors import SpecError
from nsbox.record import Record


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    with Log(path) as log:
        one, two = Record(log, "aaaa1111bbbb"), Record(log, "cccc2222")
        one.start(["sh", "-c", "echo \x1b[31m"], sensitive_mounts=[{"path": "/k", "why": "w"}], found=["X_TOKEN"])
        two.start(["true"])
        one.input("/data", "rw", "rw")
        one.secret_delivered("KEY", "file", 30)
        one.connect("192.0.2.1", 443, "tcp", "denied", host="evil.example", connections=3, why="not allowed")
        change = {"path": "a\n", "change": "added", "bytes": 3, "trusted_by_host": True, "secrets": ["KEY"]}
        one.output(change, "held_back", "git runs it")
        one.limit("memory", 1024, 2)
        two.end("exited", 0.1, exit_code=0)
        one.end("signaled", 1.5, signal=9)
        one.refusal("guard", "keys", "/root/.ssh", "--allow-sensitive /root/.ssh")
        one.coverage({"process": "1", "sandboxed": 3, "bare": 1})
        one.policy("allow", ["*", "a\x1b"], open_egress=True)
    return path


def test_lines(log: Path) -> None:
    lines = [logview.plain(logview.parts(event)) for event in logview.events(str(log))]
    assert len(lines) == 12
    assert all(line.isprintable() for line in lines)
    assert "let through: /k" in lines[0]
    assert "credentials inside: X_TOKEN" in lines[0]
    assert "\\x1b[31m" in lines[0]
    assert "evil.example (192.0.2.1):443/tcp denied  3 times  not allowed" in lines[4]
    assert "a\\x0a  added, 3 bytes  the host would act upon it  contains KEY  held back: git runs it" in lines[5]
    assert "exited 0  after 0.100 s" in lines[7]
    assert "allow *, a\\x1b  open egress" in lines[11]


def test_one_run_as_a_story(log: Path) -> None:
    lines = list(logview.story(logview.events(str(log), sandbox="aaaa1111")))
    assert len(lines) == 10
    assert "A sandbox is made for sh -c" in lines[0]
    assert lines[0].strip().startswith("0.000 s")
    assert "It is gone: signaled by signal 9" in lines[6]
    assert list(logview.story(logview.events(str(log), sandbox="nobody"))) == []


def test_what_is_no_event(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"{\n\x1b[2Jrubbish\xff\n[]\n" + b'{"event": "limit"}\n{"event": "unfinis')
    lines = [logview.plain(logview.parts(event)) for event in logview.events(str(path))]
    assert len(lines) == 5
    assert all(line.isprintable() for line in lines)
    with pytest.raises(SpecError, match="No such file"):
        list(logview.events(str(tmp_path / "none")))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(
    (
        *("argv", "sensitive_mounts", "found", "path", "mode", "ttl_s", "answers", "port", "bytes", "ts", "count"),
        *("limit", "connections", "tx_bytes", "exit_code", "signal", "lifetime_seconds", "sandboxed", "bare", "why"),
    )
)


@settings(max_examples=1000)
@given(name=st.sampled_from(boundary.EVENTS), fields=st.dictionaries(KEYS, VALUES, max_size=8))
def test_nothing_in_an_event_stops_the_view(name: str, fields: dict[str, Any]) -> None:
    event = logview.parse(json.dumps({"event": name, "sandbox": "x", **fields}).encode())
    assert logview.plain(logview.parts(event)).isprintable()
    assert all(line.isprintable() for line in logview.story([event]))


def test_follow_sees_what_is_appended_and_a_new_file(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logview, "POLL_S", 0.01)
    done = threading.Event()
    seen: list[str] = []

    def read() -> None:
        for event in logview.events(str(log), sandbox="new", follow=True, stop=done.is_set):
            seen.append(event["limit"])
            if event["limit"] == "last":
                done.set()

    reader = threading.Thread(target=read)
    reader.start()
    with Log(log) as out:
        Record(out, "new1").limit("first")
        while not seen:
            done.wait(0.01)
        log.rename(log.with_suffix(".1"))
    with Log(log) as out:
        Record(out, "new2").limit("last")
    reader.join(timeout=10)
    assert seen == ["first", "last"]


def test_rich() -> None:
    pytest.importorskip("rich")
    assert logview.rich_text([("a", "bold"), ("b", "")]).plain == "ab"
