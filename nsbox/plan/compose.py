"""(Spec, Host) → Plan: everything a launch will do, decided before anything is done. Nothing is opened or changed."""

from __future__ import annotations

import os
import stat

from nsbox.binds import Bind
from nsbox.errors import HostError, SpecError
from nsbox.light import TYPE_CHECKING, NamedTuple
from nsbox.plan import landlock
from nsbox.plan.limits import Controllers, LimitPlan, plan_limits, require
from nsbox.plan.ops import DIRECTORY, IDMAP_OWNER, IDMAP_RANGE, READ_ONLY, RECURSIVE, SKELETON, Op
from nsbox.probe import Host
from nsbox.secrets import DIRECTORY as SECRETS
from nsbox.spec import DEFAULT_PATH, Spec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nsbox.plan.net import NetPlan

INODES_PER_MEBIBYTE = 256

# Entries of /proc that say something about the host or change it. The payload is never the host's root, who alone may
# use most of them; they are covered all the same.
_PROC_READ_ONLY = ("sys", "irq", "bus", "fs")
_PROC_COVERED = ("kcore", "keys", "timer_list", "sysrq-trigger", "latency_stats", "sched_debug")
_PROC_COVERED_DIRECTORIES = ("scsi", "acpi", "asound")


class SkeletonSpec(NamedTuple):
    """What the made-up layer of the root contains; ``nsbox.resources.skeleton`` makes it on disk."""

    user: str
    home: str
    uid: int
    gid: int
    hostname: str
    links: tuple[tuple[str, str], ...]
    places: tuple[str, ...]  #: directories that mounts will need
    resolv_conf: str
    base: str | None  #: a root file system tree whose passwd and group are kept
    shifted: bool = False  #: ids of its files are those inside: the sandbox's range is laid over it


class Cover(NamedTuple):
    """Something inside of a mount that is covered by an empty file or directory."""

    option: str
    source: str  #: canonical host path of the mount
    relative: str
    directory: bool


class Source(NamedTuple):
    """Something of the host that is shown inside."""

    option: str
    path: str  #: canonical
    written: str  #: as the caller wrote it
    target: str


class Plan(NamedTuple):
    """What will be done. ``enforced`` tells, layer by layer, how strong it is and by what."""

    ops: tuple[Op, ...]
    skeleton: SkeletonSpec
    network: bool  #: a network namespace of its own
    hostname: str
    uid: int
    gid: int
    cwd: str
    env: dict[str, str]
    limits: LimitPlan
    nice: int
    ionice: str | None
    landlock: landlock.Ruleset
    seccomp: str
    scratch: str
    scratch_size: int
    scratch_inodes: int
    staging: str
    privileged: bool
    enforced: dict[str, dict[str, str]]
    sources: tuple[Source, ...]  #: that must exist

    def describe(self) -> list[str]:
        """One line per operation, in order."""
        return [op.describe() for op in self.ops]


def _home(uid: int) -> tuple[str, str]:
    return ("root", "/root") if uid == 0 else ("user", "/home/user")


def canonical(path: str) -> str:
    """The host path without symbolic links: the helper opens it with RESOLVE_NO_SYMLINKS, so that what the guard has
    seen is what is mounted. Raises SpecError for one that changes while it is looked at."""
    try:
        return os.path.realpath(path)
    except OSError as error:
        raise SpecError(f"mounts: {path!r} changed while it was looked at ({error.strerror}); try again") from None


#: what the made-up layer has for places beneath it; of mode 0755
ABOVE = ("/etc", "/home", "/mnt", "/opt", "/root", "/srv", "/var", "/var/cache", "/var/lib", "/var/log")


def _above(spec: Spec, target: str) -> Iterator[tuple[str, int]]:
    """The directories above ``target`` that the layers of the root have, and their modes."""
    at, tree = "", canonical(spec.root) if spec.root != "host" else None
    for name in target.split("/")[1:-1]:
        at = f"{at}/{name}"
        mode = _mode(tree + at) if tree else 0o755 if at in ABOVE else None
        if mode is None:
            return
        yield at, mode


def _mode(path: str) -> int | None:
    """The mode of a directory; None for a link, in whose place a directory would hide where it leads."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None
    return mode & 0o1777 if stat.S_ISDIR(mode) else None


def _root_ops(spec: Spec, host: Host, places: list[str], targets: Iterable[str]) -> list[Op]:
    idmap = IDMAP_RANGE if host.privileged and host.idmap else 0
    ops = [Op("lower", src=SKELETON, flags=READ_ONLY | idmap)]
    layers = "l0"
    if spec.root != "host":
        ops.append(Op("lower", src=canonical(spec.root), flags=READ_ONLY | idmap))
        layers = "l0:l1"
    if host.privileged and not host.idmap:
        # The layers below belong to ids that do not exist inside, and overlayfs copies nothing up for those. What the
        # payload must be able to write, and in which mounts make their places, is made in the upper layer, before it is
        # one.
        home = _home(spec.uid)[1]
        above = {place: mode for target in targets for place, mode in _above(spec, target)}
        if spec.uid == 0 and spec.root == "host":
            above |= dict.fromkeys(ABOVE, 0o755)
        above |= {home: 0o755, "/tmp": 0o1777, "/var/tmp": 0o1777, "/run": 0o755}
        for place, mode in sorted(above.items()):
            own = spec.uid if place == home else 0
            ops.append(Op("upper", dst=place, mode=mode, uid=own, gid=own))
    ops.append(Op("overlay", data=layers, size=0))
    if spec.root == "host":
        trees = ["/usr", *host.trees]
        ops += [Op("bind", src=canonical(tree), dst=tree, flags=READ_ONLY | RECURSIVE) for tree in trees]
        places += trees
    return ops


def _system_ops(host: Host) -> list[Op]:
    ops = [Op("dev", dst="/dev"), Op("scratch", dst="/dev/shm", mode=0o1777, size=0)]
    ops.append(Op("proc", dst="/proc"))
    # An attempt to cover what is not there costs 40 µs, for the mount that is thrown away again.
    for names, flags in ((_PROC_READ_ONLY, READ_ONLY), (_PROC_COVERED, 0), (_PROC_COVERED_DIRECTORIES, DIRECTORY)):
        ops += [Op("mask", dst=name, flags=flags) for name in names if name in host.proc]
    return ops


def _target(bind: Bind, option: str) -> str:
    target = bind.target or os.path.abspath(bind.source)
    if target == "/":
        raise SpecError(f"{option}: the host's whole root cannot be mounted over the sandbox's own; use root=/")
    return target


def _caller_ops(spec: Spec, host: Host) -> tuple[list[Op], list[Source]]:
    """The caller's own mounts, parents before what lies beneath them."""
    ops: list[list[Op]] = []
    sources: list[Source] = []
    layer = 1 if spec.root == "host" else 2
    owner = IDMAP_OWNER if host.privileged else 0
    for option, binds, flags in (("ro", spec.ro, READ_ONLY | RECURSIVE | owner), ("rw", spec.rw, RECURSIVE | owner)):
        for bind in binds:
            source = canonical(bind.source)
            sources.append(Source(option, source, bind.source, _target(bind, option)))
            ops.append([Op("bind", src=source, dst=_target(bind, option), flags=flags)])
    for number, tmpfs in enumerate(spec.tmpfs, 1):
        # Without a size of its own it is a directory of the scratch file system, under the disk limit with all else.
        kind, size = ("tmpfs", tmpfs.size) if tmpfs.size else ("scratch", number)
        ops.append([Op(kind, dst=tmpfs.target, size=size, inodes=_inodes(tmpfs.size or 0), uid=spec.uid, gid=spec.uid)])
    if spec.workspace:
        source, target = canonical(spec.workspace.source), _target(spec.workspace, "workspace")
        sources.append(Source("workspace", source, spec.workspace.source, target))
        lower = Op("lower", src=source, flags=READ_ONLY | owner)
        overlay = Op("overlay", dst=target, data=f"l{layer}", size=1, uid=spec.uid, gid=spec.uid)
        ops.append([lower, overlay])
    ops.sort(key=lambda group: group[-1].dst.count("/"))
    return [op for group in ops for op in group], sources


def _inodes(size: int) -> int:
    return max(1024, (size >> 20) * INODES_PER_MEBIBYTE) if size else 0


def _environment(spec: Spec, user: str, home: str) -> dict[str, str]:
    base = {"HOME": home, "USER": user, "LOGNAME": user, "PATH": DEFAULT_PATH, "LANG": "C.UTF-8", "TERM": "dumb"}
    return base | dict(spec.env)


def _enforced(spec: Spec, ruleset: landlock.Ruleset, host: Host) -> dict[str, dict[str, str]]:
    out = {}

    def say(layer: str, how: str, strength: str = "kernel") -> None:
        out[layer] = {"strength": strength, "how": how}

    ids = "a private range of 65536 ids" if host.privileged else "the caller's own id, alone"
    if host.uid == 0 and not host.privileged:
        ids += ", which is root's (of this container, if it is one) without any capability"
    if spec.subids:
        ids = "the caller's own id and its subordinate ids (newuidmap)"
    say("user_ns", f"CLONE_NEWUSER, {ids}")
    for layer in ("mount_ns", "pid_ns", "ipc_ns", "uts_ns", "cgroup_ns"):
        say(layer, "namespace of its own")
    say("time_ns", "not unshared", "none")
    shared = spec.net == "host"
    say("net_ns", "the host's, by --net host" if shared else "namespace of its own", "none" if shared else "kernel")
    say(
        "egress",
        "the host's network" if shared else "loopback only, nothing else exists",
        "none" if shared else "kernel",
    )
    say("pivot_root", "old root detached")
    upper = "upper layer on tmpfs" if spec.scratch == "tmpfs" else f"upper layer in {spec.scratch}"
    if host.kernel < (6, 6) and spec.workspace:
        upper += (
            "; before Linux 6.6 no directory of --workspace can be removed or renamed there: use --scratch DIR"
            if spec.scratch == "tmpfs"
            else ", since tmpfs cannot hold it before Linux 6.6"
        )
    say("overlay", upper)
    say("seccomp", f"allow-list {spec.seccomp}")
    if ruleset.handled:
        say("landlock", f"ABI {host.landlock_abi}")
    else:
        say("landlock", "switched off" if host.landlock_abi else "not in this kernel", "none")
    say("no_new_privs", "set, and inherited for ever")
    say("capabilities", "none in any set, securebits locked")
    return out


def _check_host(spec: Spec, host: Host) -> None:
    if host.kernel < (5, 12):
        release = ".".join(map(str, host.kernel))
        raise HostError(f"kernel {release} has no mount_setattr(2)", remedy="use Linux 5.12 or later (6.1 is tested)")
    if spec.subids and host.privileged:
        raise SpecError("subids: root callers have a range of ids anyway; leave it out")
    if spec.subids and spec.scratch != "tmpfs":
        raise SpecError(
            "subids: files of subordinate ids in a scratch directory could not be removed; use scratch=tmpfs"
        )


def _cover_ops(covers: Iterable[Cover], sources: Iterable[Source]) -> list[Op]:
    """Masks over credentials that lie in what is mounted, wherever it was mounted."""
    places = {(source.option, source.path): source.target for source in sources}
    return [
        Op("mask", dst=f"{places[cover.option, cover.source].rstrip('/')}/{cover.relative}", flags=flags)
        for cover in covers
        for flags in (DIRECTORY if cover.directory else 0,)
    ]


def make_plan(
    spec: Spec,
    host: Host,
    controllers: Controllers,
    egress: NetPlan | None = None,
    covers: Iterable[Cover] = (),
) -> Plan:
    """Decide what a sandbox of this kind is made of on this host. Raises HostError for a layer that cannot be had."""
    _check_host(spec, host)
    user, home = _home(spec.uid)
    places: list[str] = []
    caller_ops, sources = _caller_ops(spec, host)
    ops = _root_ops(spec, host, places, [op.dst for op in caller_ops]) + _system_ops(host)
    if spec.root != "host":
        sources.insert(0, Source("root", canonical(spec.root), spec.root, "/"))
    work = str(spec.workspace.target) if spec.workspace else None
    writable = [home, "/tmp", "/var/tmp", "/run", "/dev", "/proc"]
    writable += [op.dst for op in caller_ops if op.dst and not op.flags & READ_ONLY]
    confine = spec.landlock and host.landlock_abi > 0
    # A payload that is its box's root, or has a root file system of its own, may write anywhere in it.
    free = spec.uid == 0 or spec.root != "host"
    rules = landlock.ruleset(host.landlock_abi if confine else 0, ["/", "/dev"] if free else writable)
    limits = plan_limits(spec, controllers, host.processors)
    if limits.cpuset and not limits.cpuset <= host.allowed:
        have = ",".join(map(str, sorted(host.allowed)))
        raise HostError(f"cpuset: {spec.cpuset} is more than this process may use", remedy=f"choose from {have}")
    enforced = _enforced(spec, rules, host) | limits.enforced
    if egress:
        how = f"{egress.path}: nftables in the sandbox's own namespace, {len(spec.allow)} rules"
        enforced["egress"] = {"strength": "kernel", "how": how}
    require(spec, enforced, controllers)
    if any(secret.deliver != "fd" for secret in spec.secrets):
        caller_ops.append(Op("secrets", dst=SECRETS, uid=spec.uid, gid=spec.uid))
    ops += caller_ops + _cover_ops(covers, sources)
    if not host.privileged and not spec.subids:
        # One id is all that exists inside.
        ops = [op._replace(uid=spec.uid, gid=spec.uid) for op in ops]
    return Plan(
        ops=tuple(ops),
        skeleton=SkeletonSpec(
            *(user, home, spec.uid, spec.uid, spec.hostname),
            links=host.links if spec.root == "host" else (),
            places=tuple(places),
            resolv_conf=egress.resolv_conf if egress else "# no network\n",
            base=None if spec.root == "host" else canonical(spec.root),
            shifted=host.privileged,
        ),
        network=spec.net != "host",
        hostname=spec.hostname,
        uid=spec.uid,
        gid=spec.uid,
        cwd=spec.cwd or work or home,
        env=_environment(spec, user, home),
        limits=limits,
        nice=spec.nice,
        ionice=spec.ionice,
        landlock=rules,
        seccomp=spec.seccomp,
        scratch=spec.scratch if spec.scratch == "tmpfs" else canonical(spec.scratch),
        scratch_size=limits.scratch_size,
        scratch_inodes=_inodes(limits.scratch_size),
        staging=host.state,
        privileged=host.privileged,
        enforced=enforced,
        sources=tuple(sources),
    )
