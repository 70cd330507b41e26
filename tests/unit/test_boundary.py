"""The boundary log: every line whole, bounded, escaped, masked; no log, no run."""

import io
import json
import logging
import os
import re
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsbox import boundary
from nsbox.boundary import Log, LogError
from nsbox.errors import HostError, NsboxError
from nsbox.masking import Masker
from nsbox.record import Record

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "docs/boundary-log.schema.json").read_text())
SHA = "0" * 64


def everything(record: Record) -> None:
    """One of each event."""
    record.start(
        ["python3", "-c", "1"],
        net="filtered",
        allow=["pypi.org:443"],
        limits={"memory": 1 << 20},
        sensitive_mounts=[{"path": "/root/.ssh", "why": "keys"}],
        masked=[{"path": "/p/.env", "why": "secrets"}],
        found=["NPM_TOKEN"],
        profile="coding-agent",
        max_lifetime_s=30.0,
    )
    record.input("/data", "ro", "ro")
    record.secret_delivered("TOKEN", "file", 30)
    record.dns_query("pypi.org", "A", "allowed", ["198.51.100.1"])
    record.connect("198.51.100.1", 443, "tcp", "allowed", host="pypi.org", tx_bytes=1, rx_bytes=2)
    record.limit("memory", 1 << 20, 2, 0.5)
    change = {"path": "a", "change": "added", "kind": "file", "bytes": 1, "sha256": SHA, "mode": "0644"}
    record.output({**change, "trusted_by_host": False}, "exported")
    record.secret_revoked("TOKEN", "end")
    record.command(["make"], "exited", 0.5, exit_code=0)
    record.policy("allow", ["*:443"], open_egress=False)
    record.end("exited", 1.25, exit_code=0, usage={"cpu_user_s": 0.1}, timing={"total_ms": 3.0})
    record.refusal("guard", "keys", "/root/.ssh", "--allow-sensitive /root/.ssh")
    record.coverage({"process": "1-2", "sandboxed": 1, "bare": 0, "percent": 100.0})


def check(document: Any, schema: dict[str, Any], where: str = "") -> None:
    """The part of JSON Schema that ours uses."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
    if "type" in schema:
        wanted = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        assert any(isinstance(document, kinds[kind]) for kind in wanted), where
    if "const" in schema:
        assert document == schema["const"], where
    if "enum" in schema:
        assert document in schema["enum"], where
    if "pattern" in schema:
        assert re.search(schema["pattern"], document), where
    for name in schema.get("required", ()):
        assert name in document, f"{where} lacks {name}"
    if isinstance(document, dict):
        for name, inner in schema.get("properties", {}).items():
            if name in document:
                check(document[name], inner, f"{where}.{name}")
    if isinstance(document, list) and "items" in schema:
        for item in document:
            check(item, schema["items"], f"{where}[]")
    for rule in schema.get("allOf", ()):
        if document.get("event") == rule["if"]["properties"]["event"]["const"]:
            check(document, rule["then"], document["event"])
            known = {
                *SCHEMA["properties"],
                *rule["then"]["properties"],
                "target",
                "linked_to",
                "sparse",
                "xattrs",
                "note",
            }
            assert set(document) <= known, set(document) - known


def test_every_event_is_as_the_schema_says(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Log(path) as log:
        everything(Record(log, "f00"))
    lines = path.read_bytes().splitlines()
    for line in lines:
        check(json.loads(line), SCHEMA)
    found = {json.loads(line)["event"] for line in lines}
    assert found == set(boundary.EVENTS) == set(SCHEMA["properties"]["event"]["enum"])
    assert path.stat().st_mode & 0o777 == 0o600


def test_unknown_events_are_a_mistake(tmp_path: Path) -> None:
    with Log(tmp_path / "log") as log, pytest.raises(ValueError, match="no event"):
        log.emit("a", "surprise", {})


AWKWARD = st.sampled_from("\x00\x1b\x7f\x9b\u202e\udcff\ud800")
TEXT = st.text(alphabet=st.characters(max_codepoint=0x2FFF) | AWKWARD, max_size=50)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=20,
)


@given(fields=st.dictionaries(TEXT, VALUES, max_size=6))
def test_F14_a_line_is_a_line(fields: dict[str, Any]) -> None:
    _, line = boundary.encode("id", "output", fields)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert all(0x20 <= byte < 0x7F for byte in line[:-1])
    document = json.loads(line)
    assert document["event"] == "output"
    json.dumps(document, ensure_ascii=False).encode()  # no half surrogate pairs: every parser can read it


@settings(max_examples=30)
@given(width=st.integers(1, 40_000), items=st.integers(0, 3000), depth=st.integers(0, 3))
def test_lines_are_bounded(width: int, items: int, depth: int) -> None:
    value: Any = ["\x1b" * width] * items
    for _ in range(depth):
        value = {"in": value, "and": ["x" * width] * 20}
    document, line = boundary.encode("id", "output", {"path": "p", "value": value})
    assert len(line) <= boundary.MAX_LINE
    if len(line) > 1000 and (width > 4096 or items > 512):
        assert document["truncated"]


def test_many_fields_are_bounded() -> None:
    fields = {f"name{number}": "x" * 100 for number in range(100_000)}
    document, line = boundary.encode("id", "output", fields)
    assert len(line) <= boundary.MAX_LINE
    assert document["truncated"] == ["*"]


def test_F14_names_that_are_not_utf8() -> None:
    document, _ = boundary.encode("id", "output", {"path": os.fsdecode(b"a\xff\n")})
    assert document["path"] == "a\\xff\n"
    assert document["path_base64"] == "Yf8K"


def test_S05_values_of_secrets_are_masked_wherever_they_are(tmp_path: Path) -> None:
    secret = b"hunter2-hunter2"
    path = tmp_path / "log"
    with Log(path) as log:
        record = Record(log, "id", Masker({"PW": secret}))
        record.start(["login", "--password=hunter2-hunter2"])
        change = {"path": "dir/hunter2-hunter2\udcff", "change": "added", "bytes": 0, "xattrs": ["hunter2-hunter2"]}
        record.output(change)
        record.event("limit", limit="x", deep={"a": [{"b": "hunter2-hunter2"}]}, raw=secret)
    text = path.read_bytes()
    assert secret not in text
    assert b"aHVudGVyMi1odW50ZXIy" not in text
    assert text.count(b"***PW***") == 5


def test_an_error_says_what_crossed_all_the_same() -> None:
    error = LogError("'log'", "No space left on device", errno=28)
    plain = str(error)
    assert str(error.after("applied", [])) == plain
    assert error.crossed == {}
    error.after("exported", ["a"]).after("applied", ["b\x1b[2J", "c"]).after("applied", [*"cdefgh"])
    assert str(error) == (
        f"{plain}; by then 1 change was exported: 'a'; by then 7 changes were applied:"
        r" 'b\x1b[2J', 'c', 'd', 'e', 'f', ..."
    )
    assert error.crossed == {"exported": ("a",), "applied": ("b\x1b[2J", *"cdefgh")}
    assert error.errno == 28


def test_timestamps() -> None:
    assert boundary.timestamp(1_700_000_000_123_456_789) == "2023-11-14T22:13:20.123456Z"


def test_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "log"

    def write(name: str) -> None:
        with Log(path) as log:
            for number in range(200):
                log.emit(name, "limit", {"limit": "x" * number * 10, "count": number})

    threads = [threading.Thread(target=write, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert len(found) == 800
    for name in "0123":
        assert [event["count"] for event in found if event["sandbox"] == name] == list(range(200))


# ---- no log, no run --------------------------------------------------------------------------------------------------


def test_S07_what_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "open").write_text("")
    (tmp_path / "open").chmod(0o666)
    for target in ("missing/log", "link", "fifo", ".", "open"):
        with pytest.raises(LogError, match="cannot be written") as caught:
            Log(tmp_path / target)
        assert isinstance(caught.value, NsboxError)
        assert isinstance(caught.value, OSError)
    for wrong in (object(), 999_999, True):
        with pytest.raises(LogError):
            Log(wrong)


def test_S07_a_full_disk_is_an_error() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        record = Record(Log(full.fileno()), "id")
        with pytest.raises(LogError, match="No space") as caught:
            record.limit("memory")
    assert caught.value.errno == 28


def test_S07_a_callable_that_fails_is_an_error() -> None:
    def fails(event: dict[str, Any]) -> None:
        raise RuntimeError("no")

    with Log(fails) as log, pytest.raises(LogError, match="RuntimeError: no"):
        Record(log, "id").limit("memory")


def test_S07_a_log_inside_of_a_writable_mount_is_told(tmp_path: Path) -> None:
    top = str(tmp_path.resolve())
    assert boundary.exposed_by(f"{top}/sub/log", [f"{top}/other", f"{top}/sub"]) == f"{top}/sub"
    assert boundary.exposed_by(f"{top}/subway/log", [f"{top}/sub"]) is None


def test_rotation(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Log(path) as log:
        record = Record(log, "id")
        record.start(["a"])
        path.rename(tmp_path / "log.1")
        record.end("exited", 0.1)
        record.start(["b"])
        path.unlink()
        record.start(["c"])
    assert len((tmp_path / "log.1").read_bytes().splitlines()) == 2
    assert json.loads(path.read_bytes())["argv"] == ["c"]


# ---- other sinks -----------------------------------------------------------------------------------------------------


def test_callable_and_logger() -> None:
    events: list[dict[str, Any]] = []
    stream = io.StringIO()
    logger = logging.Logger("test")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    with Log(events.append, logger) as log:
        Record(log, "id").connect("192.0.2.1", 80, "tcp", "denied")
        Record(log, "id").input("%s%n", "ro", "ro")
    assert [event["event"] for event in events] == ["connect", "input"]
    first, second = stream.getvalue().splitlines()
    assert first.startswith("WARNING {")
    assert json.loads(second.removeprefix("INFO "))["path"] == "%s%n"


class Span:
    def __init__(self, name: str, attributes: dict[str, Any]) -> None:
        self.name, self.attributes, self.events, self.ended = name, attributes, list[str](), False

    def add_event(self, name: str, attributes: dict[str, Any]) -> None:
        assert all(isinstance(value, str | int | float | bool) for value in attributes.values())
        self.events.append(name)

    def end(self) -> None:
        self.ended = True


class Tracer:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def start_span(self, name: str, attributes: dict[str, Any]) -> Span:
        self.spans.append(Span(name, attributes))
        return self.spans[-1]


def test_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = Tracer()
    trace = types.SimpleNamespace(get_tracer=lambda name: tracer)
    monkeypatch.setitem(sys.modules, "opentelemetry", types.SimpleNamespace(trace=trace))
    with Log("otel") as log:
        everything(Record(log, "one"))
        Record(log, "two").start(["x"])
    assert [span.name for span in tracer.spans] == ["nsbox.sandbox", "refusal", "coverage", "nsbox.sandbox"]
    assert tracer.spans[0].events[0] == "input"
    assert tracer.spans[0].events[-1] == "sandbox.end"
    assert all(span.ended for span in tracer.spans)


def test_opentelemetry_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises((HostError, LogError), match="not installed"):
        Log("otel")


@pytest.mark.parametrize(
    "net, allow, open_",
    [
        ("none", ["*"], False),
        ("host", [], True),
        ("filtered", ["pypi.org"], False),
        ("filtered", ["a", "0.0.0.0/0"], True),
        ("filtered", ["*/udp"], True),
        ("filtered", ["*.org"], False),
    ],
)
def test_open_egress(net: str, allow: list[str], open_: bool) -> None:
    assert boundary.open_egress(net, allow) == open_
