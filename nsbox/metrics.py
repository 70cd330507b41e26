"""The KPIs over boundary logs: how much runs in sandboxes, how long those live, which limits are hit, what is let in.

One pass over any number of logs, in any order. A line that is not an event is counted and passed over: a log may end in
the middle of a line, or be of a later version.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

SCHEMA = 1
TOP_DESTINATIONS, SLOWEST = 20, 10


class RunFacts:
    """What is kept of one sandbox."""

    __slots__ = (
        "argv",
        "delivered",
        "found",
        "lifetime",
        "limits",
        "max_lifetime",
        "open",
        "reason",
        "sensitive",
        "start",
    )

    def __init__(self) -> None:
        self.start: str = ""
        self.argv: tuple[str, ...] = ()
        self.reason: str = ""
        self.lifetime: float | None = None
        self.max_lifetime: float | None = None
        self.open = False
        self.sensitive = self.delivered = self.found = 0
        self.limits: Counter[str] = Counter()

    def overstayed(self) -> bool:
        """Whether it existed longer than allowed, the time for ending it aside."""
        if self.lifetime is None or self.max_lifetime is None:
            return False
        return self.lifetime > self.max_lifetime * 1.05 + 1


class Collected:
    """All that the KPIs are made of. ``kpis`` makes them; the page with graphs looks at the rest as well."""

    def __init__(self) -> None:
        self.runs: dict[str, RunFacts] = {}
        self.destinations: dict[tuple[str, int, str], Counter[str]] = {}
        self.refusals: Counter[str] = Counter()
        self.refused: list[tuple[str, str, str]] = []  #: (time, kind, why), the first so many
        self.executions: Counter[str] = Counter()
        self.snapshots: list[tuple[str, str, int, int]] = []  #: (time, process, in sandboxes, past them)
        self.leaks = self.unreadable = self.lines = 0
        self.first = self.last = ""
        self._processes: dict[str, tuple[int, int, int]] = {}

    def read(self, lines: Iterable[str | bytes]) -> "Collected":
        """Take in the lines of a log."""
        for line in lines:
            if not line.strip():
                continue
            self.lines += 1
            try:
                self.take(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                self.unreadable += 1
        return self

    def take(self, event: dict[str, Any]) -> None:
        """Take in one event. Raises ValueError, TypeError, KeyError or AttributeError for what is none."""
        name, when, sandbox = event["event"], event["ts"], event["sandbox"]
        if event["schema"] != SCHEMA or not isinstance(when, str) or not isinstance(sandbox, str):
            raise ValueError("not an event of this version")
        handler = _HANDLERS.get(name)
        if handler is None and name not in _NOT_COUNTED:
            raise ValueError("no known event")
        if handler is not None:
            handler(self, event)
        self.first = min(self.first or when, when)
        self.last = max(self.last, when)

    def run(self, event: dict[str, Any]) -> RunFacts:
        """The sandbox that an event belongs to."""
        return self.runs.setdefault(event["sandbox"], RunFacts())

    def start(self, event: dict[str, Any]) -> None:
        argv, sensitive, found = (tuple(event.get(name) or ()) for name in ("argv", "sensitive_mounts", "found"))
        longest = event.get("max_lifetime_s")
        if longest is not None:
            longest = float(longest)
        run = self.run(event)
        run.start, run.argv, run.open = event["ts"], tuple(map(str, argv)), run.open or event.get("open_egress") is True
        run.sensitive, run.found, run.max_lifetime = len(sensitive), len(found), longest

    def end(self, event: dict[str, Any]) -> None:
        lifetime = float(event["lifetime_seconds"])
        if not 0 <= lifetime < math.inf:
            raise ValueError("no lifetime")
        run = self.run(event)
        run.lifetime, run.reason = lifetime, str(event["reason"])

    def limit(self, event: dict[str, Any]) -> None:
        name, count = str(event["limit"]), int(event.get("count", 1))
        self.run(event).limits[name] += count

    def deliver(self, event: dict[str, Any]) -> None:
        self.run(event).delivered += 1

    def connect(self, event: dict[str, Any]) -> None:
        key = (str(event.get("host") or event["address"]), int(event["port"]), str(event["protocol"]))
        new = Counter({str(event["verdict"]): int(event.get("connections", 1))})
        new += Counter({name: int(event.get(name, 0)) for name in ("tx_bytes", "rx_bytes")})
        self.destinations.setdefault(key, Counter()).update(new)

    def policy(self, event: dict[str, Any]) -> None:
        run = self.run(event)
        run.open = run.open or event.get("open_egress") is True

    def output(self, event: dict[str, Any]) -> None:
        self.leaks += len(event.get("secrets") or ())

    def refusal(self, event: dict[str, Any]) -> None:
        kind, why = str(event["kind"]), str(event["why"])
        self.refusals[kind] += 1
        if len(self.refused) < 1000:
            self.refused.append((event["ts"], kind, why))

    def coverage(self, event: dict[str, Any]) -> None:
        """Counts of a process only grow; what they grew by is added, whatever order the lines come in."""
        if event.get("reported_by_parent"):
            return
        now = (int(event["sandboxed"]), int(event["bare"]), int(event.get("refused", 0)))
        process = str(event["process"])
        before = self._processes.get(process, (0, 0, 0))
        grown = [max(0, new - old) for new, old in zip(now, before, strict=True)]
        self._processes[process] = (max(now[0], before[0]), max(now[1], before[1]), max(now[2], before[2]))
        for name, count in zip(("sandboxed", "bare", "refused"), grown, strict=True):
            self.executions[name] += count
        self.snapshots.append((event["ts"], process, now[0], now[1]))


_HANDLERS = {
    "sandbox.start": Collected.start,
    "sandbox.end": Collected.end,
    "limit": Collected.limit,
    "secret.deliver": Collected.deliver,
    "connect": Collected.connect,
    "policy": Collected.policy,
    "output": Collected.output,
    "refusal": Collected.refusal,
    "coverage": Collected.coverage,
}
_NOT_COUNTED = ("input", "secret.revoke", "dns.query", "command")


def collect(*logs: Iterable[str | bytes]) -> Collected:
    """Read logs."""
    found = Collected()
    for log in logs:
        found.read(log)
    return found


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """The nearest rank: the smallest value that so many per cent do not exceed. None of nothing."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def share(part: float, whole: float) -> float:
    """A fraction from 0 to 1; 0 of nothing."""
    return round(part / whole, 6) if whole else 0.0


def kpis(*logs: Iterable[str | bytes]) -> dict[str, Any]:
    """The KPIs over the lines of any number of logs."""
    return compute(collect(*logs))


def compute(found: Collected) -> dict[str, Any]:
    """The KPIs by their names, as plain values."""
    runs = list(found.runs.values())
    lifetimes = sorted(run.lifetime for run in runs if run.lifetime is not None)
    executed = found.executions["sandboxed"] + found.executions["bare"]
    return {
        "schema": SCHEMA,
        "first": found.first or None,
        "last": found.last or None,
        "runs": len(runs),
        "unfinished": len(runs) - len(lifetimes),
        "sandboxed_percent": round(100 * found.executions["sandboxed"] / executed, 3) if executed else None,
        "executions": {name: found.executions[name] for name in ("sandboxed", "bare", "refused")},
        "lifetime_seconds": {
            "p50": percentile(lifetimes, 50),
            "p95": percentile(lifetimes, 95),
            "max": lifetimes[-1] if lifetimes else None,
            "overstayed": sum(run.overstayed() for run in runs),
        },
        "limit_hits": _limit_hits(runs),
        "open_egress": sum(run.open for run in runs),
        "sensitive_mounts": sum(run.sensitive > 0 for run in runs),
        "secrets_present": {
            "delivered": sum(run.delivered for run in runs),
            "found": sum(run.found for run in runs),
            "runs_with_delivered": sum(run.delivered > 0 for run in runs),
            "runs_with_found": sum(run.found > 0 for run in runs),
            "in_outputs": found.leaks,
        },
        "destinations": _destinations(found),
        "refusals": dict(sorted(found.refusals.items())),
        "unreadable_lines": found.unreadable,
    }


def _limit_hits(runs: list[RunFacts]) -> dict[str, dict[str, float]]:
    names = sorted({name for run in runs for name in run.limits})
    out: dict[str, dict[str, float]] = {}
    for name in names:
        hit = sum(name in run.limits for run in runs)
        out[name] = {"count": sum(run.limits[name] for run in runs), "runs": hit, "share": share(hit, len(runs))}
    return out


def _destinations(found: Collected) -> list[dict[str, Any]]:
    def weight(item: tuple[tuple[str, int, str], Counter[str]]) -> tuple[int, tuple[str, int, str]]:
        return -(item[1]["allowed"] + item[1]["denied"]), item[0]

    return [
        {
            "destination": host,
            "port": port,
            "protocol": protocol,
            **{name: seen[name] for name in ("allowed", "denied", "tx_bytes", "rx_bytes")},
        }
        for (host, port, protocol), seen in sorted(found.destinations.items(), key=weight)[:TOP_DESTINATIONS]
    ]
