"""A self-test as text for people and as JSON for programs."""

import json
import os
import textwrap
from collections.abc import Sequence
from typing import Any

from nsbox.selftest.catalogue import BY_ID
from nsbox.selftest.runner import Report, verdict
from nsbox.selftest.stage import Noted

SCHEMA = 1
_TINT = {"stopped": "\033[32m", "through": "\033[31m"}
_PLAIN = "\033[0m"


def _caller() -> str:
    return "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"


def _kernel() -> str:
    return os.uname().release


def document(report: Report) -> dict[str, Any]:
    """What ``--json`` prints; docs/selftest.md says what each field means."""
    attempts = [
        {"id": a.threat, "attack": a.attack, "control": a.control, "inside": a.inside, "result": a.result}
        for a in report.attempts
    ]
    return {
        "schema": SCHEMA,
        "profile": report.profile,
        "caller": _caller(),
        "kernel": _kernel(),
        "attempts": attempts,
        "not_attempted": [{"id": threat, "reason": why} for threat, why in sorted(report.left.items())],
        "seconds": round(report.seconds, 2),
        "verdict": verdict(report.attempts),
    }


def to_json(report: Report) -> str:
    """The document as text."""
    return json.dumps(document(report), indent=2)


def overall(attempts: Sequence[Noted]) -> str:
    """What all attempts of one threat came to together."""
    results = {item.result for item in attempts}
    return next((result for result in ("through", "not shown", "stopped") if result in results), "absent")


def by_threat(report: Report) -> dict[str, list[Noted]]:
    """The attempts of each threat, in the order of the catalogue."""
    found: dict[str, list[Noted]] = {}
    for item in report.attempts:
        found.setdefault(item.threat, []).append(item)
    return found


def conclusion(report: Report) -> str:
    """The verdict in words, and what was not attempted."""
    groups = {threat: overall(items) for threat, items in by_threat(report).items()}
    made = {threat: result for threat, result in groups.items() if result in ("stopped", "through")}
    through = [threat for threat, result in made.items() if result == "through"]
    ways = sum(item.result in ("stopped", "through") for item in report.attempts)
    text = f"{len(made)} attacks attempted in {ways} ways, {len(made) - len(through)} stopped"
    if through:
        text += f"; GOT THROUGH: {', '.join(through)}"
    nothing = sum(item.result == "absent" for item in report.attempts)
    if nothing:
        text += f"; {nothing} ways are to what this kernel does not have"
    reasons: dict[str, list[str]] = {}
    for threat, why in report.left.items():
        reasons.setdefault(why, []).append(threat)
    for threat, result in groups.items():
        if result == "not shown":
            reasons.setdefault("their controls do not work here", []).append(threat)
    if reasons:
        text += "; not attempted: "
        text += "; ".join(f"{', '.join(threats)} because {why}" for why, threats in reasons.items())
    return text + "."


def text(report: Report, colour: bool, every: bool, width: int = 100) -> str:
    """One line for each attack, or, with ``every``, for each attempt; then the verdict."""
    lines = [f"profile {report.profile}, as {_caller()}, Linux {_kernel()}, {report.seconds:.1f} s", ""]
    for threat, items in by_threat(report).items():
        result = overall(items)
        tint, plain = (_TINT.get(result, ""), _PLAIN) if colour else ("", "")
        ways = f"{len(items)} way{'s' if len(items) > 1 else ''}"
        lines.append(f"{tint}{result:<9}{plain}  {threat}  {BY_ID[threat].attack} ({ways})")
        for item in items:
            if every or item.result in ("through", "not shown"):
                lines.append(f"             {item.result}: {item.attack}: outside {item.control}, inside {item.inside}")
    return "\n".join([*lines, "", *textwrap.wrap(conclusion(report), width, break_on_hyphens=False)]) + "\n"
