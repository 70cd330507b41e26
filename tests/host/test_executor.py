"""SandboxExecutor: calls in sandboxes, as concurrent.futures has them."""

import asyncio
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

import nsbox
from nsbox.errors import CommandFailed, LimitExceeded, SpecError, TimeoutExceeded
from nsbox.executor import RemoteTraceback, SandboxExecutor, TaskFailed

pytestmark = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import cloudpickle"], capture_output=True).returncode != 0,
    reason="cloudpickle is not installed",
)


@pytest.fixture
def executor() -> Iterator[SandboxExecutor]:
    with SandboxExecutor(size=1, max_workers=2) as made:
        yield made


def test_map_and_types(executor: SandboxExecutor) -> None:
    def same(value: Any) -> Any:
        return value

    values = [None, True, 2, 2.5, "ä", b"\xff", [1], (1, (2,)), {1, 2}, frozenset("a"), {(1, 2): [3]}, 1 + 2j]
    found = list(executor.map(same, values))
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


def test_closures_and_keywords(executor: SandboxExecutor) -> None:
    factor = 3
    assert executor.submit(lambda x, *, plus: x * factor + plus, 4, plus=1).result() == 13


def test_it_runs_inside(executor: SandboxExecutor) -> None:
    import os

    assert executor.submit(os.listdir, "/home").result() == ["user"]
    assert executor.submit(os.getppid).result() == 0


def test_a_built_in_exception_is_itself(executor: SandboxExecutor) -> None:
    with pytest.raises(ZeroDivisionError, match="division") as caught:
        executor.submit(lambda: 1 / 0).result()
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "ZeroDivisionError" in str(caught.value.__cause__)


def test_another_exception_is_told(executor: SandboxExecutor) -> None:
    class Private(Exception):
        pass

    def fail() -> None:
        raise Private("words")

    with pytest.raises(TaskFailed, match="Private: words"):
        executor.submit(fail).result()


def test_whoever_awaits_a_call_is_told_of_its_stop_iteration(executor: SandboxExecutor) -> None:
    def stop() -> None:
        raise StopIteration

    async def call() -> None:
        await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(executor, stop), 20)

    with pytest.raises(TaskFailed, match="StopIteration"):
        asyncio.run(call())


@pytest.mark.parametrize("value", ['{"complex": [1%s, 1]}' % ("0" * 400), '{"list": [{"set": [{"list": []}]}]}', "[]"])
def test_an_answer_that_is_no_data_is_a_type_error(executor: SandboxExecutor, value: str) -> None:
    def lie() -> None:
        import os
        import struct
        import time

        data = f'{{"value": {value}}}'.encode()
        os.write(3, struct.pack("=Q", len(data)) + data)
        time.sleep(20)

    with pytest.raises(TypeError, match="no data"):
        executor.submit(lie).result()


def test_what_is_no_data_does_not_come_back(executor: SandboxExecutor) -> None:
    with pytest.raises(TypeError, match="plain data"):
        executor.submit(lambda: object()).result()


def test_an_end_is_an_exception(executor: SandboxExecutor) -> None:
    import os

    with pytest.raises(CommandFailed, match="status 3"):
        executor.submit(os._exit, 3).result()


def test_limits_are_exceptions() -> None:
    with SandboxExecutor(size=1, timeout=0.3) as made, pytest.raises(TimeoutExceeded):
        made.submit(time.sleep, 20).result()
    with SandboxExecutor(size=1, memory="100M") as made, pytest.raises((LimitExceeded, MemoryError)):
        made.submit(lambda: len([b"x" * (1 << 20) for _ in range(400)])).result()


def test_a_call_that_waits_can_be_cancelled() -> None:
    with SandboxExecutor(size=1, max_workers=1) as made:
        first = made.submit(time.sleep, 1)
        second = made.submit(time.sleep, 1)
        assert second.cancel()
        assert first.result() is None
        with pytest.raises(CancelledError):
            second.result()


def test_shutdown_cancels_and_refuses() -> None:
    made = SandboxExecutor(size=1, max_workers=1)
    first = made.submit(time.sleep, 0.5)
    waiting = [made.submit(time.sleep, 0.5) for _ in range(3)]
    made.shutdown(wait=True, cancel_futures=True)
    assert first.result() is None
    assert all(future.cancelled() for future in waiting)
    with pytest.raises(RuntimeError):
        made.submit(time.sleep, 1)


def test_shutdown_without_waiting_lets_calls_end() -> None:
    made = SandboxExecutor(size=1, max_workers=1)
    future = made.submit(lambda: 5)
    made.shutdown(wait=False)
    assert future.result(timeout=30) == 5
    for thread in threading.enumerate():
        if thread.name == "nsbox-executor-end":
            thread.join(30)


def test_a_pool_of_the_caller_s_with_pickle() -> None:
    with nsbox.PythonPool(size=1) as pool:
        with SandboxExecutor(pool, dumps=pickle.dumps) as made:
            assert made.submit(pow, 2, 5).result() == 32
        assert pool.run("1").value == 1
        with pytest.raises(SpecError, match="memory"):
            SandboxExecutor(pool, memory="1G")
