"""``nsbox stats``: the KPIs over boundary logs, as text, JSON, a page, or for Prometheus."""

import contextlib
import os
from typing import Any

from nsbox import metrics, metrics_text
from nsbox.cli_output import Output, say
from nsbox.errors import SpecError


def show(values: dict[str, Any], words: list[str]) -> int:
    """Read the logs once and print, or write, what was asked for. Raises SpecError and HostError."""
    if values.get("json") and values.get("prometheus"):
        raise SpecError("stats: --json and --prometheus both print; choose one")
    found = _collect(words or [path for path in (os.environ.get("NSBOX_LOG", ""),) if path])
    if "html" in values:
        from nsbox import metrics_html

        _write(values["html"], metrics_html.page(found).encode("utf-8", "surrogateescape"))
        if not values.get("json") and not values.get("prometheus"):
            say(f"the page is in {values['html']}")
            return 0
    numbers = metrics.compute(found)
    if values.get("json"):
        import json

        data = json.dumps(numbers, indent=2).encode() + b"\n"
    elif values.get("prometheus"):
        data = metrics_text.prometheus(numbers)
    else:
        data = metrics_text.text(numbers).encode("utf-8", "surrogateescape")
    Output(1, None, keep=False).write(data)
    return 0


def _collect(paths: list[str]) -> metrics.Collected:
    if not paths:
        raise SpecError("stats: no file; write nsbox stats FILE..., or set NSBOX_LOG")
    found = metrics.Collected()
    for path in paths:
        try:
            with open(path, "rb") as file:
                found.read(file)
        except OSError as error:
            raise SpecError(f"stats: {path}: {error.strerror}; name a log that you may read") from None
    return found


def _write(path: str, data: bytes) -> None:
    """Replace a file in one step, so that whoever serves it never gives half a page."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise SpecError(f"--html: {path!r}: {error.strerror}; name a file that you may write") from None
