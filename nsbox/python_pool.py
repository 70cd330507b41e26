"""Python that is there before it is asked for: interpreters with everything imported, each in a sandbox of its own.

A template interpreter has imported what is wanted; it is forked ahead into complete fresh sandboxes, where each fork
waits for the one piece of code, or the one task, that it will ever run. What a caller pays is one message there and one
back. See docs/guides/python-pool.md; how a fork gets into a sandbox is in ``nsbox.python_template``.
"""

import base64
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from nsbox import python_env
from nsbox.binds import Bind
from nsbox.boxchanges import BoxCrossing
from nsbox.crossing import Crossing
from nsbox.errors import SandboxUnavailable, SpecError
from nsbox.interpreter import Lease
from nsbox.launch import count_execution
from nsbox.pool import Supply
from nsbox.prepared import limit_of
from nsbox.report import Result
from nsbox.spec import Spec
from nsbox.stock import Stock, WhenEmpty
from nsbox.supervise import drive
from nsbox.templates import Templates

Limit = float | int | str | None
#: characters of the code that a report and the boundary log show
SHOWN = 1000


class Raised(NamedTuple):
    """An exception that the code raised, as text from inside."""

    type: str
    message: str
    traceback: str
    module: str = "builtins"


class PythonResult(Result):
    """How a piece of code ended: what a ``Result`` tells, and ``value``, the value of its last line where that is an
    expression, as JSON has it; ``value_error`` says why there is none though there should be; ``exception`` is what the
    code raised. ``exit_code`` is 0, or 1 after an exception, or what the code has exited with."""

    def __init__(self, lease: Lease, sandbox_id: str, argv: list[str]) -> None:
        super().__init__(lease, sandbox_id, argv)
        reply = lease.reply or {}
        self.value: Any = reply.get("value")
        error = reply.get("value_error") or lease.trouble
        self.value_error: str | None = str(error) if error else None
        self.exception: Raised | None = _raised(reply.get("exception"))

    def check(self) -> "PythonResult":
        super().check()
        return self


def _raised(found: Any) -> Raised | None:
    if not isinstance(found, dict):
        return None
    return Raised(*(str(found.get(name, "")) for name in Raised._fields))


def _spec(spec: Spec | None, options: Mapping[str, Any], environment: python_env.PythonEnvironment) -> Spec:
    spec = spec.replace(**options) if spec else Spec.from_dict(dict(options))
    if spec.root != "host":
        raise SpecError(
            "root: the interpreters of a pool are forked from one that runs on the host, whose files another root does"
            " not show; use nsbox.Pool with the interpreter of that root, or leave root out"
        )
    if spec.subids:
        raise SpecError("subids: the sandboxes of a pool of interpreters have one id each; leave it out")
    if any(secret.deliver == "fd" for secret in spec.secrets):
        raise SpecError("secrets: a pool of interpreters delivers none as a descriptor; use deliver='file' or 'env'")
    taken = {bind.target or os.path.abspath(bind.source) for bind in (*spec.ro, *spec.rw)}
    mounts = [path for path in environment.mounts if path not in taken]
    writable: list[tuple[str, str, str | None]] = [
        ("rw", bind.source, bind.target or os.path.abspath(bind.source)) for bind in spec.rw
    ]
    if spec.workspace and spec.apply:
        writable.append(("workspace", spec.workspace.source, None))
    # What the template loads is asked of a fresh interpreter: this one's sys.path has what its program has added.
    fresh = python_env.of(environment.executable) if writable else environment
    for option, source, target in writable:
        found = python_env.in_reach(fresh, source, target, mounts)
        if found is not None:
            raise SpecError(
                f"{option}: what runs inside could change {found!r} in {source!r}, which the template interpreter loads"
                " outside of any sandbox, also later; name a folder without it, or another interpreter with python="
            )
    ro = (*spec.ro, *(Bind(path, path) for path in mounts))
    return spec.replace(ro=ro, env={**environment.env, **spec.env})


class PythonPool(Supply[Lease]):
    """Keeps interpreters ready, each in a sandbox that nobody used. Use it with ``with``; ``close`` is idempotent. Any
    thread may use it.

    Made from a Spec or from the options of one. ``python`` is the interpreter (default: the one that runs this), from
    version 3.9 on, and ``preload`` what it imports before it is forked; ``warm_up`` is code that runs once in the
    template and once in each fork, before anything is asked. Those run outside of any sandbox and must be trusted; the
    template has none of this process's variables, descriptors and memory. All interpreters of a pool share the secret
    of their string hashes: use one pool for each party that does not trust the other. ``size``, ``most``, ``max_age``
    and ``when_empty`` as for ``nsbox.Pool``; ``log`` as in ``nsbox.run``. Raises SpecError when the interpreter or a
    module cannot be loaded, and what ``nsbox.run`` raises for a Spec that cannot be had here.
    """

    def __init__(
        self,
        spec: Spec | None = None,
        *,
        preload: Sequence[str] = (),
        python: str | None = None,
        warm_up: str = "",
        size: int = 4,
        most: int | None = None,
        max_age: float = 300.0,
        when_empty: WhenEmpty = "make",
        log: Any = None,
        **options: Any,
    ) -> None:
        if isinstance(preload, str):
            raise SpecError(f"preload: give a list of modules: [{preload!r}]")
        environment = python_env.of(python)
        if environment.version < (3, 9):
            version = ".".join(map(str, environment.version))
            raise SpecError(f"python: {environment.executable!r} is Python {version}; a pool needs 3.9 or later")
        super().__init__(_spec(spec, options, environment), log)
        self._argv = [environment.executable, "-c"]
        self._crossings: dict[int, Crossing] = {}
        self._templates = Templates(self._prepared, environment, preload, warm_up)
        try:
            self._stock = Stock(
                self._make, self._discard, self._usable, size=size, most=most, max_age=max_age, when_empty=when_empty
            )
        except BaseException:
            self._templates.close()
            raise

    def run(
        self,
        code: str,
        *,
        files: Mapping[str, bytes | str] | None = None,
        inputs: Mapping[str, Any] | None = None,
        timeout: Limit = None,
        max_output: Limit = None,
        patience: float | None = None,
    ) -> PythonResult:
        """Run ``code`` in an interpreter that nobody used before, and throw that and its sandbox away.

        ``files`` (path → content; relative to the working directory inside) are written first, with the rights of the
        code. ``inputs`` are names that it finds, with values that JSON has. ``timeout`` (seconds) and ``max_output``
        (bytes of each stream) stand in for those of the Spec. ``patience``: how many seconds to wait at most where the
        pool waits. How the code ended is in the result, also an exception. Raises SpecError for inputs that are not
        JSON, SandboxUnavailable when the pool is closed or has none to give, LogError.
        """
        return self.call(_request(code, files, inputs), timeout=timeout, max_output=max_output, patience=patience)

    def call(
        self,
        request: dict[str, Any],
        *,
        timeout: Limit = None,
        max_output: Limit = None,
        patience: float | None = None,
    ) -> PythonResult:
        """``run`` for a ``request`` as ``nsbox.python_inside`` takes it; ``timeout`` (seconds), ``max_output`` (bytes)
        and ``patience`` (seconds) as there."""
        limits = self.spec.limits
        bounds = limit_of("timeout", timeout, limits.timeout), limit_of("output", max_output, limits.output)
        shown = str(request.get("code", "(a call)"))[:SHOWN]
        crossing = Crossing(self.spec, [*self._argv, shown], self.target)
        lease, began = None, time.monotonic()
        try:
            lease = self._stock.take(patience)
            self._begin(lease, crossing, began)
            result = _ask(lease, request, bounds, crossing.argv)
            result.lease = lease.proof()
            crossing.finish(lease.handle, result)
            return result
        except BaseException as error:
            crossing.fail(error)
            raise
        finally:
            if lease is not None:
                self._discard(lease)
            crossing.close()

    def session(self, patience: float | None = None) -> "PythonSession":
        """An interpreter that keeps its variables from one piece of code to the next, for one task; then it is thrown
        away like any other. ``patience``: how many seconds to wait at most where the pool waits. Raises as ``run``, and
        SpecError where the Spec wants changes taken out at the end."""
        if self.spec.apply or self.spec.export:
            raise SpecError("apply, export: a session has no end that could succeed; use run, or nsbox.Sandbox")
        crossing = BoxCrossing(self.spec, os.urandom(8).hex(), self.target)
        lease, began = None, time.monotonic()
        try:
            lease = self._stock.take(patience)
            lease.interpreter.is_last = False
            self._begin(lease, crossing, began)
            crossing.opened(lease.handle)
        except BaseException as error:
            crossing.fail(error)
            crossing.close()
            if lease is not None:
                self._discard(lease)
            raise
        return PythonSession(self, lease, crossing)

    def close(self) -> None:
        """Throw away what nobody has leased. Runs and sessions that are on their way end by themselves."""
        super().close()
        self._templates.close()

    def _begin(self, lease: Lease, crossing: Crossing, began: float) -> None:
        """From now on it is somebody's: its time begins, and ``crossing`` is told what crosses."""
        handle = lease.interpreter
        handle.started_at = handle.box.started_at = began
        self._crossings[id(lease)] = crossing
        crossing.began = time.time()
        crossing.begin(handle)
        count_execution()

    def _make(self) -> Lease:
        told: list[Lease] = []

        def on_network(event: str, fields: dict[str, Any]) -> None:
            crossing = self._crossings.get(id(told[0])) if told else None
            if crossing is not None:
                crossing.on_network(event, fields)

        lease = self._templates.make(self._fresh(), on_network)
        told.append(lease)
        return lease

    def _discard(self, lease: Lease) -> None:
        self._crossings.pop(id(lease), None)
        lease.handle.close()
        self._templates.gone(lease.template)

    def _usable(self, lease: Lease) -> bool:
        return self._templates.is_current(lease) and lease.healthy


class PythonSession:
    """One interpreter for one task. Use it with ``with``; one thread at a time may ``run``. ``close`` is idempotent."""

    def __init__(self, pool: PythonPool, lease: Lease, crossing: BoxCrossing) -> None:
        self._pool, self._lease, self._crossing = pool, lease, crossing
        self._open = True
        self.id = lease.handle.id

    @property
    def is_running(self) -> bool:
        """Whether more code can be run: it is open, and the interpreter has not ended."""
        return self._open and self._is_ours and self._lease.healthy

    @property
    def _is_ours(self) -> bool:
        """A forked child has copies of the descriptors, and no part in it."""
        return os.getpid() == self._lease.handle.owner

    def run(
        self,
        code: str,
        *,
        files: Mapping[str, bytes | str] | None = None,
        inputs: Mapping[str, Any] | None = None,
        timeout: Limit = None,
        max_output: Limit = None,
    ) -> PythonResult:
        """Run more code with the variables of the former. ``timeout`` (seconds) and ``max_output`` (bytes) limit each
        piece by itself, ``files`` and ``inputs`` are as for ``PythonPool.run``; a limit that ends it, or an end of the
        interpreter, ends the session. Raises SandboxUnavailable after that."""
        if not self.is_running:
            raise SandboxUnavailable("the session has ended", remedy="open another")
        request = _request(code, files, inputs) | {"keep": True}
        limits = self._pool.spec.limits
        bounds = limit_of("timeout", timeout, limits.timeout), limit_of("output", max_output, limits.output)
        result = _ask(self._lease, request, bounds, [*self._pool._argv, code[:SHOWN]])
        self._crossing.command(result)
        if self._lease.reply is None:
            self.close()
        else:
            self._lease.settle()
        return result

    def close(self) -> None:
        """End it, and throw its sandbox away. Raises LogError."""
        was_open, self._open = self._open, False
        if not was_open:
            return
        try:
            if self._is_ours:
                self._crossing.ended(self._lease.handle)
        finally:
            if self._is_ours:
                self._crossing.close()
            self._pool._discard(self._lease)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._open and self._is_ours:
            warnings.warn(f"session {self.id} was never closed; use it with 'with'", ResourceWarning, stacklevel=2)
        self.close()


def _request(code: str, files: Mapping[str, bytes | str] | None, inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(code, str):
        raise SpecError(f"code: wants text, not a {type(code).__name__}")
    request: dict[str, Any] = {"code": code}
    if files:
        request["files"] = {
            os.fspath(path): base64.b64encode(data.encode() if isinstance(data, str) else data).decode()
            for path, data in files.items()
        }
    if inputs:
        request["inputs"] = dict(inputs)
    return request


def _ask(lease: Lease, request: dict[str, Any], bounds: tuple[Any, Any], argv: list[str]) -> PythonResult:
    secret = lease.interpreter.box.given().variables
    if secret:
        request = {**request, "env": dict(secret)}  # the caller's own stays without
    try:
        lease.ask(request, *bounds)
    except (TypeError, ValueError) as error:
        raise SpecError(f"inputs: a value is not JSON: {error}") from None
    drive(lease)
    if lease.error is not None:
        raise lease.error
    return PythonResult(lease, lease.handle.id, argv)
