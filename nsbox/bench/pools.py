"""What a sandbox made ahead costs from lease to result, and how many a second a pool keeps up: programs, and Python."""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import nsbox
from nsbox.bench.frame import Benchmark, Found, Setting, ratio_table, table
from nsbox.bench.measure import TRUE, Samples, measure, median, percentile, spawn, summary
from nsbox.bench.throughput import rate

BASELINE = "posix_spawn"
FULL_S = 30.0  #: how long to wait at most until a pool is full
SIZE = 8
PLAIN = nsbox.Spec()
FILTERED = nsbox.Spec(net="filtered", allow=("example.org",))

# A loop of fork and wait in an interpreter that does nothing else; prints how many a second.
FORKS = """
import os, sys, time
end, count, began = float(sys.argv[1]), 0, time.perf_counter()
while time.perf_counter() - began < end:
    pid = os.fork()
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0); count += 1
print(count / (time.perf_counter() - began))
"""


def _call(pool: Any, request: Any) -> Callable[[], None]:
    def once() -> None:
        result = pool.run(request)
        if not result.ok:
            raise RuntimeError(f"{request!r} in a pool: {result!r} {result.stderr_text}")

    return once


def _full(pool: Any) -> Callable[[], None]:
    def wait() -> None:
        if not pool.wait_full(FULL_S):
            raise RuntimeError(f"the pool was not full after {FULL_S:g} s")

    return wait


def latency(pools: dict[str, tuple[Any, Any]], runs: int) -> dict[str, Samples]:
    """Microseconds from lease to result of pools that are full and idle, in turns with posix_spawn; the refill that a
    lease causes is over before the next turn."""

    def cold(spec: nsbox.Spec) -> None:
        if not nsbox.run([TRUE], spec).ok:
            raise RuntimeError(f"{TRUE} in a sandbox")

    def settle() -> None:
        for pool, _ in pools.values():
            _full(pool)()

    subjects: dict[str, Callable[[], object]] = {
        BASELINE: lambda: spawn([TRUE]),
        "nsbox.run, cold": lambda: cold(PLAIN),
        "nsbox.run, cold, filtered egress": lambda: cold(FILTERED),
    }
    subjects |= {name: _call(pool, request) for name, (pool, request) in pools.items()}
    return measure(subjects, runs, 3, before=settle)


def paced(call: Callable[[], object], per_second: float, seconds: float) -> Samples:
    """Microseconds of calls that begin at a steady pace, from when each was due."""
    samples, began = [], time.perf_counter()
    for number in range(max(2, int(per_second * seconds))):
        due = began + number / per_second
        time.sleep(max(0.0, due - time.perf_counter()))
        call()
        samples.append((time.perf_counter() - due) * 1e6)
    return samples


def forks_per_second(seconds: float) -> float:
    """What a bare loop of os.fork and wait gives, in this interpreter."""
    words = [sys.executable, "-I", "-S", "-c", FORKS, str(seconds)]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def sustained(
    pools: dict[str, tuple[Any, Any]], workers: int, seconds: float, rounds: int
) -> dict[str, dict[str, float]]:
    """How many a second, without a pause, and latencies at half of that."""
    subjects: dict[str, Callable[[], float]] = {
        "posix_spawn": lambda: rate(lambda: spawn([TRUE]), workers, seconds)[0],
        "os.fork and wait": lambda: forks_per_second(seconds),
    }
    for name, (pool, request) in pools.items():
        subjects[name] = lambda pool=pool, request=request: rate(_call(pool, request), workers, seconds)[0]  # type: ignore[misc]
    rates: dict[str, Samples] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            rates[name].append(subject())
    out: dict[str, dict[str, float]] = {name: {"per_s": round(median(found), 1)} for name, found in rates.items()}
    for name, (pool, request) in pools.items():
        _full(pool)()
        times = paced(_call(pool, request), out[name]["per_s"] / 2, seconds * rounds)
        shares = {f"p{share}_us": round(percentile(times, share / 100), 1) for share in (50, 95, 99)}
        base = "os.fork and wait" if "Python" in name else "posix_spawn"
        out[name] |= {**shares, "of_bare": round(out[name]["per_s"] / out[base]["per_s"], 3)}
    return out


def run(settings: dict[str, Any]) -> Found:
    made: list[Any] = []
    pools: dict[str, tuple[Any, Any]] = {}
    skipped: dict[str, str] = {}
    try:
        for name, spec in (("Pool", PLAIN), ("Pool, filtered egress", FILTERED)):
            made.append(nsbox.Pool(spec, size=SIZE))
            pools[f"{name}: {TRUE}"] = (made[-1], [TRUE])
        for name, preload, code in (("pass", [], "pass"), ("numpy", ["numpy"], "import numpy\nnumpy.arange(10).sum()")):
            label = f"PythonPool: {name}"
            try:
                pool = nsbox.PythonPool(preload=preload, size=SIZE)
                made.append(pool)
                _call(pool, code)()
            except (AttributeError, RuntimeError, nsbox.errors.NsboxError) as error:
                skipped[label] = str(error)
            else:
                pools[label] = (pool, code)
        samples = latency(pools, int(settings["runs"]))
        found = sustained(pools, int(settings["workers"]), settings["seconds"], int(settings["rounds"]))
    finally:
        for pool in made:
            pool.close()
    results = {name: summary(values, samples[BASELINE]) for name, values in samples.items()}
    for name, values in samples.items():
        results[name]["p99_us"] = round(percentile(values, 0.99), 1)
    return {"results": results, "sustained": found, "skipped": skipped}, samples[BASELINE]


def text(report: dict[str, Any]) -> list[str]:
    rows = []
    for name, row in report["sustained"].items():
        times = [f"{row[key]:.0f}" if key in row else "" for key in ("p50_us", "p95_us", "p99_us")]
        rows.append([name, f"{row['per_s']:.0f}", f"{row['of_bare']:.0%}" if "of_bare" in row else "", *times])
    head = ["without a pause", "a second", "of bare", "p50 µs at half", "p95 µs", "p99 µs"]
    return [
        ratio_table("lease to result, pool full", BASELINE, report["results"]),
        table(head, rows),
        "\n".join(f"{name} is left out: {why}" for name, why in report["skipped"].items()),
    ]


BENCHMARK = Benchmark(
    "pools",
    "Sandboxes and interpreters made ahead: from lease to result, and how many a second.",
    (
        Setting("runs", 150, 2, 10, "measured rounds"),
        Setting("workers", 2, 1, 2, "threads that lease without a pause"),
        Setting("seconds", 1.5, 0.1, 0.3, "length of a turn"),
        Setting("rounds", 3, 1, 1, "turns of each subject"),
    ),
    run,
    text,
)
