"""Overlays, idmapped mounts, and the directories that nsbox writes to."""

import contextlib
import errno
import os
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterator

from nsbox.doctor import attempt as a
from nsbox.doctor.attempt import Outcome, attempt
from nsbox.doctor.fact import Fact, as_root, newer_kernel
from nsbox.doctor.identity import is_privileged
from nsbox.probe import state_path
from nsbox.resources.cgroup_fs import unescape
from nsbox.resources.ids import FIRST, SIZE

_OPEN_TREE_CLONE = 1
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_MOUNT_ATTR_IDMAP = 0x00100000
_LAYERS = "lowerdir=lower,upperdir=upper,workdir=work"


def file_system_of(path: str, mountinfo: str) -> str:
    """The type of the file system that a path (absolute, without symlinks) is on, by /proc/self/mountinfo."""
    best, kind = "", "unknown"
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = unescape(fields[4])
        # Later lines are mounted on top of earlier ones.
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind


def _kind(path: str) -> str:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return file_system_of(os.path.realpath(path), file.read())


def _layers() -> None:
    for name in ("lower", "lower/d", "upper", "work", "merged"):
        os.mkdir(name)


def _use_overlay() -> bool:
    """Write, remove and replace in ./merged; whether a replaced directory stays empty of the lower one's files."""
    with open("merged/d/new", "w") as file:
        file.write("x")
    os.unlink("merged/d/new")
    try:
        # Needs an "opaque" mark on the new directory, which is an extended attribute of the upper one.
        os.rmdir("merged/d")
        os.mkdir("merged/d")
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EOPNOTSUPP):
            raise
        return False
    return True


def _overlay_in(directory: str | None) -> bool:
    """An overlay made in a user namespace over ``directory``, or over a tmpfs of its own."""
    a.enter_user_namespace(a.CLONE_NEWNS, "CLONE_NEWNS")
    if directory is None:
        directory = tempfile.gettempdir()
        a.mount("none", directory, "tmpfs", a.MS_NOSUID | a.MS_NODEV)
    os.chdir(directory)
    _layers()
    a.mount("overlay", "merged", "overlay", a.MS_NOSUID | a.MS_NODEV, _LAYERS + ",userxattr")
    return _use_overlay()


def _tmpfs_xattr() -> None:
    a.enter_user_namespace(a.CLONE_NEWNS, "CLONE_NEWNS")
    directory = tempfile.gettempdir()
    a.mount("none", directory, "tmpfs", a.MS_NOSUID | a.MS_NODEV)
    os.setxattr(directory, "user.nsbox", b"x")


def overlay(outcome: Outcome) -> Fact:
    if outcome.ok:
        return Fact("overlay", True, True)
    if outcome.errno == errno.ENODEV:
        return Fact("overlay", False, False, "the kernel has no overlayfs", as_root("modprobe overlay"))
    reason = f"{outcome.error}: overlays cannot be mounted in a user namespace (Linux 5.11 and later can)"
    return Fact("overlay", False, False, reason, newer_kernel())


def tmpfs_xattr(outcome: Outcome, replaces: bool) -> Fact:
    if outcome.ok and replaces:
        return Fact("tmpfs_user_xattr", True, True)
    reason = (
        "tmpfs takes no user.* attributes (it does from 6.6 on, with CONFIG_TMPFS_XATTR=y):"
        " inside, a directory of a lower layer that was removed cannot be made again"
    )
    return Fact("tmpfs_user_xattr", False, False, reason, newer_kernel())


def scratch(path: str, kind: str, outcome: Outcome) -> Fact:
    """Whether the temporary directory can hold the upper layer of an overlay."""
    value = f"{path} ({kind})"
    if outcome.ok and outcome.value:
        return Fact("scratch_directory", True, value)
    remedy = "point TMPDIR to a directory on ext4, xfs, btrfs or tmpfs: TMPDIR=/dev/shm nsbox ..."
    if kind == "overlay":
        reason = "it is on overlayfs itself, which cannot carry a further upper layer (as in most containers)"
        return Fact("scratch_directory", False, value, reason, remedy + "; in a container: mount a volume there")
    reason = outcome.error if not outcome.ok else f"{kind} stores no user.* attributes for overlays"
    return Fact("scratch_directory", False, value, f"it cannot carry the upper layer of an overlay: {reason}", remedy)


@contextlib.contextmanager
def _temporary() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="nsbox-doctor-")
    try:
        yield path
    finally:
        inner = os.path.join(path, "work", "work")  # overlayfs makes it, with no permissions at all
        if os.path.isdir(inner):
            os.chmod(inner, 0o700)
        shutil.rmtree(path, ignore_errors=True)


def overlays() -> list[Fact]:
    on_tmpfs = attempt(lambda: _overlay_in(None))
    found = [overlay(on_tmpfs), tmpfs_xattr(attempt(_tmpfs_xattr), bool(on_tmpfs.value))]
    temporary = os.path.realpath(tempfile.gettempdir())
    try:
        with _temporary() as directory:
            found.append(scratch(temporary, _kind(directory), attempt(lambda: _overlay_in(directory))))
    except OSError as error:
        reason = f"nothing can be made there: {error.strerror}"
        remedy = "point TMPDIR to a directory that you may write to"
        found.append(Fact("scratch_directory", False, temporary, reason, remedy))
    return found


# Idmapped mounts --------------------------------------------------------------------------------------------------


def _idmapped(path: str, namespace: int) -> int:
    """A detached mount of a path, with root's files shown as those of the sandbox range."""
    tree = a.syscall(
        f"open_tree of {path}", a.OPEN_TREE, _AT_FDCWD, os.fsencode(path), _OPEN_TREE_CLONE | os.O_CLOEXEC
    )  # fmt: skip
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_IDMAP, 0, 0, namespace)
    a.syscall(f"mount_setattr of {path}", a.MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attributes, len(attributes))
    return tree


def _private_tmpfs(path: str) -> None:
    a.mount("none", path, "tmpfs", a.MS_NOSUID | a.MS_NODEV)
    os.chdir(path)


def _idmap_all(paths: list[str]) -> dict[str, int]:
    """Error numbers of mapping each path, a tmpfs ("tmpfs"), and an overlay over a mapped layer ("layers")."""
    found: dict[str, int] = {}
    a.unshare(a.CLONE_NEWNS, "CLONE_NEWNS")
    a.mount("none", "/", None, a.MS_REC | a.MS_PRIVATE)
    with a.held_namespace() as pid:
        for name in ("uid_map", "gid_map"):
            a.write(f"/proc/{pid}/{name}", f"0 {FIRST} {SIZE}")
        namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        lower = None
        for path in paths:
            try:
                tree = _idmapped(path, namespace)
                lower = tree if lower is None else lower
                found[path] = 0
            except OSError as error:
                found[path] = error.errno or errno.EIO
        _private_tmpfs(tempfile.gettempdir())
        try:
            os.close(_idmapped(".", namespace))
            found["tmpfs"] = 0
        except OSError as error:
            found["tmpfs"] = error.errno or errno.EIO
        found["layers"] = errno.EINVAL if lower is None else _overlay_over(lower)
    return found


def _overlay_over(tree: int) -> int:
    _layers()
    try:
        a.syscall("move_mount", a.MOVE_MOUNT, tree, b"", _AT_FDCWD, b"lower", _MOVE_MOUNT_F_EMPTY_PATH)
        a.mount("overlay", "merged", "overlay", 0, _LAYERS)
        return 0
    except OSError as error:
        return error.errno or errno.EIO


def idmapped(paths: dict[str, str], outcome: Outcome) -> list[Fact]:
    """Facts about idmapped mounts; ``paths`` gives the file system type of each path that was tried."""
    codes = outcome.value if outcome.ok else {}
    refused = {path: kind for path, kind in paths.items() if codes.get(path, outcome.errno)}
    value = ", ".join(f"{path} ({kind}) {'no' if path in refused else 'yes'}" for path, kind in paths.items())
    if refused:
        kinds = ", ".join(sorted(set(refused.values())))
        reason = (
            f"{kinds} cannot be idmapped by this kernel"
            if outcome.ok
            else f"{outcome.error}: no mount could be idmapped"
        )
        main = Fact("idmapped_mounts", False, value, reason + ": what is mounted from there keeps the host's owners",
                    "keep shared directories on ext4, xfs or btrfs, or use a newer kernel")  # fmt: skip
    else:
        main = Fact("idmapped_mounts", True, value)
    found = [main]
    for name, key, since in (("idmapped_tmpfs", "tmpfs", "6.3"), ("idmapped_overlay_layers", "layers", "5.19")):
        code = codes.get(key, outcome.errno)
        reason = f"{os.strerror(code)}: Linux {since} and later can" if code else ""
        found.append(Fact(name, not code, not code, reason, newer_kernel() if code else ""))
    return found


def idmaps() -> list[Fact]:
    if not is_privileged():
        value = "not needed: an ordinary user's sandbox has the user's own id"
        return [Fact(name, True, value) for name in ("idmapped_mounts", "idmapped_tmpfs", "idmapped_overlay_layers")]
    paths = {path: _kind(path) for path in dict.fromkeys(("/usr", os.path.realpath(tempfile.gettempdir())))}
    return idmapped(paths, attempt(lambda: _idmap_all(list(paths))))


# Directories of nsbox ---------------------------------------------------------------------------------------------


def cache_path(home: str, cache: str) -> str:
    """Where compiled filters are kept; relative values of XDG_CACHE_HOME do not count."""
    return os.path.join(cache if os.path.isabs(cache) else os.path.join(home, ".cache"), "nsbox")


def why_unusable(path: str, uid: int) -> tuple[str, str]:
    """Reason and remedy where a directory cannot be used or made as one private to the caller, else ("", "")."""
    parent = path
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    status = os.lstat(parent)
    if parent == path:
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid:
            return f"it is not a directory of uid {uid}", as_root(f"rm -rf {path}")
        if status.st_mode & 0o077:
            return f"others may enter it (mode {stat.S_IMODE(status.st_mode):o})", f"chmod 700 {path}"
    try:
        os.rmdir(tempfile.mkdtemp(prefix="nsbox-doctor-", dir=parent))
    except OSError as error:
        return f"nothing can be made in {parent}: {error.strerror}", ""
    return "", ""


def directories() -> list[Fact]:
    uid = os.geteuid()
    path = state_path()
    reason, remedy = why_unusable(path, uid)
    remedy = remedy or "export XDG_RUNTIME_DIR=DIRECTORY, one of mode 0700 that you own (systemd makes /run/user/UID)"
    state = Fact("state_directory", not reason, path, reason, remedy if reason else "", True)
    path = cache_path(os.path.expanduser("~"), os.environ.get("XDG_CACHE_HOME", ""))
    reason, remedy = why_unusable(path, uid)
    if reason:
        reason += "; filters are compiled anew in each process, which takes tens of milliseconds"
        remedy = remedy or "export XDG_CACHE_HOME=DIRECTORY, one that you may write to"
    return [state, Fact("cache_directory", not reason, path, reason, remedy)]


def facts(user_namespaces: bool) -> list[Fact]:
    """All facts of this module; those about mounts only where there are user namespaces to mount in."""
    return [*(overlays() if user_namespaces else []), *(idmaps() if user_namespaces else []), *directories()]
