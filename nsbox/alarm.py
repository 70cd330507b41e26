"""Calls functions at their times: secrets of a sandbox that stays have an end, and so has the sandbox.

One thread for all of them, started with the first and ended when none is left.
"""

import contextlib
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable

Job = Callable[[], object]

_queue: list[tuple[float, int, Job]] = []
_numbers = itertools.count(1)
#: ``with`` takes the lock and not the condition, here and elsewhere: a signal handler that raises may do so in the
#: midst of Condition.__enter__, which is Python, and leave it locked for ever. The same goes for Event.
_lock = threading.RLock()
_wake = threading.Condition(_lock)
_thread: threading.Thread | None = None


def at(when: float, job: Job) -> int:
    """Have ``job`` called at ``when`` (time.monotonic()), by another thread; what it raises is dropped. The answer is
    for ``cancel``."""
    global _thread
    with _lock:
        number = next(_numbers)
        heapq.heappush(_queue, (when, number, job))
        if _thread is None or not _thread.is_alive():  # a signal may have come before its start
            _thread = threading.Thread(target=_work, name="nsbox-alarm", daemon=True)
            _thread.start()
        else:
            _wake.notify()
        return number


def cancel(number: int) -> None:
    """Forget a job; one that is being called is not waited for."""
    with _lock:
        _queue[:] = [entry for entry in _queue if entry[1] != number]
        heapq.heapify(_queue)
        _wake.notify()


def _next() -> Job | None:
    """Wait for the next job to be due; None when there is no more."""
    with _lock:
        while _queue:
            pause = _queue[0][0] - time.monotonic()
            if pause <= 0:
                return heapq.heappop(_queue)[2]
            _wake.wait(pause)
        global _thread
        _thread = None
        return None


def _work() -> None:
    while (job := _next()) is not None:
        with contextlib.suppress(Exception):
            job()
        del job  # what it stands for is not kept while the next is waited for


def _after_fork() -> None:
    """The sandboxes are the parent's, and so is the thread."""
    global _thread, _lock, _wake
    _lock, _thread = threading.RLock(), None
    _wake = threading.Condition(_lock)
    _queue.clear()


os.register_at_fork(after_in_child=_after_fork)
