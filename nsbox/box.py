"""A sandbox to live in for one task: many commands, files, then gone.

The box is one launch without a command: its init waits. Each command gets a watcher process of its own inside (see
native/command.c) and a socket to it, and is driven by the same loop as a single run; commands of several threads do not
meet. A command that ends takes its whole tree with it, unless it was asked to stay (``background``).
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from nsbox._native import lib
from nsbox.encode import command
from nsbox.errors import SandboxUnavailable
from nsbox.files import Files
from nsbox.launch import Argument, Handle, launch, prepare, start_command
from nsbox.process import PIPE as PIPE
from nsbox.process import Process as Process
from nsbox.report import Result
from nsbox.spec import Spec
from nsbox.supervise import Run, drive

Callback = Callable[[bytes], object]
START_TIMEOUT_S = 30.0


class Sandbox:
    """A sandbox that stays until it is closed. Use it with ``with``; ``close`` is idempotent.

    Made from a Spec or from the options of one. Raises what ``nsbox.run`` raises. Memory, processors, processes and disk
    are limits of the whole box; wall clock, processor time and output count for each command by itself. Any thread may
    use it.
    """

    _handle: Handle | None = None
    _files: Files | None = None

    def __init__(self, spec: Spec | None = None, **options: Any) -> None:
        self.spec = spec.replace(**options) if spec else Spec.from_dict(options)
        self.id = os.urandom(8).hex()
        self._lock = threading.Lock()
        self._processes: set[Process] = set()
        self._oom_kills = 0
        self._prepared = prepare(self.spec)
        self.started_at = time.time()
        self._start()

    def _start(self) -> None:
        handle = launch(self._prepared, None)
        try:
            _handshake(handle)
            self._files = Files(handle.root_fd, handle.host_ids, self._prepared.plan.cwd)
        except BaseException:
            handle.close()
            raise
        self._handle = handle

    @property
    def files(self) -> Files:
        """The files inside; they need no process there."""
        files = self._files
        if files is None:
            raise SandboxUnavailable("the sandbox is closed", remedy="make another")
        return files

    @property
    def is_running(self) -> bool:
        """Whether the box is open and its init lives."""
        handle = self._handle
        return handle is not None and handle.alive()

    def popen(
        self,
        argv: Sequence[Argument] | str,
        *,
        stdin: bytes | str | int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        max_output: int | None = None,
        background: bool = False,
        tty: bool = False,
        on_stdout: Callback | None = None,
        on_stderr: Callback | None = None,
    ) -> Process:
        """Start a command. ``argv`` is a list, or shell text for ``sh -c``.

        ``stdin``: what it reads, a descriptor that is passed on as it comes, or PIPE. ``env`` is added to the box's
        variables. ``timeout`` (seconds) and ``max_output`` (bytes of each stream) default to the box's. With
        ``background`` the processes that it leaves behind live on until the box ends; nobody reads their pipes then, so
        they should write to files. With ``tty`` its streams are one terminal of the sandbox, read as stdout. A callback
        gets a stream as it comes, and that stream is then not kept.
        """
        words = ["/bin/sh", "-c", argv] if isinstance(argv, str) else list(argv)
        plan, limits = self._prepared.plan, self.spec.limits
        flags = lib.NSB_TTY if tty else lib.NSB_STDIN if stdin is not None else 0
        flags |= lib.NSB_KEEP if background else 0
        what = command(words, {**plan.env, **(env or {})}, cwd or plan.cwd, flags)
        with self._lock:
            if self._handle is None:
                raise SandboxUnavailable("the sandbox is closed", remedy="make another")
            handle = start_command(self._handle, what)
        pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) if stdin == PIPE else (-1, -1)
        run = Run(
            handle,
            stdin=pipe[0] if stdin == PIPE else stdin.encode() if isinstance(stdin, str) else stdin,
            timeout=limits.timeout if timeout is None else timeout,
            output=limits.output if max_output is None else max_output,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            tty=tty,
        )
        process = Process(self, run, [os.fsdecode(word) for word in words], cwd or plan.cwd, pipe)
        self._processes.add(process)
        return process

    def run(self, argv: Sequence[Argument] | str, **options: Any) -> Result:
        """Run a command to its end; the keywords are those of ``popen``."""
        return self.popen(argv, **options).wait()

    def forget(self, process: Process) -> None:
        """A command is over."""
        self._processes.discard(process)

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel has killed something inside for the memory limit since this was last asked."""
        handle = self._handle
        if handle is None or handle.cgroup is None:
            return False
        before, self._oom_kills = self._oom_kills, int(handle.cgroup.counters()["oom_kills"] or 0)
        return self._oom_kills > before

    def read_file(self, path: str | os.PathLike[str], **options: Any) -> bytes:
        """See ``Files.read_file``."""
        return self.files.read_file(path, **options)

    def write_file(self, path: str | os.PathLike[str], data: bytes | str, **options: Any) -> None:
        """See ``Files.write_file``."""
        self.files.write_file(path, data, **options)

    def close(self) -> None:
        """End every process inside and throw the box away. Whoever waits for a command in it gets SandboxUnavailable."""
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is None:
            return
        handle.close()
        self._files = None
        for process in list(self._processes):
            process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._handle is not None:
            warnings.warn(f"sandbox {self.id} was never closed; use it with 'with'", ResourceWarning, stacklevel=2)
            self.close()


def _handshake(handle: Handle) -> None:
    """Wait until init has built the root and given up its privileges."""
    run = Run(handle, timeout=START_TIMEOUT_S, streams=False)
    drive([run], until=lambda: run.started or run.error is not None)
    if run.error is not None:
        raise run.error
    if not run.started:
        raise SandboxUnavailable("the sandbox did not start in time", remedy="run: nsbox doctor")
    for name in ("stdout", "stderr", "stdin"):
        handle.close_stream(name)
