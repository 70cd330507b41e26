"""``nsbox run --review``: what changed, shown on the terminal, and the question whether it may leave the sandbox."""

from __future__ import annotations

import os

from nsbox.cli_output import say
from nsbox.errors import SpecError
from nsbox.light import TYPE_CHECKING, contextlib
from nsbox.report import Result

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

# The command wrote to the same terminal. Undone is what could hide or garble what follows: another character set,
# colours, the alternate screen, a hidden cursor, a scrolling region (xterm control sequences: DECSTR and others).
_SANE = "\x1b[!p\x1b(B\x0f\x1b[0m\x1b[?1049l\x1b[?25h\r\n"
_COLOURS = {"+": "32", "-": "31", "@": "36", "!": "1;31"}
_DONE = ("exported", "applied")


class Terminal:
    """The controlling terminal: neither redirection nor the command's own input can answer for the person."""

    def __init__(self, question: str) -> None:
        self._question = question
        try:
            self._fd = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError:
            raise SpecError(
                "--review: there is no terminal to ask on; use --export DIR and look at what is in it, or --apply"
            ) from None

    def __call__(self, text: str) -> bool:
        """Show ``text`` and ask; only a plain yes is one."""
        with self._line_by_line():
            return self._ask(text)

    @contextlib.contextmanager
    def _line_by_line(self) -> Iterator[None]:
        """Answers are lines that are echoed, whatever was made of the terminal before (``--tty``)."""
        import termios

        before = termios.tcgetattr(self._fd)
        now = termios.tcgetattr(self._fd)
        now[0] |= termios.ICRNL
        now[1] |= termios.OPOST | termios.ONLCR
        now[3] |= termios.ICANON | termios.ECHO | termios.ISIG
        termios.tcsetattr(self._fd, termios.TCSADRAIN, now)
        try:
            yield
        finally:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, before)

    def _ask(self, text: str) -> bool:
        lines = [_SANE, *(_coloured(line) + "\n" for line in text.splitlines()), f"{self._question} [y/N] "]
        try:
            self._write("".join(lines).encode("utf-8", "backslashreplace"))
            self._forget_typed()
            return os.read(self._fd, 1024).strip().lower() in (b"y", b"yes")
        except OSError:
            return False

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def _forget_typed(self) -> None:
        """What was typed before the question was shown is no answer, nor is what the terminal itself replied to some
        sequence that the command wrote."""
        import termios

        termios.tcdrain(self._fd)
        termios.tcflush(self._fd, termios.TCIFLUSH)

    def close(self) -> None:
        """Close the terminal. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _coloured(line: str) -> str:
    colour = None if line.startswith(("+++", "---")) else _COLOURS.get(line[:1])
    return f"\x1b[{colour}m{line}\x1b[0m" if colour else line


def terminal(values: Mapping[str, Any]) -> Terminal | None:
    """The terminal that ``--review`` asks on, None where it was not asked for. Raises SpecError where there is none."""
    if not values.get("review"):
        return None
    if values.get("workspace") is None and "profile" not in values:
        raise SpecError("--review: there is nothing to look at; give a --workspace as well")
    return Terminal("Copy this to the export directory?" if _only_exports(values) else "Apply this to the workspace?")


def _only_exports(values: Mapping[str, Any]) -> bool:
    return "export" in values and not values.get("apply")


def options(values: Mapping[str, Any]) -> dict[str, Any]:
    """What ``--review`` means for the Spec: to apply, unless only an export was asked for."""
    return {} if not values.get("review") or _only_exports(values) else {"apply": True}


def tell(result: Result, *, verbose: bool) -> None:
    """After the end: what was taken out in one line, and one for each change that was not."""
    for secret in result.boundary.get("secrets", ()):
        if not secret["masked"]:
            say(f"secret {secret['name']} is too short to be masked in the output")
    outputs = [entry for entry in result.boundary["outputs"] if "action" in entry]
    for action in _DONE:
        count = sum(entry["action"] == action for entry in outputs)
        if count and verbose:
            say(f"{count} {'change was' if count == 1 else 'changes were'} {action}")
    for entry in outputs:
        if entry["action"] == "held_back":
            say(f"held back: {entry['path']}: {entry['why']}; to let it out: --allow-trusted {entry['path']}")
        elif entry["action"] in ("conflict", "skipped"):
            say(f"{entry['action']}: {entry['path']}: {entry['why']}")
    if outputs and all(entry.get("why") == "declined" for entry in outputs):
        say("nothing was taken out")
