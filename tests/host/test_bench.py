"""`nsbox bench` on this host: it measures what it says, and leaves nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsbox import cli, cli_bench
from nsbox.bench import frame, layers, memory, netns, pools, runtime, throughput
from nsbox.errors import SpecError

CUT = {"runs": 2, "warmup": 0}


def test_the_command_measures_layers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = layers.BENCHMARK._replace(
        settings=tuple(s._replace(quick=max(2, s.least)) for s in layers.BENCHMARK.settings)
    )
    monkeypatch.setattr(layers, "BENCHMARK", few)
    words = ["bench", "layers", "--quick", "--json", str(tmp_path / "all.json"), "--svg", str(tmp_path / "plots")]
    words += ["--plot", str(tmp_path / "all.svg")]
    assert cli.call(words) == 0
    shown = capfd.readouterr().out
    assert "+ net namespace" in shown
    told = json.loads((tmp_path / "all.json").read_text())
    (report,) = told["benchmarks"]
    assert [row["name"] for row in told["layers"]] == list(report["rows"])
    assert told["peers"] == []
    assert (tmp_path / "all.svg").read_text().count("<svg ") == 2
    assert {"posix_spawn", "clone, exec", "+ landlock", "+ seccomp filter"} <= set(report["rows"])
    assert all(row["p50_us"] > 0 for row in report["rows"].values())
    assert report["rows"]["+ /proc"]["before"] == "+ init, id maps, overlay root, /dev"
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["layers.svg"]


@pytest.mark.root
def test_veth_is_measured_without_the_hosts_network() -> None:
    before = os.listdir("/sys/class/net")
    facts, baseline = layers.run(CUT)
    assert "+ veth pair, nft rules" in facts["rows"]
    assert len(baseline) == 2
    assert os.listdir("/sys/class/net") == before


def test_a_cut_sandbox_lacks_what_was_left_out() -> None:
    from nsbox.launch import launch
    from nsbox.supervise import Run, drive

    def seen(*has: str) -> list[bytes]:
        handle = launch(layers._Cut().prepared(*has), ["sh", "-c", "ls /proc | head -1; grep -c : /proc/net/dev"])
        try:
            watch = Run(handle)
            drive(watch)
            return watch.stdout.data.split()
        finally:
            handle.close()

    assert seen() == []
    assert seen("proc", "net") == [b"1", b"1"]  # pid 1, and loopback alone


def test_work_is_measured_inside_and_outside() -> None:
    facts, _ = runtime.run({"rounds": 2, "scale": 0.01})
    assert set(facts["results"]) == set(runtime.KINDS)
    assert all(row["inside_ns"] > 0 for row in facts["results"].values())


def test_throughput_counts_all_subjects() -> None:
    facts, _ = throughput.run({"workers": 2, "seconds": 0.1, "rounds": 2})
    assert {row["subject"] for row in facts["rows"]} == {"posix_spawn", "bare namespaces", "nsbox"}
    assert all(row["per_s"] > 0 for row in facts["rows"])


def test_memory_of_idle_sandboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "STARTS", 2)
    monkeypatch.setattr(memory, "SETTLE_S", 0.1)
    facts, _ = memory.run({"alive": 3})
    assert frame.words(memory.BENCHMARK, _report(memory.BENCHMARK, facts))
    pss = facts["held_kib"]["init_pss"]
    assert pss is None if os.geteuid() else 0 < pss < 400  # what cannot be read is told as such


def _report(benchmark: frame.Benchmark, facts: dict[str, object]) -> dict[str, object]:
    return {"options": frame.values(benchmark), "quiet": {"warnings": []}, "host": {}, **facts} | {
        "host": {"cpu": "", "cores": 1, "virtual": False, "kernel": "", "python": "", "user": ""}
    }


def test_a_child_apart_has_another_network_and_tells_its_failure(capfd: pytest.CaptureFixture[str]) -> None:
    mine = os.readlink("/proc/self/ns/net")
    assert netns.apart(lambda: os.readlink("/proc/self/ns/net")) != mine
    assert os.readlink("/proc/self/ns/net") == mine
    with pytest.raises(RuntimeError, match="own network"):
        netns.apart(lambda: 1 // 0)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_no_such_benchmark() -> None:
    with pytest.raises(SpecError, match="did you mean memory"):
        cli_bench.chosen(["memroy"])
    assert [benchmark.name for benchmark in cli_bench.chosen([])] == ["layers", "start", "runtime"]


@pytest.mark.usefixtures("gateway_thread")
def test_pools_are_measured_full_and_without_a_pause() -> None:
    facts, _ = pools.run({"runs": 2, "workers": 2, "seconds": 0.1, "rounds": 1})
    assert facts["results"]["Pool: /bin/true"]["p50_us"] > 0
    assert facts["results"]["PythonPool: pass"]["p50_us"] > 0
    assert facts["sustained"]["Pool: /bin/true"]["per_s"] > 0
    assert facts["sustained"]["os.fork and wait"]["per_s"] > 0
    assert frame.words(pools.BENCHMARK, _report(pools.BENCHMARK, facts))


def test_a_run_of_the_command_imports_nothing_heavy() -> None:
    code = (
        "import sys; before = set(sys.modules); from nsbox import cli; status = cli.call(['run', '--', 'true']);"
        "print(status, *sorted(set(sys.modules) - before))"
    )
    lines = f"import sys; sys.path[:0] = {sys.path!r}; {code}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", lines], capture_output=True, text=True, check=True)
    status, *found = done.stdout.split()
    assert status == "0"
    heavy = {"typing", "contextlib", "functools", "collections", "enum", "re", "socket", "threading", "random"}
    assert not heavy & set(found)
