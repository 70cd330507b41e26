"""Plan → the flat buffer of native/nsbox.h. Compiled once per Spec; a launch adds its command and its ids."""

from __future__ import annotations

import os

from nsbox._native import ffi, lib
from nsbox.errors import SpecError
from nsbox.light import TYPE_CHECKING, NamedTuple
from nsbox.plan.compose import Plan
from nsbox.plan.ops import KINDS, SKELETON
from nsbox.spec import DEFAULT_PATH

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from nsbox.plan.net import NetPlan

_KIND = {name: getattr(lib, f"NSB_OP_{name.upper()}") for name in KINDS}
_HEADER = ffi.sizeof("struct nsb_plan")
MAX_ARGUMENT = 131071  # MAX_ARG_STRLEN of execve(2), less the NUL


class Ids(NamedTuple):
    """Who is who: ids inside while the root is built, and afterwards; the maps; the payload as the host sees it."""

    uid_map: str
    gid_map: str
    setup_uid: int
    setup_gid: int
    uid: int
    gid: int
    host_uid: int
    host_gid: int
    deny_setgroups: bool
    maps_by_caller: bool = False


class Writer:
    """Appends strings and arrays; every offset counts from the start of the whole blob."""

    def __init__(self, start: int) -> None:
        self.body = bytearray()
        self.start = start

    def string(self, text: str) -> int:
        """Offset of ``text``; 0, which means absent, for the empty one."""
        return self.strings([text]) if text else 0

    def strings(self, texts: Sequence[str]) -> int:
        """Offset of the first of the NUL-terminated strings, one after the other."""
        at = self.start + len(self.body)
        for text in texts:
            self.body += os.fsencode(text) + b"\0"
        return at

    def array(self, data: bytes) -> int:
        """Offset of ``data``, aligned to 8 bytes."""
        self.body += bytes(-len(self.body) % 8)
        at = self.start + len(self.body)
        self.body += data
        return at


class Compiled(NamedTuple):
    """A plan as bytes, less what differs from launch to launch."""

    header: bytes
    body: bytes


def _some(count: int) -> frozenset[int]:
    """That many of the caller's processors, others for each sandbox compiled."""
    allowed = sorted(os.sched_getaffinity(0))
    start = int.from_bytes(os.urandom(4), "little") % len(allowed)
    return frozenset((allowed + allowed)[start : start + count])


def _mask(processors: frozenset[int]) -> bytes:
    """A mask for sched_setaffinity(2)."""
    return sum(1 << number for number in processors).to_bytes(max(processors) // 64 * 8 + 8, "little")


def _ioprio(text: str | None) -> int:
    """The class and level of ioprio_set(2); 0: none."""
    if text is None:
        return 0
    name, _, level = text.partition(":")
    return (3 << 13) if name == "idle" else (2 << 13) | int(level or 4)


def _write_network(header: Any, writer: Writer, net: NetPlan) -> None:
    """The netlink batches and sockets that init makes in the network namespace."""
    header.rtnl, header.n_rtnl = writer.array(net.rtnl), len(net.rtnl)
    header.nft, header.n_nft = writer.array(net.nft), len(net.nft)
    sockets = ffi.new("struct nsb_socket[]", len(net.sockets))
    for slot, spec in zip(sockets, net.sockets, strict=True):
        options = ffi.new("struct nsb_sockopt[]", [(level, name, value, 0) for level, name, value in spec.options])
        slot.family, slot.type, slot.protocol, slot.backlog = spec.family, spec.type, spec.protocol, spec.backlog
        slot.options, slot.n_options = writer.array(bytes(ffi.buffer(options))), len(spec.options)
        slot.address, slot.address_size = writer.array(spec.sockaddr()), len(spec.sockaddr())
    header.sockets, header.n_sockets = writer.array(bytes(ffi.buffer(sockets))), len(net.sockets)


def compile_plan(plan: Plan, skeleton: str, program: bytes, net: NetPlan | None = None) -> Compiled:
    """``program`` is the seccomp filter, ``skeleton`` the prepared directory that stands for SKELETON."""
    writer = Writer(_HEADER)
    header = ffi.new("struct nsb_plan *")
    header.magic, header.layout = lib.NSB_MAGIC, lib.NSB_LAYOUT
    ops = ffi.new("struct nsb_op[]", len(plan.ops))
    for slot, op in zip(ops, plan.ops, strict=True):
        slot.kind, slot.flags, slot.mode, slot.uid, slot.gid = _KIND[op.kind], op.flags, op.mode, op.uid, op.gid
        slot.size, slot.inodes = op.size, op.inodes
        slot.src = writer.string(skeleton if op.src == SKELETON else op.src)
        slot.dst, slot.data = writer.string(op.dst), writer.string(op.data)
    header.ops, header.n_ops = writer.array(bytes(ffi.buffer(ops))), len(plan.ops)
    limits = ffi.new("struct nsb_rlimit[]", [(number, 0, soft, hard) for number, soft, hard in plan.limits.rlimits])
    header.rlimits, header.n_rlimits = writer.array(bytes(ffi.buffer(limits))), len(plan.limits.rlimits)
    rules = ffi.new("struct nsb_rule[]", [(writer.string(path), 0, access) for path, access in plan.landlock.rules])
    header.rules, header.n_rules = writer.array(bytes(ffi.buffer(rules))), len(plan.landlock.rules)
    header.landlock_fs, header.landlock_scoped = plan.landlock.handled, plan.landlock.scoped
    header.filter, header.n_filter = writer.array(program), len(program) // 8
    if net is not None:
        _write_network(header, writer, net)
    if plan.limits.pinned or plan.limits.cpuset:
        mask = _mask(plan.limits.cpuset or _some(plan.limits.pinned))
        header.affinity, header.n_affinity = writer.array(mask), len(mask)
    header.nice, header.ioprio = plan.nice, _ioprio(plan.ionice)
    header.staging, header.hostname = writer.string(plan.staging), writer.string(plan.hostname)
    header.scratch_size, header.scratch_inodes = plan.scratch_size, plan.scratch_inodes
    header.flags = (
        (lib.NSB_HOST_SOURCES if plan.privileged else 0)
        | (lib.NSB_NETWORK if plan.network else 0)
        | (lib.NSB_NET_WAIT if net is not None else 0)
    )
    writer.array(b"")
    return Compiled(bytes(ffi.buffer(header)), bytes(writer.body))


def _arguments(argv: Sequence[str | bytes | os.PathLike[str]]) -> list[str]:
    if isinstance(argv, str | bytes) or not argv:
        raise SpecError(
            "command: wants a list of arguments with at least the program; for shell text use ['sh', '-c', TEXT]"
        )
    out = []
    for number, item in enumerate(argv):
        if not isinstance(item, str | bytes | os.PathLike):
            raise SpecError(f"command: argument {number} is {item!r}, not text")
        text = os.fsdecode(item)
        if "\0" in text:
            raise SpecError(f"command: argument {number} contains a NUL byte, which no program can be given")
        if len(os.fsencode(text)) > MAX_ARGUMENT:
            raise SpecError(
                f"command: argument {number} is longer than {MAX_ARGUMENT} bytes; pass it through a file or stdin"
            )
        out.append(text)
    if not out[0]:
        raise SpecError("command: the program's name is empty")
    return out


class Command(NamedTuple):
    """A program to start inside, checked: nothing in it can be refused later for its form."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    flags: int = 0
    n_join: int = 0
    n_variables: int = 0  #: more variables, which come through a pipe
    n_give: int = 0  #: descriptors that become the program's from 3 up
    detail: int = 0  #: NSB_CONNECT: the port; NSB_TTY: rows << 16 | columns


def command(
    argv: Sequence[str | bytes | os.PathLike[str]], env: Mapping[str, str], cwd: str, flags: int = 0, n_join: int = 0
) -> Command:
    """Raises SpecError for arguments that no program can be given."""
    return Command(tuple(_arguments(argv)), env, cwd, flags, n_join)


def window(rows: int, columns: int) -> int:
    """A terminal's size as a command has it. Raises SpecError."""
    if not (0 <= rows < 65536 and 0 <= columns < 65536):
        raise SpecError(f"tty: a terminal cannot have {rows} rows and {columns} columns")
    return rows << 16 | columns


def waiting(n_join: int = 0, flags: int = 0) -> Command:
    """No program yet: the sandbox waits for NSB_MSG_RUN, or for NSB_MSG_START."""
    return Command((), {}, "/", flags, n_join)


def _write_command(out: Any, writer: Writer, what: Command) -> None:
    """Fill a struct nsb_command, all but its size."""
    argv, variables = what.argv, [f"{key}={value}" for key, value in what.env.items()]
    out.magic = lib.NSB_MAGIC
    out.argv, out.argc = (writer.strings(argv) if argv else 0), len(argv)
    out.envp, out.envc = (writer.strings(variables) if variables else 0), len(variables)
    out.cwd, out.path = writer.string(what.cwd), writer.string(what.env.get("PATH", DEFAULT_PATH))
    out.flags, out.n_join, out.detail = what.flags, what.n_join, what.detail
    out.n_variables, out.n_give = what.n_variables, what.n_give
    out.pointers = writer.array(bytes(8 * (len(argv) + len(variables) + what.n_variables + 2)))
    writer.body += bytes(8)


def _finish(header: Any, size: int) -> bytes:
    if size > lib.NSB_MAX_BLOB:
        raise SpecError(f"command: arguments and environment are {size} bytes in all; pass data through files or stdin")
    return bytes(ffi.buffer(header))


def launch_blob(
    compiled: Compiled,
    what: Command,
    ids: Ids,
    flags: int = 0,
    fault: tuple[int, int] | None = None,
    scratch_dir: str = "",
) -> bytes:
    """The whole buffer for one launch. ``scratch_dir``: the sandbox's own directory in place of a scratch tmpfs.
    ``fault`` breaks the launch for a test: (stage, -errno; or 1 to hang there)."""
    writer = Writer(len(compiled.header) + len(compiled.body))
    header = ffi.new("struct nsb_plan *")
    ffi.buffer(header)[:] = compiled.header
    header.uid_map, header.gid_map = writer.string(ids.uid_map), writer.string(ids.gid_map)
    header.setup_uid, header.setup_gid, header.uid, header.gid = ids.setup_uid, ids.setup_gid, ids.uid, ids.gid
    header.host_uid, header.host_gid = ids.host_uid, ids.host_gid
    header.flags |= (
        (lib.NSB_SETGROUPS_DENY if ids.deny_setgroups else 0)
        | (lib.NSB_MAPS_BY_CALLER if ids.maps_by_caller else 0)
        | (lib.NSB_SCRATCH_DIR if scratch_dir else 0)
        | flags
    )
    header.scratch_dir = writer.string(scratch_dir)
    if fault:
        header.fault_stage, header.fault = fault[0] + 1, fault[1]
    _write_command(header.command, writer, what)
    header.size = header.command.size = writer.start + len(writer.body)
    return _finish(header, header.size) + compiled.body + bytes(writer.body)


def command_blob(what: Command) -> bytes:
    """The buffer for NSB_MSG_RUN."""
    header = ffi.new("struct nsb_command *")
    writer = Writer(ffi.sizeof("struct nsb_command"))
    _write_command(header, writer, what)
    header.size = writer.start + len(writer.body)
    return _finish(header, header.size) + bytes(writer.body)
