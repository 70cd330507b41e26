"""The KPIs against a second count, made in another way, over thousands of generated events."""

import json
import random
import re
import shutil
import statistics
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsbox import boundary, metrics, metrics_html, metrics_text
from nsbox.boundary import Log
from nsbox.errors import HostError
from nsbox.record import Record

LIMITS = ("memory", "pids", "disk", "timeout", "output")


class Generated:
    """A log of many mixed runs, and what was put into it, noted on the way."""

    def __init__(self, seed: int, runs: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.runs = runs
        self.lifetimes: list[float] = []
        self.hits: dict[str, set[int]] = {}
        self.times: dict[str, int] = {}
        self.open: set[int] = set()
        self.sensitive: set[int] = set()
        self.delivered: list[int] = []
        self.found: list[int] = []
        self.denied: dict[str, int] = {}
        self.inside = self.past = self.refused = 0
        self.unfinished: set[int] = set()
        for number in range(runs):
            self.one(number)
        # Events of sandboxes that run at the same time lie between each other.
        self.random.shuffle(self.lines)

    def one(self, number: int) -> None:
        chance = self.random.random
        with Log(lambda event: self.lines.append(json.dumps(event))) as log:
            record = Record(log, f"box{number}")
            open_, sensitive = chance() < 0.1, [{"path": "/x", "why": "y"}] * (chance() < 0.05)
            found = ["A_TOKEN"] * self.random.choice([0, 0, 0, 1, 2])
            record.start(["job", str(number)], open_egress=open_, sensitive_mounts=sensitive, found=found)
            if chance() < 0.1:  # egress that is opened later counts as well
                wide = chance() < 0.5
                record.policy("allow", ["*" if wide else "a.example"], open_egress=wide)
                record.policy("deny", ["b.example"])
                open_ = open_ or wide
            self.open |= {number} if open_ else set()
            self.sensitive |= {number} if sensitive else set()
            self.found.append(len(found))
            self.delivered.append(self.random.choice([0, 0, 1, 3]))
            for _ in range(self.delivered[-1]):
                record.secret_delivered("K", "file")
            for name in self.random.sample(LIMITS, self.random.choice([0, 0, 0, 1, 2])):
                count = self.random.randint(1, 9)
                self.hits.setdefault(name, set()).add(number)
                self.times[name] = self.times.get(name, 0) + count
                record.limit(name, 1, count)
            if chance() < 0.3:
                host = f"host{self.random.randint(0, 5)}.example"
                self.denied[host] = self.denied.get(host, 0) + 2
                record.connect("192.0.2.1", 443, "tcp", "denied", host=host, connections=2)
            if chance() < 0.1:
                self.refused += 1
                record.refusal("guard", "no")
            if chance() < 0.95:
                self.lifetimes.append(round(self.random.expovariate(1), 6))
                record.end("exited", self.lifetimes[-1], exit_code=0)
            else:
                self.unfinished.add(number)
        self.count_executions(number)

    def count_executions(self, number: int) -> None:
        self.inside += 1
        self.past += self.random.choice([0, 0, 1])
        if number == self.runs - 1 or number % 7 == 0:
            snapshot = {"process": "1-1", "sandboxed": self.inside, "bare": self.past, "refused": 0}
            with Log(lambda event: self.lines.append(json.dumps(event))) as log:
                Record(log, "").coverage(snapshot)


@pytest.mark.parametrize("seed", range(3))
def test_against_an_independent_count(seed: int) -> None:
    made = Generated(seed, 1500)
    assert len(made.lines) > 4000
    third = len(made.lines) // 3
    found = metrics.kpis(made.lines[:third], (line.encode() + b"\n" for line in made.lines[third:]))
    assert found["runs"] == made.runs
    assert found["unfinished"] == len(made.unfinished)
    assert found["sandboxed_percent"] == pytest.approx(100 * made.inside / (made.inside + made.past), abs=0.001)
    lifetime = found["lifetime_seconds"]
    assert lifetime["max"] == max(made.lifetimes)
    # Ranks by another route: so many of the values are at most the percentile, and no smaller value has that many.
    for name, percent in (("p50", 50), ("p95", 95)):
        at_most = sum(value <= lifetime[name] for value in made.lifetimes)
        below = sum(value < lifetime[name] for value in made.lifetimes)
        assert below < percent / 100 * len(made.lifetimes) <= at_most
    assert lifetime["p50"] == statistics.median_low(made.lifetimes)
    assert set(found["limit_hits"]) == set(made.hits)
    for name, runs in made.hits.items():
        share = pytest.approx(len(runs) / made.runs, abs=1e-6)
        assert found["limit_hits"][name] == {"count": made.times[name], "runs": len(runs), "share": share}
    assert found["open_egress"] == len(made.open)
    assert found["sensitive_mounts"] == len(made.sensitive)
    assert found["secrets_present"] == {
        "delivered": sum(made.delivered),
        "found": sum(made.found),
        "runs_with_delivered": sum(count > 0 for count in made.delivered),
        "runs_with_found": sum(count > 0 for count in made.found),
        "in_outputs": 0,
    }
    assert {item["destination"]: item["denied"] for item in found["destinations"]} == made.denied
    assert [item["denied"] for item in found["destinations"]] == sorted(made.denied.values(), reverse=True)
    assert found["refusals"] == {"guard": made.refused}
    assert found["unreadable_lines"] == 0
    json.dumps(found)


def test_nothing() -> None:
    found = metrics.kpis([])
    assert found["runs"] == 0
    assert found["sandboxed_percent"] is None
    assert found["lifetime_seconds"]["p95"] is None
    assert "unknown" in metrics_text.text(found)
    assert "nothing in the logs" in metrics_html.page(metrics.collect([]))


@pytest.mark.parametrize(
    "values, percent, result",
    [([], 50, None), ([7], 95, 7), ([1, 2], 50, 1), ([1, 2, 3], 50, 2), (list(range(1, 101)), 95, 95), ([1, 2], 0, 1)],
)
def test_percentile(values: list[float], percent: float, result: float | None) -> None:
    assert metrics.percentile(values, percent) == result


def line(event: str, **fields: Any) -> str:
    return boundary.encode("box", event, fields)[1].decode()


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        "7",
        "null",
        '{"event": "sandbox.end"}',
        line("sandbox.end", reason="exited"),
        line("sandbox.end", reason="exited", lifetime_seconds=-1),
        line("sandbox.end", reason="exited", lifetime_seconds=1).replace(":1", ":NaN"),
        line("limit", limit="x", count="many"),
        line("limit", limit="x", count=1).replace('"count":1', '"count":Infinity'),
        line("connect", address="a", port="x", protocol="tcp", verdict="allowed"),
        line("input").replace('"schema":1', '"schema":2'),
        line("input").replace('"input"', '"strange"'),
        "[" * 100_000,
    ],
)
def test_lines_that_are_no_events_are_counted(bad: str) -> None:
    found = metrics.kpis([bad, "", line("sandbox.start", argv=["x"])])
    assert found["unreadable_lines"] == 1
    assert found["runs"] == 1
    assert found["limit_hits"] == {}
    assert found["destinations"] == []


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(
    (
        *("argv", "open_egress", "sensitive_mounts", "found", "lifetime_seconds", "max_lifetime_s", "reason", "limit"),
        *("count", "address", "host", "port", "protocol", "verdict", "connections", "tx_bytes", "secrets", "kind"),
        *("why", "process", "sandboxed", "bare", "refused"),
    )
)


@settings(max_examples=300)
@given(event=st.sampled_from(boundary.EVENTS), fields=st.dictionaries(KEYS, JUNK, max_size=8))
def test_no_line_stops_the_count(event: str, fields: dict[str, Any]) -> None:
    head = {"schema": 1, "ts": boundary.timestamp(), "sandbox": "x", "event": event}
    found = metrics.collect([json.dumps(head | fields)])
    metrics_text.text(metrics.compute(found))
    metrics_html.page(found)


def test_coverage_of_several_processes_and_their_children() -> None:
    counts = [("a", 3, 1), ("a", 5, 1), ("b", 1, 1), ("a", 4, 1)]
    lines = [line("coverage", process=name, sandboxed=inside, bare=past) for name, inside, past in counts]
    lines.append(line("coverage", process="c", sandboxed=9, bare=9, reported_by_parent=True))
    found = metrics.kpis(lines)
    assert found["executions"] == {"sandboxed": 6, "bare": 2, "refused": 0}
    assert found["sandboxed_percent"] == 75.0


def test_kept_too_long() -> None:
    lines = [line("sandbox.start", argv=["x"], max_lifetime_s=10), line("sandbox.end", reason="x", lifetime_seconds=12)]
    assert metrics.kpis(lines)["lifetime_seconds"]["overstayed"] == 1


def test_text_is_for_terminals() -> None:
    lines = [line("connect", address="\x1b[31m", port=1, protocol="tcp", verdict="denied")]
    text = metrics_text.text(metrics.kpis(lines))
    assert "\\x1b[31m:1/tcp" in text
    assert "\x1b" not in text


class Page(HTMLParser):
    """What a browser would load, and what it would show."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not {"src", "href", "onload", "srcset"} & {name for name, _ in attrs}
        if tag not in ("meta", "path", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_page_is_one_file_and_well_formed() -> None:
    made = Generated(7, 400)
    lines = [*made.lines, line("refusal", kind="guard", why="<script>alert(1)</script>&")]
    text = metrics_html.page(metrics.collect(lines))
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert "script" not in page.tags
    assert "<script>alert(1)</script>&" in page.words
    assert text.count("<svg") == 4
    assert not re.search(r"url\(|@import|https?:", text)
    assert "NaN" not in text


def test_page_draws_what_was_executed_in_any_order() -> None:
    stamps = [f"2026-01-01T0{hour}:00:00.000000Z" for hour in range(5)]
    events = [line("coverage", process="p", sandboxed=10 * n, bare=10 * (n // 3)) for n in range(5)]
    lines = [json.dumps(json.loads(event) | {"ts": ts}) for event, ts in zip(events, stamps, strict=True)]
    graphs = set()
    for order in (lines, lines[::-1]):
        found = metrics.collect(order)
        times = metrics_html._Times(found)
        graphs.add(tuple(times.sandboxed()))
        assert metrics.compute(found)["executions"] == {"sandboxed": 40, "bare": 10, "refused": 0}
    (graph,) = graphs
    assert [value for value in graph if value is not None] == [100.0, 100.0, 50.0, 100.0]


@pytest.mark.slow
def test_page_in_a_browser(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here: apt install chromium")
    (tmp_path / "page.html").write_text(metrics_html.page(metrics.collect(Generated(3, 300).lines)))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    page = f"file://{tmp_path}/page.html"
    shown = subprocess.run([*command, "--dump-dom", page], capture_output=True, text=True, timeout=120)
    assert shown.stdout.count("<svg") == 4
    assert "The slowest runs" in shown.stdout
    assert "Refused to" not in shown.stderr  # by the page's own policy
    subprocess.run([*command, f"--screenshot={tmp_path}/page.png", page], capture_output=True, timeout=120)
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_prometheus() -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    made = Generated(1, 300)
    text = metrics_text.prometheus(metrics.kpis(made.lines)).decode()
    samples = {(s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert samples["nsbox_runs",] == 300
    assert samples["nsbox_open_egress_runs",] == len(made.open)
    assert samples["nsbox_limit_hit_runs", "memory"] == len(made.hits["memory"])
    assert samples["nsbox_lifetime_seconds", "max"] == max(made.lifetimes)


def test_prometheus_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(HostError, match="pip install"):
        metrics_text.prometheus(metrics.kpis([]))
