"""Takes what a launch needs, in order, asks the zygote, and answers a handle that owns all of it.

Python-side work per launch stays under 200 µs: everything that depends on the Spec alone is in ``Prepared``.
"""

import contextlib
import errno as _errno
import functools
import itertools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nsbox import _native, janitor, probe, secrets
from nsbox._native import ffi, lib
from nsbox.encode import Command, Compiled, Ids, command, command_blob, compile_plan, launch_blob, waiting
from nsbox.errors import HostError, MountRefused, NsboxError, SandboxUnavailable, SetupError, SpecError
from nsbox.plan.compose import Cover, Plan, make_plan
from nsbox.plan.filter import cached_filter
from nsbox.plan.ops import IDMAP_RANGE
from nsbox.probe import Host
from nsbox.resources import cgroup, scratch, skeleton, subids
from nsbox.resources.ids import FIRST, SIZE, IdRanges
from nsbox.secrets import Values
from nsbox.spec import Spec

#: for tests of what a broken launch leaves: (number of the stage, -errno or 1); see nsb_plan.fault
fault: tuple[int, int] | None = None
if TYPE_CHECKING:
    from nsbox.guard import Verdict
    from nsbox.masking import Masker
    from nsbox.plan.net import NetPlan, NetPolicy
    from nsbox.resources.egress import Egress

Argument = str | bytes | os.PathLike[str]


class NoIdmap(Exception):
    """The skeleton cannot be idmapped: the plan must do without."""


class Prepared(NamedTuple):
    """A Spec compiled for this host and this caller."""

    spec: Spec
    host: Host
    plan: Plan
    skeleton: str
    compiled: Compiled
    policy: "NetPolicy | None" = None  #: for filtered egress
    net: "NetPlan | None" = None
    verdict: "Verdict | None" = None  #: what the guard said of the mounts


class Handle:
    """A sandbox that runs. Owns a pidfd, the control socket, three pipes and an id range; ``close`` ends all of it."""

    is_command = False  #: whether the end of the control socket is the end of all that this stands for

    def __init__(self, prepared: Prepared, started_at: float) -> None:
        self.id = os.urandom(8).hex()
        self.prepared = prepared
        self.started_at = started_at  #: time.monotonic() when the launch was asked for
        self.control = self.pidfd = self.stdout = self.stderr = self.stdin = -1
        self.root_fd = self.scratch_fd = self.secrets_fd = -1  #: see NSB_PASS_ROOT
        self.secrets = Values((), ())
        self.revoked_at: dict[str, float] = {}  #: name of a secret → time.time() when it was taken away
        self.on_revoked: Callable[[str, str], None] | None = None
        self.pid = 0
        self.cloned_at = 0.0
        self.host_ids: tuple[int, int] | None = None  #: the payload's ids on the host, where they are not the caller's
        self.cgroup: cgroup.Cgroup | None = None
        self.egress: Egress | None = None
        self.on_network: Callable[[str, dict[str, Any]], None] | None = None
        self.scratch: scratch.Scratch | None = None
        self._range: int | None = None
        self._ranges: IdRanges | None = None

    def tell(self, kind: int, value: int = 0, op: int = 0) -> bool:
        """Send init a message; False when nobody is there any more."""
        return self.control >= 0 and lib.nsb_tell(self.control, kind, value, op) >= 0

    def abandon(self) -> None:
        """End what cannot be watched any more."""
        self.kill()

    def masker(self) -> "Masker | None":
        """For one stream of what comes out; None where there is nothing to mask."""
        if not self.secrets.secrets:
            return None
        from nsbox.masking import Masker

        return Masker(self.secrets.by_name())

    def secret_variables(self) -> dict[str, str]:
        """The secrets that a command which starts now gets as variables."""
        found = self.secrets.environment()
        return {name: value for name, value in found.items() if name not in self.revoked_at}

    def _to_revoke(self) -> list[tuple[float, str]]:
        limited = [secret for secret in self.secrets.secrets if secret.ttl is not None]
        return [(self.started_at + (s.ttl or 0.0), s.name) for s in limited if s.name not in self.revoked_at]

    def next_revocation(self) -> float | None:
        """When the next secret's time is over (time.monotonic())."""
        return min((at for at, _ in self._to_revoke()), default=None)

    def revoke_secrets(self, now: float) -> None:
        """Take away every secret whose time is over. One that was a variable stays in the processes that have it."""
        for at, name in self._to_revoke():
            if now >= at and self.secrets_fd >= 0:
                if not secrets.revoke(self.secrets_fd, name):
                    self.kill()  # rather no sandbox than one that keeps what it should not have
                self.revoked_at[name] = time.time()
                if self.on_revoked:
                    self.on_revoked(name, "ttl")

    def inside_id(self, host_id: int) -> int:
        """The id inside of a file that the host sees as owned by ``host_id``."""
        if self._range is not None and self._range <= host_id < self._range + SIZE:
            return host_id - self._range
        return self.prepared.plan.uid if host_id == self.prepared.host.uid else 65534

    def alive(self) -> bool:
        """Whether pid 1 inside still runs."""
        waiter = select.poll()
        waiter.register(self.pidfd, select.POLLIN)
        return self.pidfd >= 0 and not waiter.poll(0)

    def wait_until_gone(self) -> None:
        """Wait for the end of pid 1, for at most a second."""
        waiter = select.poll()
        waiter.register(self.pidfd, select.POLLIN)
        waiter.poll(1000)

    def kill(self) -> None:
        """SIGKILL pid 1 inside, and with it everything (pid_namespaces(7))."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close_stream(self, name: str) -> None:
        """Close one of the descriptors, by name."""
        fd = getattr(self, name)
        setattr(self, name, -1)
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """End the sandbox if it still runs; what must wait for its last process is given back later. Idempotent."""
        self.kill()
        for name in ("stdin", "stdout", "stderr", "control"):
            self.close_stream(name)
        if (self.pidfd, self.cgroup, self.egress, self.scratch, self._range) != (-1, None, None, None, None):
            janitor.later(_GiveBack(self))

    def release(self) -> None:
        """Wait, for at most two seconds, until init is gone; then give back all that it had."""
        gone = True
        if self.pidfd >= 0:
            waiter = select.poll()
            waiter.register(self.pidfd, select.POLLIN)
            gone = bool(waiter.poll(2000))
        for name in ("pidfd", "root_fd", "scratch_fd", "secrets_fd"):
            self.close_stream(name)
        # What is stuck in the kernel keeps its ids and files for as long as this process lives; a sweep takes the files.
        if gone and self._range is not None and self._ranges is not None:
            self._ranges.give_back(self._range)
        if self.cgroup is not None:
            self.cgroup.release()
        if self.egress is not None:
            self.egress.close()
        if gone and self.scratch is not None:
            self.scratch.release()
        self._range = self.cgroup = self.egress = self.scratch = None
        tidy(self.prepared.host.state)


_launches = itertools.count(1)


def tidy(state: str) -> None:
    """Between launches, off their path: collect what the dead left, once; make groups ahead, for those who go on."""
    number = next(_launches)
    if number == 1:
        from nsbox.resources import sweep

        sweep.sweep(state)
    else:
        cgroup.discover(state).refill()


class CommandHandle(Handle):
    """A later command in a sandbox that stays. It owns its socket, its pipes and copies of the box's descriptors: the
    box may be closed by another thread meanwhile."""

    is_command = True

    def __init__(self, box: Handle) -> None:
        super().__init__(box.prepared, time.monotonic())
        self._box = box
        self.secrets, self.revoked_at = box.secrets, box.revoked_at
        self.pid, self.cloned_at = box.pid, self.started_at
        self._asked_again = False
        self.pidfd = os.dup(box.pidfd)
        self.scratch_fd = os.dup(box.scratch_fd)

    def tell(self, kind: int, value: int = 0, op: int = 0) -> bool:
        """Send the watcher a message, or init where everything inside is meant."""
        return self._box.tell(kind, value, op) if op else super().tell(kind, value, op)

    def _to_revoke(self) -> list[tuple[float, str]]:
        return []  # they are the box's, which takes them away whether a command runs or not

    def kill(self) -> None:
        """The watcher was asked and did not answer: the payload has killed it, or stopped it, which can be mended. If
        that does not help, the whole box goes."""
        if self._asked_again or not self._box.tell(lib.NSB_MSG_SIGNAL, signal.SIGCONT, 1):
            self.abandon()
        self._asked_again = True

    def abandon(self) -> None:
        """SIGKILL pid 1 inside, and with it everything; it is gone in a moment."""
        super().kill()
        self.wait_until_gone()

    def close(self) -> None:
        """Close the socket, at which the watcher ends what is left of the command, and the rest. Idempotent."""
        for name in ("stdin", "stdout", "stderr", "control", "pidfd", "scratch_fd"):
            self.close_stream(name)


def start_command(box: Handle, what: Command) -> CommandHandle:
    """Have a sandbox's init start a program. Raises SandboxUnavailable when the sandbox has ended."""
    blob = command_blob(what)
    handle = CommandHandle(box)
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as owned:
        undo.callback(handle.close)
        fds = _streams(handle, owned, box.host_ids, stdin=bool(what.flags & lib.NSB_STDIN))
        ret = lib.nsb_run(box.control, blob, len(blob), fds, len(fds))
        if ret < 0:
            raise SandboxUnavailable(f"the sandbox does not answer: {os.strerror(-ret)}", remedy="start another")
        handle.control = ret
        undo.pop_all()
    _count_execution()
    return handle


def _count_execution() -> None:
    """For the share of executions that go through sandboxes, where anybody counts them."""
    counter = sys.modules.get("nsbox.coverage")
    if counter is not None:
        counter.sandboxed()


def _streams(
    handle: Handle, owned: contextlib.ExitStack, host_ids: tuple[int, int] | None, *, stdin: bool
) -> list[int]:
    """Make the pipes of a command: the sandbox's ends in the order of take_descriptors(), closed with ``owned``."""
    handle.stdout, out = _pipe(owned, to_inside=False, host_ids=host_ids)
    handle.stderr, err = _pipe(owned, to_inside=False, host_ids=host_ids)
    if not stdin:
        return [out, err]
    handle.stdin, source = _pipe(owned, to_inside=True, host_ids=host_ids)
    return [out, err, source]


class _GiveBack:
    """What the janitor calls. It takes over all that a handle still owns, so that the handle is closed at once."""

    def __init__(self, handle: Handle) -> None:
        self._owner = Handle(handle.prepared, handle.started_at)
        for name in (
            "pidfd",
            "root_fd",
            "scratch_fd",
            "secrets_fd",
            "cgroup",
            "egress",
            "scratch",
            "_range",
            "_ranges",
        ):
            setattr(self._owner, name, getattr(handle, name))
        handle.pidfd = handle.root_fd = handle.scratch_fd = handle.secrets_fd = -1
        handle.cgroup = handle.egress = handle.scratch = handle._range = None

    def __call__(self) -> None:
        self._owner.release()


_ranges: IdRanges | None = None
_ranges_lock = threading.Lock()


def _after_fork() -> None:
    """A forked child shares the open file description, and with it its parent's locks: it takes its own."""
    global _ranges, _ranges_lock
    if _ranges is not None:
        _ranges.close()
    _ranges, _ranges_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _id_ranges(state: str) -> IdRanges:
    global _ranges
    with _ranges_lock:
        _ranges = _ranges or IdRanges(state)
        return _ranges


def _check_sources(plan: Plan) -> None:
    for option, path, written, _ in plan.sources:
        try:
            os.stat(path)
        except OSError as error:
            meant = "" if written == path else f" (that is {path!r})"
            raise SpecError(f"{option}: {written!r}{meant}: {error.strerror}; name a path that you may read") from None


def _filter(spec: Spec, plan: Plan) -> bytes:
    # Where the share of processors is held by pinning, nobody inside may pin itself elsewhere.
    deny = ("sched_setaffinity",) if plan.limits.pinned else ()
    return cached_filter(plan.seccomp, extra_deny=deny, set_id=not spec.rw)


@functools.lru_cache(maxsize=64)
def _prepare(spec: Spec, host: Host, where: tuple[str, ...], verdict: "Verdict | None") -> Prepared:
    hierarchy = cgroup.discover(host.state)
    limits: tuple[cgroup.Limit, ...] = ("memory", "pids", "cpu", "io")
    policy = net = None
    if spec.net == "filtered":
        from nsbox.plan.net import EgressLimits
        from nsbox.resources import egress

        most = EgressLimits(spec.limits.net_connections, spec.limits.net_rate, spec.limits.net_bytes)
        policy, net = egress.plan(spec.allow, spec.net_path, privileged=host.privileged, limits=most)
    masks = verdict.masks if verdict else ()
    covers = [Cover(mask.option, mask.source, mask.relative, mask.directory) for mask in masks]
    plan = make_plan(spec, host, {limit: hierarchy.strength(limit) for limit in limits}, net, covers)
    root = skeleton.ensure(plan.skeleton, host.state)
    compiled = compile_plan(plan, root, _filter(spec, plan), net=net)
    return Prepared(spec, host, plan, root, compiled, policy, net, verdict)


def _guard(spec: Spec, host: Host) -> "Verdict":
    """Ask the guard about every mount, each time: what lies in a directory changes. Raises SpecError for a refusal."""
    from nsbox import guard

    binds = [(option, os.path.realpath(path), option == "rw") for option, path in spec.mounts()]
    allow = {os.path.realpath(path) for path in spec.allow_sensitive}
    verdict = guard.check(binds, allow, guard.facts(host.state))
    if verdict.refusals:
        first = verdict.refusals[0]
        raise MountRefused(str(first), path=first.path, why=first.why, word=first.word)
    return verdict


def prepare(spec: Spec) -> Prepared:
    """Compile ``spec`` for this host, or take it from the cache. Raises SpecError, HostError, SandboxUnavailable."""
    host = probe.host()
    if spec.workspace and spec.scratch == "tmpfs" and host.kernel < (6, 6):
        # tmpfs(5): without user.* extended attributes overlayfs cannot mark a directory as replaced, and rm -r fails.
        spec = spec.replace(scratch=probe.disk_directory())
    paths = spec.host_paths()
    # What the paths mean may change between two launches of one Spec: links, and the directory that they start from.
    try:
        where = (*map(os.path.realpath, paths), "" if all(map(os.path.isabs, paths)) else os.getcwd())
    except OSError as error:
        raise SpecError(f"mounts: {error.filename!r} changed while it was looked at: {error.strerror}") from None
    verdict = _guard(spec, host) if paths else None
    prepared = _prepare(spec, host, where, verdict)
    if not os.path.isdir(prepared.skeleton):
        _prepare.cache_clear()
        prepared = _prepare(spec, host, where, verdict)
    _check_sources(prepared.plan)
    return prepared


def _ids(prepared: Prepared, first: int | None) -> Ids:
    plan, host = prepared.plan, prepared.host
    if first is not None:
        whole = f"0 {first} {SIZE}\n"
        return Ids(whole, whole, 0, 0, plan.uid, plan.gid, first + plan.uid, first + plan.gid, False)
    if prepared.spec.subids:
        return Ids("", "", 0, 0, plan.uid, plan.gid, host.uid, host.gid, False, maps_by_caller=True)
    uid_map, gid_map = f"{plan.uid} {host.uid} 1\n", f"{plan.gid} {host.gid} 1\n"
    return Ids(uid_map, gid_map, plan.uid, plan.gid, plan.uid, plan.gid, host.uid, host.gid, True)


def _write_maps(handle: Handle) -> None:
    """Subordinate ids: init waits in its user namespace until the set-uid helpers have mapped it."""
    plan, host = handle.prepared.plan, handle.prepared.host
    uids, gids = subids.ranges(host.uid)
    subids.write(handle.pid, "uid", subids.mapping(plan.uid, host.uid, uids))
    subids.write(handle.pid, "gid", subids.mapping(plan.gid, host.gid, gids))
    handle.tell(lib.NSB_MSG_GO)


def _remedy(stage: str, err: int, prepared: Prepared) -> str:
    """What usually mends an error of this kind at this stage."""
    if stage in ("clone", "idmap") and err in (_errno.EPERM, _errno.EACCES, _errno.EINVAL):
        return "this host restricts user namespaces: run nsbox doctor for the setting and the command that mends it"
    if stage == "source" and err == _errno.EINVAL:
        return _no_view(prepared)
    if stage == "source" and err in (_errno.ENOENT, _errno.EACCES, _errno.ELOOP):
        return "name a path that exists and that you may read"
    if stage == "scratch" and err == _errno.EACCES:
        return "every directory above the scratch one must let anybody pass (chmod a+x): the sandbox's ids are its own"
    if stage == "mount" and err in (_errno.EROFS, _errno.EACCES):
        return (
            "the place does not exist inside, and none is made where the host's own files are shown: choose another DST"
        )
    if stage == "mount" and err == _errno.ELOOP:
        return "the place is a symbolic link that leads nowhere inside; choose another DST"
    if stage == "mount" and err == _errno.EPERM:
        return "inside a container, /proc must not be masked: run nsbox doctor"
    return ""


def _no_view(prepared: Prepared) -> str:
    """Why a source cannot be shown with other ids, or copy-on-write."""
    if not prepared.host.privileged:
        return "a copy-on-write view cannot contain other mounts: name a directory without any beneath it"
    return (
        "its file system does not take idmapped mounts (ext4, xfs and btrfs do, tmpfs since Linux 6.3, overlayfs and 9p do"
        " not): keep it on one that does, show it with --ro, or run as an ordinary user"
    )


def _exhausted() -> str:
    """What to do about a limit on namespaces, by the name of the setting that is 0, if one is."""
    for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
        with contextlib.suppress(OSError), open(f"/proc/sys/user/max_{kind}_namespaces", encoding="ascii") as file:
            if file.read().strip() == "0":
                name = f"user.max_{kind}_namespaces"
                return f"{name} is 0; run as root: sysctl -w {name}=15000 (and write that to /etc/sysctl.d to keep it)"
    return (
        "a limit on namespaces is reached: close sandboxes, or raise sysctl user.max_user_namespaces and its siblings"
    )


def failure(prepared: Prepared, message: Any) -> NsboxError:
    """The error for a NSB_MSG_FAILED message."""
    number, op, err = message.stage, message.op, -message.err
    stage = _native.STAGES[number] if number < len(_native.STAGES) else "request"
    plan = prepared.plan
    subject = plan.ops[op] if op < len(plan.ops) else None
    remedy = _remedy(stage, err, prepared)
    if stage == "exec":
        return SetupError(
            "the working directory", err, target=plan.cwd, remedy="use --cwd with a directory that exists inside"
        )
    if stage in ("clone", "network") and err in (_errno.EPERM, _errno.ENOSYS, _errno.ENOSPC, _errno.EUSERS):
        remedy = _exhausted() if err in (_errno.ENOSPC, _errno.EUSERS) else remedy
        return SandboxUnavailable(f"namespaces cannot be made here: {os.strerror(err)}", remedy=remedy, errno=err)
    return SetupError(stage, err, target=subject.describe() if subject else "", remedy=remedy)


def _pipe(owned: contextlib.ExitStack, *, to_inside: bool, host_ids: tuple[int, int] | None) -> tuple[int, int]:
    """(our end, the sandbox's end). The latter is closed with ``owned``; ours does not block."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    ours, theirs = (writer, reader) if to_inside else (reader, writer)
    owned.callback(os.close, theirs)
    os.set_blocking(ours, False)
    if host_ids:
        # /dev/stdout opens the pipe anew, which asks for its owner: make that the payload.
        os.fchown(theirs, *host_ids)
    return ours, theirs


def launch(prepared: Prepared, argv: Sequence[Argument] | None, **options: Any) -> Handle:
    """Start ``argv`` in a fresh sandbox, or none yet. Raises SpecError, SetupError or SandboxUnavailable; then nothing
    is left. The keywords are those of ``_launch``."""
    try:
        return _launch(prepared, argv, **options)
    except NoIdmap:
        probe.no_idmap()
        return _launch(prepare(prepared.spec), argv, **options)


def _launch(
    prepared: Prepared,
    argv: Sequence[Argument] | None,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: bool = False,
    tty: bool = False,
    on_ready: Callable[[Handle], None] | None = None,
    on_network: Callable[[str, dict[str, Any]], None] | None = None,
) -> Handle:
    """``on_ready`` is called when everything is known and nothing runs yet; what it raises ends the launch."""
    handle = Handle(prepared, time.monotonic())
    handle.on_network = on_network
    plan = prepared.plan
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as owned:
        undo.callback(handle.close)
        if plan.privileged:
            handle._ranges = _id_ranges(prepared.host.state)
            handle._range = handle._ranges.take()
        ids = _ids(prepared, handle._range)
        limits = plan.limits
        if limits.cgroup:
            wanted = cgroup.Wanted(limits.memory, limits.pids, limits.cpus)
            handle.cgroup = cgroup.discover(prepared.host.state).make(wanted, "sandbox")
        join, into = (handle.cgroup.join, handle.cgroup.into) if handle.cgroup else ((), -1)
        flags = (lib.NSB_STDIN if stdin else 0) | (lib.NSB_TTY if tty else 0)
        if prepared.spec.secrets:
            handle.secrets = secrets.resolve(prepared.spec.secrets)
        environment = {**(plan.env if env is None else env), **handle.secrets.environment()}
        what = command(argv, environment, cwd or plan.cwd, flags, len(join)) if argv else waiting(len(join))
        passed = lib.NSB_PASS_ROOT | (lib.NSB_CGROUP_FD if into >= 0 else 0)
        if plan.scratch != "tmpfs":
            handle.scratch = scratch.Scratch(plan.scratch, prepared.host.state, handle._range)
        if handle.secrets.secrets:
            passed |= lib.NSB_SECRETS
        where = handle.scratch.path if handle.scratch else ""
        blob = launch_blob(prepared.compiled, what, ids, passed, fault, where)
        handle.host_ids = (ids.host_uid, ids.host_gid) if plan.privileged else None
        fds = _streams(handle, owned, handle.host_ids, stdin=stdin)
        pipe = (_secrets_pipe(handle.secrets, owned),) if handle.secrets.secrets else ()
        if on_ready:
            on_ready(handle)
        _ask(handle, blob, [*fds, *join, *((into,) if into >= 0 else ()), *pipe])
        if ids.maps_by_caller:
            _write_maps(handle)
        if prepared.net is not None:
            _connect(handle)
        if handle.cgroup:
            handle.cgroup.joined()
        undo.pop_all()
    if argv:
        _count_execution()
    return handle


def _secrets_pipe(values: Values, owned: contextlib.ExitStack) -> int:
    """The read end of a pipe that holds all secrets: memory of the kernel's, never swapped, gone with the reader."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    owned.callback(os.close, reader)
    try:
        os.set_blocking(writer, False)
        data = values.packed()
        if os.write(writer, data) < len(data):
            raise SpecError("secrets: more than a pipe takes here; mount a file with --ro instead")
    finally:
        os.close(writer)
    return reader


def _connect(handle: Handle) -> None:
    """Filtered egress: take the sockets that init made in its network namespace, serve them, and let init go on."""
    from nsbox.resources.egress import Egress

    prepared = handle.prepared
    message, fds = ffi.new("struct nsb_msg *"), ffi.new("int[16]")
    ret = lib.nsb_receive(handle.control, message, fds, 16)
    received = [fds[number] for number in range(max(0, ret))]
    assert prepared.net is not None
    assert prepared.policy is not None
    if ret < 0 or message.type != lib.NSB_MSG_NETWORK or len(received) != 2 + len(prepared.net.sockets):
        for fd in received:
            os.close(fd)
        raise failure(prepared, message) if ret >= 0 and message.type == lib.NSB_MSG_FAILED else _vanished()
    slot = 0 if handle._range is None else (handle._range - FIRST) // SIZE
    handle.egress = Egress(handle.id, prepared.policy, prepared.net, received, slot, handle.on_network)
    handle.tell(lib.NSB_MSG_GO)


def _vanished() -> SandboxUnavailable:
    return SandboxUnavailable("the sandbox ended while it was set up", remedy="run: nsbox doctor")


def _ask(handle: Handle, blob: bytes, fds: Sequence[int]) -> None:
    answer, pidfd = ffi.new("struct nsb_msg *"), ffi.new("int *")
    zygote = _native.zygote()
    ret = lib.nsb_launch(zygote.socket, blob, len(blob), fds, len(fds), answer, pidfd)
    if ret in (-_errno.EPIPE, -_errno.ECONNRESET, -_errno.EBADF):
        # The zygote is gone (killed by somebody): start another and ask once more.
        ret = lib.nsb_launch(_native.zygote(dead=zygote).socket, blob, len(blob), fds, len(fds), answer, pidfd)
    if ret < 0:
        raise HostError(
            f"the helper process cannot be asked: {os.strerror(-ret)}", remedy="run: nsbox doctor", errno=-ret
        )
    handle.control = ret
    plan = handle.prepared.plan
    first = answer.op == 0 and _native.STAGES[min(answer.stage, len(_native.STAGES) - 1)] == "source"
    if answer.type == lib.NSB_MSG_FAILED and first and -answer.err == _errno.EINVAL and plan.ops[0].flags & IDMAP_RANGE:
        raise NoIdmap
    if answer.type != lib.NSB_MSG_CLONED:
        raise failure(handle.prepared, answer)
    handle.pidfd, handle.pid, handle.cloned_at = pidfd[0], answer.pid, time.monotonic()
