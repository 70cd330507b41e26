"""Stopping what runs in a sandbox, and letting it go on: signals from the host side, which nothing inside can block."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection

#: gives the host pids of a sandbox, init first
Lister = Callable[[], list[int]]
PATIENCE_S = 1.0
_STILL = "TtZX"


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return "X"
    return chr(stat[stat.rfind(b")") + 2])


def send(pids: Collection[int], number: int, inside: Lister) -> None:
    """Send a signal to those of the processes that are inside, whatever became of their numbers meanwhile: what a pidfd
    was opened for before it was seen inside is the process that was seen."""
    fds = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            fds[pid] = os.pidfd_open(pid)
    seen = set(inside()) if fds else set()
    for pid, fd in fds.items():
        if pid in seen:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)
        os.close(fd)


def stop(inside: Lister) -> set[int]:
    """Stop everything but init, which cannot be stopped; those that ran until now, once all stand still."""
    stopped: set[int] = set()
    deadline = time.monotonic() + PATIENCE_S
    while running := {pid for pid in inside()[1:] if _state(pid) not in _STILL}:
        send(running - stopped, signal.SIGSTOP, inside)
        stopped |= running  # a fork may have raced with the list: look again
        if time.monotonic() > deadline:
            break
        time.sleep(0.0005)
    return stopped


def go_on(pids: Collection[int], inside: Lister) -> None:
    """Continue them."""
    send(pids, signal.SIGCONT, inside)
