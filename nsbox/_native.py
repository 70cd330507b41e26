"""The only importer of the compiled module: version handshake, the zygote of this process, calls with their errors."""

import os
import threading
from typing import Any

from nsbox.errors import SandboxUnavailable

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


class Zygote:
    """The helper process of this process (see native/zygote.c). It ends when this process ends, however that happens."""

    def __init__(self) -> None:
        pid = ffi.new("int *")
        sock = lib.nsb_zygote_start(pid)
        if sock < 0:
            raise SandboxUnavailable(
                f"the helper process cannot be started: {os.strerror(-sock)}", remedy="run: nsbox doctor", errno=-sock
            )
        self.socket: int = sock
        self.pid: int = pid[0]
        self.owner = (os.getpid(), os.geteuid(), os.getegid())

    def close(self) -> None:
        """End it, and with it every sandbox that it started."""
        os.close(self.socket)


_zygote: Zygote | None = None
_lock = threading.Lock()


def _after_fork() -> None:
    """A forked child leaves its parent's zygote alone and starts its own when it needs one."""
    global _zygote, _lock  # noqa: PLW0603
    if _zygote is not None:
        os.close(_zygote.socket)
    _zygote, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def zygote(*, fresh: bool = False) -> Zygote:
    """The zygote of this process, started on demand. A forked child, or one that changed its ids, gets its own.

    ``fresh`` replaces one that was found dead.
    """
    global _zygote  # noqa: PLW0603 - one per process is the point
    with _lock:
        owner = (os.getpid(), os.geteuid(), os.getegid())
        if _zygote is None or fresh or _zygote.owner != owner:
            _zygote = Zygote()
        return _zygote


def landlock_abi() -> int:
    """The kernel's Landlock ABI version, 0 where there is none."""
    return max(0, int(lib.nsb_landlock_abi()))
