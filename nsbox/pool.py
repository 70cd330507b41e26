"""Sandboxes made ahead, each leased once.

Almost all of what a sandbox costs is its making. A pool makes them before they are asked for, complete up to the
program, and never gives one out twice: what one run has left cannot meet the next."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from nsbox.ahead import Ahead, begin
from nsbox.crossing import Crossing, Review, target_of
from nsbox.launch import Argument, prepare
from nsbox.prepared import Prepared
from nsbox.report import Result
from nsbox.spec import Spec
from nsbox.stock import Counts, Stock, WhenEmpty
from nsbox.supervise import Run

T = TypeVar("T")


class Lease:
    """A sandbox of the pool from the moment that it is somebody's to its end."""

    def __init__(self, ahead: Ahead, crossing: Crossing) -> None:
        self._ahead, self.crossing = ahead, crossing
        self.handle = ahead.handle

    def begin(self, argv: Sequence[Argument], env: Mapping[str, str], **streams: Any) -> Run:
        """Start the program; the keywords are those of ``nsbox.ahead.begin``."""
        handle = self._ahead.lease(self.crossing)
        if handle.prepared.spec is not self.crossing.spec:
            spec, plan = self.crossing.spec, handle.prepared.plan
            handle.prepared = handle.prepared._replace(spec=spec, plan=plan._replace(cwd=spec.cwd or plan.cwd))
        return begin(self._ahead, argv, env, **streams)

    def conduct(self, run: Run, publish: Sequence[int | str]) -> Result:
        """See ``Crossing.conduct``."""
        return self._told(self.crossing.conduct(run, publish))

    def conclude(self, run: Run) -> Result:
        """The result of a run that is over."""
        return self._told(self.crossing.conclude(run))

    def _told(self, result: Result) -> Result:
        """With what shows that nobody used the sandbox before."""
        result.lease = self._ahead.proof()
        return result

    def close(self) -> None:
        """Throw the sandbox away."""
        self._ahead.close()
        self.crossing.close()


class Supply(Generic[T]):
    """What every pool has: a Spec that is made ready for this host, and a stock of what is made of it."""

    _stock: Stock[T]

    def __init__(self, spec: Spec, log: Any) -> None:
        self.spec = spec
        self.target = target_of(spec, log)
        self._prepared = prepare(spec)

    def _fresh(self) -> Prepared:
        """For one more launch: what the guard has said of the sources must hold for that one too."""
        if self.spec.mounts() or not os.path.isdir(self._prepared.skeleton):
            self._prepared = prepare(self.spec)
        return self._prepared

    def counts(self) -> Counts:
        """How many are ready, were leased, were missed."""
        return self._stock.counts()

    def wait_full(self, timeout: float = 30.0) -> bool:
        """Wait until as many are ready as are kept; whether that came true within ``timeout`` seconds."""
        return self._stock.wait_full(timeout)

    def close(self) -> None:
        """Throw away what nobody has leased. Runs that are on their way end by themselves."""
        self._stock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pool(Supply[Ahead]):
    """Keeps sandboxes of one Spec ready. Use it with ``with``; ``close`` is idempotent. Any thread may use it.

    Made from a Spec or from the options of one. ``size`` are kept ready at least and ``most`` at most (four times as
    many): demand that finds none raises the number, and it falls again when there is none. One that has waited longer
    than ``max_age`` seconds is replaced, and so is one whose init has ended. ``when_empty``: ``make`` one on the spot,
    ``wait`` for one, or raise an ``error``. With ``boxes`` they are made for ``nsbox.Sandbox.from_pool``, with room for
    a cgroup for each command. ``log`` as in ``nsbox.run``. Values of secrets are fetched when a sandbox
    is made. What is mounted is the directory that was there when the sandbox was made. Raises what ``nsbox.run`` raises
    for a Spec that cannot be had here."""

    def __init__(
        self,
        spec: Spec | None = None,
        *,
        size: int = 4,
        most: int | None = None,
        max_age: float = 300.0,
        when_empty: WhenEmpty = "make",
        boxes: bool = False,
        log: Any = None,
        **options: Any,
    ) -> None:
        self._boxes = boxes
        super().__init__(spec.replace(**options) if spec else Spec.from_dict(options), log)
        self._stock = Stock(
            self._make, Ahead.close, Ahead.healthy, size=size, most=most, max_age=max_age, when_empty=when_empty
        )

    def _make(self) -> Ahead:
        return Ahead(self._fresh(), commands=self._boxes)

    def run(
        self,
        argv: Sequence[Argument],
        *,
        stdin: bytes | str | int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | str | None = None,
        max_output: int | str | None = None,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        tty: bool | tuple[int, int] = False,
        on_tty: Callable[[int], object] | None = None,
        publish: Sequence[int | str] = (),
        review: Review | None = None,
        patience: float | None = None,
    ) -> Result:
        """Run ``argv``, a list, in a sandbox that nobody used before, and throw that away.

        ``env`` is added to the variables of the Spec; ``cwd``, ``timeout`` (seconds, or as text) and ``max_output``
        (bytes of each stream) stand in for its own. ``stdin``, ``on_stdout``, ``on_stderr``, ``tty``, ``on_tty``,
        ``publish`` and ``review`` are those of ``nsbox.run``. ``patience``: how many seconds to wait at most where the
        pool waits.
        ``Result.lease`` tells by what the sandbox is known to be fresh. Raises what ``nsbox.run`` raises, and
        SandboxUnavailable when the pool is closed or has none to give.
        """
        lease = self.lease(argv, cwd, timeout, max_output, review, patience)
        try:
            run = lease.begin(
                argv, env or {}, stdin=stdin, tty=tty, on_tty=on_tty, on_stdout=on_stdout, on_stderr=on_stderr
            )
            return lease.conduct(run, publish)
        except BaseException as error:
            lease.crossing.fail(error)
            raise
        finally:
            lease.close()

    def lease(
        self,
        argv: Sequence[Argument],
        cwd: str | None = None,
        timeout: float | str | None = None,
        max_output: int | str | None = None,
        review: Review | None = None,
        patience: float | None = None,
    ) -> Lease:
        """A sandbox for one command, which the caller closes; see ``run``."""
        own = {"cwd": cwd, "timeout": timeout, "output": max_output}
        given = {name: value for name, value in own.items() if value is not None}
        spec = self.spec.replace(**given) if given else self.spec
        words = [] if isinstance(argv, str | bytes) else [os.fsdecode(word) for word in argv]
        crossing = Crossing(spec, words, self.target, review)
        try:
            return Lease(self.take(patience), crossing)
        except BaseException as error:
            crossing.fail(error)
            crossing.close()
            raise

    def take(self, patience: float | None = None) -> Ahead:
        """A sandbox whose init waits, which the caller closes; ``nsbox.Sandbox.from_pool`` lives in one."""
        return self._stock.take(patience)
