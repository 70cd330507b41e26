"""``nsbox shell`` and ``--tty``: this terminal joined to one of the sandbox's own.

The payload never has a descriptor of the caller's terminal, so it can neither feed it input (TIOCSTI) nor change its
modes. What it writes is shown as it comes: control sequences act on the terminal as they would over ssh.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from nsbox import api
from nsbox.cli_options import RUN
from nsbox.cli_output import Output
from nsbox.report import Result
from nsbox.spec import Spec

if TYPE_CHECKING:
    from nsbox.cli_run import Report
    from nsbox.crossing import Review

#: the best shell there is inside; a login to nowhere, so no profile is read
SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")
_KEYBOARD, _SCREEN = 0, 1


def shell(values: Mapping[str, Any]) -> int:
    """An interactive shell, or without a keyboard one that runs the script on standard input; the exit status.

    Raises what ``nsbox.run`` raises."""
    from nsbox import cli_run

    values = {"timeout": "unlimited", "cpu_time": "unlimited", "output": "unlimited", **values}
    values["tty" if os.isatty(_KEYBOARD) else "stdin"] = True
    if "profile" in values:
        from nsbox import profiles

        # The limits of a profile were chosen by somebody, ours were not.
        given = profiles.load(values["profile"])
        for name in ("timeout", "cpu_time", "output"):
            if name in given and values[name] == "unlimited":
                del values[name]
    return cli_run.run(values, SHELL, RUN)


def run(
    values: Mapping[str, Any], spec: Spec, command: Sequence[str], report: "Report", review: "Review | None"
) -> Result:
    """One command on a terminal of the sandbox's own, joined to ours. What is no keyboard is passed on with --stdin."""
    import termios

    if "TERM" not in spec.env and os.isatty(_SCREEN):
        spec = spec.replace(env={**spec.env, "TERM": os.environ.get("TERM", "dumb")})
    timeout = spec.limits.timeout
    screen = Output(_SCREEN, None if timeout is None else time.monotonic() + timeout, keep=report.wanted)
    stdin = _KEYBOARD if values.get("stdin") or os.isatty(_KEYBOARD) else None
    publish = values.get("publish", ())
    size = termios.tcgetwinsize(_KEYBOARD) if os.isatty(_KEYBOARD) else True
    with _raw_terminal(_KEYBOARD) as follow:
        result = api.run(
            command, spec, stdin=stdin, on_stdout=screen.write, tty=size, on_tty=follow, review=review, publish=publish
        )
    if report.wanted:
        result.stdout = b"".join(screen.kept or ())
    return result


@contextlib.contextmanager
def _raw_terminal(keyboard: int) -> Iterator[Callable[[int], object]]:
    """Our terminal passes every key on meanwhile, and is put back however this ends. What is answered makes the
    sandbox's terminal, by the descriptor of its master, as large as ours, now and whenever ours changes."""
    import termios
    import tty

    if not os.isatty(keyboard):
        yield lambda master: None
        return
    master = -1
    before = termios.tcgetattr(keyboard)

    def resize(_number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(OSError, termios.error):
            if master >= 0:
                termios.tcsetwinsize(master, termios.tcgetwinsize(keyboard))

    def again(_number: int, _frame: FrameType | None) -> None:
        # Stopped from elsewhere and continued: the shell has put its own modes back meanwhile.
        with contextlib.suppress(OSError, termios.error):
            tty.setraw(keyboard, termios.TCSANOW)
        resize(_number, _frame)

    def follow(fd: int) -> None:
        nonlocal master
        master = fd
        resize(0, None)

    handlers = {
        signal.SIGWINCH: signal.signal(signal.SIGWINCH, resize),
        signal.SIGCONT: signal.signal(signal.SIGCONT, again),
    }
    try:
        tty.setraw(keyboard, termios.TCSANOW)
        yield follow
    finally:
        master = -1
        for number, handler in handlers.items():
            signal.signal(number, handler)
        # SIGTTOU would stop us here if we were put into the background meanwhile: tcsetattr(3).
        old = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTTOU, old)
