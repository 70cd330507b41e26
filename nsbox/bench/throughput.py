"""How many sandboxes a second, cold, with several workers; against what the kernel gives bare clones with the same
namespaces, and against posix_spawn, with as many workers."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from nsbox.bench import svg
from nsbox.bench.frame import Benchmark, Found, Setting, table
from nsbox.bench.layers import everything
from nsbox.bench.measure import TRUE, Samples, median, percentile, ratio_interval, spawn

PAUSE_S = 0.3  #: between turns, for what the kernel takes down later


def rate(call: Callable[[], object], workers: int, seconds: float) -> tuple[float, Samples]:
    """(calls a second, microseconds of each) of threads that call without a pause. Raises what a call raised."""
    end = time.perf_counter() + seconds
    samples: list[Samples] = [[] for _ in range(workers)]
    errors: list[BaseException] = []

    def work(mine: Samples) -> None:
        try:
            while not errors:
                began = time.perf_counter()
                call()
                done = time.perf_counter()
                mine.append((done - began) * 1e6)
                if done >= end:  # at least one call: on a busy machine a thread may begin late
                    return
        except BaseException as error:
            errors.append(error)

    began = time.perf_counter()
    threads = [threading.Thread(target=work, args=(mine,)) for mine in samples]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    every = [value for mine in samples for value in mine]
    return len(every) / (time.perf_counter() - began), every


def subjects() -> dict[str, Callable[[], object]]:
    import nsbox

    spec = nsbox.Spec()

    def sandbox() -> None:
        if not nsbox.run([TRUE], spec).ok:
            raise RuntimeError(f"{TRUE} in a sandbox")

    return {"posix_spawn": lambda: spawn([TRUE]), "bare namespaces": everything(), "nsbox": sandbox}


def run(settings: dict[str, Any]) -> Found:
    calls, draw = subjects(), random.Random(1)
    counts = [1, int(settings["workers"])]
    rates: dict[tuple[str, int], Samples] = {(name, count): [] for name in calls for count in counts}
    times: dict[tuple[str, int], Samples] = {key: [] for key in rates}
    for call in calls.values():
        call()
    order = list(rates)
    for _ in range(int(settings["rounds"])):
        draw.shuffle(order)
        for name, count in order:
            found, samples = rate(calls[name], count, settings["seconds"])
            rates[name, count].append(found)
            times[name, count] += samples
            time.sleep(PAUSE_S)
    rows = []
    for (name, count), values in rates.items():
        low, high = ratio_interval(values, rates["bare namespaces", count])
        row = {"subject": name, "workers": count, "per_s": round(median(values), 1)}
        row |= {
            "p50_us": round(median(times[name, count]), 1),
            "p95_us": round(percentile(times[name, count], 0.95), 1),
        }
        share = median(values) / median(rates["bare namespaces", count])
        rows.append(row | {"of_bare": round(share, 3), "of_bare_low": round(low, 3), "of_bare_high": round(high, 3)})
    return {"rows": rows}, times["posix_spawn", 1]


def _label(row: dict[str, Any]) -> str:
    return f"{row['subject']}, {row['workers']} worker{'s' if row['workers'] > 1 else ''}"


def text(report: dict[str, Any]) -> list[str]:
    rows = []
    for row in report["rows"]:
        share = [f"{row['of_bare']:.0%}", f"{row['of_bare_low']:.0%} to {row['of_bare_high']:.0%}"]
        times = [f"{row['p50_us']:.0f}", f"{row['p95_us']:.0f}"]
        rows.append([_label(row), f"{row['per_s']:.0f}", *times, *share])
    return [table([f"{TRUE} by", "a second", "p50 µs", "p95 µs", "of bare", "95 % interval"], rows)]


def plots(report: dict[str, Any]) -> dict[str, str]:
    rows = [(_label(row), row["per_s"], row["per_s"]) for row in report["rows"]]
    return {"throughput": svg.bars("Starts a second", "sustained, cold; medians", rows, mark="nsbox")}


BENCHMARK = Benchmark(
    "throughput",
    "Cold starts a second with several workers, against bare clones with the same namespaces.",
    (
        Setting("workers", 8, 2, 8, "threads that start without a pause"),
        Setting("seconds", 1.5, 0.1, 0.3, "length of a turn"),
        Setting("rounds", 5, 2, 2, "turns of each subject"),
    ),
    run,
    text,
    plots,
)
