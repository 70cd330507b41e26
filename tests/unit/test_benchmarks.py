"""The arithmetic, the words and the plots of nsbox.bench and of benchmarks/, without a sandbox."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from nsbox.bench import (
    NAMES,
    frame,
    host,
    layers,
    memory,
    outline,
    peers,
    pools,
    program,
    runtime,
    start,
    svg,
    throughput,
)
from nsbox.bench.measure import (
    difference_interval,
    measure,
    median,
    median_interval,
    percentile,
    ratio_interval,
    spawn,
    touched,
)

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import neighbours  # noqa: E402
import network  # noqa: E402
import tables  # noqa: E402

PROGRAMS = sorted(path for path in BENCHMARKS.glob("*.py") if path.name != "tables.py")
EVERY = [
    module.BENCHMARK for module in (layers, start, runtime, throughput, memory, program, pools, network, neighbours)
]


class StubSandbox:
    """Takes no time and starts nothing."""

    def __init__(self) -> None:
        self.results: list[dict[str, float]] = []
        self.enforced = {"seccomp": "kernel"}

    def __call__(self) -> None:
        timing = {"setup_ms": 1.0, "run_ms": 0.5, "teardown_ms": 0.1, "total_ms": 1.6}
        self.results.append(start.account(timing, {"mount": 300.0, "pivot": 200.0}, 1650.0))


class NoPeers(peers.Peers):
    """A host on which nothing is installed."""

    def __init__(self) -> None:
        super().__init__(())
        self.skipped["bwrap"] = "not installed"


# ---- statistics -----------------------------------------------------------------------------------------------------


def test_percentile_interpolates() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0, 2.0], 1.0) == 2.0
    assert percentile([7.0], 0.95) == 7.0


def test_interval_holds_the_ratio_and_narrows() -> None:
    baseline = [100.0 + i % 7 for i in range(200)]
    low, high = ratio_interval([3 * value for value in baseline], baseline)
    assert low <= 3.0 <= high
    assert high - low < 0.1
    assert ratio_interval(baseline, baseline) == (1.0, 1.0)


def test_intervals_of_a_median_and_of_a_difference() -> None:
    few, many = [10.0, 20.0, 30.0, 40.0], [10.0, 20.0, 30.0, 40.0] * 50
    assert median_interval(few)[0] < median(few) < median_interval(few)[1]
    assert median_interval(many)[1] - median_interval(many)[0] < median_interval(few)[1] - median_interval(few)[0]
    low, high = difference_interval([value + 5 for value in many], many)
    assert (low, high) == (5.0, 5.0)


def test_every_round_calls_every_subject_once() -> None:
    calls: list[str] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: calls.append(name)

    samples = measure({name: note(name) for name in "abc"}, runs=20, warmup=3)
    assert {name: len(values) for name, values in samples.items()} == {"a": 20, "b": 20, "c": 20}
    rounds = ["".join(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert len(rounds) == 23
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) > 1, "the order never changed"


def test_spawn_tells_failure(capfd: pytest.CaptureFixture[str]) -> None:
    spawn(["/bin/true"])
    with pytest.raises(RuntimeError, match="status 1"):
        spawn(["/bin/false"])
    spawn(["/bin/echo", "heard"])
    spawn(["/bin/echo", "not heard"], silent=True)
    assert capfd.readouterr().out == "heard\n"


def test_quiet_machine_has_no_warnings() -> None:
    calm = {"load_before": 0.0, "steal": 0.0, "baseline_spread": 1.2, "baseline_drift": 0.01}
    assert host.quiet_warnings(calm) == []
    for name, value in (("load_before", 2.0), ("steal", 0.1), ("baseline_spread", 3.0), ("baseline_drift", -0.3)):
        assert len(host.quiet_warnings({**calm, name: value})) == 1


def test_touched_memory_is_really_written() -> None:
    memory = touched(2)
    assert len(memory) == 2 << 20
    assert memory[::4096] == b"\1" * 512


# ---- the frame ------------------------------------------------------------------------------------------------------


def report_of(benchmark: frame.Benchmark, facts: dict[str, Any]) -> dict[str, Any]:
    quiet = {"load_before": 0.0, "warnings": []}
    return {"host": host.host_facts(), "options": frame.values(benchmark), "quiet": quiet, **facts}


@pytest.mark.parametrize("benchmark", EVERY, ids=lambda benchmark: benchmark.name)
def test_settings_are_within_their_bounds(benchmark: frame.Benchmark) -> None:
    names = [setting.name for setting in benchmark.settings]
    assert len(set(names)) == len(names)
    for setting in benchmark.settings:
        assert setting.default >= setting.quick >= setting.least
        assert type(setting.default) is type(setting.quick)


@pytest.mark.parametrize("benchmark", EVERY, ids=lambda benchmark: benchmark.name)
@pytest.mark.parametrize("word", ["--no-such", "-1"])
def test_a_program_refuses_what_makes_no_sense(benchmark: frame.Benchmark, word: str) -> None:
    first = f"--{benchmark.settings[0].name.replace('_', '-')}"
    with pytest.raises(SystemExit):
        frame.main(benchmark, [word] if word == "--no-such" else [f"{first}={word}"])


def test_every_program_tells_its_options() -> None:
    for path in PROGRAMS:
        environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent), "PYTHONDONTWRITEBYTECODE": "1"}
        shown = subprocess.run([sys.executable, path, "--help"], env=environment, capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr
        assert "--results" in shown.stdout


def test_all_runs_every_program() -> None:
    text = (BENCHMARKS / "all.sh").read_text()
    named = next(line for line in text.splitlines() if line.startswith("for name in")).removesuffix("; do").split()[3:]
    assert sorted(named) == sorted(path.stem for path in PROGRAMS)
    assert set(NAMES) <= set(named)
    assert os.access(BENCHMARKS / "all.sh", os.X_OK)


def test_report_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(start, "Sandbox", StubSandbox)
    monkeypatch.setattr(start, "Peers", NoPeers)
    words = ["--runs", "5", "--warmup", "1", "--json", str(tmp_path / "start.json"), "--results", str(tmp_path / "r")]
    assert frame.main(start.BENCHMARK, words) == 0
    shown = capsys.readouterr().out
    assert "not installed" in shown
    assert "pivot_root" in shown
    report = json.loads((tmp_path / "start.json").read_text())
    assert set(report["host"]) == {"kernel", "machine", "cpu", "cores", "virtual", "memory_mib", "python", "user"}
    assert report["results"]["posix_spawn"]["ratio"] == 1.0
    assert report["steps"]["request"]["p50_us"] == pytest.approx(500.0)
    assert list(report["steps"]) == ["request", "mount", "pivot", "run", "teardown", "around"]
    end = frame.result_name(report)
    stored = {path.name for path in (tmp_path / "r").iterdir()}
    assert stored == {f"start{end}.json", f"start-waterfall{end}.svg", f"start-peers{end}.svg"}


# ---- the benchmarks -------------------------------------------------------------------------------------------------


def test_account_adds_up() -> None:
    timing = {"setup_ms": 2.0, "run_ms": 0.5, "teardown_ms": 0.25, "total_ms": 2.75}
    parts = start.account(timing, {"mount": 300.0, "pivot": 700.0}, 2800.0)
    assert parts["request"] == pytest.approx(1000.0)
    assert sum(parts.values()) == pytest.approx(2800.0)


def test_steps_are_those_of_the_helper() -> None:
    text = (BENCHMARKS.parent / "native" / "nsbox.h").read_text()
    for name in start.STEPS:
        assert f"NSB_STAGE_{name.upper()}" in text


def test_a_stage_without_words_is_told_all_the_same() -> None:
    found = start.steps_summary([{"request": 1.0, "novelty": 2.0, "exec": 3.0}])
    assert list(found) == ["request", "exec", "novelty"]


def test_rows_of_layers_add_to_the_right_row() -> None:
    bare = ["posix_spawn", "clone, exec", "+ mount namespace", "+ net namespace"]
    real = ["+ init", "+ cgroup", "+ Result (nsbox.run)", "+ gateway, nft rules", "+ veth pair, nft rules"]
    before = layers.chain(bare, real)
    assert "posix_spawn" not in before
    assert before["+ net namespace"] == "+ mount namespace"
    assert before["+ init"] == "+ mount namespace"
    assert before["+ gateway, nft rules"] == before["+ veth pair, nft rules"] == "+ cgroup"


def test_oci_config_is_json_with_every_namespace() -> None:
    config = json.loads(json.dumps(peers.oci_config("/nonexistent/root")))
    kinds = {item["type"] for item in config["linux"]["namespaces"]}
    assert kinds == {"user", "mount", "pid", "network", "ipc", "uts", "cgroup"}
    assert config["process"]["noNewPrivileges"] is True


def test_peers_leave_nothing_and_tell_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "place"))
    (tmp_path / "place").mkdir()
    broken = peers.Peer("broken", "false", lambda program, place: [program], "everything")
    absent = peers.Peer("absent", "no-such-program", lambda program, place: [program], "everything")
    sound = peers.Peer("sound", "true", lambda program, place: [program], "everything")
    monkeypatch.setattr(peers, "ALL", (broken, absent, sound))
    with peers.Peers(("broken", "absent", "sound")) as found:
        assert list(found.subjects) == ["sound"]
        assert found.skipped == {"broken": "does not run here: status 1", "absent": "not installed"}
        found.subjects["sound"]()
    assert list(tmp_path.iterdir()) == []


def test_the_program_of_runtime_measures_every_kind(tmp_path: Path) -> None:
    words = [sys.executable, "-I", "-c", runtime.PROGRAM, "0.002", str(tmp_path), runtime.large_file()]
    figures = json.loads(subprocess.run(words, check=True, capture_output=True, timeout=60).stdout)
    assert set(figures) == set(runtime.KINDS)
    assert all(value > 0 for value in figures.values())
    assert list(tmp_path.iterdir()) == []


def test_rate_counts_and_tells_errors() -> None:
    calls: list[int] = []
    per_second, samples = throughput.rate(lambda: calls.append(1), 3, 0.02)
    assert len(samples) == len(calls) >= 3
    assert per_second > 0
    assert throughput.rate(lambda: None, 2, -1.0)[0] > 0, "a turn that is over before it begins has one call of each"
    with pytest.raises(ZeroDivisionError):
        throughput.rate(lambda: 1 // 0, 2, 5.0)


def test_meminfo_has_what_is_told() -> None:
    assert set(memory.KERNEL) <= set(memory.meminfo())
    own = memory.rollup("self")
    assert own is not None
    assert own["Pss"] > 0
    assert memory.rollup(2**22 + 1) is None


def test_text_of_reports() -> None:
    row = {"p50_us": 4000.0, "p95_us": 9000.0, "ratio": 1.31, "ratio_low": 1.2, "ratio_high": 1.45}
    figures = dict.fromkeys(network.METRICS, 10.0)
    facts = {
        "traffic": {"host": figures, "gateway": dict.fromkeys(figures, 5.0)},
        "start": {"none": row, "gateway": row},
    }
    traffic, starts = network.text(report_of(network.BENCHMARK, facts))
    assert traffic.splitlines()[2].split()[-4:] == ["10.0", "(1.00)", "5.0", "(0.50)"]
    assert starts.splitlines()[-1].endswith("1.20 to 1.45")
    compile(network.CLIENT, "client", "exec")
    jobs = {"results": {"alone": row, "cpu": row}, "enforced": {"memory": "kernel"}}
    assert "1.20 to 1.45" in frame.words(neighbours.BENCHMARK, report_of(neighbours.BENCHMARK, jobs))


# ---- plots ----------------------------------------------------------------------------------------------------------


def boxes(text: str) -> list[tuple[float, float, float, float]]:
    """x, y, width and height of every bar; the page itself is left out."""
    root = ElementTree.fromstring(text)
    found = [[float(r.get(key, "nan")) for key in ("x", "y", "width", "height")] for r in root.iter(f"{NS}rect")]
    return [(x, y, width, height) for x, y, width, height in found[1:]]


NS = "{http://www.w3.org/2000/svg}"


def kept(name: str) -> dict[str, Any]:
    """A report that is kept."""
    path = next(iter(sorted((BENCHMARKS / "results").glob(f"{name}-[0-9]*-root.json"))))
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def test_the_outline_is_the_reports_in_short() -> None:
    layered, started = kept("layers"), kept("start")
    short = outline.outline([layered, started])
    assert [*short] == ["host", "baseline", "layers", "peers"]
    assert short["host"] == layered["host"]
    assert short["baseline"]["p50_us"] == started["results"]["posix_spawn"]["p50_us"]
    assert [row["name"] for row in short["layers"]] == list(layered["rows"])
    second = list(layered["rows"].values())[1]
    assert short["layers"][1]["delta_us"] == second["added_us"]
    peers = {row["name"]: row for row in short["peers"]}
    assert {"bwrap", "unshare"} <= peers.keys()
    assert not {"posix_spawn", "nsbox"} & peers.keys()
    assert peers["bwrap"]["ratio"] == started["results"]["bwrap"]["ratio"]
    assert started["lacks"]["bwrap"] in peers["bwrap"]["notes"]
    assert outline.outline([])["baseline"] is None


def test_versions() -> None:
    assert outline.version("no-such-program") == ""
    assert "env" in outline.version("env")


def test_plots_below_each_other() -> None:
    one = svg.bars("One", "a unit", [("a", 1.0, 2.0)])
    two = svg.waterfall("Two", "a unit", [("a", 1.0), ("b", 2.0)])
    root = ElementTree.fromstring(svg.stack([one, two]))
    inside = root.findall(f"{NS}svg")
    heights = [float(plot.get("height", 0)) for plot in inside]
    assert [float(plot.get("y", -1)) for plot in inside] == [0, heights[0]]
    assert float(root.get("height", 0)) == sum(heights)


def test_bars_are_proportional_and_do_not_touch() -> None:
    drawn = svg.bars("A title", "a unit", [("one", 100.0, 150.0), ("two & <three>", 200.0, 9000.0), ("four", 0.0, 0.0)])
    one, two, four = boxes(drawn)
    assert two[2] == pytest.approx(2 * one[2], abs=0.2)
    assert four[2] == 0.5
    assert one[1] + one[3] < two[1]
    assert "two &amp; &lt;three&gt;" in drawn


def test_a_waterfall_goes_on_where_it_was() -> None:
    first, second, whole = boxes(svg.waterfall("A title", "a unit", [("a", 30.0), ("b", 70.0)]))
    assert second[0] == pytest.approx(first[0] + first[2], abs=0.2)
    assert whole[2] == pytest.approx(first[2] + second[2], abs=0.2)
    assert whole[0] == first[0]


def test_everything_drawn_is_on_the_page() -> None:
    rows = [("a label that is rather long for a row", 17_000.0, 90_000.0), ("b", 3.0, 4.0)]
    root = ElementTree.fromstring(svg.bars("A title", "a unit", rows))
    width, height = (float(root.get(key, "nan")) for key in ("width", "height"))
    for text in root.iter(f"{NS}text"):
        length = len(text.text or "") * int(text.get("font-size", "0")) * 0.6
        x = float(text.get("x", "nan")) - {"end": length, "middle": length / 2}.get(text.get("text-anchor", ""), 0)
        assert x >= 0
        assert x + length <= width
        assert float(text.get("y", "nan")) < height


@pytest.mark.parametrize(
    ("most", "wanted"), [(10.0, [0, 2, 4, 6, 8, 10]), (5800.0, [0, 1000, 2000, 3000, 4000, 5000]), (0.0, [0])]
)
def test_ticks_are_round(most: float, wanted: list[float]) -> None:
    assert svg.ticks(most) == wanted
    small = svg.ticks(1.4)
    assert small[1] == pytest.approx(0.5)


# ---- what is stored -------------------------------------------------------------------------------------------------


def stored() -> list[Path]:
    return sorted((BENCHMARKS / "results").glob("*.json"))


def test_stored_results_are_of_these_programs() -> None:
    names = {benchmark.name: benchmark for benchmark in EVERY}
    assert stored()
    for path in stored():
        report = json.loads(path.read_text())
        benchmark = names[report["benchmark"]]
        assert path.name == f"{benchmark.name}{frame.result_name(report)}.json"
        assert frame.words(benchmark, report)
        for drawn in benchmark.plots(report).values():
            ElementTree.fromstring(drawn)


def test_the_page_of_results_holds_all_of_them() -> None:
    text = tables.page(BENCHMARKS / "results")
    assert list(tables.benchmarks()) == [benchmark.name for benchmark in EVERY]
    for path in stored():
        assert f"]({path.name})" in text
    assert (BENCHMARKS / "results" / "README.md").read_text() == text, "run: python benchmarks/tables.py"
