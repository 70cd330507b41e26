"""What a fresh sandbox costs: /bin/true through ``nsbox.run`` against posix_spawn(3) and the peers of this host."""

import os
import time
from collections.abc import Callable
from typing import Any

from nsbox.bench import svg
from nsbox.bench.frame import Benchmark, Found, Setting, ratio_table, table
from nsbox.bench.measure import TRUE, Samples, measure, median, percentile, spawn, summary, touched
from nsbox.bench.peers import Peers

BASELINE = "posix_spawn"
FORKS = 20
SLOW_ROUNDS = 10  #: of peers that take tens of milliseconds, in place of all rounds
SLOW_US = 20_000

# The stages of native/nsbox.h in words: each row is the time since the row before.
STEPS = {
    "cgroup": "join the cgroups (v1), cgroup namespace",
    "hostname": "thread started that builds the root, private mounts, host name",
    "idmap": "wait for the id maps (and sources, for root)",
    "identity": "take on the new identity",
    "scratch": "scratch file system",
    "mount": "overlay root, /usr, /dev, /proc, masks",
    "pivot": "Landlock rules, pivot_root",
    "network": "wait for the network namespace",
    "landlock": "Landlock domain",
    "limits": "close descriptors, resource limits",
    "capabilities": "capability sets, securebits, ids, no_new_privs",
    "seccomp": "wait for the old root to be off, load the filter",
    "exec": "vfork, exec of the command",
}
AROUND = {
    "request": "plan, pipes, request, clone3",
    **STEPS,
    "run": "the command itself",
    "teardown": "end of everything inside",
    "around": "Spec from the cache, Result, closing (Python)",
}


class Sandbox:
    """The subject: one fresh sandbox a call. Keeps what each Result says about its own time."""

    def __init__(self) -> None:
        import nsbox

        self._run, self._spec = nsbox.run, nsbox.Spec()
        self.results: list[dict[str, float]] = []
        self.enforced: dict[str, str] = {}

    def __call__(self) -> None:
        began = time.perf_counter_ns()
        result = self._run([TRUE], self._spec)
        whole = (time.perf_counter_ns() - began) / 1000
        if not result.ok:
            raise RuntimeError(f"{TRUE} in a sandbox: {result!r} {result.stderr_text}")
        self.results.append(account(result.timing, result.steps, whole))
        self.enforced = {layer: how["strength"] for layer, how in result.enforced.items()}


def account(timing: dict[str, float], steps: dict[str, float], whole_us: float) -> dict[str, float]:
    """Where the time of one run went, in microseconds: request, the steps of init, the run, the end, and what lies
    before and after what the Result covers."""
    before = timing["setup_ms"] * 1000 - sum(steps.values())
    around = whole_us - timing["total_ms"] * 1000
    after = {"run": timing["run_ms"] * 1000, "teardown": timing["teardown_ms"] * 1000, "around": max(0.0, around)}
    return {"request": max(0.0, before), **steps, **after}


def fork_and_exec() -> None:
    """What a library pays that forks its caller."""
    pid = os.fork()
    if pid == 0:
        try:
            os.execv(TRUE, [TRUE])
        finally:
            os._exit(127)
    os.waitpid(pid, 0)


def first_run(subject: Callable[[], object]) -> float:
    """Milliseconds of the first sandbox of a process: the filter's cache, the plan, the helper process."""
    began = time.perf_counter()
    subject()
    return round((time.perf_counter() - began) * 1000, 2)


def steps_summary(results: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """p50 and p95 in microseconds of each part of the sandbox's time, in order."""
    out = {}
    seen = [name for result in results for name in result]
    order = [*AROUND, *sorted(set(seen) - set(AROUND))]  # a stage that has no words yet is told all the same
    for name in [name for name in order if name in seen]:
        values = [result.get(name, 0.0) for result in results]
        out[name] = {"p50_us": round(median(values), 1), "p95_us": round(percentile(values, 0.95), 1)}
    return out


def _in_turns(subjects: dict[str, Callable[[], object]], settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Summaries of the baseline, nsbox and the fast peers, all rounds in turns."""
    pause_s = settings["pause_ms"] / 1000
    samples = measure(subjects, int(settings["runs"]), int(settings["warmup"]), pause_s=pause_s)
    return {
        "samples": samples,
        "results": {name: summary(values, samples[BASELINE]) for name, values in samples.items()},
    }


def _slow_peers(subjects: dict[str, Callable[[], object]]) -> dict[str, dict[str, Any]]:
    """The same of those that take long, in few rounds of their own, with the baseline among them."""
    if not subjects:
        return {}
    samples = measure({BASELINE: lambda: spawn([TRUE]), **subjects}, SLOW_ROUNDS, 1)
    return {name: summary(samples[name], samples[BASELINE]) for name in subjects}


def run(settings: dict[str, Any]) -> Found:
    memory = touched(int(settings["touch_mib"]))
    sandbox = Sandbox()
    first = first_run(sandbox)
    with Peers() as peers:
        once = {name: median(values) for name, values in measure(peers.subjects, 3, 0).items()}
        slow = {name: call for name, call in peers.subjects.items() if once[name] > SLOW_US}
        fast = {name: call for name, call in peers.subjects.items() if name not in slow}
        subjects: dict[str, Callable[[], object]] = {BASELINE: lambda: spawn([TRUE]), "nsbox": sandbox, **fast}
        found = _in_turns(subjects, settings)
        results = found["results"] | _slow_peers(slow)
    baseline: Samples = found["samples"][BASELINE]
    if memory:
        # By itself and last: a fork leaves every page of the caller to be copied at the next write.
        results["fork"] = summary(measure({"fork": fork_and_exec}, FORKS, 2)["fork"], baseline[:FORKS])
    facts = {
        "first_run_ms": first,
        "results": results,
        "skipped": peers.skipped,
        "lacks": peers.lacks,
        "steps": steps_summary(sandbox.results[-int(settings["runs"]) :]),
        "enforced": sandbox.enforced,
    }
    return facts, baseline


def steps_table(report: dict[str, Any]) -> str:
    """Where the sandbox's time goes."""
    rows = [
        [AROUND.get(name, name), f"{row['p50_us']:.0f}", f"{row['p95_us']:.0f}"]
        for name, row in report["steps"].items()
    ]
    return table(["step of nsbox", "p50 µs", "p95 µs"], rows)


def text(report: dict[str, Any]) -> list[str]:
    lacks = [f"{name} has not: {what}" for name, what in report.get("lacks", {}).items()]
    skipped = [f"{name} is left out: {why}" for name, why in report["skipped"].items()]
    return [
        f"first sandbox of the process: {report['first_run_ms']:.1f} ms",
        ratio_table(f"{TRUE} by", BASELINE, report["results"]),
        "\n".join(lacks + skipped),
        steps_table(report),
    ]


def plots(report: dict[str, Any]) -> dict[str, str]:
    steps = [(AROUND.get(name, name), row["p50_us"]) for name, row in report["steps"].items()]
    bars = [(name, row["p50_us"], row["p95_us"]) for name, row in report["results"].items()]
    return {
        "start-waterfall": svg.waterfall(
            "Where the start of a sandbox goes",
            "medians in µs; of the whole it is a little more or less than their sum",
            steps,
        ),
        "start-peers": svg.bars(
            "/bin/true, started and waited for", "µs; bar and number: median, line: to p95", bars, mark="nsbox"
        ),
    }


BENCHMARK = Benchmark(
    "start",
    "What a fresh sandbox costs, against posix_spawn and the programs of this host that isolate.",
    (
        Setting("runs", 300, 2, 25, "measured rounds"),
        Setting("warmup", 20, 0, 3, "rounds before them"),
        Setting("touch_mib", 0, 0, 0, "have N MiB of memory in use"),
        Setting("pause_ms", 0.0, 0, 0.0, "idle time before each call"),
    ),
    run,
    text,
    plots,
)
