"""Other programs of this host that isolate, each told to isolate as much as it can of what nsbox does by default."""

import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from nsbox.bench.measure import TRUE, spawn

NAMESPACES = ("user", "mount", "pid", "net", "ipc", "uts", "cgroup")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

Argv = list[str]


class Place(NamedTuple):
    """What a peer may need: a directory of its own, and a root tree in it with everything but /usr's content."""

    directory: str
    root: str


class Peer(NamedTuple):
    """``argv`` makes the command line. ``lacks`` tells, in words, what nsbox has by default and this has not."""

    name: str
    program: str
    argv: Callable[[str, Place], Argv]
    lacks: str


def usr_links() -> dict[str, str]:
    """/bin and the like where they are links into /usr."""
    names = ("bin", "sbin", "lib", "lib64")
    return {name: os.readlink(f"/{name}") for name in names if os.path.islink(f"/{name}")}


def usr_trees() -> list[str]:
    """/usr, and those beside it that are directories of their own."""
    names = ("bin", "sbin", "lib", "lib64")
    return ["/usr", *(f"/{name}" for name in names if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}"))]


def _unshare(program: str, _place: Place) -> Argv:
    flags = [f"--{name}" for name in NAMESPACES]
    return [program, "--fork", *flags, "--map-root-user", "--mount-proc", TRUE]


def _bwrap(program: str, _place: Place) -> Argv:
    argv = [program, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    for tree in usr_trees():
        argv += ["--ro-bind", tree, tree]
    for name, target in usr_links().items():
        argv += ["--symlink", target, f"/{name}"]
    return [*argv, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", TRUE]


def _nsjail(program: str, _place: Place) -> Argv:
    argv = [program, "--mode", "o", "--really_quiet", "--user", "1000", "--group", "1000", "--hostname", "nsbox"]
    for tree in usr_trees():
        argv += ["--bindmount_ro", tree]
    for name, target in usr_links().items():
        argv += ["--symlink", f"{target}:/{name}"]
    argv += ["--tmpfsmount", "/tmp", "--tmpfsmount", "/dev", "--bindmount", "/dev/null"]
    return [*argv, "--seccomp_string", "KILL { ptrace, bpf, mount } DEFAULT ALLOW", "--", TRUE]


def _minijail(program: str, place: Place) -> Argv:
    argv = [program, "-U", "-m", "-M", "-v", "-p", "-e", "-l", "-N", "-n", "-P", place.root]
    for tree in usr_trees():
        argv += ["-b", tree]
    return [*argv, "--", TRUE]


def _firejail(program: str, _place: Place) -> Argv:
    keep = ["--noprofile", "--quiet", "--net=none", "--private", "--private-dev", "--private-tmp", "--caps.drop=all"]
    return [program, *keep, "--seccomp", "--nonewprivs", "--noroot", "--ipc-namespace", "--", TRUE]


def _nspawn(program: str, place: Place) -> Argv:
    argv = [program, "--quiet", "--register=no", "--keep-unit", "--directory", place.root, "--private-network"]
    argv += ["--private-users=no", "--pipe", "--as-pid2", "--volatile=no", "--link-journal=no", "--timezone=off"]
    return [*argv, *(f"--bind-ro={tree}" for tree in usr_trees()), TRUE]


def _podman(program: str, place: Place) -> Argv:
    argv = [program, "run", "--rm", "--network=none", "--cgroups=disabled", "--log-driver=none", "--read-only"]
    return [*argv, *(f"--volume={tree}:{tree}:ro" for tree in usr_trees()), "--rootfs", place.root, TRUE]


def oci_config(root: str) -> dict[str, Any]:
    """A bundle's config.json: all namespaces, no capability, a small filter, /usr of the host, read-only."""
    mine = os.geteuid(), os.getegid()
    first = 100_000 if mine[0] == 0 else mine[0]
    size = 65536 if mine[0] == 0 else 1
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=65536k"]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev"]},
    ]
    for tree in usr_trees():
        mounts.append({"destination": tree, "type": "none", "source": tree, "options": ["rbind", "ro"]})
    kinds = [{"type": {"net": "network"}.get(name, name)} for name in NAMESPACES]
    ids = [{"containerID": 0, "hostID": first, "size": size}]
    deny = [{"names": ["ptrace", "bpf", "mount"], "action": "SCMP_ACT_ERRNO"}]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [TRUE],
            "env": ["PATH=/usr/bin:/bin"],
            "cwd": "/",
            "noNewPrivileges": True,
        },
        "root": {"path": root, "readonly": True},
        "hostname": "nsbox",
        "mounts": mounts,
        "linux": {
            "namespaces": kinds,
            "uidMappings": ids,
            "gidMappings": [{**ids[0], "hostID": first if mine[0] == 0 else mine[1]}],
            "maskedPaths": ["/proc/kcore", "/proc/keys"],
            "readonlyPaths": ["/proc/sys"],
            "seccomp": {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": deny},
        },
    }


def _oci(program: str, place: Place, *words: str) -> Argv:
    bundle = os.path.join(place.directory, "bundle")
    os.makedirs(bundle, exist_ok=True)
    with open(os.path.join(bundle, "config.json"), "w", encoding="utf-8") as file:
        json.dump(oci_config(place.root), file)
    name = os.path.basename(place.directory)
    state = os.path.join(place.directory, os.path.basename(program))
    return [program, "--root", state, *words, "run", "--bundle", bundle, f"{name}-{os.path.basename(program)}"]


def _crun(program: str, place: Place) -> Argv:
    return _oci(program, place, "--cgroup-manager=disabled")


def _runsc(program: str, place: Place) -> Argv:
    return _oci(program, place, "--ignore-cgroups", "--network=none")


ALL = (
    Peer("unshare", "unshare", _unshare, "a root of its own, seccomp, landlock, limits; capabilities stay"),
    Peer("bwrap", "bwrap", _bwrap, "overlay, seccomp, landlock, limits"),
    Peer("nsjail", "nsjail", _nsjail, "overlay, landlock; a filter of three calls; rlimits only"),
    Peer("minijail", "minijail0", _minijail, "overlay, seccomp, landlock, limits"),
    Peer("firejail", "firejail", _firejail, "overlay, landlock, limits; the host's root file system stays visible"),
    Peer("crun", "crun", _crun, "overlay, landlock, limits; a filter of three calls"),
    Peer("runc", "runc", _oci, "overlay, landlock, limits; a filter of three calls"),
    Peer("runsc", "runsc", _runsc, "another kind: a kernel of its own in user space"),
    Peer("systemd-nspawn", "systemd-nspawn", _nspawn, "user namespace, overlay, landlock, limits"),
    Peer("podman", "podman", _podman, "landlock, limits"),
)


def make_root(directory: str) -> str:
    """A root tree that holds mount points, links and nothing else."""
    root = os.path.join(directory, "root")
    for name in ("proc", "sys", "dev", "tmp", "run", "etc", "var", "root", *(tree[1:] for tree in usr_trees())):
        os.makedirs(os.path.join(root, name))
    for name, target in usr_links().items():
        os.symlink(target, os.path.join(root, name))
    return root


def _sandlock() -> Callable[[], object]:
    """sandlock is a library; this is its own way to run a program. Raises ImportError."""
    import sandlock  # type: ignore[import-not-found]

    box = sandlock.Sandbox(fs_readable=[*usr_trees(), *(f"/{name}" for name in usr_links())], fs_writable=["/tmp"])

    def run() -> None:
        if not box.run([TRUE]).success:
            raise RuntimeError(f"sandlock: {TRUE} failed")

    return run


def _attempt(argv: Argv, environment: dict[str, str]) -> str:
    """Why it does not work here, in the peer's own last words; "" if it does."""
    try:
        done = subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return "" if done.returncode == 0 else said[-1][:120] if said else f"status {done.returncode}"


class Peers(ExitStack):
    """The peers that work on this host, as subjects to measure; ``skipped`` tells of the others why. Use ``with``."""

    def __init__(self, names: tuple[str, ...] | None = None) -> None:
        super().__init__()
        self.subjects: dict[str, Callable[[], object]] = {}
        self.lacks: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        directory = tempfile.mkdtemp(prefix="nsbox-bench-")
        self.callback(shutil.rmtree, directory, ignore_errors=True)
        os.chmod(directory, 0o755)
        place = Place(directory, make_root(directory))
        for peer in ALL:
            if names is None or peer.name in names:
                self._try(peer, place)
        if names is None or "sandlock" in names:
            self._try_sandlock()

    def _try(self, peer: Peer, place: Place) -> None:
        program = shutil.which(peer.program, path=os.environ.get("PATH", "") + ":" + PATH)
        if program is None:
            self.skipped[peer.name] = "not installed"
            return
        environment = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": place.directory}
        if "XDG_RUNTIME_DIR" in os.environ:
            environment["XDG_RUNTIME_DIR"] = os.environ["XDG_RUNTIME_DIR"]
        argv = peer.argv(program, place)
        why = _attempt(argv, environment)
        if why:
            self.skipped[peer.name] = f"does not run here: {why}"
        else:
            self.subjects[peer.name] = functools.partial(spawn, argv, environment, silent=True)
            self.lacks[peer.name] = peer.lacks

    def _try_sandlock(self) -> None:
        try:
            call = _sandlock()
            call()
        except ImportError:
            self.skipped["sandlock"] = "not installed"
        except Exception as error:  # whatever that library raises
            self.skipped["sandlock"] = f"does not run here: {error}"
        else:
            self.subjects["sandlock"] = call
            self.lacks["sandlock"] = "every namespace, overlay, limits; called as a library, in this process"
