"""Facts as text for people and as JSON for programs."""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

from nsbox.doctor.fact import Fact

_GREEN, _RED, _YELLOW, _DIM, _BOLD, _PLAIN = "\033[32m", "\033[31m", "\033[33m", "\033[2m", "\033[1m", "\033[0m"
_NARROWEST, _WIDEST = 40, 110
_LIMITS = ("memory", "pids", "cpu")


def to_json(facts: Sequence[Fact]) -> str:
    """``{"facts": [{"name", "ok", "value", "reason", "remedy"}, ...]}``."""
    fields = ("name", "ok", "value", "reason", "remedy")
    return json.dumps({"facts": [{field: getattr(fact, field) for field in fields} for fact in facts]}, indent=2)


def marks(encoding: str) -> tuple[str, str, str, str]:
    """Marks for good, missing but needed, missing, and a command, in what the encoding can say."""
    try:
        "✓✗→".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "+", "x", "!", "->"
    return "✓", "✗", "!", "→"


def shown(value: str | int | bool) -> str:
    """A value in words."""
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _and(words: Sequence[str]) -> str:
    return " and ".join(words) if len(words) < 3 else f"{', '.join(words[:-1])} and {words[-1]}"


def _limits(facts: Sequence[Fact]) -> str:
    """The limits that the kernel does not enforce, in a clause with the remedy; "" where it enforces all."""
    found = {name: fact for name in _LIMITS for fact in facts if fact.name == f"{name}_limit" and not fact.ok}
    watched = [name for name, fact in found.items() if fact.value == "watched"]
    absent = [name for name, fact in found.items() if fact.value != "watched"]
    clauses = []
    if watched:
        clauses.append(f"{_and(watched)} {'is' if len(watched) == 1 else 'are'} watched, not enforced by the kernel")
    if absent:
        clauses.append(f"{_and(absent)} {'is' if len(absent) == 1 else 'are'} not limited")
    if not clauses:
        return ""
    return f"{', and '.join(clauses)}: {next(iter(found.values())).remedy}"


def verdict(facts: Sequence[Fact], uid: int) -> str:
    """One line: whether sandboxes can run here, and the most important thing that is missing."""
    for fact in facts:
        if fact.needed and not fact.ok:
            return f"Sandboxes cannot run here: {fact.reason}: {fact.remedy}"
    who = next((fact for fact in facts if fact.name == "caller"), None)
    as_whom = "as root" if uid == 0 and (who is None or who.ok) else "as an ordinary user"
    start = f"Sandboxes can run here {as_whom}"
    limits = _limits(facts)
    if limits:
        return f"{start}; {limits}"
    lacking = [fact.name.replace("_", " ") for fact in facts if not fact.ok and fact.name != "caller"]
    if lacking:
        return f"{start} with every limit enforced by the kernel; without {_and(lacking)}, see above"
    return f"{start}, with everything that nsbox can enforce"


def _block(fact: Fact, mark: str, arrow: str, column: int, width: int, dim: str, plain: str) -> list[str]:
    indent = " " * (column + 4)
    name = fact.name.replace("_", " ")
    lines = textwrap.wrap(shown(fact.value), width - len(indent), break_on_hyphens=False) or [""]
    block = [f"{mark} {name:<{column}}  {lines[0]}", *(indent + line for line in lines[1:])]
    if fact.reason and not fact.ok:
        reason = textwrap.wrap(fact.reason, width - len(indent), break_long_words=False, break_on_hyphens=False)
        block += [f"{indent}{dim}{line}{plain}" for line in reason]
    if fact.remedy and not fact.ok:
        # Never broken into lines: it is there to be copied.
        block.append(f"{indent}{arrow} {fact.remedy}")
    return [line.rstrip() for line in block]


def render(facts: Sequence[Fact], colour: bool, *, width: int = 0, encoding: str = "", uid: int | None = None) -> str:
    """Text for a terminal: a line or more for each fact, then the verdict.

    ``width`` and ``encoding`` are those of the terminal or of standard output unless given, ``uid`` the caller's.
    """
    width = max(_NARROWEST, min(width or shutil.get_terminal_size((80, 24)).columns, _WIDEST))
    good, bad, lacking, arrow = marks(encoding or getattr(sys.stdout, "encoding", "") or "ascii")
    green, red, yellow, dim, bold, plain = (
        (_GREEN, _RED, _YELLOW, _DIM, _BOLD, _PLAIN) if colour else ("", "", "", "", "", "")
    )
    column = max((len(fact.name) for fact in facts), default=0)
    lines: list[str] = []
    given: dict[str, str] = {}
    for fact in facts:
        tint, mark = (green, good) if fact.ok else (red, bad) if fact.needed else (yellow, lacking)
        first = given.setdefault(fact.remedy, fact.name) if fact.remedy else fact.name
        if first != fact.name:
            fact = fact._replace(remedy=f"as for {first.replace('_', ' ')}")
        lines += _block(fact, f"{tint}{mark}{plain}", arrow, column, width, dim, plain)
    final = verdict(facts, os.geteuid() if uid is None else uid)
    return "\n".join([*lines, "", f"{bold}{final}{plain}"])
