"""nsbox runs what an agent generates or invokes in an isolated, throw-away environment.

The names are loaded when they are first used: importing this package costs almost nothing.
"""

from __future__ import annotations

import atexit as _atexit
import sys as _sys

TYPE_CHECKING = False  # that of typing costs half as much as an interpreter's start
if TYPE_CHECKING:
    from typing import Any

    from nsbox import coverage as coverage
    from nsbox import errors as errors
    from nsbox.aio import AsyncSandbox as AsyncSandbox
    from nsbox.aio import arun as arun
    from nsbox.aio_pool import AsyncPool as AsyncPool
    from nsbox.api import run as run
    from nsbox.binds import Bind as Bind
    from nsbox.binds import Tmpfs as Tmpfs
    from nsbox.box import Sandbox as Sandbox
    from nsbox.executor import SandboxExecutor as SandboxExecutor
    from nsbox.pool import Pool as Pool
    from nsbox.python_pool import PythonPool as PythonPool
    from nsbox.python_pool import PythonResult as PythonResult
    from nsbox.report import Result as Result
    from nsbox.secrets import Secret as Secret
    from nsbox.spec import Spec as Spec

__version__ = "0.1.0"
_HOME = {
    "AsyncPool": "aio_pool",
    "AsyncSandbox": "aio",
    "Bind": "binds",
    "Pool": "pool",
    "PythonPool": "python_pool",
    "PythonResult": "python_pool",
    "Result": "report",
    "Sandbox": "box",
    "SandboxExecutor": "executor",
    "Secret": "secrets",
    "Spec": "spec",
    "Tmpfs": "binds",
    "arun": "aio",
    "run": "api",
}
__all__ = [
    "AsyncPool",
    "AsyncSandbox",
    "Bind",
    "Pool",
    "PythonPool",
    "PythonResult",
    "Result",
    "Sandbox",
    "SandboxExecutor",
    "Secret",
    "Spec",
    "Tmpfs",
    "arun",
    "coverage",
    "errors",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in ("coverage", "errors"):
        return __import__(f"nsbox.{name}", fromlist=(name,))
    if name not in _HOME:
        raise AttributeError(f"module 'nsbox' has no attribute {name!r}")
    value = getattr(__import__(f"nsbox.{_HOME[name]}", fromlist=(name,)), name)
    globals()[name] = value
    return value


def _leave() -> None:
    native = _sys.modules.get("nsbox._native")
    if native is not None:
        native.leave()


# Here, before anything can be used: what is registered later is called earlier, and may still use a sandbox.
_atexit.register(_leave)
