"""The made-up layer of the root: /etc with what programs look for, a home, and places for mounts.

Made once per kind of sandbox under the state directory and shared, read-only, by every sandbox of that kind: it is the
lowest layer of an overlay, nothing is ever written to it. Nothing of the host goes in but what the table below names,
and of that only files that every user of the host may read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time

from nsbox.light import TYPE_CHECKING, contextlib, threading
from nsbox.plan.compose import ABOVE, SkeletonSpec
from nsbox.resources import ofd, owned

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION = 6
MAX_FILE = 4 << 20
MAX_AGE = 86400.0  #: seconds that an unused skeleton is kept
DRAFT = ".draft-"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    **{name: f"/proc/self/fd/{number}" for number, name in enumerate(("stdin", "stdout", "stderr"))},
    "ptmx": "pts/ptmx",
}

# Files and folders of the host's /etc that belong to programs in /usr rather than to the host's administration.
HOST_ETC = (
    *("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone", "protocols", "services"),
    *("mime.types", "magic", "debian_version", "os-release", "inputrc", "bash.bashrc", "terminfo", "fonts", "perl"),
    *("ssl/certs", "ssl/openssl.cnf", "ca-certificates", "ca-certificates.conf", "pki/tls/certs", "pki/tls/cert.pem"),
    *(
        "pki/ca-trust/extracted",
        "crypto-policies",
        "python3",
        "java",
        "ImageMagick-6",
        "vulkan",
        "OpenCL",
        "magic.mime",
    ),
)
#: what is before and behind a number in others of the same kind
HOST_ETC_NUMBERED = (("python3.", ""), ("java-", "-openjdk"), ("ImageMagick-", ""))

_NSSWITCH = "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\nprotocols: files\n"
_HOSTS = "127.0.0.1\tlocalhost {name}\n::1\tlocalhost ip6-localhost ip6-loopback {name}\n"


def _passwd(spec: SkeletonSpec) -> tuple[str, str]:
    users = ["root:x:0:0:root:/root:/bin/sh", "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin"]
    groups = ["root:x:0:", "tty:x:5:", "nogroup:x:65534:"]
    if spec.base is not None:
        users, groups = _lines_of(spec.base, "etc/passwd") or users, _lines_of(spec.base, "etc/group") or groups
    if not any(line.split(":")[2:3] == [str(spec.uid)] for line in users):
        users.append(f"{spec.user}:x:{spec.uid}:{spec.gid}:{spec.user}:{spec.home}:/bin/sh")
    if not any(line.split(":")[2:3] == [str(spec.gid)] for line in groups):
        groups.append(f"{spec.user}:x:{spec.gid}:")
    return "\n".join(users) + "\n", "\n".join(groups) + "\n"


def _lines_of(base: str, name: str) -> list[str]:
    """Lines of a regular file of somebody else's root tree; a link there could lead anywhere, so none is followed."""
    path = base
    for part in name.split("/"):
        path = os.path.join(path, part)
        if os.path.islink(path):
            return []
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return []
        return [line for line in file.read(1 << 20).decode("utf-8", "replace").splitlines() if line.count(":") >= 2]


def _texts(spec: SkeletonSpec) -> dict[str, str]:
    passwd, group = _passwd(spec)
    return {
        "etc/passwd": passwd,
        "etc/group": group,
        "etc/hostname": spec.hostname + "\n",
        "etc/hosts": _HOSTS.format(name=spec.hostname),
        "etc/resolv.conf": spec.resolv_conf,
        "etc/nsswitch.conf": _NSSWITCH,
    }


def _host_entries() -> list[str]:
    try:
        present = sorted(os.listdir("/etc"))
    except OSError:
        present = []
    return [*HOST_ETC, *(name for name in present if _is_numbered(name) and name not in HOST_ETC)]


def _is_numbered(name: str) -> bool:
    numbers = [
        name.removeprefix(begin).removesuffix(end)
        for begin, end in HOST_ETC_NUMBERED
        if name.startswith(begin) and name.endswith(end)
    ]
    return any(number.isascii() and number.isdigit() for number in numbers)


def _digest(spec: SkeletonSpec, texts: dict[str, str], entries: list[str]) -> str:
    """Changes when anything that goes in changes: the host's entries are known by their time of change and size."""
    state = [VERSION, spec, sorted(texts.items()), os.geteuid()]
    for name in entries if spec.base is None else ():
        try:
            status = os.stat(f"/etc/{name}")
            state.append((name, status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            continue
    try:
        from _blake2 import blake2b  # hashlib loads OpenSSL, which takes longer than a launch
    except ImportError:
        from hashlib import blake2b
    return blake2b(repr(state).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _copy(source: str, target: str) -> None:
    """A file, link or folder of /etc, without anything that not every user of the host may read."""
    status = os.lstat(source)
    if stat.S_ISLNK(status.st_mode):
        link = os.readlink(source)
        # A link that stays within /usr or /etc means the same inside; any other is replaced by what it names.
        resolved = os.path.normpath(os.path.join(os.path.dirname(source), link))
        if resolved.startswith(("/usr/", "/etc/")) and source != "/etc/localtime":
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(link, target)
            return
        status = os.stat(source)
    if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o005 == 0o005:
        os.makedirs(target, exist_ok=True)
        for name in os.listdir(source):
            _copy(os.path.join(source, name), os.path.join(target, name))
    elif stat.S_ISREG(status.st_mode) and status.st_mode & 0o004 and status.st_size <= MAX_FILE:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        import shutil

        shutil.copyfile(source, target)
        os.chmod(target, 0o755 if status.st_mode & 0o001 else 0o644)


def _make_dev(at: str) -> None:
    """A /dev without nodes: an empty file for each, to bind the host's over, and the usual links."""
    for name in ("pts", "shm"):
        os.makedirs(os.path.join(at, name))
    for name in DEVICES:
        os.close(os.open(os.path.join(at, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, os.path.join(at, name))


def _make(spec: SkeletonSpec, texts: dict[str, str], entries: list[str], at: str) -> None:
    # None is closed to reading: where this is not idmapped nobody inside owns it, and of a directory that has a layer
    # below it overlayfs reads user.overlay.opaque, which asks for the same permission as its content (xattr(7)).
    modes = {"tmp": 0o1777, "var/tmp": 0o1777, "var/empty": 0o555, "proc": 0o555}
    folders = [
        *modes,
        "run",
        "dev",
        "etc",
        "root",
        spec.home.lstrip("/"),
        *(place.lstrip("/") for place in spec.places),
    ]
    if spec.base is None:
        folders += ["usr", *(place.lstrip("/") for place in ABOVE)]
    for name in folders:
        os.makedirs(os.path.join(at, name), exist_ok=True)
    _make_dev(os.path.join(at, "dev"))
    for link, target in spec.links:
        os.symlink(target, os.path.join(at, link))
    if spec.base is None:
        os.symlink("../run", os.path.join(at, "var/run"))
        for name in entries:
            if os.path.exists(f"/etc/{name}"):
                _copy(f"/etc/{name}", os.path.join(at, "etc", name))
    for name, text in texts.items():
        path = os.path.join(at, name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with open(path, "x", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    _set_modes(at, modes)
    if spec.shifted:
        os.chown(os.path.join(at, spec.home.lstrip("/")), spec.uid, spec.gid)


def _set_modes(at: str, modes: dict[str, int]) -> None:
    """Readable by everyone whatever the umask was; that belongs to the whole process, so it is not changed here."""
    for folder, _, files in os.walk(at):
        os.chmod(folder, 0o755)
        for name in files:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, 0o755 if os.stat(path).st_mode & 0o100 else 0o644)
    for name, mode in modes.items():
        os.chmod(os.path.join(at, name), mode)


class _Users:
    """Who uses which skeleton: a read lock on one byte of a file per skeleton, gone with its process
    (fcntl_locking(2))."""

    def __init__(self, state: str) -> None:
        self.pid = os.getpid()
        self.held: set[str] = set()
        self.file = ofd.open_file(os.path.join(state, "users"))

    def hold(self, path: str) -> bool:
        """Mark a skeleton as used by this process until it ends; False when there is none."""
        if path not in self.held:
            ofd.lock(self.file, fcntl.F_RDLCK, _byte(path), wait=True)
            self.held.add(path)
            with contextlib.suppress(OSError):
                os.utime(path)
        return os.path.isdir(path)


_users: _Users | None = None
_lock = threading.Lock()


def _after_fork() -> None:
    """A forked child shares the open file description, and with it its parent's locks; it takes its own."""
    global _users, _lock
    if _users is not None:
        os.close(_users.file)
    _users, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _byte(path: str) -> int:
    return int(path[-24:][:14], 16)


@contextlib.contextmanager
def _draft(state: str) -> Iterator[str]:
    """The path of a directory of this process, gone with the block, or swept when the process is killed in it."""
    parent = os.open(state, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    fd = -1
    try:
        name, fd = owned.make(parent, DRAFT)
        try:
            yield f"{state}/{name}"
        finally:
            owned.remove(parent, name)
    finally:
        for one in (fd, parent):
            if one >= 0:
                os.close(one)


def collect(state: str, older_than: float = MAX_AGE) -> list[str]:
    """Remove skeletons that nobody uses and nobody used for ``older_than`` seconds, and drafts left by the killed.
    Answers the paths of what was removed."""
    removed = owned.sweep(state, DRAFT, lambda uid: uid == os.geteuid())
    file = ofd.open_file(os.path.join(state, "users"))
    try:
        for name in os.listdir(state):
            path = os.path.join(state, name)
            old = name.startswith("skeleton-") and time.time() - os.lstat(path).st_mtime >= older_than
            if old and ofd.lock(file, fcntl.F_WRLCK, _byte(path)):
                with _draft(state) as draft:
                    os.rename(path, f"{draft}/old")
                removed.append(path)
    except FileNotFoundError:
        pass  # somebody else collects
    finally:
        os.close(file)
    return removed


def ensure(spec: SkeletonSpec, state: str) -> str:
    """The path of the skeleton for ``spec``, made where it is missing and held until this process ends.

    Safe against others making or collecting the same one. Raises OSError when the state directory cannot hold it.
    """
    texts = _texts(spec)
    entries = _host_entries() if spec.base is None else []
    path = os.path.join(state, "skeleton-" + _digest(spec, texts, entries))
    global _users
    with _lock:
        _users = _users or _Users(state)
        if not _users.hold(path):
            collect(state)
            with _draft(state) as draft:
                _make(spec, texts, entries, f"{draft}/new")
                with contextlib.suppress(OSError):  # somebody else was faster
                    os.rename(f"{draft}/new", path)
        if not os.path.isdir(path):
            raise FileNotFoundError(errno.ENOENT, "the skeleton cannot be made", path)
    return path
