"""``Pool`` for asyncio: the loop watches what runs; what blocks for a moment is done in its default executor."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from nsbox.aio import Watch
from nsbox.aio_wait import settled, whole
from nsbox.launch import Argument
from nsbox.pool import Lease, Pool
from nsbox.report import Result
from nsbox.stock import Counts

LEASE_OPTIONS = ("cwd", "timeout", "max_output", "review", "patience")


class AsyncPool:
    """``async with AsyncPool(size=8) as pool: await pool.run([...])``. The arguments are those of ``nsbox.Pool``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._make: Callable[[], Pool] = lambda: Pool(*args, **options)
        self._pool: Pool | None = None

    @property
    def pool(self) -> Pool:
        """The pool itself; its calls block. Raises RuntimeError before the start."""
        if self._pool is None:
            raise RuntimeError("the pool is not started; use it with 'async with'")
        return self._pool

    def counts(self) -> Counts:
        """How many sandboxes are ready, were leased, were missed."""
        return self.pool.counts()

    async def start(self) -> Self:
        """Begin to make sandboxes. Raises what ``nsbox.Pool`` raises. Cancelled, it waits until nothing is left."""
        if self._pool is None:
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(None, self._make)
            if cancelled := await settled(future):
                if future.exception() is None:
                    await settled(loop.run_in_executor(None, future.result().close))
                raise cancelled
            self._pool = future.result()
        return self

    async def run(self, argv: Sequence[Argument], *, env: Mapping[str, str] | None = None, **options: Any) -> Result:
        """Run ``argv``, a list, in a sandbox that nobody used before, and throw that away. ``env`` and the ``options``
        are those of ``Pool.run``; callbacks are called by the loop. Cancelled, it kills everything inside and waits for
        it. Raises what ``Pool.run`` raises."""
        own = {name: options.pop(name) for name in LEASE_OPTIONS if name in options}
        leasing = asyncio.get_running_loop().run_in_executor(None, lambda: self.pool.lease(argv, **own))
        try:
            lease = await asyncio.shield(leasing)
        except asyncio.CancelledError:
            leasing.add_done_callback(_close_late)
            raise
        try:
            return await _conduct(lease, argv, env or {}, options)
        except BaseException as error:
            lease.crossing.fail(error)
            raise
        finally:
            lease.close()

    async def close(self) -> None:
        """Throw away what nobody has leased, cancelled or not. Runs that are on their way end by themselves."""
        if self._pool is not None:
            await whole(self._pool.close)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _close_late(leasing: "asyncio.Future[Lease]") -> None:
    if not leasing.cancelled() and leasing.exception() is None:
        leasing.result().close()


async def _conduct(
    lease: Lease, argv: Sequence[Argument], env: Mapping[str, str], options: Mapping[str, Any]
) -> Result:
    done: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    run = lease.begin(argv, env, **options)
    watch = Watch(run, lambda error: None if done.done() else done.set_result(error))
    try:
        await asyncio.wait([done])
    except asyncio.CancelledError:
        run.stop("cancelled")
        watch.update()
        await settled(done)
        raise
    finally:
        watch.stop()
    error = done.result()
    if error is not None:
        raise error
    if lease.crossing.spec.workspace is None:
        return lease.conclude(run)
    return await whole(lambda: lease.conclude(run))  # the workspace is searched, and perhaps copied
