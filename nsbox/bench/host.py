"""The machine that figures come from, and whether it was left alone meanwhile."""

import os
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nsbox.bench.measure import Samples, median, percentile

LOAD_LIMIT = 0.3  #: of one processor, before the run
SPREAD_LIMIT = 1.5  #: p95 / p50 of the baseline
DRIFT_LIMIT = 0.10  #: between the medians of the first and the last third of the baseline
STEAL_LIMIT = 0.02  #: of all processor time during the run
LOOK_S = 0.3  #: how long the machine is looked at before a run


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


def _processor_times() -> tuple[int, int, int]:
    """(all, idle, stolen) ticks since boot: proc_stat(5)."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4], ticks[7]


def busy_processors() -> float:
    """How many processors are at work right now while this process waits. The load average tells of the last minute,
    which is also that of the run before."""
    before = _processor_times()
    time.sleep(LOOK_S)
    total, idle, _ = (now - then for now, then in zip(_processor_times(), before, strict=True))
    return (total - idle) / total * (os.cpu_count() or 1) if total else 0.0


@dataclass
class Quiet:
    """Whether the machine was left alone; made before a run, asked after it."""

    load: float = field(default_factory=busy_processors)
    before: tuple[int, int, int] = field(default_factory=_processor_times)

    def report(self, baseline: Samples) -> dict[str, Any]:
        """The figures, and a warning for each that a quiet machine would not show."""
        total, _, stolen = (now - then for now, then in zip(_processor_times(), self.before, strict=True))
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
        out.append(f"{facts['load_before']:.2f} processors were busy before the run: other programs were running")
    if facts["steal"] > STEAL_LIMIT:
        out.append(f"{facts['steal']:.1%} of the processor time went to other virtual machines")
    if facts["baseline_spread"] > SPREAD_LIMIT:
        out.append(f"p95 of the baseline is {facts['baseline_spread']:.2f} times its p50: the machine was not quiet")
    if abs(facts["baseline_drift"]) > DRIFT_LIMIT:
        moved = f"{facts['baseline_drift']:+.0%}"
        out.append(f"the p50 of the baseline moved by {moved} from the first third of the runs to the last")
    return out
