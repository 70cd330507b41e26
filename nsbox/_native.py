"""The only importer of the compiled module: version handshake, the zygote of this process, calls with their errors."""

from __future__ import annotations

import os
import select
import sys
from itertools import pairwise

from nsbox.errors import SandboxUnavailable
from nsbox.light import TYPE_CHECKING, contextlib, threading

if TYPE_CHECKING:
    from typing import Any

try:
    from nsbox import _native_ffi
except ImportError as _error:  # pragma: no cover - a broken installation
    raise SandboxUnavailable(
        f"the compiled part of nsbox cannot be loaded ({_error})", remedy="run: pip install --force-reinstall nsbox"
    ) from None

ffi: Any = _native_ffi.ffi
lib: Any = _native_ffi.lib

if lib.nsb_layout() != lib.NSB_LAYOUT:  # pragma: no cover - a broken installation
    raise SandboxUnavailable("the compiled part of nsbox is of another version", remedy="reinstall nsbox")

STAGES: tuple[str, ...] = tuple(
    name.removeprefix("NSB_STAGE_").lower()
    for _, name in sorted(ffi.typeof("enum nsb_stage").elements.items())
    if name.startswith("NSB_STAGE_")
)


def steps(stamps: dict[str, int]) -> dict[str, float]:
    """Microseconds from one stage's end to the next."""
    ordered = sorted((at, name) for name, at in stamps.items())
    return {name: round((at - before) / 1000, 1) for (before, _), (at, name) in pairwise(ordered)}


class Zygote:
    """The helper process of this process (see native/zygote.c). It ends when this process ends, however that ends."""

    def __init__(self) -> None:
        self._retired = False
        pid = ffi.new("int *")
        sock = lib.nsb_zygote_start(pid)
        if sock < 0:
            raise SandboxUnavailable(
                f"the helper process cannot be started: {os.strerror(-sock)}", remedy="run: nsbox doctor", errno=-sock
            )
        self.socket: int = sock
        self.pid: int = pid[0]
        self.owner = (os.getpid(), os.geteuid(), os.getegid())

    def nest(self) -> None:
        """Have it go into a user namespace that maps its own id only: what it launches later is beneath that one, and
        can be entered by a template that it starts (native/template.c). Raises SandboxUnavailable."""
        answer, made = ffi.new("struct nsb_msg *"), ffi.new("int[2]", (-1, -1))
        ret = lib.nsb_ask(self.socket, lib.NSB_NEST, b"\0", 1, [], 0, answer, made)
        if ret == 0:
            os.close(made[0])
            ret = answer.err
        if ret < 0:
            raise SandboxUnavailable(
                f"a user namespace for a pool cannot be made: {os.strerror(-ret)}",
                remedy="run: nsbox doctor",
                errno=-ret,
            )

    def close(self) -> None:
        """End it, and with it every sandbox that it started."""
        os.close(self.socket)
        if self.owner[0] == os.getpid():
            # It is our child. A host that reaps every child, or ignores SIGCHLD, has perhaps done so already.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def _disconnect(self) -> None:
        """Let go of the socket but keep its number: another thread may be about to ask, and must not ask whoever gets
        the number next."""
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, self.socket, inheritable=False)
        os.close(null)

    def retire(self) -> None:
        """Reap one that is dead. Other threads may be about to ask it: the number of its socket stays taken until the
        last of them has let go of this object. Else they would ask whoever gets it next, and wait for ever."""
        self._disconnect()
        self._retired = True
        if self.owner[0] == os.getpid():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def __del__(self) -> None:
        if self._retired:
            os.close(self.socket)

    def close_soon(self) -> None:
        """The same, but wait for three seconds at most: a helper that somebody has stopped would not end."""
        with contextlib.suppress(OSError):
            # The number stays taken: a thread that still runs must not ask whoever gets it next.
            self._disconnect()
            fd = os.pidfd_open(self.pid)
            try:
                waiter = select.poll()
                waiter.register(fd, select.POLLIN)
                waiter.poll(3000)
                os.waitpid(self.pid, os.WNOHANG)
            finally:
                os.close(fd)


_zygote: Zygote | None = None
_lock = threading.Lock()
_worker: int | None = None  #: the process for which _leave_workers() has been called


def leave() -> None:
    """Wait for the helper, which ends with this process: the pid 1 of many a container reaps no orphans."""
    global _zygote
    last, _zygote = _zygote, None
    if last is not None and last.owner[0] == os.getpid():
        last.close_soon()


def _leave_workers() -> None:
    """A worker of multiprocessing ends without atexit."""
    global _worker
    util = sys.modules.get("multiprocessing.util")
    if util and _worker != os.getpid():
        _worker = os.getpid()
        util.Finalize(None, leave, exitpriority=0)


def _after_fork() -> None:
    """A forked child leaves its parent's zygote alone and starts its own when it needs one."""
    global _zygote, _lock
    if _zygote is not None:
        os.close(_zygote.socket)
    _zygote, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def zygote(dead: Zygote | None = None) -> Zygote:
    """The zygote of this process, started on demand. A forked child, or one that changed its ids, gets its own.

    ``dead`` is one that was found not to answer: it is replaced, unless another thread has done so meanwhile.
    """
    global _zygote
    with _lock:
        owner = (os.getpid(), os.geteuid(), os.getegid())
        if _zygote is not None and _zygote is dead:
            _zygote.retire()
            _zygote = None
        if _zygote is None or _zygote.owner != owner:
            # Sandboxes of a former identity go on: the zygote of that identity ends with this process.
            _zygote = Zygote()
            _leave_workers()
        return _zygote


def landlock_abi() -> int:
    """The kernel's Landlock ABI version, 0 where there is none."""
    return max(0, int(lib.nsb_landlock_abi()))
