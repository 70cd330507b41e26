"""A sandbox to live in for one task: many commands, files, then gone.

The box is one launch without a command: its init waits. Each command gets a watcher process of its own inside (see
native/command.c) and a socket to it, and is driven by the same loop as a single run; commands of several threads do not
meet. A command that ends takes its whole tree with it, unless it was asked to stay (``background``).
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nsbox import pausing, watch
from nsbox._native import lib
from nsbox.boxchanges import BoxCrossing
from nsbox.change import ChangeSet
from nsbox.crossing import target_of
from nsbox.encode import command
from nsbox.errors import SandboxUnavailable, SpecError
from nsbox.files import Files
from nsbox.launch import Argument, Handle, launch, prepare, start_command
from nsbox.outgoing import Applied, Exported
from nsbox.process import PIPE as PIPE
from nsbox.process import Process as Process
from nsbox.report import Result
from nsbox.spec import Spec
from nsbox.supervise import Run, drive

if TYPE_CHECKING:
    from nsbox.resources.egress import Egress
    from nsbox.ports import Forward
    from nsbox.shell import Shell
    from nsbox.snapshot import Snapshot

Callback = Callable[[bytes], object]
START_TIMEOUT_S = 30.0


class Sandbox:
    """A sandbox that stays until it is closed. Use it with ``with``; ``close`` is idempotent.

    Made from a Spec or from the options of one; ``log`` as in ``nsbox.run``. Raises what ``nsbox.run`` raises. Memory, processors, processes and
    disk are limits of the whole box; wall clock, processor time and output count for each command by itself. Any
    thread may use it.
    """

    _handle: Handle | None = None
    _files: Files | None = None

    def __init__(
        self, spec: Spec | None = None, *, log: Any = None, snapshot: "Snapshot | None" = None, **options: Any
    ) -> None:
        spec = spec or (snapshot.spec if snapshot else None)
        self.spec = spec.replace(**options) if spec else Spec.from_dict(options)
        self.id = os.urandom(8).hex()
        self._lock = threading.Lock()
        self._processes: set[Process] = set()
        self._stopped: set[int] = set()
        self._forwards: list[Forward] = []
        self._oom_kills = 0
        self._layers = snapshot.layers if snapshot else ()
        self.started_at = time.time()
        self._crossing = BoxCrossing(self.spec, self.id, target_of(self.spec, log))
        try:
            self._prepared = prepare(self.spec)
            self._start()
        except BaseException as error:
            self._crossing.fail(error)
            self._crossing.close()
            raise

    def _start(self, since: float | None = None) -> None:
        """``since``: when the box was first started (time.monotonic()), where this is not the first time."""
        crossing, prepared = self._crossing, self._prepared
        if self._layers:
            from nsbox.snapshot import with_layers

            prepared = with_layers(prepared, self._layers)
        handle = launch(prepared, None, on_ready=crossing.begin, on_network=crossing.on_network)
        handle.layers = self._layers
        handle.started_at = handle.started_at if since is None else since
        try:
            _handshake(handle)
            crossing.opened(handle)
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
        timeout: float | str | None = None,
        max_output: int | str | None = None,
        background: bool = False,
        tty: bool = False,
        on_stdout: Callback | None = None,
        on_stderr: Callback | None = None,
    ) -> Process:
        """Start a command. ``argv`` is a list, or shell text for ``sh -c``.

        ``stdin``: what it reads, a descriptor that is passed on as it comes, or PIPE. ``env`` is added to the box's
        variables. ``timeout`` (seconds, or as in a Spec) and ``max_output`` (bytes of each stream) default to the
        box's; ``"unlimited"`` is none. With ``background`` the processes that it leaves behind live on until the box
        ends; nobody reads their pipes then, so they should write to files. With ``tty`` its streams are one terminal of the sandbox, read as stdout. A callback
        gets a stream as it comes, and that stream is then not kept.
        """
        words = ["/bin/sh", "-c", argv] if isinstance(argv, str) else list(argv)
        plan, limits = self._prepared.plan, self.spec.limits
        flags = lib.NSB_TTY if tty else lib.NSB_STDIN if stdin is not None else 0
        flags |= lib.NSB_KEEP if background else 0
        with self._lock:
            if self._handle is None:
                raise SandboxUnavailable("the sandbox is closed", remedy="make another")
            variables = {**plan.env, **self._handle.secret_variables(), **(env or {})}
            what = command(words, variables, cwd or plan.cwd, flags)
            handle = start_command(self._handle, what)
        pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) if stdin == PIPE else (-1, -1)
        run = Run(
            handle,
            stdin=pipe[0] if stdin == PIPE else stdin.encode() if isinstance(stdin, str) else stdin,
            timeout=_or_default("timeout", timeout, limits.timeout),
            output=_or_default("output", max_output, limits.output),
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

    def shell(self, **options: Any) -> "Shell":
        """A bash that keeps its state between commands; see ``nsbox.shell.Shell``."""
        from nsbox.shell import Shell

        return Shell(self, **options)

    def terminal(
        self, argv: Sequence[Argument] | str = ("bash",), *, rows: int = 24, columns: int = 80, **options: Any
    ) -> Process:
        """A command on a terminal of the sandbox's own, without a time limit unless one is given: write keys to it,
        read its screen from ``output``, ``resize`` it. The other keywords are those of ``popen``."""
        options = {"timeout": "unlimited", "max_output": "unlimited", "stdin": PIPE, **options}
        options["env"] = {"TERM": "xterm", **(options.get("env") or {})}
        process = self.popen(argv, tty=True, **options)
        process.resize(rows, columns)
        return process

    def forward(self, port: int, listen: int | str | os.PathLike[str] = 0) -> "Forward":
        """Have a port of the host's loopback (0: any that is free), or a unix socket, lead to a TCP port inside.

        It ends with ``Forward.close`` or with the box. Raises SpecError, OSError where ``listen`` cannot be had."""
        from nsbox.ports import Forward

        self._open_handle()
        made = Forward(self._open_handle, port, listen)
        self._forwards.append(made)
        return made

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

    def snapshot(self) -> "Snapshot":
        """The files as they are now, to go back to or to start others from; see ``nsbox.snapshot``.

        Everything inside stands still meanwhile. Raises HostError where this host cannot do it, OSError."""
        from nsbox import snapshot

        handle, running = self._open_handle(), not self._stopped
        self.pause()
        try:
            return snapshot.take(handle, self.spec, self._layers)
        finally:
            if running:
                self.resume()

    def restore(self, snapshot: "Snapshot") -> None:
        """Go back to a snapshot, of this box or another: all that runs inside ends, and the files are as they were."""
        with self._lock:
            handle, self._handle = self._open_handle(), None
        self._crossing.left()
        self._close(handle)
        self._layers = snapshot.layers
        try:
            self._start(handle.started_at)
        except BaseException as error:
            self._layers = ()
            self._crossing.fail(error)
            self._crossing.close()
            raise

    @classmethod
    def from_snapshot(cls, snapshot: "Snapshot", **options: Any) -> Self:
        """A new box with the files of a snapshot, and its Spec with some ``options`` changed."""
        return cls(snapshot=snapshot, **options)

    def fork(self, count: int, **options: Any) -> list[Self]:
        """``count`` new boxes with the files of this one, which share all that is there now. The caller closes each."""
        snapshot, made = self.snapshot(), list[Self]()
        try:
            for _ in range(count):
                made.append(type(self)(snapshot=snapshot, **options))
        except BaseException:
            for box in made:
                box.close()
            raise
        return made

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

    def changes(self) -> ChangeSet:
        """What has changed in the workspace until now. Raises SpecError where there is none."""
        return self._crossing.changes(self._open_handle())

    def diff(self) -> str:
        """The same as unified text for people."""
        return self._crossing.diff(self._open_handle())

    def export(self, directory: str | os.PathLike[str], *, allow_trusted: Collection[str] | bool = ()) -> Exported:
        """Copy what was added or changed into a new or empty directory; see ``nsbox.transfer.export``."""
        return self._crossing.export(self._open_handle(), os.fspath(directory), allow_trusted)

    def apply(
        self,
        paths: Collection[str] | None = None,
        *,
        force: bool = False,
        allow_trusted: Collection[str] | bool = (),
    ) -> Applied:
        """Write changes, or those at or beneath ``paths``, back into the workspace; see ``nsbox.transfer.apply``."""
        return self._crossing.apply(self._open_handle(), paths, force, allow_trusted)

    def allow(self, *rules: str) -> None:
        """Let filtered egress reach more, from now on; the rules are written as in a Spec. If it raises (SpecError,
        HostError) the former policy still holds."""
        self._egress().allow(rules)

    def deny(self, *rules: str) -> None:
        """Refuse destinations from now on, whatever was allowed, and end connections to them. Raises as ``allow``."""
        self._egress().deny(rules)

    def destinations(self) -> list[dict[str, Any]]:
        """Every destination that was reached or refused until now, as a report has them."""
        return self._egress().record()

    def _egress(self) -> "Egress":
        egress = self._open_handle().egress
        if egress is None:
            raise SpecError("allow: this sandbox has no filtered egress; make it with net='filtered'")
        return egress

    def _open_handle(self) -> Handle:
        handle = self._handle
        if handle is None:
            raise SandboxUnavailable("the sandbox is closed", remedy="make another")
        return handle

    def close(self) -> None:
        """End every process inside and throw the box away. Waiting for a command then raises SandboxUnavailable."""
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            self._crossing.ended(handle)
        finally:
            self._crossing.close()
            self._close(handle)
            self._layers = ()

    def _close(self, handle: Handle) -> None:
        handle.close()
        handle.layers = handle.merged = ()
        self._files = None
        for forward in self._forwards:
            forward.close()
        self._forwards.clear()
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


def _or_default(name: str, value: Any, default: Any) -> Any:
    """A limit of one command, in any form that a Spec takes."""
    return default if value is None else getattr(Spec.from_dict({name: value}).limits, name)


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
