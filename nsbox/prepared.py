"""A Spec made ready for this host and this caller: guarded, planned, compiled, kept for the next launch."""

from __future__ import annotations

import os

from nsbox import probe
from nsbox.encode import Compiled, compile_plan
from nsbox.errors import MountRefused, SpecError
from nsbox.light import TYPE_CHECKING, NamedTuple, functools
from nsbox.plan.compose import Cover, Plan, canonical, make_plan
from nsbox.plan.filter import cached_filter
from nsbox.probe import Host
from nsbox.resources import cgroup, skeleton
from nsbox.spec import Spec

if TYPE_CHECKING:
    from typing import Any

    from nsbox.guard import Verdict
    from nsbox.plan.net import NetPlan, NetPolicy

MAX_LINKS = 40  #: path_resolution(7)


class Prepared(NamedTuple):
    """A Spec compiled for this host and this caller."""

    spec: Spec
    host: Host
    plan: Plan
    skeleton: str
    compiled: Compiled
    policy: NetPolicy | None = None  #: for filtered egress
    net: NetPlan | None = None
    verdict: Verdict | None = None  #: what the guard said of the mounts


def _check_sources(plan: Plan) -> None:
    for option, path, written, _ in plan.sources:
        try:
            os.stat(path)
        except OSError as error:
            meant = "" if written == path else f" (that is {path!r})"
            raise SpecError(f"{option}: {written!r}{meant}: {error.strerror}; name a path that you may read") from None


def program_of(spec: Spec, plan: Plan) -> bytes:
    """The seccomp filter that a plan wants."""
    # Where the share of processors is held by pinning, nobody inside may pin itself elsewhere.
    deny = ("sched_setaffinity",) if plan.limits.pinned or plan.limits.cpuset else ()
    return cached_filter(plan.seccomp, extra_deny=deny, set_id=not spec.rw)


@functools.lru_cache(maxsize=64)
def _prepare(spec: Spec, host: Host, where: tuple[str, ...], verdict: Verdict | None) -> Prepared:
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
    compiled = compile_plan(plan, root, program_of(spec, plan), net=net)
    return Prepared(spec, host, plan, root, compiled, policy, net, verdict)


def _guard(spec: Spec, host: Host, binds: list[tuple[str, str, bool]]) -> Verdict:
    """Ask the guard about every mount, each time: what lies in a directory changes. Raises SpecError for a refusal."""
    from nsbox import guard

    allow = {canonical(path) for path in spec.allow_sensitive}
    verdict = guard.check(binds, allow, guard.facts(host.state))
    if verdict.refusals:
        first = verdict.refusals[0]
        raise MountRefused(str(first), path=first.path, why=first.why, word=first.word)
    return verdict


def _followed(path: str) -> tuple[str, list[str]]:
    """What a path means, and each symbolic link on the way there."""
    parts, here, links = os.path.join(os.getcwd(), path).split("/")[::-1], "", list[str]()
    while parts and len(links) <= MAX_LINKS:
        part = parts.pop()
        if part == "..":
            here = here.rpartition("/")[0]
        elif part not in ("", "."):
            here += f"/{part}"
            try:
                parts += os.readlink(here).split("/")[::-1]
            except OSError:
                continue
            links.append(here)
            here = "" if parts[-1] == "" else here.rpartition("/")[0]
    return here or "/", links


def _refuse_planted(spec: Spec, binds: list[tuple[str, str, bool]]) -> None:
    """What is shown must not depend on a link that an earlier sandbox of the same Spec may have made: it would choose
    what the next one sees of the host. Raises SpecError."""
    written = [*spec.rw, *([spec.workspace] if spec.workspace and spec.apply else [])]
    folders = tuple(f"{canonical(bind.source).rstrip('/')}/" for bind in written)
    for (option, path), (_, judged, _) in zip(spec.mounts(), binds, strict=True) if folders else ():
        meant, links = _followed(path)
        for link in links:
            if link.startswith(folders):
                raise SpecError(
                    f"{option}: {path!r} leads through the link {link!r}, and what runs inside can write there and may"
                    f" have made it; where it is yours, name what it leads to: {meant!r}"
                )
        if meant != judged:
            raise SpecError(f"{option}: {path!r} changed while it was looked at; try again")


def prepare(spec: Spec) -> Prepared:
    """Compile ``spec`` for this host, or take it from the cache. Raises SpecError, HostError, SandboxUnavailable."""
    try:
        return _looked_up(spec)
    except OSError as error:
        told = probe.scarce(error)
        if told is None:
            raise
        raise told from error


def _looked_up(spec: Spec) -> Prepared:
    host = probe.host()
    if spec.workspace and spec.scratch == "tmpfs" and host.kernel < (6, 6):
        # tmpfs(5): without user.* extended attributes overlayfs cannot mark a directory as replaced, and rm -r fails.
        spec = spec.replace(scratch=probe.disk_directory() or "tmpfs")
    paths = spec.host_paths()
    # What the paths mean may change between two launches of one Spec: links, and the directory that they start from.
    where = (*map(canonical, paths), "" if all(map(os.path.isabs, paths)) else os.getcwd())
    kept = spec.without_values()
    binds = [(option, canonical(path), option == "rw") for option, path in spec.mounts()]
    _refuse_planted(spec, binds)
    verdict = _guard(spec, host, binds) if binds else None
    prepared = _prepare(kept, host, where, verdict)
    if not os.path.isdir(prepared.skeleton):
        _prepare.cache_clear()
        prepared = _prepare(kept, host, where, verdict)
    # A link above a source may be flipped while all of this is done, by a sandbox that may write there. What the guard
    # has seen must be what is planned; and the helper opens that without following any link.
    judged = {path for _, path, _ in binds}
    for source in prepared.plan.sources:
        if source.path not in judged:
            _prepare.cache_clear()
            raise SpecError(f"{source.option}: {source.written!r} changed while it was looked at; try again")
    _check_sources(prepared.plan)
    return prepared if kept is spec else prepared._replace(spec=spec)


def limit_of(name: str, value: Any, default: Any) -> Any:
    """A limit of one command, in any form that a Spec takes; None is the ``default``. Raises SpecError."""
    if value is None:
        return default
    if isinstance(value, int | float) and value is not True and 0 < value < float("inf"):
        return value
    return getattr(Spec.from_dict({name: value}).limits, name)
