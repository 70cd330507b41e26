"""Takes what a launch needs, in order, asks the zygote, and answers a handle that owns all of it.

Python-side work per launch stays under 200 µs: everything that depends on the Spec alone is in ``Prepared``.
"""

import contextlib
import errno as _errno
import functools
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nsbox import _native, probe
from nsbox._native import ffi, lib
from nsbox.encode import Compiled, Ids, command, compile_plan, launch_blob
from nsbox.errors import HostError, NsboxError, SandboxUnavailable, SetupError, SpecError
from nsbox.plan.compose import Plan, make_plan
from nsbox.plan.filter import cached_filter
from nsbox.probe import Host
from nsbox.resources import skeleton
from nsbox.resources.ids import SIZE, IdRanges
from nsbox.spec import Spec

_NO_OP = 0xFFFFFFFF


class Prepared(NamedTuple):
    """A Spec compiled for this host and this caller."""

    spec: Spec
    host: Host
    plan: Plan
    skeleton: str
    compiled: Compiled


class Handle:
    """A sandbox that runs. Owns a pidfd, the control socket, three pipes and an id range; ``close`` ends all of it."""

    def __init__(self, prepared: Prepared, started_at: float) -> None:
        self.prepared = prepared
        self.started_at = started_at  #: time.monotonic() when the launch was asked for
        self.control = self.pidfd = self.stdout = self.stderr = self.stdin = -1
        self.root_fd = self.scratch_fd = -1  #: see NSB_PASS_ROOT
        self.pid = 0
        self.cloned_at = 0.0
        self._range: int | None = None
        self._ranges: IdRanges | None = None

    def tell(self, kind: int, value: int = 0) -> bool:
        """Send init a message; False when nobody is there any more."""
        return self.control >= 0 and lib.nsb_tell(self.control, kind, value) >= 0

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
        """End the sandbox if it still runs and give everything back. Idempotent."""
        self.kill()
        for name in ("stdin", "stdout", "stderr", "control", "pidfd", "root_fd", "scratch_fd"):
            self.close_stream(name)
        if self._range is not None and self._ranges is not None:
            self._ranges.give_back(self._range)
            self._range = None


_ranges: tuple[int, IdRanges] | None = None
_ranges_lock = threading.Lock()


def _id_ranges(state: str) -> IdRanges:
    global _ranges
    with _ranges_lock:
        if _ranges is None or _ranges[0] != os.getpid():
            # A forked child shares the open file description, and with it its parent's locks: leave that one alone.
            _ranges = (os.getpid(), IdRanges(state))
        return _ranges[1]


def _check_sources(plan: Plan) -> None:
    for option, path in plan.sources:
        try:
            os.stat(path)
        except OSError as error:
            raise SpecError(
                f"{option}: {path!r}: {error.strerror}; name a path that exists and that you may read"
            ) from None


@functools.lru_cache(maxsize=64)
def _prepare(spec: Spec, host: Host, where: tuple[str, ...]) -> Prepared:
    plan = make_plan(spec, host)
    root = skeleton.ensure(plan.skeleton, host.state)
    return Prepared(spec, host, plan, root, compile_plan(plan, root, cached_filter(plan.seccomp, set_id=not spec.rw)))


def prepare(spec: Spec) -> Prepared:
    """Compile ``spec`` for this host, or take it from the cache. Raises SpecError, HostError, SandboxUnavailable."""
    host = probe.host()
    paths = spec.host_paths()
    # What the paths mean may change between two launches of one Spec: links, and the directory that they start from.
    where = (*map(os.path.realpath, paths), "" if all(map(os.path.isabs, paths)) else os.getcwd())
    prepared = _prepare(spec, host, where)
    if not os.path.isdir(prepared.skeleton):
        _prepare.cache_clear()
        prepared = _prepare(spec, host, where)
    _check_sources(prepared.plan)
    return prepared


def _ids(prepared: Prepared, first: int | None) -> Ids:
    plan, host = prepared.plan, prepared.host
    if first is None:
        uid_map, gid_map = f"{plan.uid} {host.uid} 1\n", f"{plan.gid} {host.gid} 1\n"
        return Ids(uid_map, gid_map, plan.uid, plan.gid, plan.uid, plan.gid, host.uid, host.gid, True)
    whole = f"0 {first} {SIZE}\n"
    return Ids(whole, whole, 0, 0, plan.uid, plan.gid, first + plan.uid, first + plan.gid, False)


def _remedy(stage: str, err: int, prepared: Prepared) -> str:
    """What usually mends an error of this kind at this stage."""
    if stage == "clone" and err in (_errno.ENOSPC, _errno.EUSERS):
        return "a limit on namespaces is reached: see sysctl user.max_user_namespaces and its siblings"
    if stage in ("clone", "idmap") and err in (_errno.EPERM, _errno.EACCES, _errno.EINVAL):
        return "this host restricts user namespaces: run nsbox doctor for the setting and the command that mends it"
    if stage == "source" and err == _errno.EINVAL:
        return (
            "the file system cannot be idmapped; use --workspace for a copy-on-write view or --ro"
            if prepared.host.privileged
            else "a copy-on-write view cannot contain other mounts; name a directory without any beneath it"
        )
    if stage == "source" and err in (_errno.ENOENT, _errno.EACCES, _errno.ELOOP):
        return "name a path that exists and that you may read"
    if stage == "mount" and err in (_errno.EROFS, _errno.EACCES):
        return "the place does not exist inside and cannot be made in a read-only mount; choose another DST"
    if stage == "mount" and err == _errno.ELOOP:
        return "the place is a symbolic link that leads nowhere inside; choose another DST"
    if stage == "mount" and err == _errno.EPERM:
        return "inside a container, /proc must not be masked: run nsbox doctor"
    return ""


def failure(prepared: Prepared, message: object) -> NsboxError:
    """The error for a NSB_MSG_FAILED message."""
    stage = _native.STAGES[message.stage] if message.stage < len(_native.STAGES) else "request"  # type: ignore[attr-defined]
    op, err = message.op, -message.err  # type: ignore[attr-defined]
    plan = prepared.plan
    target = plan.ops[op].describe() if op != _NO_OP and op < len(plan.ops) else ""
    remedy = _remedy(stage, err, prepared)
    if stage == "exec":
        return SetupError(
            "the working directory", err, target=plan.cwd, remedy="use --cwd with a directory that exists inside"
        )
    if stage == "clone" and err in (_errno.EPERM, _errno.ENOSYS):
        return SandboxUnavailable(f"namespaces cannot be made here: {os.strerror(err)}", remedy=remedy, errno=err)
    return SetupError(stage, err, target=target, remedy=remedy)


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


def launch(
    prepared: Prepared,
    argv: Sequence[str | bytes | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: bool = False,
) -> Handle:
    """Start ``argv`` in a fresh sandbox. Raises SpecError, SetupError or SandboxUnavailable; then nothing is left."""
    handle = Handle(prepared, time.monotonic())
    plan = prepared.plan
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as owned:
        undo.callback(handle.close)
        if plan.privileged:
            handle._ranges = _id_ranges(prepared.host.state)
            handle._range = handle._ranges.take()
        ids = _ids(prepared, handle._range)
        what = command(argv, plan.env if env is None else env, cwd or plan.cwd, lib.NSB_STDIN if stdin else 0)
        blob = launch_blob(prepared.compiled, what, ids)
        host_ids = (ids.host_uid, ids.host_gid) if plan.privileged else None
        handle.stdout, out = _pipe(owned, to_inside=False, host_ids=host_ids)
        handle.stderr, err = _pipe(owned, to_inside=False, host_ids=host_ids)
        source = -1
        if stdin:
            handle.stdin, source = _pipe(owned, to_inside=True, host_ids=host_ids)
        _ask(handle, blob, [out, err, source] if stdin else [out, err])
        undo.pop_all()
    return handle


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
    if answer.type != lib.NSB_MSG_CLONED:
        raise failure(handle.prepared, answer)
    handle.pidfd, handle.pid, handle.cloned_at = pidfd[0], answer.pid, time.monotonic()
