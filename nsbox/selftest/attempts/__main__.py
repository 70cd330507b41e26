"""One line for each attempt: its name, and what came of it."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback

from . import files, hogs, interfaces, kernel, outputs, reach  # noqa: F401  # they register their attempts
from .calls import ATTACKS, CONTROL, TOLD, attack, enter_namespaces
from .sweep import ranges, sweep

PATIENCE_S = 30


def _inherited() -> list[int]:
    """Descriptors above the three that this program was started with; that of the listing is closed by then."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue
        if int(name) > 2:
            found.append(int(name))
    return found


INHERITED = _inherited()


@attack
def inherited_descriptors() -> object:
    """What the caller had open."""
    return "done" if INHERITED else "none"


def outcome_of(word: str) -> str:
    """Makes one attempt, here and now."""
    name, colon, what = word.partition(":")
    try:
        if CONTROL:
            enter_namespaces()
        outcome = TOLD[name](what) if colon else ATTACKS[name]()
    except OSError as error:
        # A timeout has no number.
        return errno.errorcode.get(error.errno or 0, type(error).__name__)
    return outcome if isinstance(outcome, str) else "done"


def apart(word: str) -> str:
    """Makes one attempt in a child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            signal.alarm(PATIENCE_S)
            os.write(writer, outcome_of(word).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    os.close(writer)
    told = os.read(reader, 4096)  # one write, not the end of file: what an attempt leaves behind may hold the pipe
    os.close(reader)
    status = os.waitpid(pid, 0)[1]
    return told.decode() or (f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "failed")


def main() -> None:
    # Init passes this one on to us, when it is told that it comes from outside: kernel.signals_to_init.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for word in sys.argv[1:]:
        name, _, what = word.partition(":")
        if name in ("sweep", "sweep_slowly"):
            for number, outcome in sweep(ranges(what), 0.5 if name == "sweep" else 20):
                print(number, outcome, flush=True)
            print("survived", flush=True)
        elif word != "--control":
            print(word, apart(word), flush=True)


if __name__ == "__main__":
    main()
