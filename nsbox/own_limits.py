"""The limits of one command within those of its sandbox: checked, and by what each is held."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from nsbox import units
from nsbox.errors import HostError, SpecError
from nsbox.prepared import limit_of
from nsbox.resources.cgroup_nest import Wanted
from nsbox.spec import Limits

if TYPE_CHECKING:
    from nsbox.resources.cgroup import Cgroup

_LAYERS = {"memory": "memory", "pids": "pids", "cpus": "cpu"}  #: option → controller
_WATCHED = {
    "memory": "resident memory of the command's processes, looked at every 50 ms, ended when over",
    "pids": "the command's processes and threads, counted every 50 ms, ended when over",
}
_WATCHER = 1  #: the process of ours that is in the command's group


class OwnLimits(NamedTuple):
    """What holds for one command."""

    limits: Limits  #: the sandbox's, with the command's own in their places
    wanted: Wanted | None  #: for a cgroup of its own; None: it has no limit there
    watch: frozenset[str]  #: of memory, pids, cpu_time: looked at by the host side
    enforced: dict[str, dict[str, str]]  #: layers that are held otherwise than for the sandbox


def _within(name: str, value: Any, box: Any) -> Any:
    """``value`` parsed. Raises SpecError where it is more than the sandbox's."""
    number = limit_of(name, value, None)
    if box is not None and (number is None or number > box):
        what, whole = units.UNLIMITED if number is None else value, f"{box:g}" if isinstance(box, float) else box
        raise SpecError(
            f"{name}: {what} for one command is more than the sandbox's {whole}; give it at most that, or make the"
            f" sandbox with a higher {name}"
        )
    return number


def own_limits(box: Limits, given: Mapping[str, Any], cgroup: "Cgroup | None", *, nested: bool) -> OwnLimits:
    """``given``: option → value as the caller wrote it. ``nested``: whether commands have groups in ``cgroup``. Raises
    SpecError, and HostError for a share of the processors where no group can hold it."""
    own = {name: _within(name, value, getattr(box, name)) for name, value in given.items() if value is not None}
    by_kernel: dict[str, Any] = {}
    limits = Limits(**{**vars(box), **own}) if own else box
    watch, enforced = {"cpu_time"} if limits.cpu_time is not None else set(), {}
    for name, layer in _LAYERS.items():
        if own.get(name) is None:
            continue
        if nested and cgroup is not None and cgroup.holds(layer):
            by_kernel[name] = own[name]
            enforced[layer] = {"strength": "kernel", "how": "a cgroup of the command's own, below the sandbox's"}
        elif name == "cpus":
            raise HostError(
                "cpus: no cgroup of this sandbox can hold a share of the processors for one command",
                remedy="limit the whole sandbox, or run: nsbox doctor",
            )
        else:
            watch.add(name)
            enforced[layer] = {"strength": "watched", "how": _WATCHED[name]}
    wanted = None
    if by_kernel:
        pids = by_kernel.get("pids")
        pids = None if pids is None else pids + _WATCHER
        wanted = Wanted(by_kernel.get("memory"), pids, by_kernel.get("cpus"))
    return OwnLimits(limits, wanted, frozenset(watch), enforced)
