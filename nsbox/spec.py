"""What a caller wants from a sandbox: frozen values, checked when they are made, without looking at the host.

A ``Spec`` says nothing about how; ``nsbox.plan`` turns it into operations for one host. Paths are ``str`` in the file
system encoding with ``surrogateescape``, so that every byte a path can hold survives.
"""

from __future__ import annotations

import os
from _collections_abc import Iterable, Mapping

from nsbox import secrets, units
from nsbox.binds import Bind, Tmpfs, escaped, path_text, target_text
from nsbox.errors import SpecError
from nsbox.frozen import frozen
from nsbox.light import TYPE_CHECKING, functools, re
from nsbox.secrets import Secret
from nsbox.toml import toml

if TYPE_CHECKING:
    from typing import Any

NETWORKS = ("none", "filtered", "host")
NET_PATHS = ("auto", "veth", "gateway")
LAYERS = (
    *("user_ns", "mount_ns", "pid_ns", "net_ns", "ipc_ns", "uts_ns", "cgroup_ns", "pivot_root", "overlay", "seccomp"),
    *("landlock", "no_new_privs", "capabilities", "memory", "cpu", "pids", "disk", "io", "egress"),
)
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@frozen
class Limits:
    """Every limit of a sandbox; None is an explicit ``unlimited``."""

    memory: int | None = 512 << 20  #: bytes, resident, of everything inside together
    cpus: float | None = 1.0  #: processors
    pids: int | None = 128  #: processes and threads
    disk: int | None = 256 << 20  #: bytes of all that is written inside
    files: int | None = 1024  #: open descriptors of one process
    file_size: int | None = None  #: bytes of one file (the disk limit holds anyway)
    timeout: float | None = 30.0  #: seconds of wall clock
    cpu_time: float | None = 30.0  #: seconds of processor time, summed
    output: int | None = 10 << 20  #: bytes kept of each output stream
    io: int | None = None  #: bytes a second, read and written each, of the block devices behind what may be written
    lifetime: float | None = 3600.0  #: seconds that a sandbox which stays (``Sandbox``) may exist
    net_connections: int | None = 512  #: open at once by filtered egress, flows of UDP among them
    net_bytes: int | None = 1 << 30  #: bytes sent by filtered egress, in the sandbox's life
    net_rate: float | None = 1000.0  #: new connections a second of filtered egress; more have to wait


_LIMIT_PARSERS = {
    **dict.fromkeys(("memory", "disk", "file_size", "output", "net_bytes"), units.size),
    **dict.fromkeys(("pids", "files", "net_connections"), units.count),
    **dict.fromkeys(("timeout", "cpu_time", "lifetime"), units.seconds),
    "cpus": units.share,
    "net_rate": units.rate,
    "io": units.size,
}


def _items(name: str, value: object) -> Iterable[object]:
    if isinstance(value, str | bytes | os.PathLike | Bind | Tmpfs | Secret | Mapping):
        return [value]
    if not isinstance(value, Iterable):
        raise SpecError(f"{name}: wants a list, not {value!r}")
    return value


def _is_word(text: str, more: str, most: int) -> bool:
    """Whether it is 1 to ``most`` ASCII letters, digits and what ``more`` names; without ``re``, which has to be
    imported and to compile."""
    rest = text.translate(dict.fromkeys(map(ord, more)))
    return 0 < len(text) <= most and text.isascii() and (not rest or rest.isalnum())


def _environment(value: object) -> dict[str, str]:
    pairs: dict[str, str] = {}
    if not isinstance(value, Mapping):
        raise SpecError(f"env: wants a mapping of names to values, not {value!r}")
    for key, item in value.items():
        if not isinstance(key, str) or not isinstance(item, str):
            raise SpecError(f"env: {key!r}={item!r}: both must be text")
        if not key or "=" in key or "\0" in key or "\0" in item:
            raise SpecError(f"env: {key!r} cannot name a variable (empty, '=' or NUL in it, or NUL in its value)")
        pairs[key] = item
    return pairs


def _layers(name: str, value: object) -> tuple[str, ...]:
    found = tuple(str(item) for item in _items(name, value))
    for item in found:
        layer, _, strength = item.partition("=")
        if layer not in LAYERS or strength not in ("", "kernel", "watched") or (name == "degrade" and strength):
            raise SpecError(f"{name}: {item!r} is not a layer; the layers are {', '.join(LAYERS)}")
    return found


_NOTHING: Mapping[str, str] = {}


@frozen
class Spec:
    """One kind of sandbox. Immutable and reusable: compile once, launch often.

    Made with the names of the command line's options (``Spec(ro=["data"], timeout="10s", memory="1G")``), which
    ``nsbox run --help`` tells: sizes are bytes, times seconds, or texts as there; ``"unlimited"`` is no limit. Raises
    ``SpecError``, a ``ValueError``, that names the option, the reason and the way out.
    """

    seccomp: str = "default"
    root: str = "host"
    ro: tuple[Bind, ...] = ()
    rw: tuple[Bind, ...] = ()
    tmpfs: tuple[Tmpfs, ...] = ()
    workspace: Bind | None = None
    scratch: str = "tmpfs"
    net: str = "none"
    net_path: str = "auto"
    allow: tuple[str, ...] = ()
    allow_host_net: bool = False
    env: Mapping[str, str] = _NOTHING
    cwd: str | None = None
    hostname: str = "nsbox"
    uid: int = 1000
    allow_sensitive: tuple[str, ...] = ()
    secrets: tuple[Secret, ...] = ()
    secret_env: bool = False
    secret_fd: bool = False
    export: str | None = None
    apply: bool = False
    allow_trusted: tuple[str, ...] = ()
    log: str | None = None
    subids: bool = False
    landlock: bool = True
    require: tuple[str, ...] = ()
    degrade: tuple[str, ...] = ()
    memory: Any = 512 << 20
    cpus: Any = 1.0
    pids: Any = 128
    disk: Any = 256 << 20
    files: Any = 1024
    file_size: Any = units.UNLIMITED
    timeout: Any = 30.0
    cpu_time: Any = 30.0
    output: Any = 10 << 20
    lifetime: Any = 3600.0
    net_connections: Any = 512
    net_bytes: Any = 1 << 30
    net_rate: Any = 1000.0
    io: Any = units.UNLIMITED
    nice: int = 0
    ionice: str | None = None
    cpuset: str | None = None
    grace: Any = 0.0

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("ro", "rw"):
            put(self, name, tuple(Bind.parse(name, item) for item in _items(name, getattr(self, name))))
        put(self, "tmpfs", tuple(Tmpfs.parse("tmpfs", item) for item in _items("tmpfs", self.tmpfs)))
        if self.workspace is not None:
            put(self, "workspace", Bind.parse("workspace", self.workspace, "/work"))
        put(self, "env", _environment(self.env))
        for name in ("allow_sensitive", "allow_trusted"):
            put(self, name, tuple(path_text(name, item) for item in _items(name, getattr(self, name))))
        found = secrets.parse_all(_items("secrets", self.secrets), env=self.secret_env, fd=self.secret_fd)
        put(self, "secrets", found)
        for name in ("export", "log"):
            if getattr(self, name) is not None:
                put(self, name, path_text(name, getattr(self, name)))
        put(self, "allow", tuple(str(item) for item in _items("allow", self.allow)))
        if self.allow and self.net == "none":
            put(self, "net", "filtered")
        for name in ("require", "degrade"):
            put(self, name, _layers(name, getattr(self, name)))
        put(self, "root", path_text("root", self.root))
        put(self, "scratch", path_text("scratch", self.scratch))
        if self.cwd is not None:
            put(self, "cwd", "/" if self.cwd == "/" else target_text("cwd", self.cwd))
        for name, parse in _LIMIT_PARSERS.items():
            value = parse(name, getattr(self, name))
            put(self, name, units.UNLIMITED if value is None else value)
        put(self, "grace", 0.0 if self.grace in (0, "0", "0s") else units.seconds("grace", self.grace) or 0.0)
        self._check()
        self._check_priorities()

    def _check(self) -> None:
        if self.net not in NETWORKS:
            raise SpecError(f"net: {self.net!r} is not one of {', '.join(NETWORKS)}")
        if self.workspace is None and (self.export or self.apply):
            raise SpecError(
                f"{'export' if self.export else 'apply'}: there is nothing to take out; give a workspace as well"
            )
        if self.net_path not in NET_PATHS:
            raise SpecError(f"net_path: {self.net_path!r} is not one of {', '.join(NET_PATHS)}")
        if self.allow and self.net == "host":
            raise SpecError("allow: net 'host' lets everything through; use net 'filtered' with rules")
        if self.net == "host" and not self.allow_host_net:
            raise SpecError("net: 'host' gives the sandbox the host's whole network; say allow_host_net as well")
        if not isinstance(self.uid, int) or not 0 <= self.uid < 65534:
            raise SpecError(f"uid: must be a number from 0 to 65533, not {self.uid!r}")
        if not isinstance(self.hostname, str) or not _is_word(self.hostname, "-.", 63) or self.hostname[0] in "-.":
            raise SpecError(
                f"hostname: {self.hostname!r} is not a host name of at most 63 letters, digits, '.' and '-'"
            )
        if not _is_word(str(self.seccomp), "-_", 255) or str(self.seccomp) != str(self.seccomp).lower():
            raise SpecError(f"seccomp: {self.seccomp!r} is not the name of a policy")
        targets = [bind.target or bind.source for bind in (*self.ro, *self.rw)] + [t.target for t in self.tmpfs]
        if self.workspace:
            targets.append(str(self.workspace.target))
        for target in targets:
            if targets.count(target) > 1:
                raise SpecError(f"mounts: {target!r} is the place of more than one mount; give each its own")

    def _check_priorities(self) -> None:
        if not isinstance(self.nice, int) or not 0 <= self.nice <= 19:
            raise SpecError(f"nice: must be a number from 0 to 19, not {self.nice!r}; only root could go below 0")
        if self.ionice is not None and not re.fullmatch(r"idle|best-effort(:[0-7])?", str(self.ionice)):
            raise SpecError(f"ionice: {self.ionice!r} is not idle, best-effort or best-effort:0 to best-effort:7")
        if self.cpuset is not None:
            self.processors()

    def processors(self) -> frozenset[int]:
        """The processors that ``cpuset`` names, as cpuset(7) lists them: ``0-2,5``. Raises SpecError."""
        found: set[int] = set()
        for part in str(self.cpuset or "").split(","):
            first, dash, last = part.strip().partition("-")
            if not first.isdigit() or (dash and not last.isdigit()) or int(last or first) > 8191:
                raise SpecError(f"cpuset: {self.cpuset!r} is not a list of processors such as 0-2,5")
            found |= set(range(int(first), int(last or first) + 1))
        if not found:
            raise SpecError(f"cpuset: {self.cpuset!r} names no processor")
        return frozenset(found)

    @functools.cached_property
    def limits(self) -> Limits:
        """The limits with None for ``unlimited``."""
        values = {name: getattr(self, name) for name in _LIMIT_PARSERS}
        return Limits(**{name: None if value == units.UNLIMITED else value for name, value in values.items()})

    @functools.cached_property
    def _hash(self) -> int:
        values = map(vars(self).__getitem__, _ORDER)
        return hash(tuple(frozenset(v.items()) if isinstance(v, Mapping) else v for v in values))

    def __hash__(self) -> int:
        return self._hash

    def mounts(self) -> tuple[tuple[str, str], ...]:
        """(option, host path) of everything of the host that is shown inside."""
        found = [("root", self.root)] if self.root != "host" else []
        found += [("ro", bind.source) for bind in self.ro] + [("rw", bind.source) for bind in self.rw]
        return (*found, *((("workspace", self.workspace.source),) if self.workspace else ()))

    def host_paths(self) -> tuple[str, ...]:
        """Every host path that the Spec names."""
        paths = [bind.source for bind in (*self.ro, *self.rw, *((self.workspace,) if self.workspace else ()))]
        return (*paths, *(path for path, none in ((self.root, "host"), (self.scratch, "tmpfs")) if path != none))

    def replace(self, **changes: Any) -> Spec:
        """A copy with some fields changed (``changes``), checked anew. Raises SpecError."""
        _known(changes)
        return Spec(**{**{name: vars(self)[name] for name in _ORDER}, **changes})

    def without_values(self) -> Spec:
        """What a cache may keep: the same, less the values of secrets and the functions that make them."""
        if all(secret.value is None and secret.call is None for secret in self.secrets):
            return self
        kept = object.__new__(Spec)
        fields = {name: vars(self)[name] for name in _ORDER}  # not what is cached beside them
        fields["secrets"] = tuple(item._replace(value=None, call=None) for item in self.secrets)
        vars(kept).update(fields)
        return kept

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Spec:
        """A Spec from plain values, as ``to_dict`` or a profile file gives them; unknown keys are refused by name."""
        if "secrets" not in values and all(isinstance(value, str | int | float) for value in values.values()):
            # Most calls have few options, again and again the same; True and 1 are equal but not the same.
            return _plain(tuple((name, type(value), value) for name, value in values.items()))
        _known(values)
        return cls(**values)

    @classmethod
    def from_profile(cls, name: str | os.PathLike[str], **changes: Any) -> Spec:
        """A Spec from the shipped profile ``name``, or the profile file of that path, with some options changed
        (``changes``): lists of mounts and layers, and variables, add up; all else replaces. Raises SpecError."""
        from nsbox import profiles

        return cls.from_dict(profiles.merged(profiles.load(name), changes))

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON and TOML can hold; ``from_dict`` makes an equal Spec of them."""
        out: dict[str, Any] = {}
        for name in FIELDS:
            value = getattr(self, name)
            if name in ("ro", "rw"):
                value = [[bind.source, bind.target] if bind.target else escaped(bind.source) for bind in value]
            elif name == "tmpfs":
                value = [escaped(t.target) + (f":{t.size}" if t.size else "") for t in value]
            elif isinstance(value, Bind):
                value = [value.source, value.target]
            elif name == "secrets":
                value = [secret.written() for secret in value]
            elif isinstance(value, tuple):
                value = list(value)
            elif isinstance(value, Mapping):
                value = dict(value)
            if value is not None:
                out[name] = value
        return out

    def to_toml(self) -> str:
        """The Spec as a profile file."""
        return "".join(f"{key} = {toml(value)}\n" for key, value in sorted(self.to_dict().items()))


@functools.lru_cache(maxsize=64)
def _plain(options: tuple[tuple[str, type, str | int | float], ...]) -> Spec:
    _known(name for name, _, _ in options)
    values: dict[str, Any] = {name: value for name, _, value in options}
    return Spec(**values)


def _known(values: Iterable[str]) -> None:
    unknown = sorted(set(values) - FIELDS)
    if unknown:
        raise SpecError(f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(FIELDS))}")


_ORDER = tuple(Spec.__annotations__)
FIELDS = frozenset(_ORDER)
