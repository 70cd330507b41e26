"""What the command itself writes: passing streams on, and messages. Imports nothing of nsbox."""

import os
import select
import stat
import sys
import time

#: select(2): what a poll calls ready takes at least this much without blocking
PIPE_BUF = select.PIPE_BUF


class DownstreamClosed(Exception):
    """Nobody reads what the command writes any more."""


class Output:
    """One of our own streams. Waits for a slow reader, but never past ``deadline``: the time limit must be acted on."""

    def __init__(self, fd: int, deadline: float | None, keep: bool) -> None:
        self.kept: list[bytes] | None = [] if keep else None
        self._fd = fd
        self._deadline = deadline
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        mode = os.fstat(fd).st_mode
        self._step = sys.maxsize if stat.S_ISREG(mode) else PIPE_BUF

    def write(self, data: bytes) -> None:
        """Pass it on whole. Raises DownstreamClosed; after the deadline, what nobody takes is dropped."""
        if self.kept is not None:
            self.kept.append(data)
        rest = memoryview(data)
        while rest:
            pause = None if self._deadline is None else max(0.0, self._deadline - time.monotonic()) * 1000
            if not self._poll.poll(pause):
                return
            try:
                rest = rest[os.write(self._fd, rest[: self._step]) :]
            except BrokenPipeError:
                raise DownstreamClosed from None
            except BlockingIOError:  # somebody else made it non-blocking, and a part would fit
                time.sleep(0.001)


def say(text: str) -> None:
    """One line on standard error, whatever is in it: names of files may hold anything."""
    line = "".join(c if c.isprintable() or "\ud800" <= c <= "\udfff" else repr(c)[1:-1] for c in text)
    try:
        os.write(2, f"nsbox: {line}\n".encode("utf-8", "surrogateescape"))
    except OSError:
        pass
