"""A command that runs in a sandbox that stays: its streams as they come, signals, its end.

Streams are read while somebody waits, polls, reads or writes. What nobody reads stays in the pipe, so that a slow
reader slows the command down and memory does not grow. Limits hold in any case: ``tick``.
"""

import collections
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nsbox._native import lib
from nsbox.errors import CommandError, NsboxError, SandboxUnavailable, SetupError
from nsbox.report import Result
from nsbox.supervise import Run

if TYPE_CHECKING:
    from nsbox.commands import Commands

#: for ``stdin``: input is given piece by piece, by ``Process.write``
PIPE = -1
IDLE_S = 0.2  #: seconds from one look at a command that somebody waits for to the next


class Process:
    """A command in a box. One thread at a time may wait, poll, read or write; any may ``kill`` or ``send_signal``."""

    def __init__(self, box: "Commands", run: Run, argv: list[str], cwd: str, pipe: tuple[int, int]) -> None:
        self._box, self._argv, self._cwd = box, argv, cwd
        self.watched = run  #: what the supervisor knows of it
        self._source, self._stdin = pipe  #: the pipe that ``write`` fills, or -1 twice
        self._busy = threading.Lock()
        self.driven = False  #: by a loop that keeps its time limits as well
        self._result: Result | None = None
        self._error: BaseException | None = None

    @property
    def pid(self) -> int:
        """The process id inside; 0 while it is not known."""
        return self.watched.pid

    @property
    def is_over(self) -> bool:
        """Whether the end has been seen by whoever waits."""
        return self._result is not None or self._error is not None

    @property
    def outcome(self) -> Result | None:
        """The result, once there is one."""
        return self._result

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the end, for at most ``timeout`` seconds: TimeoutError then, and the command goes on.

        Raises CommandError when the command could not be executed, SetupError for its working directory,
        SandboxUnavailable when the box ended under it, and what a callback raises: that ends the command."""
        limit = None if timeout is None else time.monotonic() + timeout
        while not self.is_over:
            self._turn(limit)
            if limit is not None and not self.is_over and time.monotonic() >= limit:
                raise TimeoutError(f"{self._argv[0]} still runs after {timeout:g} s")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def poll(self) -> Result | None:
        """Take what there is without waiting; the result, once that was the end. Raises what ``wait`` raises."""
        try:
            return self.wait(0)
        except TimeoutError:
            return None

    def advance(self, limit: float | None) -> None:
        """Wait until something happens, or until ``limit`` (time.monotonic()), and act on it. Raises what a callback
        raises."""
        self._turn(limit)

    def output(self) -> Iterator[tuple[str, bytes]]:
        """("stdout" or "stderr", bytes) as they come, to the end; what is given here is not kept for the Result."""
        found: collections.deque[tuple[str, bytes]] = collections.deque()
        self.watched.stdout.divert(lambda data: found.append(("stdout", data)))
        self.watched.stderr.divert(lambda data: found.append(("stderr", data)))
        while found or not self.is_over:
            while found:
                yield found.popleft()
            if not self.is_over:
                self._turn(None)

    def write(self, data: bytes | str) -> None:
        """Give the command ``data`` (text: as UTF-8); waits while it takes none, and meanwhile takes what it writes.

        Only with ``stdin=PIPE``. Raises BrokenPipeError when nobody reads it (any more)."""
        view = memoryview(data.encode() if isinstance(data, str) else data)
        while view:
            try:
                view = view[os.write(self.input(), view) :]
            except BlockingIOError:
                self._turn(None)
        self._turn(0)

    def input(self) -> int:
        """The descriptor that ``write`` fills; it does not block. Raises BrokenPipeError when nobody reads it."""
        if self._stdin < 0 or (self.watched.started and self.watched.handle.stdin < 0):
            raise BrokenPipeError(f"{self._argv[0]} does not read its input (any more)")
        return self._stdin

    def close_stdin(self) -> None:
        """Let the command see the end of its input."""
        self.end_input()
        self._turn(0)

    def end_input(self) -> None:
        """The same for who watches by other means."""
        fd, self._stdin = self._stdin, -1
        if fd >= 0:
            os.close(fd)

    def resize(self, rows: int, columns: int) -> None:
        """Change a terminal's size to ``rows`` and ``columns``; whoever is in its foreground gets SIGWINCH."""
        while not self.is_over and not self.watched.started:
            self._turn(None)
        if self.watched.handle.stdout >= 0:
            import termios

            termios.tcsetwinsize(self.watched.handle.stdout, (rows, columns))

    def send_signal(self, number: int) -> None:
        """Send signal ``number`` to the command's first process; nothing happens once it has ended."""
        if not self.is_over:
            self.watched.handle.tell(lib.NSB_MSG_SIGNAL, int(number))

    def kill(self) -> None:
        """SIGKILL the command and all that it started; ``wait`` then tells reason ``cancelled``."""
        self.end("cancelled")

    def exceed(self, limit: str, value: float | None) -> None:
        """End it, for the whole box is over ``limit``, which is ``value``."""
        self.watched.enforcer.hit(limit, value)
        self.end(limit)

    def end(self, reason: str) -> None:
        """Have it ended; whoever waits sees ``reason``, and if nobody does it ends all the same."""
        if not self.is_over:
            self.watched.stop(reason)
            self._box.arm(self.watched.next_time())

    def tick(self, now: float) -> float | None:
        """Keep the limits that are due ``now``, while nobody else does. When the next one is (both
        time.monotonic())."""
        if self.driven or self.is_over:
            return None
        if not self._busy.acquire(blocking=False):
            return now + IDLE_S  # somebody waits for it, and may leave off
        try:
            if self.watched.settled:
                return None  # it waits for whoever wants to know
            self.watched.take_start()
            self.watched.on_time(now)
            return self.watched.next_time()
        finally:
            self._busy.release()

    def close(self) -> None:
        """End the command if it still runs, and give up its descriptors. ``Sandbox.close`` does it as well, but where
        another thread waits for it just now: that one does it then."""
        if self._busy.acquire(blocking=False):
            try:
                if not self.is_over:
                    self.fail(SandboxUnavailable("the command was closed before its end", remedy="wait for it"))
            finally:
                self._busy.release()

    def fail(self, error: BaseException) -> None:
        """Whoever waits gets ``error``; the command, where it still runs, is ended by its watcher."""
        self._error = error
        self._release()

    def settle(self) -> None:
        """The supervisor has seen the end: make the result, or the error, of it."""
        try:
            self._result = self._conclude()
        except NsboxError as error:
            self._error = error
        self._release()

    def _release(self) -> None:
        self.watched.handle.close()
        for fd in (self._source, self._stdin):
            if fd >= 0:
                os.close(fd)
        self._source = self._stdin = -1
        self._box.forget(self)

    def _turn(self, limit: float | None) -> None:
        with self._busy:
            if self.is_over:
                return
            try:
                if not self.watched.over:
                    self.watched.turn(limit)
            except BaseException as error:
                self.fail(error)
                raise
            if self.watched.over or self.watched.error is not None:
                self.settle()

    def _conclude(self) -> Result:
        run = self.watched
        if isinstance(run.error, CommandError):
            run.error.command = self._argv[0]
        elif isinstance(run.error, SetupError) and run.error.stage == "the working directory":
            run.error.target, run.error.remedy = self._cwd, "name a directory that exists inside"
        if run.error is not None:
            raise run.error
        killed = run.status is None or os.WTERMSIG(run.status) == signal.SIGKILL or run.status >> 8 == 137
        if run.handle.cgroup is None and run.reason is None and killed and self._box.ran_out_of_memory():
            run.enforcer.hit("memory", self._box.spec.limits.memory)
            run.reason = "memory"
        result = Result(run, self._box.id, self._argv)
        if run.status is None and run.reason is None and not self._box.is_running:
            why = self._box.why_ended()
            raise SandboxUnavailable(f"the sandbox {why} while a command ran in it", remedy="start another")
        return result
