"""Takes what a launch needs, in order, asks the zygote, and answers a handle that owns all of it.

Python-side work per launch stays under 200 µs: everything that depends on the Spec alone is in ``Prepared``.
"""

from __future__ import annotations

import errno as _errno
import os
import sys
import time

from nsbox import _native, copyin, janitor, probe, received, secrets
from nsbox._native import ffi, lib
from nsbox.encode import Command, Ids, command, command_blob, launch_blob, waiting, window
from nsbox.errors import HostError, SandboxUnavailable
from nsbox.failures import failure, vanished
from nsbox.handle import CommandHandle, Handle, id_ranges
from nsbox.light import TYPE_CHECKING, contextlib
from nsbox.plan.ops import IDMAP_RANGE
from nsbox.prepared import Prepared, prepare
from nsbox.resources import cgroup, scratch, subids
from nsbox.resources.ids import FIRST, SIZE
from nsbox.secrets import NOTHING_GIVEN, Given

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from nsbox.own_limits import OwnLimits

__all__ = ["Argument", "CommandHandle", "Handle", "Prepared", "launch", "prepare", "start_command"]

#: for tests of what a broken launch leaves: (number of the stage, -errno or 1); see nsb_plan.fault
fault: tuple[int, int] | None = None
Argument = str | bytes | os.PathLike[str]
#: seconds that init gets to itself, if it takes so long: what Python does meanwhile takes a processor from it
HEAD_START_S = 0.02


class NoIdmap(Exception):
    """Operation ``op`` has a source that cannot be idmapped; there is a way to do without."""

    def __init__(self, op: int) -> None:
        super().__init__()
        self.op = op


def start_command(
    box: Handle, what: Command, given: Given = NOTHING_GIVEN, own: OwnLimits | None = None
) -> CommandHandle:
    """Have a sandbox's init start a program, with limits of its ``own`` perhaps. Raises SandboxUnavailable when the
    sandbox has ended, HostError where a cgroup cannot be made."""
    what = _with(what, given)
    handle = CommandHandle(box, lasting=bool(what.flags & lib.NSB_KEEP), own=own)
    if not handle.watch_for and not what.flags & lib.NSB_TTY:
        # Else it must be known at once which processes are the command's: it may stop the one that would tell.
        what = what._replace(flags=what.flags | lib.NSB_TOGETHER)
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as owned:
        undo.callback(handle.take_back)
        undo.callback(handle.close)
        fds = _streams(handle, owned, box.host_ids, stdin=bool(what.flags & lib.NSB_STDIN))
        fds += _hand_over(given, box, handle, owned)
        if box.groups is not None and not what.flags & lib.NSB_CONNECT:
            handle.control, handle.own = box.groups.start(what, fds, own.wanted if own else None)
            handle.cgroup = handle.own
        else:
            blob = command_blob(what)
            with box.borrowed("control") as init:
                ret = lib.nsb_run(init, blob, len(blob), fds, len(fds))
            if ret < 0:
                raise SandboxUnavailable(f"the sandbox does not answer: {os.strerror(-ret)}", remedy="start another")
            handle.control = ret
        undo.pop_all()
    count_execution()
    return handle


def start_program(handle: Handle, what: Command, given: Given = NOTHING_GIVEN) -> None:
    """Have a sandbox that was made without a program start it, on the streams that it was made with. Raises
    SandboxUnavailable when the sandbox has ended."""
    blob = command_blob(_with(what, given))
    with contextlib.ExitStack() as owned:
        fds = _hand_over(given, handle, handle, owned)
        ret = lib.nsb_start(handle.control, blob, len(blob), fds, len(fds))
    if ret < 0:
        raise SandboxUnavailable(f"the sandbox does not answer: {os.strerror(-ret)}", remedy="start another")
    count_execution()


def count_execution() -> None:
    """For the share of executions that go through sandboxes, where anybody counts them."""
    counter = sys.modules.get("nsbox.coverage")
    if counter is not None:
        counter.sandboxed()


def _streams(
    handle: Handle, owned: contextlib.ExitStack, host_ids: tuple[int, int] | None, *, stdin: bool
) -> list[int]:
    """Make the pipes of a command: the sandbox's ends in the order of take_descriptors(), closed with ``owned``."""
    handle.stdout, out = pipe(owned, to_inside=False, host_ids=host_ids)
    handle.stderr, err = pipe(owned, to_inside=False, host_ids=host_ids)
    if not stdin:
        return [out, err]
    handle.stdin, source = pipe(owned, to_inside=True, host_ids=host_ids)
    return [out, err, source]


def _with(what: Command, given: Given) -> Command:
    return what._replace(n_variables=len(given.variables), n_give=len(given.pipes))


def _hand_over(given: Given, box: Handle, to: Handle, owned: contextlib.ExitStack) -> list[int]:
    """Secrets that are no files: the pipe of variables where there are any, then what becomes descriptors."""
    fds: list[int] = []
    if given.variables:
        fds.append(secrets.filled(given.packed()))
        owned.callback(os.close, fds[0])
    for fd in box.lend(given, to):
        owned.callback(os.close, fd)
        fds.append(fd)
    return fds


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


def pipe(owned: contextlib.ExitStack, *, to_inside: bool, host_ids: tuple[int, int] | None) -> tuple[int, int]:
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
        janitor.launches.append(None)
        while True:
            try:
                return _launch(prepared, argv, **options)
            except NoIdmap as refused:
                prepared = _without_idmap(prepared, refused.op)
    except OSError as error:
        told = probe.scarce(error)
        if told is None:
            raise
        raise told from error
    finally:
        if janitor.launches:  # a fork meanwhile leaves its child none
            janitor.launches.pop()


def _without_idmap(prepared: Prepared, number: int) -> Prepared:
    """What to launch where operation ``number`` was refused; a refused skeleton or workspace is remembered."""
    op = prepared.plan.ops[number]
    if copyin.possible(op):
        copyin.remember(op.src)
        return prepared
    probe.no_idmap()
    return prepare(prepared.spec)


def _io_max(prepared: Prepared) -> tuple[cgroup.IoMax, ...]:
    """The bandwidth limit, for each disk that something of the sandbox is on."""
    rate, plan = prepared.plan.limits.io, prepared.plan
    if rate is None:
        return ()
    paths = [source.path for source in plan.sources] + [path for path in (plan.scratch,) if path != "tmpfs"]
    devices = {device for path in ("/usr", *paths) if (device := probe.block_device(path))}
    return tuple(cgroup.IoMax(device, rate, rate) for device in sorted(devices))


def _launch(
    prepared: Prepared,
    argv: Sequence[Argument] | None,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: bool = False,
    tty: bool | tuple[int, int] = False,
    on_ready: Callable[[Handle], None] | None = None,
    on_network: Callable[[str, dict[str, Any]], None] | None = None,
    flags: int = 0,
    zygote: _native.Zygote | None = None,
    commands: bool = False,
) -> Handle:
    """``flags`` are added to the plan's; ``zygote`` is asked instead of that of the process; with ``commands`` there
    will be others, each in a cgroup below the sandbox's.
    ``on_ready`` is called when everything is known and nothing runs yet; what it raises ends the launch."""
    handle = Handle(prepared, time.monotonic())
    handle.on_network = on_network
    plan = prepared.plan
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as owned:
        undo.callback(handle.close)
        if plan.privileged:
            handle._ranges = id_ranges(prepared.host.state)
            handle._range = handle._ranges.take()
            if copyin.wanted(prepared):
                prepared = handle.prepared = copyin.copy(handle, handle._range)
                plan = prepared.plan
                handle.enforced = plan.enforced
        ids = _ids(prepared, handle._range)
        limits = plan.limits
        if limits.cgroup:
            # The watcher that waits for the next command is none of the caller's processes; see nsbox.groups.
            pids = limits.pids if limits.pids is None else limits.pids + commands
            wanted = cgroup.Wanted(limits.memory, pids, limits.cpus, _io_max(prepared), commands)
            handle.cgroup = cgroup.discover(prepared.host.state).make(wanted, "sandbox")
        join, into = (handle.cgroup.join, handle.cgroup.into) if handle.cgroup else ((), -1)
        how = (lib.NSB_STDIN if stdin else 0) | (lib.NSB_TTY if tty else 0)
        if prepared.spec.secrets:
            handle.secrets = secrets.resolve(prepared.spec.secrets)
        given = handle.given() if argv is not None else NOTHING_GIVEN
        environment = given.environment(plan.env if env is None else env)
        what = (
            command(argv, environment, cwd or plan.cwd, how, len(join)) if argv is not None else waiting(len(join), how)
        )
        what = _with(what, given)
        if isinstance(tty, tuple):
            what = what._replace(detail=window(*tty))
        passed = flags | lib.NSB_PASS_ROOT | (lib.NSB_CGROUP_FD if into >= 0 else 0)
        if plan.scratch != "tmpfs":
            handle.scratch = scratch.Scratch(plan.scratch, prepared.host.state, handle._range)
        if handle.secrets.files:
            passed |= lib.NSB_SECRETS
        where = handle.scratch.path if handle.scratch else ""
        blob = launch_blob(prepared.compiled, what, ids, passed, fault, where)
        handle.host_ids = (ids.host_uid, ids.host_gid) if plan.privileged else None
        fds = _streams(handle, owned, handle.host_ids, stdin=stdin)
        fds += _hand_over(given, handle, handle, owned)
        pipe = (_secrets_pipe(handle.secrets, owned),) if handle.secrets.files else ()
        if on_ready:
            on_ready(handle)
        _ask(handle, zygote, blob, [*fds, *join, *((into,) if into >= 0 else ()), *pipe])
        if ids.maps_by_caller:
            _write_maps(handle)
        if prepared.net is not None:
            _connect(handle)
        handle.await_news(HEAD_START_S)
        if handle.cgroup:
            handle.cgroup.joined()
        undo.pop_all()
    if argv is not None:
        count_execution()
    return handle


def _secrets_pipe(values: secrets.Values, owned: contextlib.ExitStack) -> int:
    reader = secrets.filled(values.packed())
    owned.callback(os.close, reader)
    return reader


def _connect(handle: Handle) -> None:
    """Filtered egress: take the sockets that init made in its network namespace, serve them, and let init go on."""
    from nsbox.resources.egress import Egress

    prepared = handle.prepared
    message, fds = ffi.new("struct nsb_msg *"), ffi.new("int[16]")
    ret = lib.nsb_receive(handle.control, message, fds, 16)
    came = [fds[number] for number in range(max(0, ret))]
    assert prepared.net is not None
    assert prepared.policy is not None
    if ret < 0 or message.type != lib.NSB_MSG_NETWORK or len(came) != 2 + len(prepared.net.sockets):
        for fd in came:
            os.close(fd)
        raise failure(prepared, message) if ret >= 0 and message.type == lib.NSB_MSG_FAILED else vanished()
    try:
        received.network(came, prepared.net.sockets)
    except BaseException:
        for fd in came:
            os.close(fd)
        raise
    slot = 0 if handle._range is None else (handle._range - FIRST) // SIZE
    handle.egress = Egress(handle.id, prepared.policy, prepared.net, came, slot, handle.on_network)
    handle.tell(lib.NSB_MSG_GO)


def _ask(handle: Handle, own: _native.Zygote | None, blob: bytes, fds: Sequence[int]) -> None:
    # made: the control socket and the pidfd, written by C: an exception in between (KeyboardInterrupt) loses neither.
    answer, made = ffi.new("struct nsb_msg *"), ffi.new("int[2]", (-1, -1))
    zygote = own or _native.zygote()
    try:
        ret = lib.nsb_launch(zygote.socket, blob, len(blob), fds, len(fds), answer, made)
        if ret == -_errno.ENODATA:
            # No answer: the request was dropped for want of descriptors, or the zygote died over it. A dead one cannot
            # be asked again; a living one must not be replaced, for all its sandboxes would end.
            ret = lib.nsb_launch(zygote.socket, blob, len(blob), fds, len(fds), answer, made)
        if own is None and ret in (-_errno.EPIPE, -_errno.ECONNRESET, -_errno.EBADF, -_errno.ENOTSOCK):
            # The zygote is gone (killed by somebody): start another and ask once more.
            zygote = _native.zygote(dead=zygote)
            ret = lib.nsb_launch(zygote.socket, blob, len(blob), fds, len(fds), answer, made)
    finally:
        handle.control, handle.pidfd = made
    if ret < 0:
        raise HostError(
            f"the helper process cannot be asked: {os.strerror(-ret)}", remedy="run: nsbox doctor", errno=-ret
        )
    if answer.type == lib.NSB_MSG_FAILED and _mendable(handle.prepared, answer):
        raise NoIdmap(answer.op)
    if answer.type != lib.NSB_MSG_CLONED:
        raise failure(handle.prepared, answer)
    handle.pid, handle.cloned_at = answer.pid, time.monotonic()


def _mendable(prepared: Prepared, answer: Any) -> bool:
    """Whether a source cannot be idmapped, and that of the skeleton or of the workspace, which can do without."""
    ops, source = prepared.plan.ops, answer.stage == _native.STAGES.index("source")
    if not source or -answer.err != _errno.EINVAL or answer.op >= len(ops):
        return False
    return copyin.possible(ops[answer.op]) or (answer.op == 0 and bool(ops[0].flags & IDMAP_RANGE))
