"""``nsbox stats`` over logs of many runs, real ones among them, against a count that shares no code with it."""

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import start_helper

import nsbox
from nsbox.boundary import Log
from nsbox.record import Record

NSBOX = [sys.executable, "-m", "nsbox"]
RUNS, REAL = 1500, 6
REASONS = ("exited", "signaled", "timeout", "memory", "error")
LIMITS = ("memory", "pids", "disk", "timeout", "output", "cpu")
HOSTS = [f"host{number}.example" for number in range(30)]


def cli(*words: str | Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*NSBOX, *map(str, words)], capture_output=True, stdin=subprocess.DEVNULL, timeout=120, check=False
    )


def one_run(chance: random.Random, record: Record, number: int) -> None:
    """The events of a run that might have been."""
    open_egress = chance.random() < 0.1
    record.start(
        ["job", str(number)],
        net="host" if open_egress else "filtered",
        open_egress=open_egress,
        sensitive_mounts=[{"path": "/x", "why": "y"}] * (chance.random() < 0.05),
        found=["API_TOKEN"] * chance.choice((0, 0, 0, 1, 2)),
        max_lifetime_s=30.0,
    )
    record.input("/data", "ro", "ro")
    for secret in range(chance.choice((0, 0, 1, 3))):
        record.secret_delivered(f"S{secret}", chance.choice(("file", "env")))
    for _ in range(chance.randrange(4)):
        host, verdict = chance.choice(HOSTS), chance.choice(("allowed", "denied"))
        record.dns_query(host, "A", verdict)
        record.connect("198.51.100.7", 443, "tcp", verdict, host=host, connections=chance.randrange(1, 4), tx_bytes=10)
    for limit in LIMITS:
        if chance.random() < 0.04:
            record.limit(limit, 1, chance.randrange(1, 9), 0.1)
    if chance.random() < 0.1:
        change = {
            "path": "leak",
            "change": "added",
            "kind": "file",
            "bytes": 1,
            "mode": "0644",
            "trusted_by_host": False,
        }
        record.output({**change, "secrets": ["S0"]})
    if chance.random() < 0.97:
        record.end(chance.choice(REASONS), chance.choice((chance.random(), chance.random() * 60)))


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory, helper_process: None) -> list[Path]:
    """Three logs: two of runs that might have been, one of real runs; the first with lines that are no event."""
    folder = tmp_path_factory.mktemp("logs")
    chance = random.Random(7)
    paths = [folder / "one", folder / "two", folder / "real"]
    made = [Log(path) for path in paths[:2]]
    for number in range(RUNS):
        log = chance.choice(made)
        one_run(chance, Record(log, f"{number:016x}"), number)
        if number % 10 == 0:
            executed = {"sandboxed": number, "bare": number // 9, "refused": number // 100}
            Record(log, "").coverage({"process": f"{number % 3}-1", "percent": 1.0, **executed})
        if chance.random() < 0.06:
            Record(log, "").refusal(chance.choice(("guard", "spec", "host")), "why not", "/home/x")
    for log in made:
        log.close()
    with paths[0].open("a") as file:
        file.write('not json\n[]\n{"event": 5}\n{"schema":1,"ts":"x","sandbox":"s","event":"nonsense"}\n{"cut": "of')
    for number in range(REAL):
        nsbox.run(["sleep", "5"] if number == 0 else ["true"], timeout=0.2 if number == 0 else 30, log=paths[2])
    start_helper()
    return paths


def counted(paths: list[Path]) -> dict[str, Any]:
    """The same numbers, counted by reading the lines one question at a time."""
    events = []
    for path in paths:
        for line in path.read_text().splitlines():
            if re.match(r'\{"schema":1,"ts":"\d{4}', line):
                events.append(json.loads(line))

    def of(name: str) -> list[dict[str, Any]]:
        return [event for event in events if event["event"] == name]

    starts, lifetimes = of("sandbox.start"), sorted(event["lifetime_seconds"] for event in of("sandbox.end"))
    highest: dict[str, dict[str, int]] = {}
    for event in of("coverage"):
        kept = highest.setdefault(event["process"], {"sandboxed": 0, "bare": 0})
        for name in kept:
            kept[name] = max(kept[name], event[name])
    inside, past = (sum(item[name] for item in highest.values()) for name in ("sandboxed", "bare"))
    hits = {}
    for limit in {event["limit"] for event in of("limit")}:
        mine = [event for event in of("limit") if event["limit"] == limit]
        runs = len({event["sandbox"] for event in mine})
        share = round(runs / len(starts), 6)
        hits[limit] = {"count": sum(event["count"] for event in mine), "runs": runs, "share": share}
    kinds = [event["kind"] for event in of("refusal")]
    return {
        "runs": len(starts),
        "unfinished": len(starts) - len(lifetimes),
        "sandboxed_percent": round(100 * inside / (inside + past), 3),
        # The smallest value that so many per cent of all do not exceed.
        "p50": next(v for v in lifetimes if sum(w <= v for w in lifetimes) >= 0.50 * len(lifetimes)),
        "p95": next(v for v in lifetimes if sum(w <= v for w in lifetimes) >= 0.95 * len(lifetimes)),
        "max": max(lifetimes),
        "overstayed": sum(value > 30 * 1.05 + 1 for value in lifetimes),
        "limit_hits": hits,
        "open_egress": sum(event["open_egress"] for event in starts),
        "sensitive_mounts": sum(bool(event["sensitive_mounts"]) for event in starts),
        "delivered": len(of("secret.deliver")),
        "found": sum(len(event["found"]) for event in starts),
        "in_outputs": sum(len(event.get("secrets", ())) for event in of("output")),
        "refusals": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "attempts": {
            host: sum(event["connections"] for event in of("connect") if event["host"] == host)
            for host in {event["host"] for event in of("connect")}
        },
    }


def test_the_numbers_are_those_of_an_independent_count(logs: list[Path]) -> None:
    told = json.loads(cli("stats", "--json", *logs).stdout)
    own = counted(logs)
    assert sum(len(path.read_text().splitlines()) for path in logs) > 4000
    assert told["runs"] == own["runs"] == RUNS + REAL
    assert told["unreadable_lines"] == 5
    for name in ("unfinished", "sandboxed_percent", "limit_hits", "open_egress", "sensitive_mounts", "refusals"):
        assert told[name] == own[name], name
    for name in ("p50", "p95", "max", "overstayed"):
        assert told["lifetime_seconds"][name] == own[name], name
    for name in ("delivered", "found", "in_outputs"):
        assert told["secrets_present"][name] == own[name], name
    top = told["destinations"]
    assert len(top) == 20
    assert [item["allowed"] + item["denied"] for item in top] == sorted(own["attempts"].values(), reverse=True)[:20]
    assert all(item["allowed"] + item["denied"] == own["attempts"][item["destination"]] for item in top)


def test_the_order_of_logs_does_not_matter(logs: list[Path]) -> None:
    assert cli("stats", *logs, "--json").stdout == cli("stats", "--json", *reversed(logs)).stdout


def test_text(logs: list[Path]) -> None:
    done = cli("stats", *logs)
    assert (done.returncode, done.stderr) == (0, b"")
    text, own = done.stdout.decode(), counted(logs)
    assert text.startswith(f"{RUNS + REAL} runs from ")
    for name in ("sandboxed_percent", "lifetime_seconds", "limit_hits", "open_egress", "secrets_present", "refusals"):
        assert re.search(rf"^{name}\b", text, re.MULTILINE), name
    assert f"{own['open_egress']} runs" in text


def test_real_runs_alone(logs: list[Path]) -> None:
    told = json.loads(cli("stats", "--json", logs[2]).stdout)
    assert (told["runs"], told["unfinished"], told["sandboxed_percent"]) == (REAL, 0, None)
    assert told["limit_hits"] == {"timeout": {"count": 1, "runs": 1, "share": round(1 / REAL, 6)}}
    assert 0.15 < told["lifetime_seconds"]["max"] < 10


def test_refused(logs: list[Path], tmp_path: Path) -> None:
    for words, said in (
        (["stats"], b"no file"),
        (["stats", "/no/such"], b"/no/such: No such file"),
        (["stats", "--json", "--prometheus", logs[0]], b"choose one"),
        (["stats", "--html", "/no/such/page", logs[0]], b"--html: '/no/such/page'"),
        (["stats", "--jsno", logs[0]], b"did you mean --json?"),
    ):
        done = cli(*words)
        assert (done.returncode, done.stdout) == (125, b"")
        assert said in done.stderr
        assert done.stderr.count(b"\n") == 1


def test_prometheus(logs: list[Path]) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed in this environment")
    text = cli("stats", "--prometheus", *logs).stdout.decode()
    assert f"nsbox_runs {RUNS + REAL}.0" in text
    assert f"nsbox_open_egress_runs {counted(logs)['open_egress']}.0" in text


def test_page(logs: list[Path], tmp_path: Path) -> None:
    done = cli("stats", "--html", tmp_path / "page.html", *logs)
    assert (done.returncode, done.stdout) == (0, b"")
    text = (tmp_path / "page.html").read_text()
    assert f"{RUNS + REAL} runs" in text
    assert not re.search(r"<script|url\(|@import|https?:|<link|<img", text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html"]


@pytest.mark.slow
@pytest.mark.leaves_traces  # a browser is no sandbox: what it leaves is its own
def test_page_in_a_browser(logs: list[Path], tmp_path: Path) -> None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    cli("stats", "--html", page, *logs)
    base = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    dom = subprocess.run([*base, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    for words in ("sandboxed", "lifetime, p95", "limits hit", "secrets present", "Refusals", "The slowest runs"):
        assert words in dom.stdout
    assert dom.stdout.count("<svg") == 4
    assert dom.stdout.count("<circle") >= 4
    shot = [*base, "--window-size=1100,1900", f"--screenshot={picture}", page.as_uri()]
    subprocess.run(shot, capture_output=True, timeout=120, check=False)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000  # something is drawn on it
