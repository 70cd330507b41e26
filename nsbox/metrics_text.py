"""The KPIs for people and for Prometheus."""

from collections.abc import Iterator
from typing import Any

from nsbox.diff import escaped
from nsbox.errors import HostError


def text(found: dict[str, Any]) -> str:
    """A page of plain text."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    runs = found["runs"]
    yield f"{runs} runs from {found['first'] or '-'} to {found['last'] or '-'}"
    if found["unfinished"]:
        yield f"  {found['unfinished']} without an end: still running, or their process was killed"
    if found["unreadable_lines"]:
        yield f"  {found['unreadable_lines']} lines could not be read"
    yield ""
    executions, percent = found["executions"], found["sandboxed_percent"]
    if percent is None:
        yield _line("sandboxed_percent", "unknown: call nsbox.coverage.install()")
    else:
        inside, past = executions["sandboxed"], executions["bare"]
        yield _line("sandboxed_percent", f"{percent:g} % ({inside} inside, {past} past the sandboxes)")
    lifetime = found["lifetime_seconds"]
    values = ", ".join(f"{name} {_seconds(lifetime[name])}" for name in ("p50", "p95", "max"))
    yield _line("lifetime_seconds", f"{values}; {lifetime['overstayed']} longer than allowed")
    hits = found["limit_hits"]
    yield _line("limit_hits", "" if hits else "none")
    for name, hit in hits.items():
        yield f"    {escaped(name):<16}{hit['runs']} runs ({100 * hit['share']:.1f} %), {hit['count']} times"
    yield _line("open_egress", f"{found['open_egress']} runs")
    yield _line("sensitive_mounts", f"{found['sensitive_mounts']} runs")
    secrets = found["secrets_present"]
    yield _line("secrets_present", f"{secrets['delivered']} delivered in {secrets['runs_with_delivered']} runs")
    yield _line("", f"{secrets['found']} found without purpose in {secrets['runs_with_found']} runs")
    yield _line("", f"{secrets['in_outputs']} in changed files")
    yield _line("refusals", ", ".join(f"{escaped(k)} {n}" for k, n in found["refusals"].items()) or "none")
    yield _line("destinations", "" if found["destinations"] else "none")
    for item in found["destinations"]:
        place = f"{escaped(item['destination'])}:{item['port']}/{escaped(item['protocol'])}"
        yield f"    {place:<40}{item['allowed']} allowed, {item['denied']} denied"


def _line(name: str, value: str) -> str:
    return f"{name:<20}{value}".rstrip()


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"


def prometheus(found: dict[str, Any]) -> bytes:
    """The KPIs in the exposition format. Raises HostError where prometheus-client is not installed."""
    try:
        from prometheus_client import CollectorRegistry, Gauge, generate_latest  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise HostError("prometheus-client is not installed", remedy="run: pip install 'nsbox[prometheus]'") from None
    registry = CollectorRegistry()

    def gauge(name: str, help_: str, values: dict[str, float | None], label: str = "") -> None:
        made = Gauge(f"nsbox_{name}", help_, [label] if label else [], registry=registry)
        for key, value in values.items():
            if value is not None:
                (made.labels(key) if label else made).set(value)

    lifetime, secrets, hits = found["lifetime_seconds"], found["secrets_present"], found["limit_hits"]
    gauge("runs", "Sandboxes that were started", {"": found["runs"]})
    if found["sandboxed_percent"] is not None:
        gauge("sandboxed_percent", "Executions that went through nsbox", {"": found["sandboxed_percent"]})
    gauge("executions", "What embedding processes executed", found["executions"], "where")
    quantiles = {name: lifetime[name] for name in ("p50", "p95", "max")}
    gauge("lifetime_seconds", "How long sandboxes existed", quantiles, "quantile")
    gauge("overstayed_runs", "Sandboxes kept longer than allowed", {"": lifetime["overstayed"]})
    gauge("limit_hit_runs", "Runs that touched a limit", {name: hit["runs"] for name, hit in hits.items()}, "limit")
    gauge("limit_hit_share", "The same as a share of runs", {name: hit["share"] for name, hit in hits.items()}, "limit")
    gauge("open_egress_runs", "Runs that could talk to everybody", {"": found["open_egress"]})
    gauge("sensitive_mounts_runs", "Runs with a mount let through by name", {"": found["sensitive_mounts"]})
    present = {name: secrets[name] for name in ("delivered", "found", "in_outputs")}
    gauge("secrets_present", "Secrets inside: on purpose, without, and in outputs", present, "how")
    gauge("refusals", "Refused before anything was started", found["refusals"], "kind")
    gauge("unreadable_lines", "Lines of the log that could not be read", {"": found["unreadable_lines"]})
    return bytes(generate_latest(registry))
