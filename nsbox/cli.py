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

USAGE = """\
usage: nsbox run [OPTIONS] [--] COMMAND [ARG...]        one fresh sandbox, one command, gone afterwards
       nsbox shell [OPTIONS]                            an interactive shell in a fresh sandbox
       nsbox python [OPTIONS] FILE|-|-c CODE [ARG...]   this interpreter and its packages in a fresh sandbox
       nsbox profiles [NAME]                            the shipped profiles, or one of them in full
       nsbox doctor [--json]                            what this host can enforce, and what mends the rest
       nsbox log [FILE] [--follow] [--sandbox ID]       the boundary log, readable
       nsbox stats [FILE...] [--json] [--html FILE]     the numbers over boundary logs
       nsbox bench [WHAT...] [--quick]                  what isolation costs on this host
       nsbox selftest [--json] [--profile NAME|FILE]    attack a sandbox on this host, and say what was stopped
       nsbox gc                                         remove what killed processes have left, and say what it was
       nsbox --version
"""
_EXAMPLES = """
examples:
  nsbox run -- sh -c 'id; ls -la ~; ps'
  nsbox run --workspace . --timeout 2m -- make test
  nsbox run --ro data.csv:/data.csv --memory 1G -- python3 -c 'print(open("/data.csv").readline())'
  nsbox python --ro ./dataset:/data script.py

Exit status: the command's own; 128+n where signal n ended it; 124 after a time limit; 137 for memory; 125 where nsbox
itself could not, with the reason on standard error; 126 where the command could not be executed; 127 where it was not
found.
"""
_USAGES = {
    "run": "usage: nsbox run [OPTIONS] [--] COMMAND [ARG...]\n\nRuns COMMAND in a fresh sandbox that is thrown away.\n",
    "shell": """\
usage: nsbox shell [OPTIONS]

An interactive shell in a fresh sandbox, on a terminal of the sandbox's own. There is no time limit unless one is given.
""",
    "python": """\
usage: nsbox python [OPTIONS] FILE|-|-c CODE [ARG...]

Runs Python code in a fresh sandbox that is thrown away, with this interpreter and its packages, read-only. Only FILE
itself is shown inside, read-only too; - reads the code from standard input.
""",
    "log": """\
usage: nsbox log [FILE] [OPTIONS]

Prints a boundary log, one line for each event. FILE is $NSBOX_LOG where none is named.
""",
    "stats": """\
usage: nsbox stats [FILE...] [OPTIONS]

Counts over boundary logs, in any order: how much runs in sandboxes, how long they live, which limits are hit, what is
let through, which secrets are present. FILE is $NSBOX_LOG where none is named.
""",
    "bench": """\
usage: nsbox bench [WHAT...] [OPTIONS]

Measures what isolation costs on this host. WHAT is one or more of
  layers      one layer added at a time, from a bare process to filtered egress
  start       a fresh sandbox against posix_spawn and the programs of this host that isolate
  runtime     the same work inside and outside
  throughput  starts a second with several workers
  memory      what idle sandboxes hold
  program     this command as a process of its own
  pools       sandboxes and interpreters made ahead
and the first three where none is named. It takes minutes, or seconds with --quick, on a machine that does nothing else.
""",
    "selftest": """\
usage: nsbox selftest [OPTIONS]

Attempts attacks from inside sandboxes on this host, each after a control that shows that it works outside. It changes
nothing on the host. Exit status: 0 when all were stopped, 1 when something got through, 125 when it could not be run.
""",
}
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


def _run(arguments: list[str]) -> int:
    from nsbox.cli_options import RUN, help_text, parse

    values, command = parse(arguments, RUN)
    if values.get("help"):
        _print(_USAGES["run"] + help_text(RUN, _width()) + _EXAMPLES)
        return 0
    if not command:
        raise SpecError("run: no command; write it after the options: nsbox run -- COMMAND")
    from nsbox.cli_run import run

    return run(values, command, RUN)


def _shell(arguments: list[str]) -> int:
    from nsbox.cli_options import RUN, help_text, parse

    values, words = parse(arguments, RUN)
    if values.get("help"):
        _print(_USAGES["shell"] + help_text(RUN, _width()))
        return 0
    if words:
        raise SpecError(f"shell: takes no command; for a command on a terminal: nsbox run --tty -- {words[0]}")
    from nsbox.cli_shell import shell

    return shell(values)


def _python(arguments: list[str]) -> int:
    from nsbox.cli_options import PYTHON, help_text, parse

    values, words = parse(arguments, PYTHON, ends="-c")
    if values.get("help"):
        _print(_USAGES["python"] + help_text(PYTHON, _width()) + _EXAMPLES)
        return 0
    from nsbox.cli_python import run_python

    return run_python(values, words)


def _profiles(arguments: list[str]) -> int:
    from nsbox import profiles
    from nsbox.cli_options import HELP, parse

    values, words = parse(arguments, HELP)
    if values.get("help") or len(words) > 1:
        _print("usage: nsbox profiles [NAME]\n\nLists the shipped profiles, or prints one of them in full.\n")
        return 0 if values.get("help") else 125
    if words:
        _print(profiles.text_of(words[0]))
    else:
        _print("".join(f"{name:<15}{profiles.description(name)}\n" for name in profiles.names()))
    return 0


def _doctor(arguments: list[str]) -> int:
    from nsbox.cli_options import DOCTOR, help_text, parse

    values, words = parse(arguments, DOCTOR)
    if values.get("help") or words:
        _print("usage: nsbox doctor [--json]\n\nProbes what this host can enforce.\n" + help_text(DOCTOR, _width()))
        return 0 if values.get("help") else 125
    from nsbox import doctor

    found = doctor.facts()
    text = doctor.to_json(found) if values.get("json") else doctor.render(found, _colour())
    _print(text.rstrip("\n") + "\n")
    return 125 if any(fact.needed and not fact.ok for fact in found) else 0


def _log(arguments: list[str]) -> int:
    from nsbox.cli_options import LOG, help_text, parse

    values, words = parse(arguments, LOG, anywhere=True)
    if values.get("help"):
        _print(_USAGES["log"] + help_text(LOG, _width()))
        return 0
    from nsbox import cli_log

    return cli_log.show(values, words, _colour())


def _stats(arguments: list[str]) -> int:
    from nsbox.cli_options import STATS, help_text, parse

    values, words = parse(arguments, STATS, anywhere=True)
    if values.get("help"):
        _print(_USAGES["stats"] + help_text(STATS, _width()))
        return 0
    from nsbox import cli_stats

    return cli_stats.show(values, words)


def _bench(arguments: list[str]) -> int:
    from nsbox.cli_options import BENCH, help_text, parse

    values, words = parse(arguments, BENCH, anywhere=True)
    if values.get("help"):
        _print(_USAGES["bench"] + help_text(BENCH, _width()))
        return 0
    from nsbox import cli_bench

    return cli_bench.show(values, words, _print)


def _selftest(arguments: list[str]) -> int:
    from nsbox.cli_options import SELFTEST, help_text, parse

    values, words = parse(arguments, SELFTEST)
    if values.get("help"):
        _print(_USAGES["selftest"] + help_text(SELFTEST, _width()))
        return 0
    from nsbox import cli_selftest

    return cli_selftest.selftest(values, words, _colour(), _width())


def _gc(arguments: list[str]) -> int:
    from nsbox.cli_options import HELP, parse

    values, words = parse(arguments, HELP)
    if values.get("help") or words:
        _print("usage: nsbox gc\n\nRemoves what killed processes have left, one line for each. Exit status: 0.\n")
        return 0 if values.get("help") else 125
    from nsbox import gc

    _print("".join(line + "\n" for line in gc.collect()) or "nothing was left\n")
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
}


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        sys.stderr.write(USAGE)
        return 125
    word = arguments[0]
    if word in ("--help", "-h", "help"):
        _print(USAGE + "\nnsbox run --help tells the options." + "\n" + _EXAMPLES)
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
