"""Commands in a sandbox that stays: what a ``Sandbox`` can do while it is open, however it was started.

Each command gets a watcher process of its own inside (see native/command.c) and a socket to it, and is driven by the
same loop as a single run; commands of several threads do not meet. A command that ends takes its whole tree with it,
unless it was asked to stay (``background``).
"""

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nsbox import pausing, watch
from nsbox._native import lib
from nsbox.encode import command, window
from nsbox.errors import SandboxUnavailable
from nsbox.files import Files
from nsbox.handle import Handle
from nsbox.launch import Argument, start_command
from nsbox.own_limits import own_limits
from nsbox.prepared import Prepared, limit_of
from nsbox.process import PIPE, Process
from nsbox.report import Result
from nsbox.rooted import Entries
from nsbox.spec import Limits, Spec
from nsbox.supervise import Run

if TYPE_CHECKING:
    from nsbox.shell import Shell

Callback = Callable[[bytes], object]
PATIENCE_S = 0.25  #: what the end of a command over a limit may take before the box is ended for it


class Commands:
    """An open sandbox, or one that was closed. Any thread may use it."""

    spec: Spec
    id: str
    _prepared: Prepared
    _handle: Handle | None = None
    _files: Files | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[Process] = set()
        self._stopped: set[int] = set()
        self._oom_kills = 0
        self._over_at = -PATIENCE_S  #: when the box was first seen over a limit (time.monotonic())

    @functools.cached_property
    def _limits(self) -> Limits:
        return self.spec.limits

    @property
    def files(self) -> Files:
        """The files inside, which need no process there. Raises SandboxUnavailable once the sandbox is closed."""
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
        timeout: float | str | None = None,
        max_output: int | str | None = None,
        memory: int | str | None = None,
        pids: int | str | None = None,
        cpus: float | str | None = None,
        cpu_time: float | str | None = None,
        background: bool = False,
        tty: bool | tuple[int, int] = False,
        on_stdout: Callback | None = None,
        on_stderr: Callback | None = None,
    ) -> Process:
        """Start a command. ``argv`` is a list, or shell text for ``sh -c``.

        ``stdin``: what it reads, a descriptor that is passed on as it comes, or PIPE. ``env`` is added to the box's
        variables. ``timeout`` (seconds, or as in a Spec) and ``max_output`` (bytes of each stream) default to the
        box's; ``"unlimited"`` is none. ``memory``, ``pids``, ``cpus`` and ``cpu_time`` are written as in a Spec and
        hold for this command alone, within the box's own limits; ``Result.enforced`` says by what. With
        ``background`` the processes that it leaves behind live on until the box ends; nobody reads their pipes then,
        so they should write to files. With ``tty`` its streams are one terminal of the sandbox, read as stdout;
        (rows, columns) is its size. ``on_stdout`` and ``on_stderr`` get a stream as it comes, and that stream is then
        not kept. ``cwd`` is a directory inside; it defaults to where the box's commands start.

        Limits hold whether anybody waits or not. Raises SandboxUnavailable, SpecError, HostError for a limit that
        cannot be held here; ``Process.wait`` raises what goes wrong later.
        """
        words = ["/bin/sh", "-c", argv] if isinstance(argv, str) else list(argv)
        plan, limits = self._prepared.plan, self._limits
        flags = lib.NSB_TTY if tty else lib.NSB_STDIN if stdin is not None else 0
        flags |= lib.NSB_KEEP if background else 0
        limited = {"memory": memory, "pids": pids, "cpus": cpus, "cpu_time": cpu_time}
        with self._lock:
            box, own, variables = self._open_handle(), None, env or {}
            if any(value is not None for value in limited.values()):
                own = own_limits(limits, limited, box.cgroup, nested=box.groups is not None)
            given = box.given().without(variables)
            what = command(words, {**given.environment(plan.env), **variables}, cwd or plan.cwd, flags)
            if isinstance(tty, tuple):
                what = what._replace(detail=window(*tty))
            handle = start_command(box, what, given, own)
        pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) if stdin == PIPE else (-1, -1)
        run = Run(
            handle,
            stdin=pipe[0] if stdin == PIPE else stdin.encode() if isinstance(stdin, str) else stdin,
            timeout=limit_of("timeout", timeout, limits.timeout),
            output=limit_of("output", max_output, limits.output),
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            tty=bool(tty),
        )
        process = Process(self, run, [os.fsdecode(word) for word in words], cwd or plan.cwd, pipe)
        self._processes.add(process)
        self.arm(run.next_time())
        return process

    def arm(self, at: float | None) -> None:
        """Have the limits looked at, at ``at`` (time.monotonic()) or before, though nobody waits."""
        handle = self._handle
        if handle is not None and handle.shared is not None:
            handle.shared.arm(at)

    def running(self) -> list[Process]:
        """The commands whose end nobody has seen."""
        return list(self._processes)

    def exceeded(self, limit: str, value: float | None) -> None:
        """``limit`` of the whole box, which is ``value``, was seen to be exceeded. Its commands are ended, and then, if
        that did not help, the box: what is over the limit may be in what a command has left behind."""
        now, running = time.monotonic(), self.running()
        first = self._over_at if now - self._over_at < 2 * PATIENCE_S else now
        self._over_at = first
        if running and now - first < PATIENCE_S:
            for process in running:
                process.exceed(limit, value)
        else:
            self.end_by(limit, value)

    def why_ended(self) -> str:
        """For a message: how the box came to its end."""
        handle = self._handle
        return f"was ended by {handle.ended_by}" if handle is not None and handle.ended_by else "ended"

    def end_by(self, limit: str, value: float | None) -> None:
        """End the box for ``limit``, which is ``value``; calls that need it then say so."""
        handle = self._handle
        if handle is not None and not handle.ended_by:
            handle.ended_by = f"its {limit} limit" + ("" if value is None else f" of {value:g}")
            handle.kill()

    def run(self, argv: Sequence[Argument] | str, **options: Any) -> Result:
        """Run ``argv`` to its end; the ``options`` are those of ``popen``. How it ended is in the Result. Raises what
        ``Process.wait`` raises."""
        return self.popen(argv, **options).wait()

    def shell(self, **options: Any) -> "Shell":
        """A bash that keeps its state between commands, a Shell. ``options``: ``cwd``, where it starts, and ``env``,
        variables that are added. Raises CommandError where there is no bash inside."""
        from nsbox.shell import Shell

        return Shell(self, **options)

    def terminal(
        self, argv: Sequence[Argument] | str = ("bash",), *, rows: int = 24, columns: int = 80, **options: Any
    ) -> Process:
        """Start ``argv`` on a terminal of the sandbox's own, of ``rows`` and ``columns``, without a time limit unless
        one is given: write keys to it, read its screen from ``output``, ``resize`` it. The other ``options`` are those
        of ``popen``. Raises what ``popen`` raises."""
        options = {"timeout": "unlimited", "max_output": "unlimited", "stdin": PIPE, **options}
        options["env"] = {"TERM": "xterm", **(options.get("env") or {})}
        return self.popen(argv, tty=(rows, columns), **options)

    def processes(self) -> list[int]:
        """The host pids of all that runs inside, init first."""
        handle = self._handle
        return watch.processes(handle.pid) if handle is not None and handle.alive() else []

    def pause(self) -> None:
        """Stop everything inside (SIGSTOP) until ``resume``; a command's time limit goes on."""
        self._stopped |= pausing.stop(self.processes)

    def resume(self) -> None:
        """Let what ``pause`` has stopped go on."""
        stopped, self._stopped = self._stopped, set()
        pausing.go_on(stopped, self.processes)

    def forget(self, process: Process) -> None:
        """A command is over."""
        self._processes.discard(process)

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel has killed something inside for the memory limit since this was last asked."""
        handle = self._handle
        if handle is None or handle.cgroup is None:
            return False
        before, self._oom_kills = self._oom_kills, int(handle.cgroup.counters(pressure=False)["oom_kills"] or 0)
        return self._oom_kills > before

    def read_file(self, path: str | os.PathLike[str], **options: Any) -> bytes:
        """The bytes of a regular file at ``path`` inside. ``options``: ``max_bytes``. Raises what ``Files.read_file``
        raises."""
        return self.files.read_file(path, **options)

    def write_file(self, path: str | os.PathLike[str], data: bytes | str, **options: Any) -> None:
        """Write ``data`` to a file at ``path`` inside, and make missing parents. ``options``: ``mode``. Raises what
        ``Files.write_file`` raises."""
        self.files.write_file(path, data, **options)

    def list(self, path: str | os.PathLike[str] = ".") -> Entries:
        """What the directory ``path`` inside holds, by name. Raises what ``Files.list`` raises."""
        return self.files.list(path)

    def _open_handle(self) -> Handle:
        handle = self._handle
        if handle is None:
            raise SandboxUnavailable("the sandbox is closed", remedy="make another")
        if handle.ended_by:
            raise SandboxUnavailable(
                f"the sandbox was ended by {handle.ended_by}", remedy="make another, with a higher limit if it needs it"
            )
        return handle
