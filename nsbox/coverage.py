"""Counts what this process executes, inside of sandboxes and past them, and can forbid the latter.

    from nsbox import coverage
    coverage.install()              # or install(enforce=True)
    ...
    coverage.snapshot()             # {"sandboxed": 12, "bare": 1, "percent": 92.3, "origins": [...]}

Python raises audit events (sys.addaudithook, PEP 578) for subprocess, os.exec*, os.spawn*, os.posix_spawn, os.system,
pty.spawn and ctypes. A hook stays until the process ends, so that ``uninstall`` only makes it do nothing. It sees what
goes through the interpreter; what an extension module starts in C it does not see, and it is no wall against code that
means to get past it: such code belongs in a sandbox.
"""

import os
import sys
import threading
from collections import Counter
from collections.abc import Collection
from typing import Any

from nsbox.errors import NsboxError

#: Kinds by the audit event that gives them away. os.spawn* is a fork that the child continues with exec: the parent
#: sees the former.
EXECUTIONS = {
    "subprocess.Popen": "subprocess",
    "os.exec": "exec",
    "os.posix_spawn": "posix_spawn",
    "os.spawn": "spawn",
    "os.system": "system",
    "pty.spawn": "pty",
}
LOADS = {"ctypes.dlopen": "dlopen"}
KINDS = frozenset((*EXECUTIONS.values(), *LOADS.values()))
MAX_ORIGINS = 1000


class Uncovered(NsboxError, PermissionError):
    """An execution past the sandboxes was refused (``install(enforce=True)``)."""


class _State:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.hooked = False
        self.active = self.enforce = False
        self.kinds: frozenset[str] = frozenset()
        self.allow: tuple[str, ...] = ()
        self.reset()

    def reset(self) -> None:
        self.pid = os.getpid()
        self.sandboxed = self.refused = self.loads = 0
        self.bare: Counter[str] = Counter()
        self.origins: Counter[tuple[str, str]] = Counter()


_state = _State()
_local = threading.local()


def install(enforce: bool = False, only: Collection[str] | None = None, allow: Collection[str] = ()) -> None:
    """Begin to count, or change how.

    ``enforce`` raises ``Uncovered`` where something would be executed past the sandboxes. ``only`` picks kinds (all
    executions; ``dlopen`` by choice). ``allow`` are modules, with all beneath them, whose executions are not counted.
    """
    kinds = frozenset(EXECUTIONS.values()) if only is None else frozenset(only)
    unknown = kinds - KINDS
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]!r} is no kind of execution; the kinds are {', '.join(sorted(KINDS))}")
    with _state.lock:
        _state.kinds, _state.allow, _state.enforce, _state.active = kinds, tuple(allow), enforce, True
        if not _state.hooked:
            sys.addaudithook(_hook)
            _state.hooked = True


def uninstall() -> None:
    """Stop counting and enforcing. The counts stay."""
    _state.active = _state.enforce = False


def reset() -> None:
    """Begin at zero."""
    with _state.lock:
        _state.reset()


def sandboxed(count: int = 1) -> None:
    """Note executions inside of a sandbox; nsbox calls it for every run."""
    with _state.lock:
        _fresh()
        _state.sandboxed += count


class own:  # noqa: N801 - reads as a word
    """What nsbox itself has to start for a sandbox is neither: ``with coverage.own(): …`` on the same thread."""

    def __enter__(self) -> None:
        _local.depth = getattr(_local, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        _local.depth -= 1


def snapshot() -> dict[str, Any]:
    """The counts as plain values. ``percent`` is None before anything was executed."""
    with _state.lock:
        _fresh()
        bare = sum(_state.bare.values())
        total = _state.sandboxed + bare
        top = sorted(_state.origins.items(), key=lambda item: (-item[1], item[0]))
        return {
            "process": f"{_state.pid}-{_started()}",
            "sandboxed": _state.sandboxed,
            "bare": bare,
            "loads": _state.loads,
            "refused": _state.refused,
            "percent": round(100 * _state.sandboxed / total, 3) if total else None,
            "kinds": dict(sorted(_state.bare.items())),
            "origins": [{"kind": kind, "where": where, "count": count} for (kind, where), count in top[:50]],
        }


def _fresh() -> None:
    # A forked child begins with its parent's counts, which are the parent's to report.
    if _state.pid != os.getpid():
        _state.reset()


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
    if kind not in _state.kinds or getattr(_local, "depth", 0):
        return
    if kind == "dlopen" and (not args or args[0] is None):  # the program itself, which is loaded already
        return
    module, where = _origin()
    if module.partition(".")[0] == "nsbox" or any(module == name or module.startswith(name + ".") for name in _state.allow):
        return
    _note(kind, where)
    if _state.enforce:
        raise Uncovered(f"{kind} at {where} would execute past the sandbox; use nsbox.run, or allow the module by name")


_NAMES = {**EXECUTIONS, **LOADS}
# Who called is looked for beneath these; they only pass calls on.
_PASSING = frozenset(("subprocess", "os", "pty", "ctypes", "asyncio", "multiprocessing", "concurrent", "threading"))


def _origin() -> tuple[str, str]:
    """The module that wanted it, and ``module:line``."""
    # _getframe raises no audit event of its own that we listen to.
    frame = sys._getframe(2)
    first = frame
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "?"))
        if module.partition(".")[0] not in _PASSING:
            return module, f"{module}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    module = str(first.f_globals.get("__name__", "?"))
    return module, f"{module}:{first.f_lineno}"


def _note(kind: str, where: str) -> None:
    # Popen raises its own event and then, on some ways, that of posix_spawn or exec: nested ones are the same execution.
    with _state.lock:
        _fresh()
        if kind == "dlopen":
            _state.loads += 1
        elif _state.enforce:
            _state.refused += 1
        else:
            _state.bare[kind] += 1
        key = (kind, where)
        if key in _state.origins or len(_state.origins) < MAX_ORIGINS:
            _state.origins[key] += 1
