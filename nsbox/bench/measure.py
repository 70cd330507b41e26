"""Subjects measured in turns, and what the samples come to: medians, p95, intervals by bootstrap."""

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

RESAMPLES = 1000
TRUE = "/bin/true"

Samples = list[float]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of ``values`` lie, interpolated between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return percentile(values, 0.5)


def _interval(count: int, figure: Callable[[list[int]], float], confidence: float, seed: int) -> tuple[float, float]:
    """Bootstrap: ``figure`` of ``count`` rounds drawn with replacement, many times; the middle of what comes."""
    draw, rounds = random.Random(seed), range(count)
    found = [figure(draw.choices(rounds, k=count)) for _ in range(RESAMPLES)]
    tail = (1 - confidence) / 2
    return percentile(found, tail), percentile(found, 1 - tail)


def median_interval(samples: Samples, confidence: float = 0.95, seed: int = 1) -> tuple[float, float]:
    """Interval of the median."""
    return _interval(len(samples), lambda chosen: median([samples[i] for i in chosen]), confidence, seed)


def ratio_interval(samples: Samples, baseline: Samples, confidence: float = 0.95, seed: int = 1) -> tuple[float, float]:
    """Interval of median(samples) / median(baseline).

    Run i of both was made in the same round: rounds are drawn as a whole, so that what slows a round down slows both
    sides of the ratio.
    """

    def ratio(chosen: list[int]) -> float:
        return median([samples[i] for i in chosen]) / median([baseline[i] for i in chosen])

    return _interval(min(len(samples), len(baseline)), ratio, confidence, seed)


def difference_interval(
    samples: Samples, baseline: Samples, confidence: float = 0.95, seed: int = 1
) -> tuple[float, float]:
    """Interval of median(samples) - median(baseline), rounds drawn as a whole as in ``ratio_interval``."""

    def difference(chosen: list[int]) -> float:
        return median([samples[i] for i in chosen]) - median([baseline[i] for i in chosen])

    return _interval(min(len(samples), len(baseline)), difference, confidence, seed)


def measure(
    subjects: Mapping[str, Callable[[], object]],
    runs: int,
    warmup: int,
    *,
    pause_s: float = 0.0,
    before: Callable[[], object] | None = None,
    seed: int = 1,
) -> dict[str, Samples]:
    """Microseconds of ``runs`` calls of every subject after ``warmup`` unmeasured ones, in rounds.

    Each round calls every subject once, in an order of its own: what one leaves behind (a network namespace is taken
    down by the kernel after its last process is gone) then falls on all the others alike. ``before`` is called ahead of
    every call, and not measured.
    """
    order = list(subjects)
    draw = random.Random(seed)
    samples: dict[str, Samples] = {name: [] for name in order}
    for number in range(-warmup, runs):
        draw.shuffle(order)
        for name in order:
            if pause_s:
                time.sleep(pause_s)
            if before:
                before()
            began = time.perf_counter_ns()
            subjects[name]()
            took = time.perf_counter_ns() - began
            if number >= 0:
                samples[name].append(took / 1000)
    return samples


def summary(samples: Samples, baseline: Samples) -> dict[str, Any]:
    """p50 and p95 in microseconds, and the ratio to the baseline with its 95 % interval."""
    low, high = ratio_interval(samples, baseline)
    return {
        "runs": len(samples),
        "p50_us": round(median(samples), 1),
        "p95_us": round(percentile(samples, 0.95), 1),
        "ratio": round(median(samples) / median(baseline), 3),
        "ratio_low": round(low, 3),
        "ratio_high": round(high, 3),
    }


def spawn(argv: Sequence[str], env: Mapping[str, str] | None = None, *, silent: bool = False) -> None:
    """Run ``argv`` by posix_spawn(3) and wait for it. Raises RuntimeError unless it ends with status 0."""
    variables = dict(env or {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"})
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)] if silent else []
    pid = os.posix_spawn(argv[0], list(argv), variables, file_actions=null)
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"{argv[0]} ended with status {os.waitstatus_to_exitcode(status)}")


def touched(mebibytes: int) -> bytearray:
    """So much private memory, with every page written to."""
    memory = bytearray(mebibytes << 20)
    memory[::4096] = b"\1" * len(range(0, len(memory), 4096))
    return memory
