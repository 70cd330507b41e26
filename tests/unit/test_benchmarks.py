"""The arithmetic and the words of benchmarks/start.py, without a sandbox."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import _common  # noqa: E402
import network  # noqa: E402
import start  # noqa: E402


class StubSandbox:
    """Takes no time and starts nothing."""

    def __init__(self) -> None:
        self.results: list[dict[str, float]] = []
        self.enforced = {"seccomp": "kernel"}

    def __call__(self) -> None:
        timing = {"setup_ms": 1.0, "run_ms": 0.5, "teardown_ms": 0.1, "total_ms": 1.6}
        self.results.append(start.account(timing, {"mount": 300.0, "pivot": 200.0}, 1650.0))


def test_percentile_interpolates() -> None:
    assert _common.percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert _common.percentile([1.0, 2.0], 1.0) == 2.0
    assert _common.percentile([7.0], 0.95) == 7.0


def test_interval_holds_the_ratio_and_narrows() -> None:
    baseline = [100.0 + i % 7 for i in range(200)]
    low, high = _common.ratio_interval([3 * value for value in baseline], baseline)
    assert low <= 3.0 <= high
    assert high - low < 0.1
    assert _common.ratio_interval(baseline, baseline) == (1.0, 1.0)


def test_every_round_calls_every_subject_once() -> None:
    calls: list[str] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: calls.append(name)

    samples = _common.measure({name: note(name) for name in "abc"}, runs=20, warmup=3)
    assert {name: len(values) for name, values in samples.items()} == {"a": 20, "b": 20, "c": 20}
    rounds = ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert len(rounds) == 23
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) > 1, "the order never changed"


def test_spawn_tells_failure() -> None:
    _common.spawn(["/bin/true"])
    with pytest.raises(RuntimeError, match="status 1"):
        _common.spawn(["/bin/false"])


def test_account_adds_up() -> None:
    timing = {"setup_ms": 2.0, "run_ms": 0.5, "teardown_ms": 0.25, "total_ms": 2.75}
    parts = start.account(timing, {"mount": 300.0, "pivot": 700.0}, 2800.0)
    assert parts["request"] == pytest.approx(1000.0)
    assert sum(parts.values()) == pytest.approx(2800.0)


def test_quiet_machine_has_no_warnings() -> None:
    calm = {"load_before": 0.0, "steal": 0.0, "baseline_spread": 1.2, "baseline_drift": 0.01}
    assert _common.quiet_warnings(calm) == []
    for name, value in (("load_before", 2.0), ("steal", 0.1), ("baseline_spread", 3.0), ("baseline_drift", -0.3)):
        assert len(_common.quiet_warnings({**calm, name: value})) == 1


def test_steps_are_those_of_the_helper() -> None:
    text = (BENCHMARKS.parent / "native" / "nsbox.h").read_text()
    for name in start.STEPS:
        assert f"NSB_STAGE_{name.upper()}" in text


def test_touched_memory_is_really_written() -> None:
    memory = _common.touched(2)
    assert len(memory) == 2 << 20
    assert memory[::4096] == b"\1" * 512


def test_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(start, "Sandbox", StubSandbox)
    monkeypatch.setattr(start, "peers", lambda: ({}, {"bwrap": "not installed"}))
    assert start.main(["--runs", "5", "--warmup", "1", "--json", str(tmp_path / "start.json")]) == 0
    shown = capsys.readouterr().out
    assert "not installed" in shown
    assert "pivot_root" in shown
    report = json.loads((tmp_path / "start.json").read_text())
    assert set(report["host"]) == {"kernel", "machine", "cpu", "cores", "virtual", "memory_mib", "python", "user"}
    assert report["results"]["posix_spawn"]["ratio"] == 1.0
    assert report["steps"]["request"]["p50_us"] == pytest.approx(500.0)
    assert list(report["steps"]) == ["request", "mount", "pivot", "run", "teardown", "around"]


def test_stored_results_have_the_shape_of_today() -> None:
    for path in (BENCHMARKS / "results").glob("start-*.json"):
        report = json.loads(path.read_text())
        assert report["benchmark"] == "start", path.name
        assert {"posix_spawn", "nsbox"} <= set(report["results"]), path.name
        assert path.stem.rsplit("-", 1)[1].split(".")[0] in ("root", "user")


def test_network_tables() -> None:
    figures = dict.fromkeys(network.METRICS, 10.0)
    start_row = {"p50_us": 4000.0, "p95_us": 9000.0, "ratio": 1.31, "ratio_low": 1.2, "ratio_high": 1.45}
    report = {
        "traffic": {"host": figures, "gateway": dict.fromkeys(figures, 5.0)},
        "start": {"none": start_row, "gateway": start_row},
    }
    lines = network.traffic_table(report).splitlines()
    assert len(lines) == 2 + len(network.METRICS)
    assert lines[2].split()[-4:] == ["10.0", "(1.00)", "5.0", "(0.50)"]
    assert network.start_table(report).splitlines()[-1].endswith("1.20 to 1.45")
    compile(network.CLIENT, "client", "exec")


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--starts", "1"], ["--mib", "x"]])
def test_network_options(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        network.main(words)


def test_network_results_are_of_this_program() -> None:
    found = list((BENCHMARKS / "results").glob("network-*.json"))
    assert found
    for path in found:
        report = json.loads(path.read_text())
        assert report["benchmark"] == "network"
        assert set(report["traffic"]["host"]) == set(network.METRICS)
        assert report["start"]["gateway"]["ratio_high"] <= 2
