"""The KPIs as one HTML page that needs nothing else: no script, no font, no request; graphs are inline SVG."""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from nsbox.diff import escaped
from nsbox.metrics import SLOWEST, Collected, RunFacts, compute, percentile, share

BUCKETS, WIDTH, HEIGHT = 48, 460, 120
_STYLE = """
:root{color-scheme:light dark;--ink:#1c2230;--soft:#667085;--line:#d0d5dd;--mark:#2563eb;--page:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#98a2b3;--line:#344054;--mark:#7aa2ff;--page:#10141c}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page)}
body{margin:2rem auto;max-width:62rem;padding:0 1rem}
h1{font-size:1.4rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .5rem}p{color:var(--soft);margin:.2rem 0}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(24rem,1fr));gap:1rem;margin-top:1.5rem}
.card{border:1px solid var(--line);border-radius:.5rem;padding:1rem}.card b{font-size:1.6rem;display:block}
svg{width:100%;height:auto;display:block;margin-top:.5rem}svg text{fill:var(--soft);font-size:11px}
table{border-collapse:collapse;width:100%}
td,th{text-align:left;padding:.3rem .6rem .3rem 0;border-bottom:1px solid var(--line)}
td{overflow-wrap:anywhere;vertical-align:top}td.n,th.n{text-align:right;white-space:nowrap}
"""
_Points = Sequence[float | None]


def page(found: Collected) -> str:
    """The whole page."""
    numbers = compute(found)
    cards = "".join(_cards(found, numbers))
    body = [
        "<h1>nsbox: what runs behind the wall</h1>",
        f"<p>{numbers['runs']} runs, {_text(_minute(found.first))} to {_text(_minute(found.last))}, UTC</p>",
        f'<div class="cards">{cards}</div>',
        "<h2>Let through and refused</h2>",
        _table(("", "runs"), _let_through(numbers)),
        "<h2>Limits</h2>",
        _table(("limit", "runs", "share", "times"), _limits(numbers)),
        "<h2>Refusals, the latest first</h2>",
        _table(("latest", "kind", "why", "times"), _refusals(found)),
        "<h2>The slowest runs</h2>",
        _table(("when", "command", "ended by", "seconds"), _slowest(found.runs.values())),
        "<h2>Destinations</h2>",
        _table(("destination", "allowed", "denied"), _destinations(numbers)),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>nsbox stats</title><style>{_STYLE}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _text(value: object) -> str:
    return escape(escaped(str(value)))


def _cards(found: Collected, numbers: dict[str, Any]) -> Iterable[str]:
    times = _Times(found)
    percent, lifetime, secrets = numbers["sandboxed_percent"], numbers["lifetime_seconds"], numbers["secrets_present"]
    hit = sum(bool(run.limits) for run in found.runs.values())
    yield _card("sandboxed", "unknown" if percent is None else f"{percent:.1f} %", times.sandboxed(), times, "%")
    longest = lifetime["p95"]
    yield _card("lifetime, p95", "-" if longest is None else f"{longest:.3g} s", times.of_runs(_p95), times, "s")
    limit_share = f"{100 * share(hit, numbers['runs']):.1f} % of runs"
    yield _card("limits hit", limit_share, times.of_runs(lambda runs: 100 * share(_hit(runs), len(runs))), times, "%")
    present = f"{secrets['delivered']} delivered, {secrets['found']} found"
    yield _card("secrets present", present, times.of_runs(_secrets), times, " a run")


def _p95(runs: list[RunFacts]) -> float | None:
    return percentile(sorted(run.lifetime for run in runs if run.lifetime is not None), 95)


def _hit(runs: list[RunFacts]) -> int:
    return sum(bool(run.limits) for run in runs)


def _secrets(runs: list[RunFacts]) -> float:
    return share(sum(run.delivered + run.found for run in runs), len(runs))


class _Times:
    """Equal parts of the time that the logs cover."""

    def __init__(self, found: Collected) -> None:
        self.found = found
        self.begin, self.end = _moment(found.first), _moment(found.last)

    def part(self, when: str) -> int:
        span = self.end - self.begin
        return min(BUCKETS - 1, max(0, int((_moment(when) - self.begin) / span * BUCKETS))) if span > 0 else 0

    def of_runs(self, value: Callable[[list[RunFacts]], float | None]) -> _Points:
        parts: list[list[RunFacts]] = [[] for _ in range(BUCKETS)]
        for run in self.found.runs.values():
            if run.start:
                parts[self.part(run.start)].append(run)
        return [value(runs) if runs else None for runs in parts]

    def sandboxed(self) -> _Points:
        inside, past = [0] * BUCKETS, [0] * BUCKETS
        before: dict[str, tuple[int, int]] = {}
        for when, process, boxed, bare in sorted(self.found.snapshots):
            part, old = self.part(when), before.get(process, (0, 0))
            before[process] = boxed, bare
            inside[part] += max(0, boxed - old[0])
            past[part] += max(0, bare - old[1])
        return [100 * share(a, a + b) if a + b else None for a, b in zip(inside, past, strict=True)]


def _moment(when: str) -> float:
    try:
        return datetime.fromisoformat(when).timestamp()
    except ValueError:
        return datetime.now(UTC).timestamp()


def _card(name: str, value: str, points: _Points, times: _Times, unit: str) -> str:
    return (
        f'<section class="card"><p>{_text(name)}</p><b>{_text(value)}</b>{_graph(name, points, times, unit)}</section>'
    )


def _graph(name: str, points: _Points, times: _Times, unit: str) -> str:
    known = [(number, value) for number, value in enumerate(points) if value is not None]
    if not known:
        return "<p>nothing in the logs</p>"
    top = 100.0 if unit == "%" else max(value for _, value in known) or 1.0
    left, right, bottom, height = 6, WIDTH - 6, HEIGHT - 18, HEIGHT - 34

    def place(number: int, value: float) -> tuple[float, float]:
        x = left + (right - left) * (number + 0.5) / BUCKETS
        return round(x, 1), round(bottom - height * value / top, 1)

    path = " ".join(f"{'L' if i else 'M'}{x},{y}" for i, (x, y) in enumerate(place(*item) for item in known))
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="2" fill="var(--mark)"/>' for x, y in (place(*item) for item in known))
    begin, end = (datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M") for at in (times.begin, times.end))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(name)} over time">'
        f'<path d="M{left},{bottom}H{right}" stroke="var(--line)"/>'
        f'<path d="M{left},{bottom - height}H{right}" stroke="var(--line)" stroke-dasharray="3"/>'
        f'<path d="{path}" fill="none" stroke="var(--mark)" stroke-width="1.5"/>{dots}'
        f'<text x="{left}" y="11">{top:.3g}{_text(unit)}</text><text x="{left}" y="{HEIGHT - 4}">{begin}</text>'
        f'<text x="{right}" y="{HEIGHT - 4}" text-anchor="end">{end}</text></svg>'
    )


def _let_through(numbers: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        ("open egress: could talk to everybody", numbers["open_egress"]),
        ("sensitive mounts, by name", numbers["sensitive_mounts"]),
        ("credentials inside without purpose", numbers["secrets_present"]["runs_with_found"]),
        ("kept longer than allowed", numbers["lifetime_seconds"]["overstayed"]),
        ("refused before they began", sum(numbers["refusals"].values())),
    ]


def _refusals(found: Collected) -> list[tuple[object, ...]]:
    grouped: dict[tuple[str, str], list[str]] = {}
    for when, kind, why in found.refused:
        grouped.setdefault((kind, why), []).append(when)
    rows = [(max(times), kind, why, len(times)) for (kind, why), times in grouped.items()]
    return [(_minute(latest), *rest) for latest, *rest in sorted(rows, reverse=True)[:30]]


def _minute(when: str) -> str:
    return when[:16].replace("T", " ") or "-"


def _limits(numbers: dict[str, Any]) -> list[tuple[object, ...]]:
    hits = numbers["limit_hits"].items()
    return [(name, hit["runs"], f"{100 * hit['share']:.1f} %", hit["count"]) for name, hit in hits]


def _slowest(runs: Iterable[RunFacts]) -> list[tuple[object, ...]]:
    ended = sorted((run for run in runs if run.lifetime is not None), key=lambda run: -(run.lifetime or 0))[:SLOWEST]
    return [(_minute(run.start), " ".join(run.argv)[:200], run.reason, f"{run.lifetime:.3f}") for run in ended]


def _destinations(numbers: dict[str, Any]) -> list[tuple[object, ...]]:
    found = numbers["destinations"]
    return [(f"{d['destination']}:{d['port']}/{d['protocol']}", d["allowed"], d["denied"]) for d in found]


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = list(rows)
    if not lines:
        return "<p>none</p>"
    numeric = [
        isinstance(value, int) or titles[number] in ("seconds", "share") for number, value in enumerate(lines[0])
    ]

    def cell(tag: str, number: int, value: object) -> str:
        kind = ' class="n"' if numeric[number] else ""
        return f"<{tag}{kind}>{_text(value)}</{tag}>"

    head = "".join(cell("th", number, title) for number, title in enumerate(titles))
    body = ["".join(cell("td", number, value) for number, value in enumerate(row)) for row in lines]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>"
