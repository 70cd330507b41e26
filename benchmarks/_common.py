"""What the benchmarks share: subjects measured in turns, statistics, facts of the host, tables."""

import os
import platform
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RESAMPLES = 2000
LOAD_LIMIT = 0.3  #: of one processor, before the run
SPREAD_LIMIT = 1.5  #: p95 / p50 of the baseline
DRIFT_LIMIT = 0.10  #: between the medians of the first and the last third of the baseline
STEAL_LIMIT = 0.02  #: of all processor time during the run

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


def ratio_interval(samples: Samples, baseline: Samples, confidence: float = 0.95, seed: int = 1) -> tuple[float, float]:
    """Bootstrap interval of median(samples) / median(baseline).

    Run i of both was made in the same round: rounds are drawn as a whole, so that what slows a round down slows both
    sides of the ratio.
    """
    draw = random.Random(seed)
    rounds = range(min(len(samples), len(baseline)))
    ratios = []
    for _ in range(RESAMPLES):
        chosen = draw.choices(rounds, k=len(rounds))
        ratios.append(median([samples[i] for i in chosen]) / median([baseline[i] for i in chosen]))
    tail = (1 - confidence) / 2
    return percentile(ratios, tail), percentile(ratios, 1 - tail)


def measure(
    subjects: Mapping[str, Callable[[], object]], runs: int, warmup: int, *, pause_s: float = 0.0, seed: int = 1
) -> dict[str, Samples]:
    """Microseconds of ``runs`` calls of every subject after ``warmup`` unmeasured ones, in rounds.

    Each round calls every subject once, in an order of its own: what one leaves behind (a network namespace is taken
    down by the kernel after its last process is gone) then falls on all the others alike.
    """
    order = list(subjects)
    draw = random.Random(seed)
    samples: dict[str, Samples] = {name: [] for name in order}
    for number in range(-warmup, runs):
        draw.shuffle(order)
        for name in order:
            if pause_s:
                time.sleep(pause_s)
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


def spawn(argv: Sequence[str]) -> None:
    """Run ``argv`` by posix_spawn(3) and wait for it. Raises RuntimeError unless it ends with status 0."""
    pid = os.posix_spawn(argv[0], list(argv), {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"})
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"{argv[0]} ended with status {os.waitstatus_to_exitcode(status)}")


def touched(mebibytes: int) -> bytearray:
    """So much private memory, with every page written to."""
    memory = bytearray(mebibytes << 20)
    memory[::4096] = b"\1" * len(range(0, len(memory), 4096))
    return memory


def _first_match(path: str, pattern: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = re.search(pattern, file.read(), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""


def host_facts() -> dict[str, Any]:
    """What a reader needs to judge the figures. Nothing that names the machine."""
    return {
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        "cpu": _first_match("/proc/cpuinfo", r"^model name\s*: (.*)$") or "unknown",
        "cores": os.cpu_count() or 1,
        "virtual": bool(_first_match("/proc/cpuinfo", r"^flags.*\b(hypervisor)\b")),
        "memory_mib": int(_first_match("/proc/meminfo", r"^MemTotal:\s*(\d+)") or 0) >> 10,
        "python": platform.python_version(),
        "user": "root" if os.geteuid() == 0 else "user",
    }


def _processor_times() -> tuple[int, int]:
    """(all, stolen) ticks since boot: proc_stat(5)."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return sum(ticks), ticks[7]


@dataclass
class Quiet:
    """Whether the machine was left alone; made before a run, asked after it."""

    load: float = field(default_factory=lambda: os.getloadavg()[0])
    before: tuple[int, int] = field(default_factory=_processor_times)

    def report(self, baseline: Samples) -> dict[str, Any]:
        """The figures, and a warning for each that a quiet machine would not show."""
        total, stolen = (now - then for now, then in zip(_processor_times(), self.before, strict=True))
        third = max(1, len(baseline) // 3)
        facts = {
            "load_before": round(self.load, 2),
            "steal": round(stolen / total, 4) if total else 0.0,
            "baseline_spread": round(percentile(baseline, 0.95) / median(baseline), 3),
            "baseline_drift": round(median(baseline[-third:]) / median(baseline[:third]) - 1, 3),
        }
        return {**facts, "warnings": quiet_warnings(facts)}


def quiet_warnings(facts: Mapping[str, float]) -> list[str]:
    """One line for each figure that lies outside of what a quiet machine shows."""
    out = []
    if facts["load_before"] > LOAD_LIMIT:
        out.append(f"load average {facts['load_before']:.2f} before the run: other programs were running")
    if facts["steal"] > STEAL_LIMIT:
        out.append(f"{facts['steal']:.1%} of the processor time went to other virtual machines")
    if facts["baseline_spread"] > SPREAD_LIMIT:
        out.append(f"p95 of the baseline is {facts['baseline_spread']:.2f} times its p50: the machine was not quiet")
    if abs(facts["baseline_drift"]) > DRIFT_LIMIT:
        moved = f"{facts['baseline_drift']:+.0%}"
        out.append(f"the p50 of the baseline moved by {moved} from the first third of the runs to the last")
    return out


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned text; the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *map(line, rows)])
