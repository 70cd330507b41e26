"""How each limit will be held on this host: by the kernel, watched by the host side, or not at all. Pure.

A limit is at least watched unless the caller lets it go by name (``degrade``); ``require X=kernel`` refuses less than
the kernel. What could not be had by the kernel comes with the reason and the remedy, so that nothing gets weaker in
silence."""

from __future__ import annotations

from _collections_abc import Mapping

from nsbox.errors import HostError
from nsbox.light import TYPE_CHECKING, NamedTuple
from nsbox.spec import Limits, Spec

if TYPE_CHECKING:
    from collections.abc import Collection

#: limit → (whether the kernel can hold it here, by what or why not, what would mend that)
Controllers = Mapping[str, tuple[bool, str, str]]

# getrlimit(2)
RLIMIT_CPU, RLIMIT_FSIZE, RLIMIT_CORE, RLIMIT_NPROC, RLIMIT_NOFILE = 0, 1, 4, 6, 7
_INIT_AND_WATCHER = 2  #: processes of ours inside, which RLIMIT_NPROC counts and the caller's number does not mean
_RANK = {"none": 0, "watched": 1, "kernel": 2}


class LimitPlan(NamedTuple):
    """What holds the limits of one sandbox."""

    memory: int | None  #: for a cgroup; None: no cgroup for it
    pids: int | None
    cpus: float | None
    watch: frozenset[str]  #: of memory, pids, cpus, cpu_time, disk
    pinned: int  #: number of processors that the sandbox is pinned to; 0: not pinned
    cpuset: frozenset[int]  #: the very processors, by choice; empty: any
    io: int | None  #: bytes a second for a cgroup
    scratch_size: int  #: bytes of the scratch tmpfs; 0: no limit
    rlimits: tuple[tuple[int, int, int], ...]
    enforced: dict[str, dict[str, str]]
    warnings: tuple[str, ...]

    @property
    def cgroup(self) -> bool:
        """Whether a cgroup is wanted."""
        return (self.memory, self.pids, self.cpus, self.io) != (None, None, None, None)


_WATCHED = {
    "memory": "resident memory of all processes and scratch files, looked at every 50 ms, killed when over",
    "pids": "RLIMIT_NPROC, counted in the sandbox's own user namespace",
    "cpu": "pinned to {pinned} processor(s); stopped and continued when over its share",
}


def _ceil(value: float) -> int:
    return -int(-value // 1)


def _rlimits(limits: Limits, watch: Collection[str]) -> tuple[tuple[int, int, int], ...]:
    # Between two looks at a watched disk, one file alone cannot grow beyond the limit on all of them.
    sizes = [limits.file_size, limits.disk if "disk" in watch else None]
    wanted: list[tuple[int, int | None]] = [
        (RLIMIT_CORE, 0),
        (RLIMIT_NOFILE, limits.files),
        (RLIMIT_FSIZE, min((size for size in sizes if size is not None), default=None)),
        # One process alone cannot go far beyond the limit on all of them together, even if nobody watches.
        (RLIMIT_CPU, None if limits.cpu_time is None else _ceil(limits.cpu_time) + 1),
        (RLIMIT_NPROC, limits.pids + _INIT_AND_WATCHER if "pids" in watch and limits.pids else None),
    ]
    return tuple((number, value, value) for number, value in wanted if value is not None)


def require(spec: Spec, enforced: Mapping[str, Mapping[str, str]], controllers: Controllers) -> None:
    """Raises HostError, with the remedy, for a layer that ``spec.require`` wants stronger than it is."""
    for item in spec.require:
        layer, _, strength = item.partition("=")
        have = enforced.get(layer, {"strength": "none", "how": "not in this version"})
        if _RANK[have["strength"]] < _RANK[strength or "watched"]:
            available, why, remedy = controllers.get(layer, (True, "", ""))
            how = have["how"] if available else f"{have['how']} ({why})"
            raise HostError(
                f"{layer}: {strength or 'kernel or watched'} is required; here it is {have['strength']}: {how}",
                remedy=remedy or "run: nsbox doctor",
            )


def plan_limits(spec: Spec, controllers: Controllers, processors: int) -> LimitPlan:
    """Decide for each limit. ``processors``: how many the caller may use."""
    limits = spec.limits
    values: dict[str, float | None] = {"memory": limits.memory, "pids": limits.pids, "cpu": limits.cpus}
    enforced: dict[str, dict[str, str]] = {}
    watch, warnings, by_kernel = set(), [], {}
    pinned = 0
    for layer, value in values.items():
        available, how, remedy = controllers[layer]
        if value is None:
            enforced[layer] = {"strength": "none", "how": "unlimited, as asked for"}
        elif available:
            by_kernel[layer] = value
            enforced[layer] = {"strength": "kernel", "how": how}
        else:
            if layer == "cpu":
                pinned = min(_ceil(value), processors)
            watch.add({"cpu": "cpus"}.get(layer, layer))
            enforced[layer] = {"strength": "watched", "how": _WATCHED[layer].format(pinned=pinned)}
            if layer not in spec.degrade:
                warnings.append(f"{layer} is watched, not held by the kernel ({how}); {remedy}")
    if limits.cpu_time is not None:
        watch.add("cpu_time")
    if spec.scratch == "tmpfs":
        how = f"size and inodes of the scratch tmpfs: {limits.disk} bytes" if limits.disk else "unlimited, as asked for"
        enforced["disk"] = {"strength": "kernel" if limits.disk else "none", "how": how}
    elif limits.disk is None:
        enforced["disk"] = {"strength": "none", "how": "unlimited, as asked for"}
    else:
        watch.add("disk")
        enforced["disk"] = {
            "strength": "watched",
            "how": "size of the scratch directory and of files removed from it, looked at every second",
        }
    enforced["io"] = {"strength": "none", "how": "no limit asked for"}
    if limits.io is not None:
        available, how, remedy = controllers["io"]
        if not available and "io" not in spec.degrade:
            raise HostError(f"io: the bandwidth of devices cannot be limited here: {how}", remedy=remedy)
        enforced["io"] = {"strength": "kernel" if available else "none", "how": how}
    pids = by_kernel.get("pids")
    # What lies in a tmpfs is memory. A cgroup counts it as such; where there is none, the size of the tmpfs is the
    # bound.
    sizes = [limits.disk, limits.memory if "memory" in watch else None]
    return LimitPlan(
        memory=limits.memory if "memory" in by_kernel else None,
        pids=None if pids is None else int(pids) + 1,  # init is counted, and is not the caller's
        cpus=by_kernel.get("cpu"),
        watch=frozenset(watch),
        pinned=pinned if pinned < processors and not spec.cpuset else 0,
        cpuset=spec.processors() if spec.cpuset else frozenset(),
        io=limits.io if limits.io is not None and controllers["io"][0] else None,
        scratch_size=min((size for size in sizes if size is not None), default=0),
        rlimits=_rlimits(limits, watch),
        enforced=enforced,
        warnings=tuple(warnings),
    )
