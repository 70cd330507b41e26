"""Waiting to the end, however often one is cancelled meanwhile: anyio cancels anew in every turn of the loop."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def settled(future: "asyncio.Future[Any]") -> asyncio.CancelledError | None:
    """Wait for ``future``. Gives the first cancellation, which has to be raised afterwards as it is: anyio knows its
    own by their text."""
    cancelled = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
    return cancelled


async def whole(call: Callable[[], T]) -> T:
    """``call`` in the executor, and to its end: a thread cannot be cancelled, and nobody should find the box closed or
    its workspace half written under it, however often the caller is."""
    future = asyncio.get_running_loop().run_in_executor(None, call)
    if cancelled := await settled(future):
        future.exception()  # told to nobody: the caller is not there any more
        raise cancelled
    return future.result()
