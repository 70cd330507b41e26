"""A ``concurrent.futures`` executor whose calls each run in an interpreter of a ``PythonPool``.

Functions and arguments go in as pickles, which only the sandbox loads. What comes back is data and nothing else: the
answer is JSON in which each list, tuple, set, dictionary, run of bytes and array says what it is. Nothing from inside
is ever unpickled.
"""

import base64
import builtins
import importlib
import math
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

from nsbox.errors import NsboxError, SpecError
from nsbox.python_pool import PythonPool, PythonResult, Raised

Dumps = Callable[[Any], bytes]
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class TaskFailed(NsboxError):
    """A call raised an exception of a kind that this process does not know; ``raised`` has it as text."""

    def __init__(self, raised: Raised) -> None:
        super().__init__(f"{raised.type}: {raised.message}")
        self.raised = raised


class RemoteTraceback(NsboxError):
    """The cause of an exception from inside: its traceback as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class SandboxExecutor(Executor):
    """Runs each call in a sandbox of its own. Made from a ``PythonPool``, which stays the caller's, or from the options
    of one.

    ``max_workers`` calls run at the same time (default: the pool's size). ``dumps`` pickles ``(function, args,
    kwargs)``: cloudpickle's, where that is installed here and for the interpreter of the pool, which must then preload
    it to be quick; ``pickle.dumps`` does for functions of modules that are there inside. A call may return None,
    booleans, numbers, text, bytes, lists, tuples, sets, dictionaries and numpy arrays of them; anything else is a
    TypeError. A built-in exception comes back as what it is, others as TaskFailed; both have the traceback inside as
    their cause. A limit that ended a call is TimeoutExceeded or LimitExceeded, an end of the interpreter CommandFailed.
    ``timeout`` is that of each call.
    """

    def __init__(
        self,
        pool: PythonPool | None = None,
        *,
        max_workers: int | None = None,
        dumps: Dumps | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> None:
        if pool is not None and options:
            raise SpecError(f"{min(options)}: a pool is given, which has options of its own")
        self._dumps = dumps or _cloudpickle()
        if dumps is None and pool is None:
            options["preload"] = [*options.get("preload", ()), "cloudpickle"]
        self._timeout = timeout
        self._own = None if pool is not None else PythonPool(**options)
        self._pool = pool or self._own
        size = self._pool.counts().size if self._pool else 1
        self._threads = ThreadPoolExecutor(max_workers or size, thread_name_prefix="nsbox-executor")
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Schedule ``fn(*args, **kwargs)``. Raises what ``dumps`` raises for arguments that cannot be pickled,
        RuntimeError after ``shutdown``."""
        return self._threads.submit(self._call, self._dumps((fn, args, kwargs)))

    def _call(self, data: bytes) -> Any:
        assert self._pool is not None
        result = self._pool.call({"call": base64.b64encode(data).decode()}, timeout=self._timeout)
        if result.exception is not None:
            raise _exception(result.exception)
        result.check()
        if result.value_error is not None:
            raise TypeError(result.value_error)
        return _value(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As that of every executor: ``wait`` for the calls that run, ``cancel_futures`` that have not begun. A pool of
        its own is closed once all calls are over."""
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        with self._lock:
            own, self._own = self._own, None
        if own is None:
            return
        if wait:
            own.close()
        else:
            threading.Thread(target=self._close_later, args=(own,), name="nsbox-executor-end", daemon=True).start()

    def _close_later(self, own: PythonPool) -> None:
        self._threads.shutdown(wait=True)
        own.close()


def _cloudpickle() -> Dumps:
    try:
        dumps: Dumps = importlib.import_module("cloudpickle").dumps
    except ImportError:
        raise SpecError(
            "dumps: cloudpickle is not installed; pip install nsbox[executor], or give dumps=pickle.dumps for functions"
            " of modules that are there inside"
        ) from None
    return dumps


def _exception(raised: Raised) -> BaseException:
    kind = getattr(builtins, raised.type, None) if raised.module == "builtins" else None
    error: BaseException = TaskFailed(raised)
    # No future of asyncio takes a StopIteration, and who awaits one would wait for ever.
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, StopIteration):
        try:
            error = kind(raised.message)
        except TypeError:  # those of Unicode, which want more than words
            pass
    error.__cause__ = RemoteTraceback(raised.traceback)
    return error


def _value(result: PythonResult) -> Any:
    try:
        return untagged(result.value)
    except Exception as error:  # numpy has more kinds of it for what is hostile than are documented
        raise TypeError(f"what came back is no data: {error}") from None


def untagged(value: Any) -> Any:
    """Data of what ``nsbox.python_inside.tagged`` has made, or somebody hostile: it makes nothing but plain values.

    Raises ValueError, TypeError for anything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("a value without a type")
    ((kind, inner),) = value.items()
    if kind in _SEQUENCES and isinstance(inner, list):
        return _SEQUENCES[kind]([untagged(item) for item in inner])
    if kind == "dict" and isinstance(inner, list):
        return {untagged(key): untagged(item) for key, item in inner}
    if kind == "complex" and isinstance(inner, list):
        return complex(*map(float, inner))
    if kind in ("bytes", "numpy") and isinstance(inner, str):
        data = base64.b64decode(inner, validate=True)
        return data if kind == "bytes" else _array(data)
    raise ValueError(f"a value of type {str(kind)[:40]!r}")


def _array(data: bytes) -> Any:
    """An array of numbers, text or bytes; nothing that would need a pickle, and no larger than what came."""
    import io

    numpy = importlib.import_module("numpy")
    file, form = io.BytesIO(data), numpy.lib.format
    read = form.read_array_header_1_0 if form.read_magic(file) == (1, 0) else form.read_array_header_2_0
    shape, by_column, dtype = read(file)
    rest = file.read()
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(rest):
        raise ValueError("an array of objects, or of another size")
    return numpy.frombuffer(bytearray(rest), dtype).reshape(shape, order="F" if by_column else "C")
