"""The ``nsbox`` command: words to functions, errors to one line and a status. Nothing heavy is imported at the top.

Start-up budget: everything that this module adds to ``import nsbox.api`` on the way of ``nsbox run`` stays under 2 ms.
"""

from __future__ import annotations

import os
import sys

from nsbox.errors import CommandError, NsboxError, SpecError
from nsbox.light import TYPE_CHECKING, signal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class Interrupted(BaseException):
    """A signal asks us to end; whatever runs inside ends on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _width() -> int:
    import shutil

    return min(120, shutil.get_terminal_size((100, 24)).columns)


def _colour() -> bool:
    return os.isatty(1) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _print(text: str) -> None:
    from nsbox.cli_output import Output

    Output(1, None, keep=False).write(text.encode("utf-8", "surrogateescape"))


def _help(name: str, status: int = 0) -> int:
    from nsbox.cli_words import help_of

    _print(help_of(name, _width()))
    return status


def _run(arguments: list[str]) -> int:
    from nsbox.cli_options import RUN, parse

    values, command = parse(arguments, RUN)
    if values.get("help"):
        return _help("run")
    if not command:
        raise SpecError("run: no command; write it after the options: nsbox run -- COMMAND")
    from nsbox.cli_run import run

    return run(values, command, RUN)


def _shell(arguments: list[str]) -> int:
    from nsbox.cli_options import RUN, parse

    values, words = parse(arguments, RUN)
    if values.get("help"):
        return _help("shell")
    if words:
        raise SpecError(f"shell: takes no command; for a command on a terminal: nsbox run --tty -- {words[0]}")
    from nsbox.cli_shell import shell

    return shell(values)


def _python(arguments: list[str]) -> int:
    from nsbox.cli_options import PYTHON, parse

    values, words = parse(arguments, PYTHON, ends="-c")
    if values.get("help"):
        return _help("python")
    from nsbox.cli_python import run_python

    return run_python(values, words)


def _profiles(arguments: list[str]) -> int:
    from nsbox import profiles
    from nsbox.cli_options import HELP, parse

    values, words = parse(arguments, HELP)
    if values.get("help") or len(words) > 1:
        return _help("profiles", 0 if values.get("help") else 125)
    if words:
        _print(profiles.text_of(words[0]))
    else:
        _print("".join(f"{name:<15}{profiles.description(name)}\n" for name in profiles.names()))
    return 0


def _doctor(arguments: list[str]) -> int:
    from nsbox.cli_options import DOCTOR, parse

    values, words = parse(arguments, DOCTOR)
    if values.get("help") or words:
        return _help("doctor", 0 if values.get("help") else 125)
    from nsbox import doctor

    found = doctor.facts()
    text = doctor.to_json(found) if values.get("json") else doctor.render(found, _colour())
    _print(text.rstrip("\n") + "\n")
    return 125 if any(fact.needed and not fact.ok for fact in found) else 0


def _log(arguments: list[str]) -> int:
    from nsbox.cli_options import LOG, parse

    values, words = parse(arguments, LOG, anywhere=True)
    if values.get("help"):
        return _help("log")
    from nsbox import cli_log

    return cli_log.show(values, words, _colour())


def _stats(arguments: list[str]) -> int:
    from nsbox.cli_options import STATS, parse

    values, words = parse(arguments, STATS, anywhere=True)
    if values.get("help"):
        return _help("stats")
    from nsbox import cli_stats

    return cli_stats.show(values, words)


def _bench(arguments: list[str]) -> int:
    from nsbox.cli_options import BENCH, parse

    values, words = parse(arguments, BENCH, anywhere=True)
    if values.get("help"):
        return _help("bench")
    from nsbox import cli_bench

    return cli_bench.show(values, words, _print)


def _selftest(arguments: list[str]) -> int:
    from nsbox.cli_options import SELFTEST, parse

    values, words = parse(arguments, SELFTEST)
    if values.get("help"):
        return _help("selftest")
    from nsbox import cli_selftest

    return cli_selftest.selftest(values, words, _colour(), _width())


def _gc(arguments: list[str]) -> int:
    from nsbox.cli_options import HELP, parse

    values, words = parse(arguments, HELP)
    if values.get("help") or words:
        return _help("gc", 0 if values.get("help") else 125)
    from nsbox import gc

    _print("".join(line + "\n" for line in gc.collect()) or "nothing was left\n")
    return 0


def _completion(arguments: list[str]) -> int:
    from nsbox.cli_options import HELP, parse

    values, words = parse(arguments, HELP)
    if values.get("help"):
        return _help("completion")
    from nsbox.cli_completion import script

    _print(script(words))
    return 0


def _version() -> str:
    from nsbox import __version__

    return f"nsbox {__version__}\n"


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "shell": _shell,
    "python": _python,
    "profiles": _profiles,
    "doctor": _doctor,
    "log": _log,
    "stats": _stats,
    "bench": _bench,
    "selftest": _selftest,
    "gc": _gc,
    "completion": _completion,
}


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        from nsbox.cli_words import usage

        sys.stderr.write(usage())
        return 125
    word = arguments[0]
    if word in ("--help", "-h", "help"):
        from nsbox.cli_words import examples, usage

        _print(usage() + "\nnsbox run --help tells the options.\n" + examples(_width()))
        return 0
    if word in ("--version", "-V"):
        _print(_version())
        return 0
    if word in _COMMANDS:
        return _COMMANDS[word](arguments[1:])
    from nsbox.cli_options import suggestion

    raise SpecError(f"{word!r} is no command{suggestion(word, _COMMANDS)}; to run a program: nsbox run -- {word}")


def _interrupt(number: int, _frame: FrameType | None) -> None:
    # Should the way out hang, the next one ends us at once, and with us the helper and all that it started.
    for name in _SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    raise Interrupted(number)


def _prepare_process() -> None:
    """Signals become exceptions, unless the caller has them ignored; descriptors 0 to 2 are open, so that none of ours
    gets such a number."""
    for name in _SIGNALS:
        number = getattr(signal, name)
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open("/dev/null", os.O_RDWR)


def _unexpected(error: Exception) -> int:
    from nsbox.cli_output import say
    from nsbox.probe import scarce

    if os.environ.get("NSBOX_DEBUG"):
        import traceback

        traceback.print_exc()
    if told := scarce(error):
        say(str(told))
        return 125
    say(f"{type(error).__name__}: {error}; this is a bug in nsbox: NSBOX_DEBUG=1 shows where")
    return 125


def call(arguments: Sequence[str]) -> int:
    """Do what a command line says; the exit status. Messages go to standard error, one line each."""
    try:
        return _dispatch(list(arguments))
    except NsboxError as error:
        from nsbox.cli_output import say

        say(str(error))
        return error.exit_code if isinstance(error, CommandError) else 125
    except Interrupted as end:
        return 128 + end.number
    except Exception as error:
        if type(error).__name__ == "DownstreamClosed":
            return 128 + 13  # what SIGPIPE would have made of it
        return _unexpected(error)


def main() -> None:
    """The program. Leaves without the interpreter's farewell to every module, which costs 8 ms and frees what is freed
    anyway; what modules have registered for the end is still called."""
    import atexit
    import gc

    # Imports make thousands of objects that stay: to look through them for garbage meanwhile costs a millisecond.
    gc.set_threshold(20_000, *gc.get_threshold()[1:])
    try:
        _prepare_process()
        status = call(sys.argv[1:])
    except Interrupted as end:
        status = 128 + end.number
    atexit._run_exitfuncs()
    os._exit(status)
