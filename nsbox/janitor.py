"""Gives back, off the caller's path, what can only be given back once a sandbox is wholly gone.

A cgroup can be removed, and a tmpfs is freed, only when the last process inside has been; that is a fraction of a
millisecond after the result is known. One thread does it, started with the first work and ended when there has been
none
for a while; at the end of the process the rest is done at once.
"""

import atexit
import collections
import contextlib
import os
import threading
from collections.abc import Callable

IDLE_S = 1.0
LAST_S = 5.0  #: seconds that the end of the process waits for the last job

_jobs: collections.deque[Callable[[], object]] = collections.deque()
_wake = threading.Condition()
_thread: threading.Thread | None = None
_busy = False
_ending = False  #: the interpreter ends: no thread can be started any more


def later(job: Callable[[], object]) -> None:
    """Have ``job`` called soon, by another thread. It may block for a bounded time; what it raises is dropped."""
    global _thread
    if _ending:
        with contextlib.suppress(Exception):
            job()
        return
    with _wake:
        _jobs.append(job)
        if _thread is None:
            _thread = threading.Thread(target=_work, name="nsbox-janitor", daemon=True)
            _thread.start()
        else:
            _wake.notify()


def _work() -> None:
    global _thread, _busy
    while True:
        with _wake:
            if not _jobs and not _wake.wait_for(lambda: bool(_jobs), IDLE_S):
                _thread = None
                return
            job = _jobs.popleft()
            _busy = True
        with contextlib.suppress(Exception):
            job()
        del job  # what it stands for is not kept while there is nothing to do
        with _wake:
            _busy = False
            _wake.notify_all()


def flush() -> None:
    """Do all that is waiting, now, and wait for what the thread is about: at exit it would be cut off in the middle."""
    while True:
        try:
            job = _jobs.popleft()
        except IndexError:
            break
        with contextlib.suppress(Exception):
            job()
    with _wake:
        _wake.wait_for(lambda: not _busy, LAST_S)


def _after_fork() -> None:
    """The jobs are the parent's; so is the thread, which no forked child has."""
    global _thread, _wake, _busy
    _jobs.clear()
    _thread, _wake, _busy = None, threading.Condition(), False


def _at_exit() -> None:
    global _ending
    _ending = True
    flush()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
