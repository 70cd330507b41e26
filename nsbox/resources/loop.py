"""One thread with one epoll(7) loop for every sandbox of the process.

asyncio would do, but costs 34 ms to import and half of its throughput per connection goes into layers that a relay does
not need. Everything but ``soon`` and ``ask`` belongs to the loop's own thread.
"""

import contextlib
import heapq
import itertools
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
_T = TypeVar("_T")


class Timer:
    """A call that is due at some time; ``cancel`` forgets it."""

    __slots__ = ("call", "due")

    def __init__(self, due: float, call: Callable[[], None] | None) -> None:
        self.due, self.call = due, call

    def cancel(self) -> None:
        self.call = None


class Loop:
    """Starts its thread when made; ``stop`` ends it."""

    def __init__(self, name: str) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._interest: dict[int, int] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._calls: deque[Callable[[], object]] = deque()
        self._closing: list[socket.socket] = []
        self._running = True
        self._epoll.register(self._wake, READ)
        self.scratch = bytearray(256 << 10)  #: where everybody receives into; nothing is kept there between two calls
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def watch(self, sock: socket.socket, events: int, handler: Callable[[int], None]) -> None:
        """Call ``handler(events)`` when the socket is ready."""
        self._handlers[sock.fileno()] = handler
        self.change(sock, events)

    def change(self, sock: socket.socket, events: int) -> None:
        """Be told of other events; 0: of none."""
        fd = sock.fileno()
        known = self._interest.get(fd, 0)
        if events == known:
            return
        # With an empty mask epoll would still report EPOLLHUP, again and again.
        if not events:
            self._epoll.unregister(fd)
            del self._interest[fd]
        elif known:
            self._epoll.modify(fd, events)
            self._interest[fd] = events
        else:
            self._epoll.register(fd, events)
            self._interest[fd] = events

    def close(self, sock: socket.socket) -> None:
        """Forget and close a socket. Its number stays taken until the events at hand are worked off."""
        fd = sock.fileno()
        if fd < 0 or sock in self._closing:
            return
        self._handlers.pop(fd, None)
        if self._interest.pop(fd, 0):
            self._epoll.unregister(fd)
        self._closing.append(sock)

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call once, in ``seconds``."""
        timer = Timer(time.monotonic() + seconds, call)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def soon(self, call: Callable[[], object]) -> None:
        """Call in the loop's thread, from any."""
        self._calls.append(call)
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._wake, 1)

    def ask(self, call: Callable[[], _T], timeout: float = 10.0) -> _T:
        """The answer of a call in the loop's thread, from any. Raises what it raises, TimeoutError, RuntimeError."""
        if threading.current_thread() is self.thread:
            return call()
        done = threading.Lock()  # not an Event: see nsbox.alarm
        done.acquire()
        box: list[Any] = [None, None]

        def answer() -> None:
            try:
                box[0] = call()
            except BaseException as error:
                box[1] = error
            done.release()

        if not self.alive:
            raise RuntimeError("the network loop has ended")
        self.soon(answer)
        if not done.acquire(timeout=timeout):
            raise TimeoutError("the network loop does not answer")
        if box[1] is not None:
            raise box[1]
        return box[0]  # type: ignore[no-any-return]

    @property
    def alive(self) -> bool:
        """Whether calls are still taken."""
        return self._running and self.thread.is_alive()

    def stop(self) -> None:
        """End the thread and give its descriptors back."""
        if not self._running:
            return
        self._running = False
        self.soon(lambda: None)
        self.thread.join()
        self._close_now()
        self._epoll.close()
        os.close(self._wake)

    def _timeout(self) -> float:
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else -1

    def _close_now(self) -> None:
        for sock in self._closing:
            sock.close()
        self._closing.clear()

    def _run(self) -> None:
        while self._running:
            for fd, events in self._epoll.poll(self._timeout(), 256):
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                elif handler := self._handlers.get(fd):
                    self._safely(lambda handler=handler, events=events: handler(events))  # type: ignore[misc]
            for _ in range(len(self._calls)):
                self._safely(self._calls.popleft())
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                call = heapq.heappop(self._timers)[2].call
                if call:
                    self._safely(call)
            self._close_now()

    @staticmethod
    def _safely(call: Callable[[], object]) -> None:
        """One sandbox's trouble must not end the loop for all of them."""
        try:
            call()
        except Exception:
            import traceback

            traceback.print_exc()
