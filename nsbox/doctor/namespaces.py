"""User namespaces and the others, a fresh /proc in them, and ranges of ids."""

import errno
import os
import re
import stat
from typing import NamedTuple

from nsbox.doctor import attempt as a
from nsbox.doctor.attempt import Outcome, attempt
from nsbox.doctor.fact import Fact, as_root, install, number, read, sysctl
from nsbox.doctor.host import container, is_privileged
from nsbox.resources.ids import FIRST, SIZE

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
_CONFIG = {"mount": "NAMESPACES", "user": "USER_NS"}


class Settings(NamedTuple):
    """What may stand in the way of a user namespace."""

    maximum: int | None = None  #: user.max_user_namespaces
    clone: int | None = None  #: kernel.unprivileged_userns_clone, Debian's own
    apparmor: int | None = None  #: kernel.apparmor_restrict_unprivileged_userns, Ubuntu 23.10 and later
    chrooted: bool = False
    container: str = ""
    ordinary: bool = True  #: the caller has no privilege that would help


def limit_of(word: str) -> int | None:
    return number(read(f"/proc/sys/user/max_{word}_namespaces"))


def is_chrooted(mountinfo: str) -> bool:
    """Whether the root directory is no mount point, as after chroot(2); from /proc/self/mountinfo."""
    points = [line.split()[4] for line in mountinfo.splitlines() if len(line.split()) > 4]
    return bool(points) and "/" not in points


def settings() -> Settings:
    kernel = "/proc/sys/kernel/"
    return Settings(
        limit_of("user"),
        number(read(kernel + "unprivileged_userns_clone")),
        number(read(kernel + "apparmor_restrict_unprivileged_userns")),
        is_chrooted(read("/proc/self/mountinfo")),
        container(),
        not is_privileged(),
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
    if code in (errno.ENOSYS, errno.EINVAL):
        return f"{error}: the kernel was built without user namespaces", "boot a kernel that has CONFIG_USER_NS=y"
    if denied and found.clone == 0 and found.ordinary:
        return (
            "kernel.unprivileged_userns_clone is 0: only root may create user namespaces",
            sysctl("kernel.unprivileged_userns_clone", 1),
        )
    if denied and found.chrooted:
        return "in a chroot nobody may create user namespaces", "run nsbox outside the chroot, or enter it by pivot_root"
    if denied and found.apparmor and found.ordinary:
        return (
            f"{error}: AppArmor takes all privileges away from user namespaces that ordinary users create",
            sysctl("kernel.apparmor_restrict_unprivileged_userns", 0),
        )
    if denied and found.container:
        return (
            f"{error}: the {found.container} container around this process forbids it",
            "start the container with: --security-opt seccomp=unconfined --security-opt apparmor=unconfined",
        )
    return f"{error}", "allow user namespaces in the seccomp filter or security policy around this process"


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
        reason = "the kernel was built without it"
        return Fact(name, False, False, reason, f"boot a kernel that has CONFIG_{_CONFIG.get(kind, kind.upper() + '_NS')}=y", needed)
    reason = f"unshare({kind}): {os.strerror(code)}"
    return Fact(name, False, False, reason, "allow it in the seccomp filter or security policy around this process", needed)


def namespaces() -> list[Fact]:
    found = settings()
    outcome = attempt(_user_namespace)
    if not outcome.ok:
        reason, remedy = why_no_user_namespace(outcome.errno, outcome.error, found)
        return [Fact("user_namespaces", False, False, reason, remedy, True)]
    value = True if found.maximum is None else f"up to {found.maximum}"
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
        reason = f"{outcome.error}: {', '.join(over[:4])}{' and others' if len(over) > 4 else ''} are covered"
        remedy = (
            "start the container with: --security-opt systempaths=unconfined (docker), --security-opt unmask=ALL (podman),"
            " procMount: Unmasked (kubernetes)"
        )
        return Fact("fresh_proc", False, False, reason, remedy, True)
    return Fact("fresh_proc", False, False, outcome.error, "mount procfs in full: " + as_root("mount -t proc proc /proc"), True)


def proc() -> list[Fact]:
    if not read("/proc/self/status"):
        remedy = as_root("mount -t proc proc /proc")
        return [Fact("proc", False, False, "/proc is not mounted", remedy, True)]
    over = covered(read("/proc/self/mountinfo"))
    return [
        Fact("proc", True, f"mounted, {len(over)} parts covered" if over else "mounted", needed=True),
        fresh_proc(attempt(_fresh_proc), over),
    ]


# Ranges of ids ----------------------------------------------------------------------------------------------------


def ranges(text: str, names: set[str]) -> list[tuple[int, int]]:
    """(first, count) of the lines of subuid(5) that belong to one of ``names``: a user's name and its uid."""
    found = []
    for line in text.splitlines():
        fields = line.strip().split(":")
        if len(fields) == 3 and fields[0] in names and fields[1].isdigit() and fields[2].isdigit():
            found.append((int(fields[1]), int(fields[2])))
    return found


def next_free(*texts: str) -> int:
    """The first id above all ranges of some subuid(5) files, 100000 at least."""
    ends = [int(m[1]) + int(m[2]) for text in texts for m in re.finditer(r"^[^:#]*:(\d+):(\d+)\s*$", text, re.MULTILINE)]
    return max([100000, *ends])


def _mapped_by_helpers(first: int, first_gid: int) -> None:
    import subprocess

    with a.held_namespace() as pid:
        for tool, own, start in (("newuidmap", os.geteuid(), first), ("newgidmap", os.getegid(), first_gid)):
            command = [tool, str(pid), "0", str(own), "1", "1", str(start), "1000"]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=a.PATIENCE)
            if done.returncode:
                raise OSError(errno.EPERM, "", done.stderr.strip() or tool)


def _mapped_by_root() -> None:
    with a.held_namespace() as pid:
        for name in ("uid_map", "gid_map"):
            a.write(f"/proc/{pid}/{name}", f"0 {FIRST} {SIZE}")


def _privileged_helper(path: str) -> bool:
    """Whether a program is setuid or has file capabilities."""
    try:
        return bool(os.stat(path).st_mode & stat.S_ISUID) or "security.capability" in os.listxattr(path)
    except OSError:
        return False


def id_ranges(uid: int, user: str, subuid: str, subgid: str, paths: list[str | None]) -> Fact | None:
    """What is missing for newuidmap(1) and newgidmap(1), None where all is there to try them."""
    if None in paths:
        return Fact("id_range", False, False, "newuidmap and newgidmap are not installed", install("uidmap"))
    if bare := [path for path in paths if path and not _privileged_helper(path)]:
        reason = f"{bare[0]} is neither setuid root nor has file capabilities"
        return Fact("id_range", False, False, reason, as_root(f"chmod u+s {' '.join(bare)}"))
    names = {user, str(uid)}
    if not ranges(subuid, names) or not ranges(subgid, names):
        first = next_free(subuid, subgid)
        span = f"{first}-{first + SIZE - 1}"
        remedy = as_root(
            f"usermod --add-subuids {span} --add-subgids {span} {user}"
            if user != str(uid)  # usermod(8) wants a user with a name
            else f"echo {uid}:{first}:{SIZE} | tee -a /etc/subuid >> /etc/subgid"
        )
        return Fact("id_range", False, False, f"/etc/subuid and /etc/subgid have no range for {user}", remedy)
    return None


def id_range() -> Fact:
    """Whether a sandbox can have ids of its own, beyond the caller's single one."""
    if is_privileged():
        outcome = attempt(_mapped_by_root)
        if outcome.ok:
            return Fact("id_range", True, f"{FIRST}+{SIZE} and those above", needed=True)
        remedy = "run nsbox in the initial user namespace, with CAP_SETUID and CAP_SETGID"
        return Fact("id_range", False, False, outcome.error, remedy, True)
    import pwd
    import shutil

    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    subuid, subgid = read("/etc/subuid"), read("/etc/subgid")
    missing = id_ranges(uid, user, subuid, subgid, [shutil.which("newuidmap"), shutil.which("newgidmap")])
    if missing:
        return missing
    first, count = ranges(subuid, {user, str(uid)})[0]
    outcome = attempt(lambda: _mapped_by_helpers(first, ranges(subgid, {user, str(uid)})[0][0]))
    if outcome.ok:
        return Fact("id_range", True, f"{first}+{count}")
    remedy = "allow setuid programs here: no nosuid mount of /usr, no no_new_privs around this process"
    return Fact("id_range", False, False, outcome.step or outcome.error, remedy)


def facts() -> list[Fact]:
    """All facts of this module. Where user namespaces fail, what needs them is left out: the first reason is enough."""
    made = namespaces()
    if not made[0].ok:
        return [*made, proc()[0]] if read("/proc/self/status") else [*made, *proc()]
    return [*made, *proc(), id_range()]
