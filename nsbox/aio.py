"""The same for asyncio: no thread per sandbox, everything that runs is watched by the event loop.

Launching, closing, file operations and what looks at the changes of a workspace block; they are done in the loop's
default executor. A cancelled ``run`` kills the command's whole tree and waits until it is gone before it raises.
"""

import asyncio
import contextlib
import os
import select
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from nsbox.aio_wait import settled, whole
from nsbox.box import Sandbox
from nsbox.change import ChangeSet
from nsbox.launch import Argument
from nsbox.process import Process
from nsbox.report import Result
from nsbox.snapshot import Snapshot
from nsbox.spec import Spec
from nsbox.supervise import Run

if TYPE_CHECKING:
    from nsbox.outgoing import Applied, Exported

MAX_BUFFERED = 1 << 20  #: bytes that an iterator holds for a slow consumer before the command has to wait


class Watch:
    """Drives one Run by an event loop. Its descriptors are in an epoll of its own, which is one descriptor for the
    loop: asyncio knows neither urgent news of a cgroup (EPOLLPRI) nor descriptors that are watched for their end alone.
    """

    def __init__(self, run: Run, on_end: Callable[[BaseException | None], None]) -> None:
        self._run, self._on_end = run, on_end
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._epoll: select.epoll | None = None
        self._registered: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._started = False
        self._open()
        self.update()

    def _open(self) -> None:
        self._epoll, self._registered = select.epoll(), {}
        self._loop.add_reader(self._epoll.fileno(), self._ready)

    def _shut(self) -> None:
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def stop(self) -> None:
        """Watch no longer; before any descriptor of the run is closed."""
        self._shut()
        if self._timer is not None:
            self._timer.cancel()

    def update(self) -> None:
        """Wait for what the run wants now."""
        if self._epoll is None:
            return
        if self._started != self._run.started:
            # A terminal has taken the place of the pipes, perhaps by the same numbers.
            self._started = True
            self._shut()
            self._open()
        wanted = self._interests()
        for fd in self._registered.keys() - wanted.keys():
            with contextlib.suppress(OSError):  # it has been closed, and with that forgotten
                self._epoll.unregister(fd)
        for fd, events in wanted.items():
            if self._registered.get(fd) != events:
                self._register(fd, events)
        self._registered = wanted
        if self._timer is not None:
            self._timer.cancel()
        at = self._run.next_time()
        self._timer = None if at is None else self._loop.call_later(max(0.0, at - time.monotonic()), self._on_time)

    def _interests(self) -> dict[int, int]:
        while True:
            found = self._run.interests()
            self._names = {fd: name for fd, (name, _) in found.items()}
            source = next((fd for fd, name in self._names.items() if name == "source"), -1)
            if source < 0 or _can_wait(source):
                return {fd: events for fd, (_, events) in found.items()}
            self._run.on_event("source", source)  # a file is always ready

    def _register(self, fd: int, events: int) -> None:
        assert self._epoll is not None
        try:
            self._epoll.register(fd, events)
        except FileExistsError:
            self._epoll.modify(fd, events)

    def _ready(self) -> None:
        assert self._epoll is not None
        found = [fd for fd, _ in self._epoll.poll(0)]
        if any(fd not in self._names for fd in found):
            # A closed descriptor stays in an epoll while a copy of it is open (epoll(7), question 6).
            self._shut()
            self._open()
        try:
            for fd in sorted(found, key=lambda fd: self._names.get(fd) == "pidfd"):
                if fd in self._names:
                    self._run.on_event(self._names[fd], fd)
        except BaseException as error:
            self._end(error)
            return
        self._on_time()

    def _on_time(self) -> None:
        self._run.on_time(time.monotonic())
        if self._run.over or self._run.error is not None:
            self._end(None)
        else:
            self.update()

    def _end(self, error: BaseException | None) -> None:
        self.stop()
        self._on_end(error)


def _can_wait(fd: int) -> bool:
    """Whether epoll takes a descriptor; regular files and directories it does not."""
    probe = select.epoll()
    try:
        probe.register(fd, 0)
    except PermissionError:
        return False
    finally:
        probe.close()
    return True


class AsyncProcess:
    """A command in an AsyncSandbox. It is watched from its start on, whether anybody awaits it or not."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._writable: asyncio.Future[None] | None = None
        self._writing = -1
        process.driven = True
        self._watch = Watch(process.watched, self._ended)

    def _ended(self, error: BaseException | None) -> None:
        if not self._process.is_over:
            self._forget_writer()
            if error is not None:
                self._process.fail(error)
            else:
                self._process.settle()
        if not self._done.done():
            self._done.set_result(None)

    def _forget_writer(self) -> None:
        waiter, self._writable = self._writable, None
        if waiter is not None:
            self._loop.remove_writer(self._writing)
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> Result:
        """The result at the end. Raises what ``Process.wait`` raises. To be cancelled here does not end the command."""
        await asyncio.wait([self._done])
        return self._process.wait()

    def kill(self) -> None:
        """SIGKILL the command and all that it started."""
        self._process.kill()
        self._watch.update()

    def send_signal(self, number: int) -> None:
        """Send signal ``number`` to the command's first process."""
        self._process.send_signal(number)

    def resize(self, rows: int, columns: int) -> None:
        """Change a terminal's size to ``rows`` and ``columns`` of characters, once the command is started."""
        if self._process.watched.started:
            self._process.resize(rows, columns)

    async def cancel(self) -> None:
        """Kill the tree and wait until it is gone, however often this is cancelled itself; the host's own grace time
        bounds it."""
        self.kill()
        if cancelled := await settled(self._done):
            raise cancelled

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        """("stdout" or "stderr", bytes) as they come, to the end. A slow consumer makes the command wait."""
        run, found, size = self._process.watched, asyncio.Queue[tuple[str, bytes] | None](), 0

        def put(name: str, data: bytes) -> None:
            nonlocal size
            size += len(data)
            found.put_nowait((name, data))
            if size > MAX_BUFFERED:
                run.streams = False

        run.stdout.divert(partial(put, "stdout"))
        run.stderr.divert(partial(put, "stderr"))
        self._done.add_done_callback(lambda _: found.put_nowait(None))
        while (item := await found.get()) is not None:
            size -= len(item[1])
            if not run.streams and size <= MAX_BUFFERED // 2:
                run.streams = True
                self._watch.update()
            yield item

    async def write(self, data: bytes | str) -> None:
        """Give the command ``data`` (text: as UTF-8) to read, waiting while it takes none; only with ``stdin=PIPE``.

        Raises BrokenPipeError when nobody reads it (any more)."""
        view = memoryview(data.encode() if isinstance(data, str) else data)
        while view:
            fd = self._process.input()
            try:
                view = view[os.write(fd, view) :]
                continue
            except BlockingIOError:
                pass
            self._writing = fd
            self._writable = waiter = self._loop.create_future()
            self._loop.add_writer(fd, _wake, waiter)
            try:
                await waiter
            finally:
                if self._writable is waiter:
                    self._writable = None
                    self._loop.remove_writer(fd)

    def close_stdin(self) -> None:
        """Let the command see the end of its input."""
        self._process.end_input()

    def close(self) -> None:
        """End the command at once, without waiting."""
        self._watch.stop()
        self._forget_writer()
        self._process.close()
        if not self._done.done():
            self._done.set_result(None)


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class AsyncSandbox:
    """``Sandbox`` for asyncio: ``async with AsyncSandbox(...) as box: await box.run([...])``.

    Made from a ``spec`` or from the ``options`` of one, and ``log`` and ``snapshot`` as in ``Sandbox``; launched by
    ``async with``. Raises SpecError when it is made, and what ``Sandbox`` raises when it is launched.
    """

    def __init__(self, spec: Spec | None = None, **options: Any) -> None:
        # Checked here and now, so that a mistake shows where it is made.
        self.spec = spec.replace(**{k: v for k, v in options.items() if k not in ("log", "snapshot")}) if spec else None
        self._make = partial(Sandbox, spec, **options)
        self._box: Sandbox | None = None
        self._abandoned = False  #: nobody waits for the launch any more
        self._processes: set[AsyncProcess] = set()

    @property
    def box(self) -> Sandbox:
        """The sandbox itself, for what is not here. Its calls block. Raises RuntimeError before the start."""
        if self._box is None:
            raise RuntimeError("the sandbox is not started; use it with 'async with'")
        return self._box

    async def start(self) -> Self:
        """Launch it. Raises what ``nsbox.Sandbox`` raises. Cancelled, it waits until nothing is left."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(None, self._launch)
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            self._abandoned = True
            await settled(future)
            if future.exception() is None and (box := future.result()) is not None:
                await settled(loop.run_in_executor(None, box.close))
            raise
        self._box = future.result()
        return self

    def _launch(self) -> Sandbox | None:
        return None if self._abandoned else self._make()

    async def popen(self, argv: Sequence[Argument] | str, **options: Any) -> AsyncProcess:
        """Start ``argv``, a list, or shell text for ``sh -c``; the ``options`` are those of ``Sandbox.popen``.

        It blocks for some hundred microseconds. Callbacks are called by the loop. Raises SandboxUnavailable."""
        process = AsyncProcess(self.box.popen(argv, **options))
        self._processes.add(process)
        process._done.add_done_callback(lambda _: self._processes.discard(process))
        return process

    async def run(self, argv: Sequence[Argument] | str, **options: Any) -> Result:
        """Run ``argv`` to its end; the ``options`` are those of ``Sandbox.popen``.

        Cancelled, it kills the command's tree and waits until that is gone. Raises what ``Process.wait`` raises."""
        process = await self.popen(argv, **options)
        try:
            return await process.wait()
        except asyncio.CancelledError:
            await process.cancel()
            raise

    async def read_file(self, path: str | os.PathLike[str], **options: Any) -> bytes:
        """``Files.read_file`` in the loop's executor: the bytes at ``path``. Raises what that raises.

        ``options``: ``max_bytes``."""
        return await asyncio.to_thread(self.box.read_file, path, **options)

    async def write_file(self, path: str | os.PathLike[str], data: bytes | str, **options: Any) -> None:
        """``Files.write_file`` in the loop's executor: ``data`` becomes what ``path`` holds. Raises what that raises.

        ``options``: ``mode``."""
        await asyncio.to_thread(self.box.write_file, path, data, **options)

    async def changes(self) -> ChangeSet:
        """What has changed in the workspace until now. Raises SpecError where there is none."""
        return await whole(self.box.changes)

    async def diff(self) -> str:
        """The same as unified text for people. Raises SpecError where there is no workspace."""
        return await whole(self.box.diff)

    async def export(
        self, directory: str | os.PathLike[str], *, allow_trusted: Collection[str] | bool = ()
    ) -> "Exported":
        """Copy what changed into ``directory``, new or empty; ``allow_trusted`` and errors as in ``Sandbox.export``.

        Cancelled, it waits until all is copied, and raises then."""
        return await whole(partial(self.box.export, directory, allow_trusted=allow_trusted))

    async def apply(
        self,
        paths: Collection[str] | None = None,
        *,
        force: bool = False,
        allow_trusted: Collection[str] | bool = (),
    ) -> "Applied":
        """Write changes, or those of ``paths``, back; ``force``, ``allow_trusted`` and errors as in ``Sandbox.apply``.

        Cancelled, it waits until all is written back, and raises then."""
        return await whole(partial(self.box.apply, paths, force=force, allow_trusted=allow_trusted))

    async def snapshot(self) -> Snapshot:
        """The files as they are now, as ``Sandbox.snapshot`` gives them. Raises HostError, OSError."""
        return await whole(self.box.snapshot)

    async def restore(self, snapshot: Snapshot) -> None:
        """Go back to ``snapshot``: what runs inside ends. Raises what ``Sandbox`` raises.

        Cancelled, it waits until the files are as they were, and raises then."""
        self._end_processes()
        await whole(partial(self.box.restore, snapshot))

    def _end_processes(self) -> None:
        for process in list(self._processes):
            process.close()

    async def close(self) -> None:
        """End every process inside and throw the sandbox away, cancelled or not. Idempotent. Raises LogError."""
        box, self._box = self._box, None
        self._end_processes()
        if box is not None:
            await whole(box.close)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def arun(argv: Sequence[Argument], spec: Spec | None = None, **options: Any) -> Result:
    """``nsbox.run`` for asyncio: ``argv``, a list, in one fresh sandbox, gone afterwards; cancellation ends both.

    ``spec`` and ``options`` as in ``nsbox.run``: the fields of a Spec, stdin, on_stdout, on_stderr and log. Raises what
    ``nsbox.run`` raises; how the command itself ended is in the Result."""
    own = {name: options.pop(name) for name in ("stdin", "on_stdout", "on_stderr") if name in options}
    async with AsyncSandbox(spec, **options) as box:
        return await box.run(argv, **own)
