"""A sandbox to live in for one task: many commands, files, then gone.

The box is one launch without a command: its init waits. Commands are in ``nsbox.commands``, its files in
``nsbox.files``, its states in ``nsbox.snapshot``, what has changed in its workspace in ``nsbox.boxchanges``.
"""

import os
import time
import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Self

from nsbox.ahead import Ahead, handshake
from nsbox.boxchanges import BoxCrossing
from nsbox.boxwatch import BoxWatch
from nsbox.change import ChangeSet
from nsbox.commands import Commands
from nsbox.crossing import target_of
from nsbox.errors import SandboxUnavailable, SpecError
from nsbox.files import Files
from nsbox.groups import Groups
from nsbox.handle import Handle
from nsbox.launch import launch, prepare
from nsbox.process import PIPE as PIPE
from nsbox.process import Process as Process
from nsbox.spec import Spec

if TYPE_CHECKING:
    from nsbox.outgoing import Applied, Exported
    from nsbox.pool import Pool
    from nsbox.ports import Forward
    from nsbox.snapshot import Snapshot


class Sandbox(Commands):
    """A sandbox that stays until it is closed. Use it with ``with``; ``close`` is idempotent.

    Made from a ``spec`` or from the ``options`` of one; ``log`` as in ``nsbox.run``; ``snapshot`` is a state to start
    from; ``ahead`` is for ``from_pool``. Raises what ``nsbox.run`` raises. Memory, processors, processes and disk are
    limits of the whole box; wall clock, processor time and output count for each command by itself, and one command can
    have less of the others. Any thread may use it."""

    def __init__(
        self,
        spec: Spec | None = None,
        *,
        log: Any = None,
        snapshot: "Snapshot | None" = None,
        ahead: Ahead | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        spec = spec or (snapshot.spec if snapshot else None)
        self.spec = spec.replace(**options) if spec else Spec.from_dict(options)
        self.id = ahead.handle.id if ahead else os.urandom(8).hex()
        self._forwards: list[Forward] = []
        self._closed = False
        self._layers = snapshot.layers if snapshot else ()
        self.started_at = time.time()
        self._crossing = BoxCrossing(self.spec, self.id, target_of(self.spec, log))
        try:
            if ahead:
                self._prepared = ahead.handle.prepared
                self._adopt(ahead.lease(self._crossing))
            else:
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
        handle = launch(prepared, None, on_ready=crossing.begin, on_network=crossing.on_network, commands=True)
        handle.layers = self._layers
        handle.started_at = handle.started_at if since is None else since
        try:
            handshake(handle)
        except BaseException:
            handle.close()
            raise
        self._adopt(handle)

    def _adopt(self, handle: Handle) -> None:
        """Live in a sandbox whose init waits."""
        try:
            for name in ("stdout", "stderr", "stdin"):
                handle.close_stream(name)
            if handle.cgroup is not None and handle.cgroup.wanted.nested:
                handle.groups = Groups(handle.cgroup, handle)
            handle.shared = BoxWatch(handle, self)
            if handle.groups is not None:
                handle.shared.arm(None)
            self._crossing.opened(handle)
            self._files = Files(handle.root_fd, handle.host_ids, self._prepared.plan.cwd)
        except BaseException:
            handle.close()
            raise
        self._handle = handle

    def forward(self, port: int, listen: int | str | os.PathLike[str] = 0) -> "Forward":
        """Have a port of the host's loopback (0: any that is free), or a unix socket, lead to a TCP port inside.

        ``port`` is the one inside, ``listen`` the host's or a path. It ends with ``Forward.close`` or with the box.
        Raises SpecError, OSError where ``listen`` cannot be had."""
        from nsbox.ports import Forward

        self._open_handle()
        made = Forward(self._open_handle, port, listen)
        self._forwards.append(made)
        return made

    def snapshot(self) -> "Snapshot":
        """The files as they are now, to go back to or to start others from. It is kept as long as it is referred to.

        Everything inside stands still meanwhile. Raises HostError where this host cannot do it, OSError."""
        from nsbox import snapshot

        with self._lock:  # no command starts meanwhile
            handle, running = self._open_handle(), not self._stopped
            self.pause()
            try:
                return snapshot.take(handle, self.spec, self._layers)
            finally:
                if running:
                    self.resume()

    def restore(self, snapshot: "Snapshot") -> None:
        """Go back to a ``snapshot``, of this box or another: all that runs inside ends, the files are as they were.

        Raises what making a box raises; then this one is closed."""
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
        if self._closed:  # by another thread meanwhile, which found nothing to end
            self.close()
            raise SandboxUnavailable("the sandbox was closed while it was restored", remedy="make another")

    @classmethod
    def from_snapshot(cls, snapshot: "Snapshot", **options: Any) -> Self:
        """A new box with the files of a ``snapshot``, and its Spec with some ``options`` changed. Raises what making a
        box raises."""
        return cls(snapshot=snapshot, **options)

    @classmethod
    def from_pool(cls, pool: "Pool", *, log: Any = None) -> Self:
        """A box that ``pool`` has made ahead, and nobody used before: it is there at once. ``log``: in place of the
        pool's. Raises SandboxUnavailable when the pool is closed or has none to give."""
        ahead = pool.take()
        try:
            return cls(pool.spec, log=pool.target if log is None else log, ahead=ahead)
        except BaseException:
            ahead.close()
            raise

    def fork(self, count: int, **options: Any) -> list[Self]:
        """``count`` new boxes with the files of this one, which share all that is there now. The caller closes each.

        ``options`` change their Spec. Raises what ``snapshot`` and making a box raise; then none of them is left."""
        snapshot, made = self.snapshot(), list[Self]()
        try:
            for _ in range(count):
                made.append(type(self)(snapshot=snapshot, **options))
        except BaseException:
            for box in made:
                box.close()
            raise
        return made

    def changes(self) -> ChangeSet:
        """What has changed in the workspace until now. Raises SpecError where there is none."""
        return self._crossing.changes(self._open_handle())

    def diff(self) -> str:
        """The same as unified text for people. Raises SpecError where there is no workspace."""
        return self._crossing.diff(self._open_handle())

    def export(self, directory: str | os.PathLike[str], *, allow_trusted: Collection[str] | bool = ()) -> "Exported":
        """Copy what was added or changed in the workspace into ``directory``, new or empty, of the host.

        What the host would act upon by itself (git hooks and the like) is held back unless ``allow_trusted`` names it,
        or is true. Raises SpecError where there is no workspace, FileExistsError, OSError."""
        return self._crossing.export(self._open_handle(), os.fspath(directory), allow_trusted)

    def apply(
        self,
        paths: Collection[str] | None = None,
        *,
        force: bool = False,
        allow_trusted: Collection[str] | bool = (),
    ) -> "Applied":
        """Write changes, or those at or beneath ``paths``, back into the workspace's own directory on the host.

        A file that was changed on the host meanwhile is left alone, and told as a conflict, unless ``force``.
        ``allow_trusted`` as in ``export``. Raises SpecError where there is no workspace, OSError."""
        return self._crossing.apply(self._open_handle(), paths, force, allow_trusted)

    def allow(self, *rules: str) -> None:
        """Let filtered egress reach more, from now on; the rules are written as in a Spec. If it raises (SpecError,
        HostError) the former policy still holds. LogError: it cannot be told, and the sandbox is ended."""
        self._crossing.policy(self._open_handle(), "allow", rules)

    def deny(self, *rules: str) -> None:
        """Refuse destinations from now on, whatever was allowed, and end connections to them; the ``rules`` are written
        as in a Spec. Raises as ``allow``."""
        self._crossing.policy(self._open_handle(), "deny", rules)

    def destinations(self) -> list[dict[str, Any]]:
        """Every destination that was reached or refused until now, as a report has them. Raises SpecError where there
        is no filtered egress."""
        egress = self._open_handle().egress
        if egress is None:
            raise SpecError("destinations: this sandbox has no filtered egress; make it with net='filtered'")
        return egress.record()

    def forget(self, process: Process) -> None:
        super().forget(process)
        if process.outcome is not None:
            self._crossing.command(process.outcome)

    def close(self) -> None:
        """End every process inside and throw the box away. Waiting for a command then raises SandboxUnavailable."""
        with self._lock:
            handle, self._handle = self._handle, None
            self._closed = True
        if handle is None:
            return None
        if os.getpid() != handle.owner:
            return self._close(handle)
        try:
            self._crossing.ended(handle)
        finally:
            self._crossing.close()
            self._close(handle)
            self._layers = ()

    def end_by(self, limit: str, value: float | None) -> None:
        super().end_by(limit, value)
        self._crossing.ended_by(limit, value)

    def _close(self, handle: Handle) -> None:
        if handle.shared is not None:
            handle.shared.end()
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._handle is not None:
            warnings.warn(f"sandbox {self.id} was never closed; use it with 'with'", ResourceWarning, stacklevel=2)
            self.close()
