"""Under anyio on asyncio everything of ``nsbox.aio`` works; under trio the blocking calls do, each in a thread."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import nsbox
from nsbox.box import PIPE
from nsbox.errors import SandboxUnavailable

anyio = pytest.importorskip("anyio", reason="anyio is not installed")
pytest.importorskip("anyio.lowlevel")
trio = pytest.importorskip("trio", reason="trio is not installed")


def play(story: Callable[[], Any]) -> None:
    anyio.run(story, backend="asyncio")


def sleeping(box: nsbox.Sandbox) -> bytes:
    """Pids of the commands below that sleep until they are ended."""
    return box.run(["pgrep", "-f", "sleep 71"]).stdout


def test_commands_streams_and_files_in_a_task_group() -> None:
    found: dict[int, bytes] = {}

    async def story() -> None:
        async with nsbox.AsyncSandbox(timeout=60) as box:

            async def one(number: int) -> None:
                await box.write_file(f"{number}", f"text {number}")
                found[number] = (await box.run(["cat", f"{number}"])).stdout

            async with anyio.create_task_group() as group:
                for number in range(8):
                    group.start_soon(one, number)
            process = await box.popen("while read x; do echo got $x; done", stdin=PIPE)
            output = process.output()
            await process.write("word\n")
            assert await anext(output) == ("stdout", b"got word\n")
            process.close_stdin()
            assert [item async for item in output] == []
        assert (await nsbox.arun(["echo", "x"])).stdout == b"x\n"

    play(story)
    assert found == {number: b"text %d" % number for number in range(8)}


def test_a_cancel_scope_ends_the_tree_and_the_box_goes_on() -> None:
    async def story() -> None:
        async with nsbox.AsyncSandbox(timeout=60) as box:
            with anyio.move_on_after(0.2) as scope:
                await box.run("setsid sleep 71 & sleep 71")
            assert scope.cancelled_caught
            assert not sleeping(box.box), "the scope has ended before the tree was gone"
            with pytest.raises(TimeoutError), anyio.fail_after(0.1):
                await box.run(["sleep", "71"])
            assert not sleeping(box.box)
            assert (await box.run(["echo", "on"])).stdout == b"on\n"

    play(story)


def test_when_a_cancelled_block_is_left_the_box_is_gone() -> None:
    boxes: list[nsbox.Sandbox] = []

    async def story() -> None:
        with anyio.CancelScope() as scope:
            async with nsbox.AsyncSandbox(timeout=60) as box:
                boxes.append(box.box)
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert not boxes[0].is_running

    play(story)


def test_a_launch_that_is_cancelled_leaves_nothing() -> None:
    made: list[nsbox.Sandbox] = []

    class Slow(nsbox.Sandbox):
        def __init__(self, *args: Any, **options: Any) -> None:
            time.sleep(0.2)
            super().__init__(*args, **options)
            made.append(self)

    async def story() -> None:
        box = nsbox.AsyncSandbox()
        box._make = Slow  # type: ignore[assignment]
        with anyio.move_on_after(0.05) as scope:
            async with box:
                raise AssertionError("it was not cancelled")
        assert scope.cancelled_caught
        assert [item.is_running for item in made] == [False]

    play(story)


def test_a_restore_that_is_cancelled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    start, kept = nsbox.Sandbox._start, list[nsbox.Sandbox]()

    def slow(self: nsbox.Sandbox, *args: Any) -> None:
        time.sleep(0.3 if args else 0)
        start(self, *args)

    monkeypatch.setattr(nsbox.Sandbox, "_start", slow)

    async def story() -> None:
        with anyio.move_on_after(30) as scope:
            async with nsbox.AsyncSandbox() as box:
                kept.append(box.box)
                snapshot = await box.snapshot()
                scope.deadline = anyio.current_time() + 0.05
                await box.restore(snapshot)
        assert scope.cancelled_caught

    play(story)
    time.sleep(0.5)  # what was begun would be there by now
    assert not kept.pop().is_running
    gc.collect()  # the snapshot is in a traceback of what was cancelled


def test_a_pool() -> None:
    async def story() -> None:
        async with nsbox.AsyncPool(size=2, timeout=60) as pool:
            assert (await pool.run(["echo", "x"])).stdout == b"x\n"
            began = time.monotonic()
            with anyio.move_on_after(0.3) as scope:
                await pool.run(["sleep", "71"])
            assert scope.cancelled_caught
            assert time.monotonic() - began < 60, "it was waited for, not ended"
            assert (await pool.run(["echo", "y"])).stdout == b"y\n"

    play(story)


def test_a_pool_whose_start_is_cancelled_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nsbox.Pool] = []

    class Slow(nsbox.Pool):
        def __init__(self, *args: Any, **options: Any) -> None:
            time.sleep(0.2)
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr("nsbox.aio_pool.Pool", Slow)

    async def story() -> None:
        with anyio.move_on_after(0.05) as scope:
            async with nsbox.AsyncPool(size=1):
                raise AssertionError("it was not cancelled")
        assert scope.cancelled_caught
        assert len(made) == 1
        with pytest.raises(SandboxUnavailable, match="closed"):
            made[0].take()

    play(story)


def test_one_failure_in_a_task_group_ends_the_others() -> None:
    async def story() -> None:
        async with nsbox.AsyncSandbox(timeout=60) as box:

            async def fail() -> None:
                await anyio.sleep(0.1)
                raise LookupError

            async def both() -> None:
                async with anyio.create_task_group() as group:
                    group.start_soon(box.run, ["sleep", "71"])
                    group.start_soon(fail)

            with pytest.raises(ExceptionGroup) as caught:
                await both()
            assert caught.group_contains(LookupError)
            assert not sleeping(box.box)

    play(story)


# ---- threads, which do for trio: docs/guides/frameworks.md has the same for trio alone -------------------------------


async def run(box: nsbox.Sandbox, argv: Any, **options: Any) -> nsbox.Result:
    process = box.popen(argv, **options)

    async def kill_when_cancelled() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            process.kill()

    async with anyio.create_task_group() as group:
        group.start_soon(kill_when_cancelled)
        with anyio.CancelScope(shield=True):
            result = await anyio.to_thread.run_sync(process.wait)
        group.cancel_scope.cancel()
    await anyio.lowlevel.checkpoint()  # raises where this was cancelled
    return result


async def threads() -> None:
    box = await anyio.to_thread.run_sync(nsbox.Sandbox)
    with box:
        result = await run(box, "echo $A; exit 3", env={"A": "b"})
        assert (result.stdout, result.exit_code) == (b"b\n", 3)
        with anyio.move_on_after(0.2) as scope:
            await run(box, "setsid sleep 71 & sleep 71")
        assert scope.cancelled_caught
        assert not sleeping(box)
        data = os.urandom(1 << 20)
        assert (await run(box, ["cat"], stdin=data)).stdout == data


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_thread_for_each_command(backend: str) -> None:
    # In a process of its own: trio keeps its threads for another ten seconds.
    done = subprocess.run([sys.executable, __file__, backend], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_asyncsandbox_says_that_it_is_for_asyncio() -> None:
    async def story() -> None:
        async with nsbox.AsyncSandbox():
            raise AssertionError("it cannot work here")

    with pytest.raises(RuntimeError, match="no running event loop"):
        trio.run(story)


if __name__ == "__main__":
    anyio.run(threads, backend=sys.argv[1])
