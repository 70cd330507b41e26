"""User namespaces and the others, and a fresh /proc in them."""

import errno
import os
from typing import NamedTuple

from nsbox.doctor import attempt as a
from nsbox.doctor.attempt import Outcome, attempt
from nsbox.doctor.fact import Fact, as_root, number, read, sysctl
from nsbox.doctor.identity import is_privileged
from nsbox.doctor.surroundings import container

#: Kind, flag, the word in user.max_*_namespaces, whether a sandbox needs it.
KINDS = (
    ("mount", a.CLONE_NEWNS, "mnt", True),
    ("pid", a.CLONE_NEWPID, "pid", True),
    ("net", a.CLONE_NEWNET, "net", True),
    ("ipc", a.CLONE_NEWIPC, "ipc", True),
    ("uts", a.CLONE_NEWUTS, "uts", True),
    ("cgroup", a.CLONE_NEWCGROUP, "cgroup", True),
    ("time", a.CLONE_NEWTIME, "time", False),
)
_USUAL_LIMIT = 16384
_UNCONFINED = "start the container with: --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
_CONFIG = {"mount": "NAMESPACES", "cgroup": "CGROUPS"}


class Settings(NamedTuple):
    """What may stand in the way of a user namespace."""

    maximum: int | None = None  #: user.max_user_namespaces
    clone: int | None = None  #: kernel.unprivileged_userns_clone, Debian's own
    apparmor: int | None = None  #: kernel.apparmor_restrict_unprivileged_userns, Ubuntu 23.10 and later
    chrooted: bool = False
    container: str = ""
    ordinary: bool = True  #: the caller has no privilege that would help
    filtered: bool = False  #: a seccomp filter is on this process


def limit_of(word: str) -> int | None:
    return number(read(f"/proc/sys/user/max_{word}_namespaces"))


def is_chrooted(mountinfo: str) -> bool:
    """Whether the root directory is no mount point, as after chroot(2); from /proc/self/mountinfo."""
    points = [line.split()[4] for line in mountinfo.splitlines() if len(line.split()) > 4]
    return bool(points) and "/" not in points


def _mount_id(path: str) -> str:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    text = read(f"/proc/self/fdinfo/{descriptor}")
    os.close(descriptor)
    return next((line for line in text.splitlines() if line.startswith("mnt_id:")), "")


def _root_moves() -> bool:
    """setns(2) to one's own mount namespace goes to the root of it: another one than a chroot's."""
    before = _mount_id("/")
    own = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    a.checked(a.libc().setns(own, a.CLONE_NEWNS), "setns")
    return _mount_id("/") != before


def settings(*, fork: bool = True) -> Settings:
    """Read them all. Without ``fork``, a chroot to a mount point goes unnoticed."""
    kernel = "/proc/sys/kernel/"
    return Settings(
        limit_of("user"),
        number(read(kernel + "unprivileged_userns_clone")),
        number(read(kernel + "apparmor_restrict_unprivileged_userns")),
        is_chrooted(read("/proc/self/mountinfo")) or (fork and bool(attempt(_root_moves).value)),
        container(),
        not is_privileged(),
        "\nSeccomp:\t2" in read("/proc/self/status"),
    )


def why_no_user_namespace(code: int, error: str, found: Settings) -> tuple[str, str]:
    """Reason and remedy for an attempt that ended with ``code`` at a step described by ``error``."""
    denied = code in (errno.EPERM, errno.EACCES)
    if found.maximum == 0:
        return "user.max_user_namespaces is 0", sysctl("user.max_user_namespaces", _USUAL_LIMIT)
    if code in (errno.ENOSPC, errno.EUSERS):
        return (
            f"{error}: all user.max_user_namespaces = {found.maximum} are in use, or 32 are nested here",
            sysctl("user.max_user_namespaces", max(2 * (found.maximum or 0), _USUAL_LIMIT)),
        )
    if code in (errno.ENOSYS, errno.EINVAL) and not found.filtered:
        return f"{error}: the kernel was built without user namespaces", "boot a kernel that has CONFIG_USER_NS=y"
    if denied and found.clone == 0 and found.ordinary:
        return (
            "kernel.unprivileged_userns_clone is 0: only root may create user namespaces",
            sysctl("kernel.unprivileged_userns_clone", 1),
        )
    if denied and found.chrooted:
        return "in a chroot nobody may create user namespaces", "run nsbox outside the chroot"
    if denied and found.apparmor and found.ordinary:
        return (
            f"{error}: AppArmor takes all privileges away from user namespaces that ordinary users create",
            sysctl("kernel.apparmor_restrict_unprivileged_userns", 0),
        )
    if found.filtered:
        whose = f"the {found.container} container's" if found.container else "a container's"
        reason = f"{error}: a seccomp filter around this process forbids it, {whose} or a systemd service's"
        return reason, f"{_UNCONFINED}; a service with: RestrictNamespaces=no"
    # user_namespaces(7): a chroot stops root too. One to a mount point shows only when root tries (see settings).
    whose = f"of the {found.container} container around this process" if found.container else "around this process"
    remedy = _UNCONFINED if found.container else "allow them in the security policy"
    return f"{error}: a security policy {whose} forbids it, or a chroot", f"{remedy}; or run nsbox outside the chroot"


def _user_namespace() -> None:
    a.enter_user_namespace(a.CLONE_NEWNS, "CLONE_NEWNS")
    # A namespace that AppArmor has stripped can be created and even mapped; what fails is the first use of its powers.
    a.mount("none", "/tmp" if os.path.isdir("/tmp") else "/", "tmpfs", a.MS_NOSUID | a.MS_NODEV)


def _all_kinds() -> dict[str, int]:
    """Error number by kind, 0 where it could be unshared."""
    a.enter_user_namespace()
    found = {}
    for kind, flag, _, _ in KINDS:
        try:
            a.unshare(flag, kind)
            found[kind] = 0
        except OSError as error:
            found[kind] = error.errno or errno.EIO
    return found


def namespace(kind: str, word: str, needed: bool, code: int, maximum: int | None) -> Fact:
    """The fact for one kind from the outcome of unsharing it inside a user namespace."""
    name = f"{kind}_namespace"
    if not code:
        return Fact(name, True, True if maximum is None else f"up to {maximum}", needed=needed)
    setting = f"user.max_{word}_namespaces"
    if maximum == 0 or code == errno.ENOSPC:
        return Fact(name, False, False, f"{setting} is {maximum}", sysctl(setting, _USUAL_LIMIT), needed)
    if code in (errno.EINVAL, errno.ENOSYS):
        remedy = f"boot a kernel that has CONFIG_{_CONFIG.get(kind, kind.upper() + '_NS')}=y"
        return Fact(name, False, False, "the kernel was built without it", remedy, needed)
    reason = f"unshare({kind}): {os.strerror(code)}"
    remedy = "allow it in the seccomp filter or security policy around this process"
    return Fact(name, False, False, reason, remedy, needed)


def namespaces() -> list[Fact]:
    outcome = attempt(_user_namespace)
    if not outcome.ok:
        reason, remedy = why_no_user_namespace(outcome.errno, outcome.error, settings())
        return [Fact("user_namespaces", False, False, reason, remedy, True)]
    maximum = limit_of("user")
    value = True if maximum is None else f"up to {maximum}"
    kinds = attempt(_all_kinds)
    codes = kinds.value if kinds.ok else {}
    return [
        Fact("user_namespaces", True, value, needed=True),
        *(
            namespace(kind, word, needed, codes.get(kind, kinds.errno), limit_of(word))
            for kind, _, word, needed in KINDS
        ),
    ]


# /proc ------------------------------------------------------------------------------------------------------------


def covered(mountinfo: str) -> list[str]:
    """What is mounted over parts of /proc, from /proc/self/mountinfo. binfmt_misc and its automount hide nothing."""
    points = [line.split()[4] for line in mountinfo.splitlines() if len(line.split()) > 4]
    return sorted({point for point in points if point.startswith("/proc/") and point != "/proc/sys/fs/binfmt_misc"})


def _fresh_proc() -> None:
    a.enter_user_namespace(a.CLONE_NEWNS | a.CLONE_NEWPID, "CLONE_NEWNS|CLONE_NEWPID")
    pid = os.fork()  # the new pid namespace begins with the next child
    if pid == 0:
        code = errno.EIO
        try:
            a.mount("proc", "/proc", "proc", a.MS_NOSUID | a.MS_NODEV | a.MS_NOEXEC)
            code = 0 if os.readlink("/proc/self") == "1" else errno.EIO
        except OSError as error:
            code = error.errno or errno.EIO
        finally:
            os._exit(code)
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise OSError(abs(code), os.strerror(abs(code)), "mount of proc")


def fresh_proc(outcome: Outcome, over: list[str]) -> Fact:
    """mount_namespaces(7): a new procfs may show no more than one that is fully visible already."""
    if outcome.ok:
        return Fact("fresh_proc", True, True, needed=True)
    if outcome.errno in (errno.EPERM, errno.EACCES) and over:
        hidden = ", ".join(over[:4]) + (" and more" if len(over) > 4 else "")
        reason = f"{outcome.error}, because something is mounted over {hidden}"
        remedy = (
            "start the container with: --security-opt systempaths=unconfined (docker),"
            " --security-opt unmask=ALL (podman), procMount: Unmasked (kubernetes); a systemd service without"
            " ProtectKernelTunables=, ProtectKernelLogs= and the like"
        )
        return Fact("fresh_proc", False, False, reason, remedy, True)
    remedy = "mount procfs in full: " + as_root("mount -t proc proc /proc")
    return Fact("fresh_proc", False, False, outcome.error, remedy, True)


def proc() -> list[Fact]:
    if not read("/proc/self/status"):
        remedy = as_root("mount -t proc proc /proc")
        return [Fact("proc", False, False, "/proc is not mounted", remedy, True)]
    over = covered(read("/proc/self/mountinfo"))
    mounted = Fact("proc", True, f"mounted, {len(over)} of its entries covered" if over else "mounted", needed=True)
    return [mounted, fresh_proc(attempt(_fresh_proc), over)]


def facts() -> list[Fact]:
    """All facts of this module. Where user namespaces fail, what needs them is left out: the first reason is enough."""
    first, *others = proc()
    if not first.ok:
        return [first, Fact("user_namespaces", False, "unknown", first.reason, first.remedy, True)]
    made = namespaces()
    return [first, *made, *(others if made[0].ok else [])]
