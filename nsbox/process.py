"""A command that runs in a sandbox that stays: its streams as they come, signals, its end.

Nothing happens by itself: streams are read and limits are watched while somebody waits, polls, reads or writes. What
nobody reads stays in the pipe, so a slow reader slows the command down and memory does not grow.
"""

import collections
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nsbox._native import lib
from nsbox.errors import CommandError, SandboxUnavailable, SetupError
from nsbox.report import Result
from nsbox.supervise import Run, drive

if TYPE_CHECKING:
    from nsbox.box import Sandbox

#: for ``stdin``: input is given piece by piece, by ``Process.write``
PIPE = -1


class Process:
    """A command in a box. One thread may wait, poll, read or write at a time; ``kill`` and ``send_signal`` may be
    called from any."""

    def __init__(self, box: "Sandbox", run: Run, argv: list[str], cwd: str, stdin: int) -> None:
        self._box, self._run, self._argv, self._cwd = box, run, argv, cwd
        self._stdin = stdin  #: our end of the pipe of ``write``, or -1
        self._result: Result | None = None
        self._error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether the end has been seen, by ``wait``, ``poll`` or ``output``."""
        return self._result is not None or self._error is not None

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the end, for at most ``timeout`` seconds: TimeoutError then, and the command goes on.

        Raises CommandError when the command could not be executed, SetupError for its working directory,
        SandboxUnavailable when the box ended under it, and whatever a callback raises: that ends the command."""
        if not self.is_over and not self._drive(timeout):
            raise TimeoutError(f"{self._argv[0]} still runs after {timeout:g} s")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def poll(self) -> Result | None:
        """Take what there is without waiting; the result if that was the end. Raises what ``wait`` raises."""
        try:
            return self.wait(0)
        except TimeoutError:
            return None

    def output(self) -> Iterator[tuple[str, bytes]]:
        """("stdout" or "stderr", bytes) as they come, to the end; what is given here is not kept for the Result."""
        found: collections.deque[tuple[str, bytes]] = collections.deque()
        for name in ("stdout", "stderr"):
            stream = getattr(self._run, name)
            found.extend((name, chunk) for chunk in stream.take())
            stream.divert(lambda data, name=name: found.append((name, data)))
        while found or not self.is_over:
            if not found:
                self._drive(None, bool_of=found)
            while found:
                yield found.popleft()
        self.wait(0)

    def write(self, data: bytes | str) -> None:
        """Give the command more input; waits while it does not take it, and meanwhile keeps what it writes.

        Only with ``stdin=PIPE``. Raises BrokenPipeError when nobody reads it any more."""
        view = memoryview(data.encode() if isinstance(data, str) else data)
        while view:
            if self._stdin < 0 or self._run.handle.stdin < 0:
                raise BrokenPipeError(f"{self._argv[0]} reads no input (any more)")
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                self._drive(None, bool_of=None)
        self._drive(0)

    def close_stdin(self) -> None:
        """Let the command see the end of its input."""
        fd, self._stdin = self._stdin, -1
        if fd >= 0:
            os.close(fd)
            self._drive(0)

    def send_signal(self, number: int) -> None:
        """Send a signal to the command's first process; nothing happens once it has ended."""
        self._run.handle.tell(lib.NSB_MSG_SIGNAL, int(number))

    def kill(self) -> None:
        """SIGKILL the command and all that it started; ``wait`` then tells reason ``cancelled``."""
        if not self.is_over:
            self._run.stop("cancelled")

    def close(self) -> None:
        """End the command, where it still runs, and give up its descriptors. ``Sandbox.close`` does it as well."""
        if not self.is_over:
            self._error = SandboxUnavailable("the command was closed before its end", remedy="wait for it")
        self._release()

    def _drive(self, timeout: float | None, bool_of: object = False) -> bool:
        """Watch until the end, for ``timeout`` seconds, until ``bool_of`` is true, or for one round (None)."""
        if self.is_over:
            return True
        limit = None if timeout is None else time.monotonic() + timeout
        rounds = iter([False, True])

        def enough() -> bool:
            return next(rounds) if bool_of is None else bool(bool_of)

        try:
            drive([self._run], until=enough, until_time=limit)
            if not self._run.over:
                return False
            self._result = self._finish()
        except BaseException as error:
            self._error = error
            self._release()
            raise
        self._release()
        return True
