"""``nsbox selftest``: the attacks that are safe on this host, and what came of them."""

from typing import Any

from nsbox.cli_output import Output
from nsbox.errors import SpecError


def selftest(values: dict[str, Any], words: list[str], colour: bool, width: int) -> int:
    """Attempt and print; 0 when all was stopped, 1 when something got through. Raises SpecError and HostError."""
    if words:
        raise SpecError(f"selftest: takes no {words[0]!r}; nsbox selftest --help tells the options")
    from nsbox.selftest import render, runner

    report = runner.run(values.get("profile") or "default")
    if values.get("json"):
        said = render.to_json(report) + "\n"
    else:
        said = render.text(report, colour, bool(values.get("verbose")), width)
    Output(1, None, keep=False).write(said.encode("utf-8", "replace"))
    return 1 if runner.verdict(report.attempts) == "through" else 0
