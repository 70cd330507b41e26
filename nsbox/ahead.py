"""A sandbox made ahead: complete up to its program, which its init starts when it is told.

Everything that a launch does is done by then, from the namespaces to the seccomp filter; what is left is one message,
and init's vfork and exec. Nothing has run inside but init, so that whoever gets it is the first."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nsbox import inputs
from nsbox._native import lib
from nsbox.crossing import Crossing
from nsbox.encode import command, window
from nsbox.errors import SandboxUnavailable
from nsbox.handle import Handle
from nsbox.launch import Argument, launch, start_program
from nsbox.prepared import Prepared
from nsbox.supervise import Run, drive

START_TIMEOUT_S = 30.0
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


def handshake(handle: Handle) -> Run:
    """Wait until init has built the root and given up its privileges. Raises SetupError, SandboxUnavailable."""
    run = Run(handle, timeout=START_TIMEOUT_S, streams=False)
    held, handle.stdin = handle.stdin, -1  # it is for the program: a run without input would end it
    try:
        drive(run, until=lambda: run.started or run.error is not None)
    finally:
        handle.stdin = held
    if run.error is not None:
        raise run.error
    if not run.started:
        raise SandboxUnavailable("the sandbox did not start in time", remedy="run: nsbox doctor")
    return run


class Ahead:
    """Raises what a launch raises, when it is made; ``commands`` is for ``launch``. It owns a handle, until ``close``
    or until somebody takes that."""

    def __init__(self, prepared: Prepared, *, commands: bool = False) -> None:
        self._crossing: Crossing | None = None
        self.handle = launch(prepared, None, stdin=True, commands=commands, on_network=self._on_network)
        try:
            self.run = handshake(self.handle)  #: what watches it, now and when it is used
        except BaseException:
            self.handle.close()
            raise
        self.handle.inputs = inputs.describe(prepared)
        self.made_at = time.time()
        self.identity = identity(self.handle)

    def _on_network(self, event: str, fields: dict[str, Any]) -> None:
        if self._crossing is not None:
            self._crossing.on_network(event, fields)

    def healthy(self) -> bool:
        """Whether it can be given out: its init waits."""
        return self.handle.control >= 0 and self.handle.alive()

    def close(self) -> None:
        """End it. Idempotent."""
        self.handle.close()

    def lease(self, crossing: Crossing) -> Handle:
        """From now on it is somebody's: its time begins, and ``crossing`` is told what crosses."""
        handle, self._crossing = self.handle, crossing
        handle.started_at = time.monotonic()
        crossing.began = time.time()
        crossing.begin(handle)
        return handle

    def proof(self) -> dict[str, Any]:
        """For the report: what shows that nobody used it before."""
        return proof(self.identity, self.made_at)


def namespaces_of(pid: int) -> dict[str, int]:
    """The numbers of a process's namespaces, as far as the caller may look at it (ptrace(2))."""
    found = {}
    for name in NAMESPACES:
        try:
            found[name] = os.stat(f"/proc/{pid}/ns/{name}").st_ino
        except OSError:  # an ordinary user may not look at an init that is not dumpable
            break
    return found


def proof(identity: Mapping[str, Any], made_at: float) -> dict[str, Any]:
    """What a report tells of something that was made ahead at ``made_at`` (time.time()), and is leased now."""
    return {**identity, "made_at": made_at, "ready_s": round(time.time() - made_at, 6)}


def identity(handle: Handle) -> dict[str, Any]:
    """Numbers by which the kernel tells this sandbox from all others that exist."""
    return {
        "init_pid": handle.pid,
        "namespaces": namespaces_of(handle.pid),
        "cgroup": handle.cgroup.paths[0] if handle.cgroup else None,
        "root_device": os.fstat(handle.root_fd).st_dev,
        "scratch_device": os.fstat(handle.scratch_fd).st_dev,
    }


def begin(
    ahead: Ahead,
    argv: Sequence[Argument],
    env: Mapping[str, str],
    *,
    stdin: bytes | str | int | None = None,
    tty: bool | tuple[int, int] = False,
    on_tty: Callable[[int], object] | None = None,
    on_stdout: Callable[[bytes], object] | None = None,
    on_stderr: Callable[[bytes], object] | None = None,
) -> Run:
    """Have a sandbox made ahead start its program. Raises SpecError, SandboxUnavailable; it stays the caller's."""
    handle, run = ahead.handle, ahead.run
    spec, plan = handle.prepared.spec, handle.prepared.plan
    flags = lib.NSB_TTY if tty else lib.NSB_TOGETHER | (lib.NSB_STDIN if stdin is not None else 0)
    given = handle.given().without(env)
    what = command(argv, {**given.environment(plan.env), **env}, plan.cwd, flags)
    if isinstance(tty, tuple):
        what = what._replace(detail=window(*tty))
    if not flags & lib.NSB_STDIN:
        handle.close_stream("stdin")
    start_program(handle, what, given)
    run.enforcer.begin(0.0)
    run.expect(
        stdin=stdin.encode() if isinstance(stdin, str) else stdin,
        timeout=spec.limits.timeout,
        output=spec.limits.output,
        on_stdout=on_stdout,
        on_stderr=on_stderr,
        tty=on_tty or bool(tty),
    )
    return run
