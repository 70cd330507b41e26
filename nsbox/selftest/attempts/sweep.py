"""Every system call number, each in a child of its own, with arguments that mean nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections.abc import Iterable, Iterator

from .calls import libc


def sweep(numbers: Iterable[int], patience_s: float = 0.5) -> Iterator[tuple[int, str]]:
    """(number, what came of it): ``ok``, an errno's name, or how the child ended."""
    words = [ctypes.c_long(-1)] * 6
    for number in numbers:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            signal.setitimer(signal.ITIMER_REAL, patience_s)
            own = os.getpid()
            ctypes.set_errno(0)
            result = libc.syscall(ctypes.c_long(number), *words)
            if os.getpid() != own:  # the call was a fork
                os._exit(0)
            text = "ok" if result != -1 or not ctypes.get_errno() else errno.errorcode.get(ctypes.get_errno(), "?")
            os.write(writer, text.encode())
            os._exit(0)
        os.close(writer)
        told = os.read(reader, 100).decode()
        os.close(reader)
        status = os.waitpid(pid, 0)[1]
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "ended"
        yield number, told or how


def ranges(text: str) -> list[int]:
    """``0-600,0x40000000-0x40000258``: numbers from the first of each to before the last."""
    pairs = (part.split("-") for part in text.split(","))
    return [number for first, last in pairs for number in range(int(first, 0), int(last, 0))]
