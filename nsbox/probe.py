"""What this host and this caller are: asked once per process, then frozen.

Only what a plan needs, and only what costs microseconds; ``nsbox doctor`` is the long form with attempts and remedies.
"""

from __future__ import annotations

import errno
import os

from nsbox.errors import HostError, SandboxUnavailable
from nsbox.light import NamedTuple, functools

_CAP_CHOWN, _CAP_SETGID, _CAP_SETUID, _CAP_SYS_ADMIN = 0, 6, 7, 21
_NEEDED = 1 << _CAP_CHOWN | 1 << _CAP_SETGID | 1 << _CAP_SETUID | 1 << _CAP_SYS_ADMIN


class Host(NamedTuple):
    """Facts of the host as one caller sees it."""

    uid: int  #: effective ids of the caller
    gid: int
    privileged: bool  #: may map ids that are not its own, and mount without a user namespace
    landlock_abi: int  #: 0 where the kernel has no Landlock
    kernel: tuple[int, int]
    links: tuple[tuple[str, str], ...]  #: /bin -> usr/bin and the like, on a host with a merged /usr
    trees: tuple[str, ...]  #: those that are directories of their own
    proc: frozenset[str]  #: entries of /proc that are not processes
    idmap: bool  #: whether the state directory's file system takes idmapped mounts; assumed until a launch says no
    allowed: frozenset[int]  #: processors that the caller may run on
    state: str  #: directory for run-time state, private to the caller

    @property
    def processors(self) -> int:
        """How many processors the caller may run on."""
        return len(self.allowed)


def scarce(error: BaseException) -> HostError | None:
    """What to say where ``error`` means that there are no more descriptors to be had; None where it does not."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    if error.errno == errno.ENFILE:
        remedy = "raise it, as root: sysctl -w fs.file-max=1000000"
        why = f"{os.strerror(error.errno)}: all that this host may have (fs.file-max) are open"
        return HostError(why, remedy=remedy, errno=error.errno)
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = "ulimit -n 1024"
    if 0 <= hard < 1024 and os.geteuid() != 0:
        remedy = "LimitNOFILE=1024 (systemd), --ulimit nofile=1024 (docker, podman), /etc/security/limits.conf"
    return HostError(
        f"{os.strerror(error.errno)}: this process may have {soft} (RLIMIT_NOFILE), and a sandbox needs up to 30",
        remedy=f"close some, or allow more: {remedy}",
        errno=error.errno,
    )


def block_device(path: str) -> str | None:
    """``major:minor`` of the disk that a path's file system is on, as io.max wants it; None where there is none."""
    number = os.stat(path).st_dev
    entry = f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"
    if not os.path.isdir(entry):
        return None
    whole = os.path.dirname(os.path.realpath(entry)) if os.path.exists(f"{entry}/partition") else entry
    try:
        with open(f"{whole}/dev", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def kernel_version(release: str) -> tuple[int, int]:
    """(major, minor) of a release such as ``6.12.3-amd64``."""
    numbers = release.split(".")
    minor = "".join(c for c in (numbers[1] if len(numbers) > 1 else "0") if c.isdigit())
    return int(numbers[0]), int(minor or 0)


def effective_capabilities() -> int:
    """The effective set of this thread as a bit mask, from /proc/self/status (capabilities(7))."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return 0


def whole_range_mapped(uid_map: str) -> bool:
    """Whether ids up to 2**31 exist in the caller's own user namespace, as in the initial one."""
    extents = [line.split() for line in uid_map.splitlines()]
    return any(int(first) == 0 and int(count) >= 1 << 31 for first, _, count in extents)


def is_privileged() -> bool:
    """Whether the caller is root in the sense that matters: it may map foreign ids and mount."""
    if os.geteuid() != 0 or effective_capabilities() & _NEEDED != _NEEDED:
        return False
    with open("/proc/self/uid_map", encoding="ascii") as uid_map:
        return whole_range_mapped(uid_map.read())


def usr_layout() -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """What /bin, /lib and so on are on this host: links into /usr, or trees of their own."""
    links, trees = [], []
    for name in ("bin", "sbin", "lib", "lib64", "lib32", "libx32"):
        path = "/" + name
        if os.path.islink(path):
            links.append((name, os.readlink(path)))
        elif os.path.isdir(path):
            trees.append(path)
    return tuple(links), tuple(trees)


def state_path() -> str:
    """Where run-time state of this caller belongs: /run/nsbox for root, $XDG_RUNTIME_DIR/nsbox for users, else /tmp."""
    uid = os.geteuid()
    # Root of a user namespace of its own has no /run to write to, and is an ordinary user here.
    root = uid == 0 and (
        os.access("/run/nsbox", os.W_OK) or (not os.path.exists("/run/nsbox") and os.access("/run", os.W_OK))
    )
    runtime = os.environ.get("XDG_RUNTIME_DIR", "") or f"/run/user/{uid}"
    if root:
        return "/run/nsbox"
    if os.path.isabs(runtime) and os.access(runtime, os.W_OK):
        return os.path.join(runtime, "nsbox")
    return f"/tmp/nsbox-{uid}"


def state_directory() -> str:
    """``state_path``, made with mode 0700, refused when anybody else owns it."""
    return private_directory(state_path(), "set XDG_RUNTIME_DIR to a directory that you own")


def private_directory(path: str, remedy: str, mode: int = 0o700) -> str:
    """``path``, made with ``mode`` where it is missing; refused when anybody else owns it or has more rights there."""
    uid = os.geteuid()
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        pass
    except OSError as error:
        raise SandboxUnavailable(f"cannot make the directory {path}: {error.strerror}", remedy=remedy) from None
    status = os.lstat(path)
    if status.st_uid != uid or status.st_mode & (0o170077 & ~mode) != 0o040000:
        raise SandboxUnavailable(
            f"{path} is not a directory of mode {mode:04o} that belongs to uid {uid}",
            remedy=f"remove it or run: chmod {mode:o} {path}",
        )
    return os.path.realpath(path)


#: file systems that can hold the upper layer of an overlay that an ordinary user mounts
_UPPER = frozenset(("ext4", "xfs", "btrfs", "f2fs", "bcachefs"))


def _file_system(path: str) -> str:
    """The type of the file system that holds ``path``, as proc_pid_mountinfo(5) names it; "" if that cannot be told."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        with open(f"/proc/self/fdinfo/{fd}") as info, open("/proc/self/mountinfo") as mounts:
            number = next((line.split()[1] for line in info if line.startswith("mnt_id:")), "")
            return next((line.partition(" - ")[2].split()[0] for line in mounts if line.split()[0] == number), "")
    except OSError:
        return ""
    finally:
        os.close(fd)


def disk_directory() -> str | None:
    """A directory on disk for scratch files, where tmpfs will not do; private to the caller. None where /var/tmp cannot
    hold an overlay's upper layer either: in a container it is an overlay itself."""
    if _file_system("/var/tmp") not in _UPPER:
        return None
    # A privileged caller's sandboxes have ids of their own, which must be able to pass through.
    mode = 0o711 if os.geteuid() == 0 else 0o700
    return private_directory(f"/var/tmp/nsbox-{os.geteuid()}", "use --scratch DIR", mode)


_idmap = True


def no_idmap() -> None:
    """A launch has found that the skeleton's file system takes no idmapped mounts (tmpfs: since 6.3): plan without."""
    global _idmap
    _idmap = False
    _host.cache_clear()


@functools.cache
def _host(uid: int, gid: int, pid: int) -> Host:
    from nsbox import _native

    links, trees = usr_layout()
    return Host(
        uid=uid,
        gid=gid,
        privileged=is_privileged(),
        landlock_abi=_native.landlock_abi(),
        kernel=kernel_version(os.uname().release),
        links=links,
        trees=trees,
        proc=frozenset(name for name in os.listdir("/proc") if not name.isdigit()),
        idmap=_idmap,
        allowed=frozenset(os.sched_getaffinity(0)),
        state=state_directory(),
    )


def host() -> Host:
    """The facts for the caller as it is now; a change of uid or a fork asks again."""
    return _host(os.geteuid(), os.getegid(), os.getpid())
