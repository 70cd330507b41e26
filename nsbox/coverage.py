"""Counts what this process executes, inside of sandboxes and past them, and can forbid the latter.

    from nsbox import coverage
    coverage.install()              # or install(enforce=True)
    ...
    coverage.snapshot()             # {"sandboxed": 12, "bare": 1, "percent": 92.3, "origins": [...]}

Python raises audit events (sys.addaudithook, PEP 578) for subprocess, os.exec*, os.spawn*, os.posix_spawn, os.system,
pty.spawn and ctypes. A hook stays until the process ends, so that ``uninstall`` only makes it do nothing. Children that
were forked (multiprocessing, os.fork) count for the process that installed it. Not seen is what is started in C: by an
extension module, or by multiprocessing's ``spawn`` method. And it is no wall against code that means to get past it:
such code belongs in a sandbox.
"""

import os
import sys
import threading
from collections import Counter
from collections.abc import Collection
from types import FrameType
from typing import Any

from nsbox.errors import NsboxError

#: Kinds by the audit event that gives them away. os.spawn* is a fork whose child goes on with exec.
EXECUTIONS = {
    "subprocess.Popen": "subprocess",
    "os.exec": "exec",
    "os.posix_spawn": "posix_spawn",
    "os.system": "system",
    "pty.spawn": "pty",
}
LOADS = {"ctypes.dlopen": "dlopen"}
KINDS = frozenset((*EXECUTIONS.values(), *LOADS.values()))
MAX_ORIGINS = 1000
_NAMES = {**EXECUTIONS, **LOADS}


class Uncovered(NsboxError, PermissionError):
    """An execution past the sandboxes was refused (``install(enforce=True)``)."""


class _State:
    """Counts of this process, and counters of the kernel (eventfd(2)) by which forked children add theirs."""

    def __init__(self) -> None:
        self.hooked = self.active = self.enforce = self.forked = False
        self.kinds: frozenset[str] = frozenset()
        self.allow: tuple[str, ...] = ()
        self.channels: dict[str, int] = {}
        self.clear()

    def clear(self) -> None:
        self.lock = threading.RLock()
        self.executing = False
        self.counts = Counter[str]()
        self.origins = Counter[tuple[str, str]]()

    def after_fork(self) -> None:
        self.forked = True
        self.clear()

    def add(self, name: str, count: int = 1) -> None:
        """Add to a count, and to the parent's where this is a forked child."""
        with self.lock:
            self.counts[name] += count
        if self.forked and name in self.channels:
            try:
                os.eventfd_write(self.channels[name], count)
            except OSError:  # closed by the child, or full
                pass

    def collect(self) -> None:
        """Take over what forked children have counted."""
        if self.forked:
            return
        for name, fd in self.channels.items():
            try:
                self.counts[name] += os.eventfd_read(fd)
            except OSError:  # nothing new
                pass


_state = _State()
_local = threading.local()


def install(enforce: bool = False, only: Collection[str] | None = None, allow: Collection[str] = ()) -> None:
    """Begin to count, or change how.

    ``enforce`` raises ``Uncovered`` where something would be executed past the sandboxes. ``only`` picks kinds (all
    executions; ``dlopen`` by choice). ``allow`` are modules, with all beneath them, whose executions are not counted.
    Raises ValueError for an unknown kind.
    """
    kinds = frozenset(EXECUTIONS.values()) if only is None else frozenset(only)
    unknown = kinds - KINDS
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]!r} is no kind of execution; the kinds are {', '.join(sorted(KINDS))}")
    with _state.lock:
        _state.kinds, _state.allow, _state.enforce, _state.active = kinds, tuple(allow), enforce, True
        if _state.hooked:
            return
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        _state.channels = {name: os.eventfd(0, flags) for name in ("sandboxed", "bare", "refused")}
        os.register_at_fork(after_in_child=_state.after_fork)
        sys.addaudithook(_hook)
        _state.hooked = True


def uninstall() -> None:
    """Stop counting and enforcing. The counts stay."""
    _state.active = _state.enforce = False


def installed() -> bool:
    """Whether executions are counted at present."""
    return _state.active


def reset() -> None:
    """Begin at zero."""
    with _state.lock:
        _state.collect()
        _state.counts.clear()
        _state.origins.clear()


def sandboxed(count: int = 1) -> None:
    """Note executions inside of a sandbox; nsbox calls it for every run."""
    _state.add("sandboxed", count)


class own:
    """What nsbox itself has to start for a sandbox is neither: ``with coverage.own(): …`` on the same thread."""

    def __enter__(self) -> None:
        _local.depth = getattr(_local, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        _local.depth -= 1


def snapshot() -> dict[str, Any]:
    """The counts as plain values. ``percent`` is None before anything was executed.

    In a forked child they are the child's own since the fork, which its parent counts as well: ``reported_by_parent``.
    """
    with _state.lock:
        _state.collect()
        counts, total = _state.counts, _state.counts["sandboxed"] + _state.counts["bare"]
        top = sorted(_state.origins.items(), key=lambda item: (-item[1], item[0]))
        return {
            "process": f"{os.getpid()}-{_started()}",
            "reported_by_parent": _state.forked,
            **{name: counts[name] for name in ("sandboxed", "bare", "loads", "refused")},
            "percent": round(100 * counts["sandboxed"] / total, 3) if total else None,
            "origins": [{"kind": kind, "where": where, "count": count} for (kind, where), count in top[:50]],
        }


def _started() -> str:
    """When this process began, in ticks since boot: pids are used again."""
    try:
        with open("/proc/self/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return "0"


def _hook(event: str, args: tuple[Any, ...]) -> None:
    # Called for every audit event of the process: the common case must cost next to nothing.
    if not _state.active or event not in _NAMES:
        return
    kind = _NAMES[event]
    if kind not in _state.kinds or getattr(_local, "depth", None):
        return
    if kind == "dlopen" and (not args or args[0] is None):  # the program itself, which is loaded already
        return
    module, where, passed = _origin()
    if any(module == name or module.startswith(name + ".") for name in ("nsbox", *_state.allow)):
        return
    if not _already_counted(kind, passed):
        _note(kind, where)
    if _state.enforce:
        raise Uncovered(f"{kind} at {where} would execute past the sandbox; use nsbox.run, or allow the module by name")


# Modules that only pass a call on: who wanted it stands behind them.
_PASSING = frozenset(("subprocess", "os", "pty", "ctypes", "asyncio", "multiprocessing", "concurrent", "threading"))


def _origin() -> tuple[str, str, list[str]]:
    """The module that wanted it, ``module:line``, and the modules that passed the call on."""
    frame: FrameType | None = sys._getframe(2)
    passed: list[str] = []
    module = where = "?"
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "?"))
        where = f"{module}:{frame.f_lineno}"
        if module.partition(".")[0] not in _PASSING:
            break
        passed.append(module)
        frame = frame.f_back
    return module, where, passed


def _already_counted(kind: str, passed: list[str]) -> bool:
    """Whether another event has told of the same execution already.

    Popen comes before its posix_spawn, pty.spawn before its child's exec, and execvp tries the directories of PATH.
    """
    if kind == "posix_spawn":
        return "subprocess" in passed
    if kind != "exec":
        return False
    again, _state.executing = _state.executing, True
    return again or "pty" in passed


def _note(kind: str, where: str) -> None:
    if kind == "dlopen":
        _state.add("loads")
    else:
        _state.add("refused" if _state.enforce else "bare")
    with _state.lock:
        key = (kind, where)
        if key in _state.origins or len(_state.origins) < MAX_ORIGINS:
            _state.origins[key] += 1
