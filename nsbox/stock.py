"""Keeps things ready that are dear to make and used once: a stock with a floor, a ceiling and an age.

One thread fills it. Making competes with whoever uses what was taken, for processors and for locks of the kernel, so
the thread holds back while things are taken in quick succession and enough are left; what is asked for when none is
left is made by the one who asks, or waited for, or refused, as he chose."""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Literal, NamedTuple, TypeVar

from nsbox.errors import NsboxError, SandboxUnavailable, SpecError

T = TypeVar("T")
WhenEmpty = Literal["make", "wait", "error"]
LULL_S = 0.002  #: a burst is over when nothing was taken for so long
IDLE_S = 10.0  #: after so long without a demand that emptied the stock, it is kept one smaller
RETRY_S, RETRY_MAX_S = 0.05, 5.0  #: pause after a failure, doubled with each


class Counts(NamedTuple):
    """What a stock has done so far."""

    ready: int  #: that could be taken now
    size: int  #: that are kept ready at present, between the floor and the ceiling
    taken: int  #: that were taken, all told
    missed: int  #: how often none was ready
    made: int  #: ahead
    discarded: int  #: too old or broken, before anybody took them


class Stock(Generic[T]):
    """``make`` answers a new one or raises NsboxError; ``discard`` takes one that nobody wants; ``healthy`` says
    whether one that has waited can be given out. Any thread may take.

    ``size`` is the floor, ``most`` the ceiling that demand may raise it to, ``max_age`` in seconds. ``when_empty``:
    ``make`` one in the caller's thread, ``wait`` until there is one, or raise an ``error``. A forked child has no part
    in its parent's stock."""

    def __init__(
        self,
        make: Callable[[], T],
        discard: Callable[[T], object],
        healthy: Callable[[T], bool],
        *,
        size: int,
        most: int | None = None,
        max_age: float = 300.0,
        when_empty: WhenEmpty = "make",
    ) -> None:
        most = max(size, 4 * size) if most is None else most
        if not 0 < size <= most:
            raise SpecError(f"size: {size} is not between 1 and {most}, the most that are kept")
        if when_empty not in ("make", "wait", "error"):
            raise SpecError(f"when_empty: {when_empty!r} is none of make, wait, error")
        if not max_age > 0:
            raise SpecError(f"max_age: {max_age} is no time; give seconds")
        self._make, self._discard, self._healthy = make, discard, healthy
        self._floor, self._ceiling, self._target = size, most, size
        self._max_age, self._when_empty = max_age, when_empty
        self._ready: deque[tuple[float, T]] = deque()
        self._lock = threading.RLock()  #: for why ``with`` takes this one see nsbox.alarm
        self._change = threading.Condition(self._lock)
        self._owner = os.getpid()
        self._closed = False
        self._taken = self._missed = self._made = self._discarded = 0
        self._last_take = self._last_miss = time.monotonic()
        self._error: NsboxError | OSError | None = None
        self._thread = threading.Thread(target=self._fill, name="nsbox-stock", daemon=True)
        self._thread.start()

    def counts(self) -> Counts:
        """Figures of now."""
        with self._lock:
            return Counts(len(self._ready), self._target, self._taken, self._missed, self._made, self._discarded)

    def take(self, timeout: float | None = None) -> T:
        """One that nobody had before; it is the caller's to put away. Raises SandboxUnavailable when the stock is
        closed, or when it is empty and that was to be an error, or has not got one within ``timeout`` seconds; and what
        ``make`` raises."""
        limit = None if timeout is None else time.monotonic() + timeout
        missed = False
        while True:
            with self._lock:
                self._check()
                found = self._ready.popleft() if self._ready else None
                if found is None and not missed:
                    missed = True
                    self._miss()
                if found is None and self._when_empty == "wait":
                    self._wait(limit)
                    continue
                if found is not None:
                    self._taken += 1
                    self._last_take = time.monotonic()
                    self._change.notify_all()
            if found is None:
                return self._without()
            made_at, thing = found
            if time.monotonic() - made_at <= self._max_age and self._healthy(thing):
                return thing
            self._throw_away(thing)

    def wait_full(self, timeout: float) -> bool:
        """Wait until as many are ready as are kept; whether that came true within ``timeout`` seconds."""
        with self._lock:
            return self._change.wait_for(lambda: len(self._ready) >= self._target or self._closed, timeout)

    def close(self) -> None:
        """Discard what is ready, and refuse from now on. Waits for the one that is being made. Idempotent."""
        with self._lock:
            self._closed = True
            self._change.notify_all()
        if os.getpid() != self._owner:
            return
        if self._thread is not threading.current_thread():
            self._thread.join()
        while self._ready:
            self._discard(self._ready.popleft()[1])

    def _check(self) -> None:
        if self._closed:
            raise SandboxUnavailable("the pool is closed", remedy="make another")
        if os.getpid() != self._owner:
            raise SandboxUnavailable("the pool belongs to the parent process", remedy="make one in this process")

    def _miss(self) -> None:
        """None is ready: keep more from now on."""
        self._missed += 1
        self._last_take = self._last_miss = time.monotonic()
        self._target = min(self._ceiling, self._target * 2)
        self._change.notify_all()

    def _wait(self, limit: float | None) -> None:
        pause = None if limit is None else limit - time.monotonic()
        if self._error is not None:
            raise self._error
        if (pause is not None and pause <= 0) or not self._change.wait(pause):
            raise SandboxUnavailable("no sandbox was ready in time", remedy="give the pool a larger size")

    def _without(self) -> T:
        if self._when_empty == "error":
            raise SandboxUnavailable("no sandbox is ready", remedy="give the pool a larger size, or when_empty='wait'")
        thing = self._make()
        with self._lock:
            self._taken += 1
        return thing

    def _throw_away(self, thing: T) -> None:
        with self._lock:
            self._discarded += 1
        with contextlib.suppress(NsboxError, OSError):
            self._discard(thing)

    def _fill(self) -> None:
        retry = RETRY_S
        while self._until_needed():
            try:
                thing = self._make()
            except (NsboxError, OSError) as error:
                with self._lock:
                    self._error = error
                    self._change.notify_all()
                    self._change.wait_for(lambda: self._closed, retry)
                retry = min(RETRY_MAX_S, retry * 2)
                continue
            retry = RETRY_S
            with self._lock:
                self._ready.append((time.monotonic(), thing))
                self._made += 1
                self._error = None
                self._change.notify_all()

    def _until_needed(self) -> bool:
        """Wait until one more should be made; False at the end."""
        while not self._closed:
            old = self._take_old()
            if old is not None:
                self._throw_away(old)
                continue
            with self._lock:
                now = time.monotonic()
                if self._target > self._floor and now - self._last_miss > IDLE_S:
                    self._target, self._last_miss = self._target - 1, now
                missing = self._target - len(self._ready)
                lull = now - self._last_take >= LULL_S
                if missing > 0 and not self._closed and (lull or 2 * missing > self._target):
                    return True
                self._change.wait(LULL_S if missing > 0 else self._pause(now))
        return False

    def _take_old(self) -> T | None:
        """One that has waited too long, or is one too many; the one that has waited longest stands first."""
        with self._lock:
            if len(self._ready) > self._target or (
                self._ready and time.monotonic() - self._ready[0][0] > self._max_age
            ):
                return self._ready.popleft()[1]
        return None

    def _pause(self, now: float) -> float:
        """Nothing to make: until when that is surely so."""
        oldest = self._ready[0][0] + self._max_age - now if self._ready else self._max_age
        return max(0.01, min(oldest + 0.001, IDLE_S))
