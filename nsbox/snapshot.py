"""States of a sandbox to go back to, and to start others from: what it has written, as layers that are shared.

A snapshot is a copy of the box's upper directories, made once, on top of the layers that the box itself was started
from. Boxes that start from it have it beneath an upper layer of their own, so that a fork costs a launch. Layers lie
in the state directory; one is removed when no snapshot and no box of this process uses it, or, if the process was
killed, by the next ``nsbox gc``. Processes, memory, /dev/shm and ``tmpfs`` mounts are no part of a snapshot. As in
any overlay, the names of one file part when one of them is written (overlayfs, "Non-standard behavior").
"""

import os
import weakref
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

from nsbox.encode import compile_plan
from nsbox.errors import HostError
from nsbox.handle import Handle
from nsbox.layers import Copier, Owner, inside_of, outside_of
from nsbox.plan.ops import IDMAP_RANGE, READ_ONLY, Op
from nsbox.prepared import Prepared, program_of
from nsbox.resources import scratch
from nsbox.spec import Spec

#: the overlays of a plan by number: of the root, of the workspace
OVERLAYS = (0, 1)
MAX_LAYERS = 16  #: more are made one


class Layer:
    """What one box has written, as ``u0`` and ``u1`` in a directory that is gone with this object."""

    def __init__(self, state: str) -> None:
        directory = scratch.Scratch(state, state, None)
        self.path, self.fd = directory.path, directory.fd
        weakref.finalize(self, directory.release)

    def fill(self, sources: Sequence[tuple[int, Owner]]) -> "Layer":
        """Copy from scratch directories, earlier ones beneath."""
        copier = Copier()
        for number in OVERLAYS:
            name = f"u{number}"
            os.mkdir(name, 0o755, dir_fd=self.fd)
            target = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
            try:
                for source, owner in sources:
                    _copy_if_there(copier, source, name, target, owner)
            finally:
                os.close(target)
        return self


def _copy_if_there(copier: Copier, at: int, name: str, target: int, owner: Owner) -> None:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    except FileNotFoundError:
        return
    try:
        copier.layer(fd, target, owner)
    finally:
        os.close(fd)


class Snapshot(NamedTuple):
    """A state of a box. It lives as long as it is referred to; nothing has to be closed."""

    spec: Spec
    layers: tuple[Layer, ...]  #: the oldest first

    def export_tar(self, stream: BinaryIO) -> None:
        """Write it to ``stream`` as an uncompressed tar archive. Raises OSError."""
        from nsbox import snapshot_tar

        snapshot_tar.write(self, stream)

    @classmethod
    def import_tar(cls, stream: BinaryIO, spec: Spec) -> "Snapshot":
        """Read what ``export_tar`` has written, to be used with ``spec``; the stream need not be trusted."""
        from nsbox import snapshot_tar

        return snapshot_tar.read(stream, spec)


def check(prepared: Prepared) -> None:
    """Raises HostError where this host or caller cannot have layers beneath a sandbox."""
    host = prepared.host
    if prepared.spec.subids:
        raise HostError("snapshots: files of subordinate ids cannot be copied", remedy="leave out subids")
    if host.privileged and not host.idmap:
        raise HostError(
            "snapshots: the state directory's file system takes no idmapped mounts (tmpfs: since Linux 6.3)",
            remedy="run as an ordinary user",
        )


def take(handle: Handle, spec: Spec, layers: tuple[Layer, ...]) -> Snapshot:
    """What a box has written, on top of the layers that it was started from. Nobody must write meanwhile."""
    check(handle.prepared)
    state, first = handle.prepared.host.state, _first(handle)
    with handle.borrowed("scratch_fd") as scratch:
        layers = (*layers, Layer(state).fill([(scratch, inside_of(first))]))
    if len(layers) > MAX_LAYERS:
        same = None if first is None else int
        layers = (Layer(state).fill([(layer.fd, same) for layer in layers]),)
    return Snapshot(spec, layers)


def merged(handle: Handle, layers: tuple[Layer, ...]) -> Layer:
    """All that was written since the first of the layers, as one; with owners as the host sees them in this box."""
    first = _first(handle)
    same = None if first is None else int
    below = [(layer.fd, outside_of(first)) for layer in layers]
    with handle.borrowed("scratch_fd") as scratch:
        return Layer(handle.prepared.host.state).fill([*below, (scratch, same)])


def _first(handle: Handle) -> int | None:
    """The host id that is 0 inside; None where all that is inside is the caller's."""
    return None if handle.host_ids is None else handle.host_ids[0] - handle.prepared.plan.uid


def with_layers(prepared: Prepared, layers: tuple[Layer, ...]) -> Prepared:
    """The same sandbox with layers beneath each of its overlays."""
    if not layers:
        return prepared
    check(prepared)
    ops = _ops(prepared, [layer.path for layer in layers])
    plan = prepared.plan._replace(ops=tuple(ops))
    program = program_of(prepared.spec, plan)
    return prepared._replace(plan=plan, compiled=compile_plan(plan, prepared.skeleton, program, net=prepared.net))


def _ops(prepared: Prepared, paths: Sequence[str]) -> list[Op]:
    flags = READ_ONLY | (IDMAP_RANGE if prepared.host.privileged else 0)
    ops: list[Op] = []
    numbers: dict[str, str] = {}  # a lower layer's name in the plan as it was → as it is
    count = old = 0
    for op in prepared.plan.ops:
        if op.kind == "lower":
            numbers[f"l{old}"] = f"l{count}"
            old, count = old + 1, count + 1
        elif op.kind == "overlay":
            names = []
            for path in reversed(paths):  # the newest first, and above all others
                ops.append(Op("lower", src=f"{path}/u{op.size}", flags=flags))
                names.append(f"l{count}")
                count += 1
            op = op._replace(data=":".join([*names, *(numbers[name] for name in op.data.split(":"))]))
        ops.append(op)
    return ops
