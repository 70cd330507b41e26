"""A sandbox to live in for one task: many commands, files, then gone.

The box is one launch without a command: its init waits. Each command gets a watcher process of its own inside (see
native/command.c) and a socket to it, and is driven by the same loop as a single run; commands of several threads do not
meet. A command that ends takes its whole tree with it, unless it was asked to stay (``background``).
"""

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from nsbox._native import lib
from nsbox.encode import command
from nsbox.errors import CommandError, SandboxUnavailable
from nsbox.files import Files
from nsbox.launch import Argument, Handle, launch, prepare, start_command
from nsbox.report import Result
from nsbox.spec import Spec
from nsbox.supervise import Run, drive

Callback = Callable[[bytes], object]
START_TIMEOUT_S = 30.0


class Process:
    """A command that runs in a box: streams are collected, or handed to callbacks, while somebody waits."""

    def __init__(self, box: "Sandbox", run: Run, argv: list[str]) -> None:
        self._box, self._run, self._argv = box, run, argv
        self._result: Result | None = None

    def wait(self) -> Result:
        """Wait for the end. Raises CommandError when the command could not be executed, SandboxUnavailable when the
        box ended under it."""
        if self._result is None:
            try:
                drive([self._run])
                self._result = self._finish()
            except BaseException:
                self._run.handle.close()
                raise
        return self._result

    def _finish(self) -> Result:
        run = self._run
        run.handle.close()
        if isinstance(run.error, CommandError):
            run.error.command = self._argv[0]
        if run.error is not None:
            raise run.error
        if run.status is None and run.reason is None:
            raise SandboxUnavailable("the sandbox ended while a command ran in it", remedy="start another")
        return Result(run, self._box.id, self._argv)

    def send_signal(self, number: int) -> None:
        """Send a signal to the command's first process; nothing happens once it has ended."""
        self._run.handle.tell(lib.NSB_MSG_SIGNAL, int(number))

    def kill(self) -> None:
        """SIGKILL the command and all that it started; ``wait`` then tells reason ``cancelled``."""
        self._run.stop("cancelled")


class Sandbox:
    """A sandbox that stays until it is closed. Use it with ``with``; ``close`` is idempotent.

    Made from a Spec or from the options of one. Raises what ``nsbox.run`` raises. The limits are those of the whole box;
    the wall clock counts for each command by itself, and so does the output limit.
    """

    def __init__(self, spec: Spec | None = None, **options: Any) -> None:
        self.spec = spec.replace(**options) if spec else Spec.from_dict(options)
        self.id = os.urandom(8).hex()
        self._prepared = prepare(self.spec)
        self._handle: Handle | None = launch(self._prepared, None)
        self.started_at = time.time()
        try:
            self._handshake(self._handle)
            plan = self._prepared.plan
            self.files = Files(self._handle.root_fd, self._handle.host_ids, plan.cwd)
        except BaseException:
            self.close()
            raise

    def _handshake(self, handle: Handle) -> None:
        """Wait until init has built the root and given up its privileges."""
        run = Run(handle, timeout=START_TIMEOUT_S, streams=False)
        while not run.started and run.error is None and not run.over:
            drive([run], until=lambda: run.started or run.error is not None)
        if run.error is not None:
            raise run.error
        if not run.started:
            raise SandboxUnavailable("the sandbox did not start in time", remedy="run: nsbox doctor")

    @property
    def is_running(self) -> bool:
        """Whether the box is open and its init lives."""
        return self._handle is not None and self._handle.alive()

    def popen(
        self,
        argv: Sequence[Argument] | str,
        *,
        stdin: bytes | str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        max_output: int | None = None,
        background: bool = False,
        on_stdout: Callback | None = None,
        on_stderr: Callback | None = None,
    ) -> Process:
        """Start a command. ``argv`` is a list, or shell text for ``sh -c``. ``timeout`` (seconds) and ``max_output``
        (bytes of each stream) default to the box's; ``env`` is added to the box's variables. With ``background`` the
        processes that it leaves behind live on until the box ends."""
        if self._handle is None:
            raise SandboxUnavailable("the sandbox is closed", remedy="make another")
        words = ["/bin/sh", "-c", argv] if isinstance(argv, str) else list(argv)
        plan, limits = self._prepared.plan, self.spec.limits
        data = stdin.encode() if isinstance(stdin, str) else stdin
        flags = (lib.NSB_STDIN if data is not None else 0) | (lib.NSB_KEEP if background else 0)
        what = command(words, {**plan.env, **(env or {})}, cwd or plan.cwd, flags)
        handle = start_command(self._handle, what)
        run = Run(
            handle,
            stdin=data,
            timeout=limits.timeout if timeout is None else timeout,
            output=limits.output if max_output is None else max_output,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
        )
        return Process(self, run, [os.fsdecode(word) for word in words])

    def run(self, argv: Sequence[Argument] | str, **options: Any) -> Result:
        """Run a command to its end; the keywords are those of ``popen``."""
        return self.popen(argv, **options).wait()

    def read_file(self, path: str | os.PathLike[str], **options: Any) -> bytes:
        """See ``Files.read_file``."""
        return self.files.read_file(path, **options)

    def write_file(self, path: str | os.PathLike[str], data: bytes | str, **options: Any) -> None:
        """See ``Files.write_file``."""
        self.files.write_file(path, data, **options)

    def close(self) -> None:
        """End every process inside and throw the box away."""
        handle, self._handle = getattr(self, "_handle", None), None
        if handle is not None:
            handle.close()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            warnings.warn(f"sandbox {self.id} was never closed; use it with 'with'", ResourceWarning, stacklevel=2)
            self.close()
