"""What is held for a sandbox that runs, and how it is given back."""

from __future__ import annotations

import itertools
import os
import select
import time

from nsbox import janitor, secrets, watch
from nsbox._native import lib
from nsbox.errors import SandboxUnavailable
from nsbox.light import TYPE_CHECKING, contextlib, signal, threading
from nsbox.prepared import Prepared
from nsbox.resources import cgroup, scratch
from nsbox.resources.ids import SIZE, IdRanges
from nsbox.secrets import Values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Protocol

    from nsbox.groups import Groups
    from nsbox.masking import Masker
    from nsbox.own_limits import OwnLimits
    from nsbox.resources.cgroup_child import Child
    from nsbox.resources.egress import Egress

    class Looker(Protocol):
        """What looks at the limits of a sandbox that stays: ``nsbox.boxwatch``."""

        def next_time(self) -> float | None: ...
        def look(self, now: float) -> None: ...
        def arm(self, at: float | None) -> None: ...
        def end(self) -> None: ...


#: what a handle gives back only when nothing is left inside: descriptors, and things that take more than a close(2)
LATE_DESCRIPTORS = ("pidfd", "root_fd", "scratch_fd", "secrets_fd")
LATE_THINGS = ("cgroup", "egress", "scratch", "copy", "_range")


class Handle:
    """A sandbox that runs. Owns a pidfd, the control socket, three pipes and an id range; ``close`` ends all of it."""

    is_command = False  #: whether the end of the control socket is the end of all that this stands for
    is_part = False  #: whether others run in the same sandbox, and this is one command of many
    is_last = True  #: whether the sandbox ends with what this stands for

    def __init__(self, prepared: Prepared, started_at: float) -> None:
        self.id = os.urandom(8).hex()
        #: A descriptor is closed, or given away, only under this: its number may be another's a moment later. Who uses
        #: one of a sandbox that another thread may close holds it meanwhile, or borrows a copy.
        self._guard = threading.RLock()
        self.owner = os.getpid()  #: a forked child has copies of the descriptors, and no right to end anything
        self.prepared = prepared
        self.started_at = started_at  #: time.monotonic() when the launch was asked for
        self.control = self.pidfd = self.stdout = self.stderr = self.stdin = -1
        self.root_fd = self.scratch_fd = self.secrets_fd = -1  #: see NSB_PASS_ROOT
        self.secrets = Values((), ())
        self.revoked_at: dict[str, float] = {}  #: name of a secret → time.time() when it was taken away
        self.lent: set[secrets.Lent] = set()  #: pipes with a secret that has an end, of this and of later commands
        self.mine: list[secrets.Lent] = []  #: those of them that are of this one
        self.on_revoked: Callable[[str, str], None] | None = None
        self.pid = 0
        self.cloned_at = 0.0
        self.host_ids: tuple[int, int] | None = None  #: the payload's ids on the host, where they are not the caller's
        self.cgroup: cgroup.Cgroup | None = None
        self.groups: Groups | None = None  #: of the commands of a sandbox that stays
        self.shared: Looker | None = None  #: what looks at the limits of such a sandbox, if anything has to
        self.limits = prepared.spec.limits
        self.watch_for = prepared.plan.limits.watch  #: limits that are looked at for this handle
        self.enforced = prepared.plan.enforced
        self.inputs: list[dict[str, Any]] | None = None  #: what goes in, where that was looked at ahead
        self.payload = 0  #: pid inside of the command, as it was told from there
        self.ended_by = ""  #: the limit that has ended the sandbox
        self.layers: tuple[Any, ...] = ()  #: nsbox.snapshot.Layer, beneath what this sandbox writes
        self.merged: tuple[Any, ...] = ()  #: copies of both as one, for who looks at all that has changed
        self.egress: Egress | None = None
        self.on_network: Callable[[str, dict[str, Any]], None] | None = None
        self.scratch: scratch.Scratch | None = None
        self.copy: scratch.Scratch | None = None  #: of the workspace, see nsbox.copyin
        self.copied_at: float | None = None  #: time.time() when that was begun
        self.settled = False  #: it was said from inside that nothing is left
        self._range: int | None = None
        self._ranges: IdRanges | None = None

    @property
    def roots(self) -> tuple[int, ...]:
        """The host pids that everything inside descends from, init first."""
        return (self.pid,)

    def tell(self, kind: int, value: int = 0, op: int = 0) -> bool:
        """Send init a message; False when nobody is there any more."""
        with self._guard:
            return self.control >= 0 and lib.nsb_tell(self.control, kind, value, op) >= 0

    @contextlib.contextmanager
    def borrowed(self, name: str) -> Iterator[int]:
        """A copy of one of the descriptors, for what may take a while. Raises SandboxUnavailable once it is closed."""
        fd = self.copied(name)
        try:
            yield fd
        finally:
            os.close(fd)

    def copied(self, name: str) -> int:
        """The same, which the caller closes."""
        with self._guard:
            fd = getattr(self, name)
            if fd < 0:
                raise SandboxUnavailable("the sandbox is closed", remedy="make another")
            return os.dup(fd)

    def abandon(self) -> None:
        """End what cannot be watched any more."""
        self.kill()

    def masker(self) -> Masker | None:
        """For one stream of what comes out; None where there is nothing to mask."""
        if not self.secrets.secrets:
            return None
        from nsbox.masking import Masker

        return Masker(self.secrets.by_name())

    def given(self) -> secrets.Given:
        """The secrets that a command which starts now gets, besides those that are files alone."""
        now = time.monotonic()
        return self.secrets.given({name for at, name in self._to_revoke() if now >= at}.union(self.revoked_at))

    def _to_revoke(self) -> list[tuple[float, str]]:
        limited = [secret for secret in self.secrets.secrets if secret.ttl is not None]
        return [(self.started_at + (s.ttl or 0.0), s.name) for s in limited if s.name not in self.revoked_at]

    def next_revocation(self) -> float | None:
        """When the next secret's time is over (time.monotonic())."""
        return min((at for at, _ in self._to_revoke()), default=None)

    def revoke_secrets(self, now: float) -> None:
        """Take away every secret whose time is over. One that was a variable stays in the processes that have it."""
        numbered = {secret.name for secret in self.secrets.secrets if secret.deliver == "fd"}
        for at, name in self._to_revoke():
            if now >= at and (name in numbered or self.secrets_fd >= 0):
                self.revoked_at[name] = time.time()  # first: see lend()
                if name in numbered:
                    gone = not [lent for lent in tuple(self.lent) if lent.name == name and not lent.empty()]
                else:
                    with self._guard:
                        gone = self.secrets_fd < 0 or secrets.revoke(self.secrets_fd, name)
                if not gone:
                    self.kill()  # rather no sandbox than one that keeps what it should not have
                if self.on_revoked:
                    self.on_revoked(name, "ttl")

    def lend(self, given: secrets.Given, to: Handle) -> list[int]:
        """The descriptors of a command, in order; the caller closes them. Those that have an end stay in reach for it
        until the command ends. Raises SpecError, OSError; then ``to`` has what it owns."""
        fds: list[int] = []
        try:
            for secret, value in given.pipes:
                fds.append(secrets.filled(value))
                if self.host_ids:
                    os.fchown(fds[-1], *self.host_ids)  # for who opens /dev/fd/3
                if secret.ttl is None or not value:
                    continue
                lent = secrets.Lent(secret.name, fds[-1])
                to.mine.append(lent)
                self.lent.add(lent)
                # Its time may have ended since it was asked for: then it is emptied there, or was not seen and is here.
                if secret.name in self.revoked_at:
                    lent.empty()
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fds

    def take_back(self) -> None:
        """Nobody has what was lent any more."""
        for lent in self.mine:
            lent.close()
        self.lent.difference_update(self.mine)
        self.mine.clear()

    def inside_id(self, host_id: int) -> int:
        """The id inside of a file that the host sees as owned by ``host_id``."""
        if self._range is not None and self._range <= host_id < self._range + SIZE:
            return host_id - self._range
        return self.prepared.plan.uid if host_id == self.prepared.host.uid else 65534

    def alive(self) -> bool:
        """Whether pid 1 inside still runs."""
        with self._guard:
            return self.pidfd >= 0 and not _readable(self.pidfd, 0) and not watch.ending(self.pid)

    def await_news(self, timeout: float) -> None:
        """Wait until init says something, for at most ``timeout`` seconds."""
        _readable(self.control, int(timeout * 1000))

    def wait_until_gone(self) -> None:
        """Wait for the end of pid 1, for at most a second."""
        with contextlib.suppress(SandboxUnavailable), self.borrowed("pidfd") as fd:
            _readable(fd, 1000)

    def kill(self) -> None:
        """SIGKILL pid 1 inside, and with it everything (pid_namespaces(7))."""
        with self._guard:
            if self.pidfd >= 0 and os.getpid() == self.owner:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close_stream(self, name: str) -> None:
        """Close one of the descriptors, by name."""
        with self._guard:
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)

    def close(self) -> None:
        """End the sandbox if it still runs; what must wait for its last process is given back later. Idempotent."""
        self.kill()
        for lent in tuple(self.lent):
            lent.close()
        if self.groups is not None:
            self.groups.close()
        for name in ("stdin", "stdout", "stderr", "control"):
            self.close_stream(name)
        if os.getpid() != self.owner:
            for name in LATE_DESCRIPTORS:
                self.close_stream(name)
            self._disown()
            return
        if self.pidfd >= 0 or any(getattr(self, name) is not None for name in LATE_THINGS):
            with self._guard:
                job = GiveBack(self)
            janitor.later(job)

    def _disown(self) -> None:
        """What it had is given back, or somebody else's."""
        for name in LATE_THINGS:
            setattr(self, name, None)


def _readable(fd: int, timeout_ms: int) -> bool:
    waiter = select.poll()
    waiter.register(fd, select.POLLIN)
    return bool(waiter.poll(timeout_ms))


class CommandHandle(Handle):
    """A later command in a sandbox that stays. It owns its socket, its pipes and copies of the box's descriptors: the
    box may be closed by another thread meanwhile."""

    is_command = is_part = True
    is_last = False

    def __init__(self, box: Handle, *, lasting: bool = False, own: OwnLimits | None = None) -> None:
        """``lasting``: what the command leaves running lives on, with what it was lent."""
        super().__init__(box.prepared, time.monotonic())
        self._box = box
        self.secrets, self.revoked_at, self.lent = box.secrets, box.revoked_at, box.lent
        self.lasting = lasting
        self.pid, self.cloned_at = box.pid, self.started_at
        self._asked_again = False
        self.groups, self.shared = box.groups, box.shared
        self.watch_for = self.watch_for & {"cpu_time"}
        if own is not None:
            self.limits, self.watch_for, self.enforced = own.limits, own.watch, {**self.enforced, **own.enforced}
        self._tree = 0
        self.own: Child | None = None  #: the same as ``cgroup``
        self.pidfd = box.copied("pidfd")
        try:
            self.scratch_fd = box.copied("scratch_fd")
        except BaseException:
            self.close_stream("pidfd")
            raise

    @property
    def roots(self) -> tuple[int, ...]:
        """The watcher, if it is known. It is found by the command's own pid, while that lives."""
        if not self._tree and self.payload:
            for pid in watch.processes(self.pid):
                if watch.inside_pid(pid) == self.payload:
                    self._tree = watch.parent(pid)
        return (self._tree,) if self._tree else ()

    def tell(self, kind: int, value: int = 0, op: int = 0) -> bool:
        """Send the watcher a message, or init where everything inside is meant."""
        return self._box.tell(kind, value, op) if op else super().tell(kind, value, op)

    def _to_revoke(self) -> list[tuple[float, str]]:
        return []  # they are the box's, which takes them away whether a command runs or not

    def kill(self) -> None:
        """The watcher was asked and did not answer: the payload has killed it, or stopped it. Its cgroup ends all of
        the command at once; where there is none the watcher may go on, and if that does not help, the box goes."""
        if self.own is not None and self.own.kill():
            return
        if self._asked_again or not self._box.tell(lib.NSB_MSG_SIGNAL, signal.SIGCONT, 1):
            self.abandon()
        self._asked_again = True

    def abandon(self) -> None:
        """SIGKILL all of the command by its cgroup; where there is none pid 1 inside, and with it everything."""
        if self.own is not None and self.own.kill():
            return
        super().kill()
        self.wait_until_gone()

    def close(self) -> None:
        """Close the socket, at which the watcher ends what is left of the command, and the rest. Idempotent."""
        if not self.lasting:
            self.take_back()
        for name in ("stdin", "stdout", "stderr", "control", "pidfd", "scratch_fd"):
            self.close_stream(name)
        own, self.own = self.own, None
        if own is not None and self.groups is not None:
            self.groups.give_back(own, empty=self.settled and not self.lasting, kill=not self.lasting)


_launches = itertools.count(1)


def tidy(state: str) -> None:
    """Between launches, off their path: collect what the dead left, once; make groups ahead, for those who go on."""
    number = next(_launches)
    if number == 1:
        from nsbox.resources import sweep

        sweep.sweep_in_turn(state)
    else:
        cgroup.discover(state).refill()


class GiveBack:
    """What the janitor calls. It takes over all that a handle still owns, so that the handle is closed at once."""

    def __init__(self, handle: Handle) -> None:
        self._state, self._ranges = handle.prepared.host.state, handle._ranges
        self._fds = [getattr(handle, name) for name in LATE_DESCRIPTORS]
        for name in LATE_DESCRIPTORS:
            setattr(handle, name, -1)
        self._range, self._cgroup, self._egress = handle._range, handle.cgroup, handle.egress
        self._directories = [directory for directory in (handle.scratch, handle.copy) if directory is not None]
        handle._disown()

    def __call__(self) -> None:
        """Wait, for at most two seconds, until init is gone; then give back all that it had."""
        gone = self._fds[0] < 0 or _readable(self._fds[0], 2000)
        for fd in self._fds:
            if fd >= 0:
                os.close(fd)
        janitor.give_way()
        # What is stuck in the kernel keeps its ids and files as long as this process lives; a sweep takes the files.
        if gone and self._range is not None and self._ranges is not None:
            self._ranges.give_back(self._range)
        if self._cgroup is not None:
            self._cgroup.release()
        if self._egress is not None:
            self._egress.close()
        for directory in self._directories if gone else ():
            directory.release()
        tidy(self._state)


_ranges: IdRanges | None = None
_ranges_lock = threading.Lock()


def _after_fork() -> None:
    """A forked child shares the open file description, and with it its parent's locks: it takes its own."""
    global _ranges, _ranges_lock
    if _ranges is not None:
        _ranges.close()
    _ranges, _ranges_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def id_ranges(state: str) -> IdRanges:
    global _ranges
    with _ranges_lock:
        _ranges = _ranges or IdRanges(state)
        return _ranges
