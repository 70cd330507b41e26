"""Gives back, off the caller's path, what can only be given back once a sandbox is wholly gone.

A cgroup can be removed, and a tmpfs is freed, only when the last process inside has been; that is a fraction of a
millisecond after the result is known. One thread does it, started with the first work and ended when there has been
none for a while; at the end of the process the rest is done at once.
"""

from __future__ import annotations

import _thread
import atexit
import os
import time

from nsbox.light import TYPE_CHECKING, contextlib

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

IDLE_S = 1.0
PATIENCE_S = 0.01  #: that a job gives way to launches, at most, and not where there are more jobs than
MANY = 4
LAST_S = 5.0  #: seconds that the end of the process waits for the last job

_jobs: list[Callable[[], object]] = []
_lock = _thread.RLock()  #: for why ``with`` takes this one see nsbox.alarm
_wake: threading.Condition | None = None  #: made when there is work for a thread
_thread_now: threading.Thread | None = None
_busy = False
#: an entry for each launch in this process that is not done; the thread gives way to them
launches: list[None] = []
_at_once = False  #: no thread: the interpreter ends, or the caller has nothing to do meanwhile


def at_once() -> None:
    """From now on have jobs done where they come up: for a command that would only wait for the thread."""
    global _at_once
    _at_once = True


def later(job: Callable[[], object]) -> None:
    """Have ``job`` called soon, by another thread. It may block for a bounded time; what it raises is dropped."""
    global _thread_now, _wake
    if _at_once:
        with contextlib.suppress(Exception):
            job()
        return
    import threading  # costs more than one sandbox's work

    with _lock:
        _wake = _wake or threading.Condition(_lock)
        _jobs.append(job)
        if _thread_now is None or not _thread_now.is_alive():  # a signal may have come before its start
            _thread_now = threading.Thread(target=_work, args=(_lock, _wake), name="nsbox-janitor", daemon=True)
            _thread_now.start()
        else:
            _wake.notify()


def _work(lock: threading.RLock, wake: threading.Condition) -> None:
    global _thread_now, _busy
    while True:
        with lock:
            if not _jobs and not wake.wait_for(lambda: bool(_jobs), IDLE_S):
                _thread_now = None
                return
            job = _jobs.pop(0)
            _busy = True
        with contextlib.suppress(Exception):
            job()
        del job  # what it stands for is not kept while there is nothing to do
        with lock:
            _busy = False
            wake.notify_all()


def give_way() -> None:
    """For a job, where it may as well wait: launches first, for a while."""
    until = time.monotonic() + PATIENCE_S
    while launches and len(_jobs) < MANY and not _at_once and time.monotonic() < until:
        time.sleep(0.001)


def flush() -> None:
    """Do all that is waiting, now, and wait for what the thread is about: at exit it would be cut off in the middle."""
    while True:
        try:
            job = _jobs.pop(0)
        except IndexError:
            break
        with contextlib.suppress(Exception):
            job()
    if _wake is not None:
        with _lock:
            _wake.wait_for(lambda: not _busy, LAST_S)


def _after_fork() -> None:
    """The jobs are the parent's; so is the thread, which no forked child has."""
    global _thread_now, _lock, _wake, _busy
    _jobs.clear()
    launches.clear()
    _thread_now, _lock, _wake, _busy = None, _thread.RLock(), None, False


def _at_exit() -> None:
    at_once()
    flush()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
