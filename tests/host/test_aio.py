"""Sandboxes in an event loop: many at once, cancelled, timed out, read slowly; no thread for any of them."""

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

import nsbox
from nsbox import transfer
from nsbox.box import PIPE
from nsbox.errors import CommandError, SandboxUnavailable, SpecError


def play(story: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine, and end the executor's threads with it."""
    asyncio.run(asyncio.wait_for(story, 120))


def test_commands_and_files() -> None:
    async def story() -> None:
        async with nsbox.AsyncSandbox(timeout=20) as box:
            result = await box.run("cat; echo err >&2; exit 3", stdin="input")
            assert (result.stdout, result.stderr, result.exit_code) == (b"input", b"err\n", 3)
            await box.write_file("dir/file", "text")
            assert await box.read_file("dir/file") == b"text"
            assert (await box.run(["cat", "dir/file"])).stdout == b"text"
            data = os.urandom(8 << 20)
            result = await box.run(["tee", "/dev/stderr"], stdin=data)
            assert result.stdout == data == result.stderr
            with pytest.raises(CommandError):
                await box.run(["nowhere"])
            with open(__file__, "rb") as file:
                assert b"many at once" in (await box.run(["cat"], stdin=file.fileno())).stdout
        with pytest.raises(RuntimeError):
            await box.run(["true"])

    play(story())


def test_mistakes_show_where_they_are_made() -> None:
    async def story() -> None:
        with pytest.raises(SpecError):
            await nsbox.arun(["true"], ro=["/no/such/path"])
        with pytest.raises(SpecError):
            async with nsbox.AsyncSandbox(no_option=1):
                pass

    play(story())


def test_back_to_a_snapshot_and_another_box_from_it() -> None:
    async def story() -> None:
        async with nsbox.AsyncSandbox(timeout=20) as box:
            await box.write_file("file", "then")
            snapshot = await box.snapshot()
            await box.write_file("file", "now")
            task = asyncio.create_task(box.run(["sleep", "71"]))
            await asyncio.sleep(0.1)
            await box.restore(snapshot)
            with pytest.raises(SandboxUnavailable):
                await task
            assert await box.read_file("file") == b"then"
        async with nsbox.AsyncSandbox(snapshot=snapshot, hostname="other") as box:
            assert (await box.run("cat file; hostname")).stdout == b"thenother\n"

    play(story())
    gc.collect()


def test_arun() -> None:
    async def story() -> None:
        result = await nsbox.arun(["sh", "-c", "echo $A"], env={"A": "b"}, timeout=10)
        assert result.stdout == b"b\n"
        result = await nsbox.arun(["sleep", "71"], timeout=0.2)
        assert result.reason == "timeout"

    play(story())


def test_two_hundred_boxes_with_ten_commands_each() -> None:
    threads: set[int] = set()

    async def one(number: int, box: nsbox.AsyncSandbox) -> None:
        for turn in range(10):
            word = f"{number}-{turn}"
            result = await box.run(["sh", "-c", f"echo {word}; exit {number % 100}"], stdin=word)
            assert (result.stdout_text, result.exit_code) == (word + "\n", number % 100)
        threads.add(threading.active_count())

    async def story() -> None:
        async with contextlib.AsyncExitStack() as stack:
            boxes = [nsbox.AsyncSandbox(timeout=100) for _ in range(200)]
            await asyncio.gather(*(stack.enter_async_context(box) for box in boxes))
            await asyncio.gather(*(one(number, box) for number, box in enumerate(boxes)))

    play(story())
    # The default executor has at most 32, whatever the number of boxes.
    assert max(threads) <= 40


def test_cancellation_kills_the_tree_and_waits() -> None:
    async def story() -> None:
        async with nsbox.AsyncSandbox(timeout=60) as box:
            task = asyncio.create_task(box.run("setsid sleep 71 & sleep 71"))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            left = await box.run(["pgrep", "-f", "sleep 71"])
            assert left.stdout == b""
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await box.run(["sleep", "71"])
            assert (await box.run(["pgrep", "-f", "sleep 71"])).stdout == b""

    play(story())


def test_everything_ends_when_all_is_cancelled() -> None:
    async def one() -> None:
        async with nsbox.AsyncSandbox(timeout=60) as box:
            await box.run(["sleep", "71"])

    async def story() -> None:
        tasks = [asyncio.create_task(one()) for _ in range(30)]
        await asyncio.sleep(0.4)  # some launch, some run
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(item, asyncio.CancelledError) for item in ended)

    play(story())  # the guard around every test looks for what is left


def test_time_limits_are_kept_while_others_run() -> None:
    async def story() -> None:
        async with nsbox.AsyncSandbox(timeout=60) as box:
            start = time.monotonic()
            results = await asyncio.gather(*(box.run(["sleep", "71"], timeout=t / 10) for t in range(1, 6)))
            assert [result.reason for result in results] == ["timeout"] * 5
            assert time.monotonic() - start < 30

    play(story())


def test_streams_as_they_come_and_a_slow_reader() -> None:
    async def story() -> None:
        async with nsbox.AsyncSandbox(timeout=60, output="unlimited") as box:
            process = await box.popen("head -c 6000000 /dev/zero; echo end >&2")
            sizes = {"stdout": 0, "stderr": 0}
            async for name, data in process.output():
                sizes[name] += len(data)
                if sizes["stdout"] < 1_000_000:
                    await asyncio.sleep(0.002)
                    assert process._process.watched.stdout.total - sizes["stdout"] < 2 << 20
            assert sizes == {"stdout": 6_000_000, "stderr": 4}
            assert (await process.wait()).ok

    play(story())


def test_a_dialogue() -> None:
    async def story() -> None:
        async with nsbox.AsyncSandbox(timeout=60) as box:
            process = await box.popen(["bash", "-c", "while read x; do echo got $x; done"], stdin=PIPE)
            output = process.output()
            for word in ("one", "two"):
                await process.write(word + "\n")
                assert await anext(output) == ("stdout", f"got {word}\n".encode())
            process.close_stdin()
            assert [item async for item in output] == []
            with pytest.raises(BrokenPipeError):
                await process.write("more")
            process = await box.popen("sleep 0.2; exec cat", stdin=PIPE)
            data = os.urandom(2 << 20)
            await process.write(data)
            process.close_stdin()
            assert (await process.wait()).stdout == data
            process = await box.popen(["sleep", "0.3"], stdin=PIPE)
            with pytest.raises(BrokenPipeError):
                await process.write(bytes(1 << 20))

    play(story())


def test_a_terminal_in_a_loop() -> None:
    async def story() -> None:
        async with nsbox.AsyncSandbox(timeout=60) as box:
            process = await box.popen(["bash", "-c", "tty; read x; echo got $x"], tty=True, stdin=PIPE)
            output = process.output()
            assert b"/dev/pts/0" in (await anext(output))[1]
            await process.write("word\n")
            rest = b"".join([data async for _, data in output])
            assert rest.endswith(b"got word\r\n")
            assert (await process.wait()).ok

    play(story())


def test_a_callback_that_raises() -> None:
    class Odd(Exception):
        pass

    def refuse(data: bytes) -> None:
        raise Odd

    async def story() -> None:
        async with nsbox.AsyncSandbox(timeout=60) as box:
            with pytest.raises(Odd):
                await box.run("echo x; sleep 71", on_stdout=refuse)
            assert (await box.run(["true"])).ok

    play(story())


def test_a_box_that_is_closed_or_ends_under_a_command() -> None:
    async def story() -> None:
        async with nsbox.AsyncSandbox(timeout=60) as box:
            task = asyncio.create_task(box.run(["sleep", "71"]))
            await asyncio.sleep(0.1)
            await box.close()
            with pytest.raises(SandboxUnavailable):
                await task
        async with nsbox.AsyncSandbox(timeout=60) as box:
            task = asyncio.create_task(box.run(["sleep", "71"]))
            await asyncio.sleep(0.1)
            os.kill(box.box.processes()[0], signal.SIGKILL)
            with pytest.raises(SandboxUnavailable):
                await task

    play(story())


def test_changes_go_out(tmp_path: Path) -> None:
    workspace = tmp_path / "project"
    workspace.mkdir()
    (workspace / "changed").write_text("before\n")

    async def story() -> None:
        async with nsbox.AsyncSandbox(workspace=workspace, timeout=20) as box:
            await box.run("echo after > changed; echo x > added; echo y > .envrc")
            assert [entry.path for entry in (await box.changes()).entries] == [".envrc", "added", "changed"]
            assert "-before\n+after\n" in await box.diff()
            exported = await box.export(tmp_path / "out")
            assert set(exported.copied) == {"added", "changed"}
            assert (tmp_path / "out/changed").read_text() == "after\n"
            applied = await box.apply(["added"])
            assert applied.applied == ("added",)
            assert (workspace / "added").read_text() == "x\n"
            applied = await box.apply(allow_trusted=[".envrc"])
            assert set(applied.applied) >= {".envrc", "changed"}
            assert (workspace / "changed").read_text() == "after\n"
            with pytest.raises(SpecError, match="not empty"):
                await box.export(tmp_path / "out")
        with pytest.raises(RuntimeError):
            await box.changes()
        async with nsbox.AsyncSandbox() as box:
            with pytest.raises(SpecError, match="no workspace"):
                await box.diff()

    play(story())


def test_others_go_on_while_changes_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready, go = threading.Event(), threading.Event()

    def slow(*_: Any) -> str:
        ready.set()
        assert go.wait(60)
        return "a difference"

    async def story() -> None:
        async with nsbox.AsyncSandbox(workspace=tmp_path, timeout=20) as box:
            monkeypatch.setattr(box.box, "diff", slow)
            task = asyncio.create_task(box.diff())
            while not ready.is_set():
                await asyncio.sleep(0.01)
            assert (await box.run(["echo", "meanwhile"])).stdout == b"meanwhile\n"
            assert not task.done()
            go.set()
            assert await task == "a difference"

    play(story())


def test_a_cancelled_apply_is_whole_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready, go = threading.Event(), threading.Event()
    real = transfer.apply

    def slow(*args: Any, **options: Any) -> Any:
        ready.set()
        assert go.wait(60)
        return real(*args, **options)

    monkeypatch.setattr(transfer, "apply", slow)

    async def story() -> None:
        async with nsbox.AsyncSandbox(workspace=tmp_path, timeout=20) as box:
            await box.run("echo x > added")
            task = asyncio.create_task(box.apply())
            while not ready.is_set():
                await asyncio.sleep(0.01)
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0.01)
            assert not task.done()
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (tmp_path / "added").read_text() == "x\n"

    play(story())
