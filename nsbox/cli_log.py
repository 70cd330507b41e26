"""``nsbox log``: the boundary log for people, as it is or as it grows."""

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from nsbox import logview
from nsbox.cli_output import Output
from nsbox.errors import SpecError

#: Styles of ``nsbox.logview`` → SGR parameters (ECMA-48), where rich is not installed.
_SGR = {"bold": "1", "bold red": "1;31", "dim": "2", "green": "32"}


def show(values: dict[str, Any], words: list[str], colour: bool) -> int:
    """Print a log. With ``--sandbox`` one run as a story; with ``--json`` the events themselves. Raises SpecError."""
    path = _path(words)
    out = Output(1, None, keep=False)
    events = logview.events(path, sandbox=values.get("sandbox"), follow=bool(values.get("follow")))
    count = 0
    for line in _lines(events, values, _painter(colour)):
        out.write(f"{line}\n".encode("utf-8", "surrogateescape"))
        count += 1
    if not count and values.get("sandbox"):
        raise SpecError(f"--sandbox: {path} has no sandbox {values['sandbox']!r}; nsbox log {path} lists them")
    return 0


def _path(words: list[str]) -> str:
    if len(words) > 1:
        raise SpecError(f"log: one file, not {len(words)}; write: nsbox log FILE")
    path = words[0] if words else os.environ.get("NSBOX_LOG", "")
    if not path:
        raise SpecError("log: no file; write nsbox log FILE, or set NSBOX_LOG")
    return path


def _lines(events: Iterable[logview.Event], values: dict[str, Any], paint: Callable[[Any], str]) -> Iterable[str]:
    if values.get("json"):
        import json

        # As it was written, but for what no terminal should be sent.
        return (
            json.dumps(event, ensure_ascii=True, separators=(",", ":")).replace("\x7f", "\\u007f") for event in events
        )
    if values.get("sandbox"):
        return logview.story(events)
    return (paint(logview.parts(event)) for event in events)


def _painter(colour: bool) -> Callable[[list[logview.Part]], str]:
    if not colour:
        return logview.plain
    try:
        from rich.console import Console  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return _sgr
    console = Console(file=sys.stdout, force_terminal=True, soft_wrap=True, highlight=False)

    def paint(pieces: list[logview.Part]) -> str:
        with console.capture() as captured:
            console.print(logview.rich_text(pieces), end="")
        return str(captured.get())

    return paint


def _sgr(pieces: list[logview.Part]) -> str:
    return "".join(f"\x1b[{_SGR[style]}m{text}\x1b[0m" if style in _SGR else text for text, style in pieces)
