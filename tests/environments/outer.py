"""outer.py STEP... -- COMMAND...: runs a command where people really run it: in a container, a chroot, a service.

Each STEP makes the surroundings of this process a little more like such a place, in the order in which they are named;
then the command is executed. Everything is made in namespaces of this process and is gone with it. Nothing but the
kernel is asked, so that it works without any container engine; the settings are those of Docker, Podman and systemd.
"""

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nsbox.doctor import attempt as a

MS_RDONLY, MS_REMOUNT, MNT_DETACH = 1, 32, 2
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
#: proc(5): what Docker and Podman cover, and what they make read-only
MASKED = ("acpi", "asound", "interrupts", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list")
READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")
#: capabilities(7): Docker's default set
DOCKER_CAPABILITIES = frozenset((0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31))
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
WORK = "/workspace"  #: in an image: a directory of the container's own root


def bind(source: str, target: str, *, recursive: bool = True) -> None:
    a.mount(source, target, None, a.MS_BIND | (a.MS_REC if recursive else 0))


def read_only(target: str) -> None:
    """A mount point that is read-only; what else is set there stays, for nobody may clear it in a user namespace."""
    if target != "/":  # where this process would stay beneath what is mounted
        bind(target, target)
    kept = os.statvfs(target).f_flag & (a.MS_NOSUID | a.MS_NODEV | a.MS_NOEXEC)
    a.mount("none", target, None, a.MS_BIND | MS_REMOUNT | MS_RDONLY | kept)


def unmount(target: str, *, locked: bool = False) -> None:
    """``locked``: it may be of a more privileged mount namespace, and stays then."""
    if locked and os.geteuid() != 0:
        return
    a.checked(a.libc().umount2(os.fsencode(target), MNT_DETACH), f"umount of {target}")


# Namespaces


def user() -> None:
    """A user namespace in which this user, alone, is root: rootless Podman without subordinate ids."""
    a.enter_user_namespace(a.CLONE_NEWNS, "CLONE_NEWNS")


def ordinary() -> None:
    """A user namespace in which this user stays that ordinary user, and can make all of this nevertheless."""
    uid, gid = os.geteuid(), os.getegid()
    a.unshare(a.CLONE_NEWUSER, "CLONE_NEWUSER")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        a.write(f"/proc/self/{name}", text)
    mounts()


def mounts() -> None:
    """A mount namespace."""
    a.unshare(a.CLONE_NEWNS, "CLONE_NEWNS")
    a.mount("none", "/", None, a.MS_REC | a.MS_PRIVATE)


def rest() -> None:
    """The other namespaces of a container, but for cgroups, of which it sees the host's."""
    a.unshare(a.CLONE_NEWIPC | a.CLONE_NEWUTS | a.CLONE_NEWNET, "a container's")
    socket.sethostname("container")


def pids() -> None:
    """A pid namespace: from here on this is its pid 1, with a /proc to match."""
    a.unshare(a.CLONE_NEWPID, "CLONE_NEWPID")
    child = os.fork()
    if child:
        with contextlib.suppress(OSError):
            for fd in range(3):
                os.close(fd)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    a.libc().prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    a.mount("proc", "/proc", "proc", a.MS_NOSUID | a.MS_NODEV | a.MS_NOEXEC)


# File systems


def _children(path: str) -> Iterator[str]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [line.split()[4] for line in file]
    yield from (point for point in points if point.startswith(path.rstrip("/") + "/"))


def _furnish(root: Path) -> None:
    """The names in this host's root, as links or with what is there bound over them; /run is the container's own."""
    for entry in sorted(os.scandir("/"), key=lambda entry: entry.name):
        inside = root / entry.name
        if entry.is_symlink():
            inside.symlink_to(os.readlink(entry.path))
        elif entry.is_dir():
            inside.mkdir(exist_ok=True)
            if entry.name not in ("run", "workspace"):
                bind(entry.path, str(inside))


def _own_usr(root: Path, layers: Path) -> None:
    """/usr, too, is on the container's overlay, where nothing is mounted in it."""
    if any(_children("/usr")):
        return
    for name in ("upper-usr", "work-usr"):
        (layers / name).mkdir()
    options = f"lowerdir=/usr,upperdir={layers}/upper-usr,workdir={layers}/work-usr,userxattr"
    unmount(str(root / "usr"))
    a.mount("overlay", str(root / "usr"), "overlay", 0, options)


def image() -> None:
    """A root on overlayfs, as container engines make it."""
    layers = Path("/mnt" if os.path.isdir("/mnt") else "/media")
    a.mount("tmpfs", str(layers), "tmpfs", 0, "mode=755")
    root = layers / "root"
    for name in ("lower", "upper", "work", "root"):
        (layers / name).mkdir()
    options = f"lowerdir={layers}/lower,upperdir={layers}/upper,workdir={layers}/work,userxattr"
    a.mount("overlay", str(root), "overlay", 0, options)
    _furnish(root)
    _own_usr(root, layers)
    for name in ("run/home", WORK.lstrip("/")):
        (root / name).mkdir(parents=True, exist_ok=True)
    os.chdir(root)
    a.syscall("pivot_root", _number("pivot_root"), b".", b".")
    unmount(".")
    os.chdir("/")
    os.environ.update(HOME="/run/home", XDG_RUNTIME_DIR="", TMPDIR=WORK)


def _number(call: str) -> int:
    import pyseccomp

    return int(pyseccomp.resolve_syscall(pyseccomp.system_arch(), call))


def volume() -> None:
    """A volume at /workspace, on a file system of its own."""
    a.mount("tmpfs", WORK, "tmpfs", a.MS_NOSUID | a.MS_NODEV, "mode=755")


def dev() -> None:
    """A small /dev with the usual nodes, a terminal file system, and /dev/shm."""
    stage = tempfile.mkdtemp(dir="/run")
    a.mount("tmpfs", stage, "tmpfs", a.MS_NOSUID, "mode=755")
    for name in DEVICES:
        Path(stage, name).touch()
        bind(f"/dev/{name}", f"{stage}/{name}", recursive=False)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("ptmx", "pts/ptmx")):
        os.symlink(target, f"{stage}/{name}")
    for name, kind, options in (("pts", "devpts", "newinstance,ptmxmode=0666,mode=620"), ("shm", "tmpfs", "mode=1777")):
        os.mkdir(f"{stage}/{name}")
        a.mount(kind, f"{stage}/{name}", kind, a.MS_NOSUID | a.MS_NOEXEC, options)
    bind(stage, "/dev")
    unmount(stage)
    os.rmdir(stage)


def no_shm() -> None:
    """A /dev without /dev/shm."""
    if os.path.ismount("/dev/shm"):
        unmount("/dev/shm", locked=True)
    if os.path.isdir("/dev/shm"):
        a.mount("tmpfs", "/dev/shm", "tmpfs", MS_RDONLY, "mode=0")
    assert not os.access("/dev/shm", os.W_OK), "the control: there must be no /dev/shm"


def masked_proc() -> None:
    """/proc as container engines show it."""
    for name in MASKED:
        path = f"/proc/{name}"
        if os.path.isdir(path):
            a.mount("tmpfs", path, "tmpfs", MS_RDONLY)
        elif os.path.exists(path):
            bind("/dev/null", path, recursive=False)
    for name in READ_ONLY:
        if os.path.exists(f"/proc/{name}"):
            read_only(f"/proc/{name}")


def read_only_cgroup() -> None:
    """/sys/fs/cgroup is there, and nobody can make a group in it."""
    for point in ["/sys/fs/cgroup", *_children("/sys/fs/cgroup")]:
        read_only(point)


def no_cgroup() -> None:
    """No control groups are mounted."""
    for point in sorted(_children("/sys/fs/cgroup"), reverse=True):
        unmount(point, locked=True)
    a.mount("tmpfs", "/sys/fs/cgroup", "tmpfs", MS_RDONLY)


def chroot() -> None:
    """The same files, but the root of this process is not the root of its mount namespace."""
    stage = "/mnt" if os.path.isdir("/mnt") else "/media"
    bind("/", stage)
    os.chroot(stage)
    os.chdir("/")


def protected() -> None:
    """systemd's ProtectSystem=strict, ProtectHome=read-only, PrivateTmp, ProtectControlGroups, and a RuntimeDirectory,
    which stands where the temporary directory was."""
    own = tempfile.gettempdir()
    for point in ["/", *_children("/")]:
        if not point.startswith(("/dev", "/proc", "/sys")):
            read_only(point)
    read_only_cgroup()
    a.mount("tmpfs", own, "tmpfs", a.MS_NOSUID | a.MS_NODEV, "mode=700")
    if not _in_tmp():
        a.mount("tmpfs", "/tmp", "tmpfs", a.MS_NOSUID | a.MS_NODEV, "mode=1777")
        os.environ["TMPDIR"] = "/tmp"
    os.environ.update(XDG_RUNTIME_DIR=f"{own}/run", HOME="/nonexistent")
    os.mkdir(f"{own}/run", 0o700)


def tunables() -> None:
    """systemd's ProtectKernelTunables."""
    for path in filter(os.path.exists, ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/sys")):
        read_only(path)


def _in_tmp() -> bool:
    """Whether a private /tmp would hide the interpreter, the checkout or the runtime directory."""
    paths = (sys.executable, sys.prefix, __file__, tempfile.gettempdir())
    return any(path.startswith("/tmp/") for path in paths)


# Rights


class _Head(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def _drop(keep: frozenset[int]) -> None:
    """capset(2): no capabilities but these, now and after an exec."""
    for number in range(64):
        if number not in keep:
            a.libc().prctl(PR_CAPBSET_DROP, number)
    low = sum(1 << number for number in keep)
    sets = (ctypes.c_uint32 * 6)(low, low, 0, 0, 0, 0)
    a.checked(a.libc().capset(ctypes.byref(_Head(0x20080522, 0)), sets), "capset")


def docker_capabilities() -> None:
    """What Docker leaves to a container's root."""
    if os.geteuid() == 0:
        _drop(DOCKER_CAPABILITIES)


def no_new_privs() -> None:
    a.checked(a.libc().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def _filter(rules: list[tuple[str, int, Any]]) -> None:
    import pyseccomp

    filtered = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    filtered.set_attr(pyseccomp.Attr.CTL_NNP, True)
    for call, code, argument in rules:
        filtered.add_rule(pyseccomp.ERRNO(code), call, *([argument] if argument else []))
    filtered.load()


def docker_seccomp() -> None:
    """Docker's default filter, for a container without CAP_SYS_ADMIN: what of it concerns a sandbox."""
    import errno

    import pyseccomp

    new = a.CLONE_NEWUSER
    flag = pyseccomp.Arg(0, pyseccomp.MASKED_EQ, new, new)
    calls = "unshare mount umount2 pivot_root setns open_tree move_mount fsopen fsmount mount_setattr keyctl bpf"
    _filter(
        [("clone3", errno.ENOSYS, None), ("clone", errno.EPERM, flag)]
        + [(call, errno.EPERM, None) for call in calls.split()]
    )


def restrict_namespaces() -> None:
    """systemd's RestrictNamespaces=yes."""
    import errno

    import pyseccomp

    flags = (a.CLONE_NEWUSER, a.CLONE_NEWNS, a.CLONE_NEWPID, a.CLONE_NEWNET, a.CLONE_NEWIPC, a.CLONE_NEWUTS)
    rules: list[tuple[str, int, Any]] = [("clone3", errno.ENOSYS, None), ("setns", errno.EPERM, None)]
    for call in ("clone", "unshare"):
        rules += [(call, errno.EPERM, pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag)) for flag in flags]
    _filter(rules)


def no_mounts() -> None:
    """A filter, or a policy, that lets namespaces be made and nothing be mounted in them."""
    import errno

    calls = "mount umount2 pivot_root open_tree move_mount fsopen fsmount mount_setattr"
    _filter([(call, errno.EPERM, None) for call in calls.split()])


def few_files() -> None:
    """RLIMIT_NOFILE 64, and no more to be had."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def tiny_files() -> None:
    """RLIMIT_NOFILE 12: enough to start Python, too few for a sandbox."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))


STEPS: dict[str, Callable[[], None]] = {
    step.__name__: step
    for step in (
        *(user, ordinary, mounts, rest, pids, image, volume, dev, no_shm, masked_proc, read_only_cgroup, no_cgroup),
        *(chroot, protected, tunables, docker_capabilities, no_new_privs, docker_seccomp, restrict_namespaces),
        *(no_mounts, few_files, tiny_files),
    )
}


def main() -> None:
    """The command line."""
    split = sys.argv.index("--")
    for name in sys.argv[1:split]:
        STEPS[name]()
    command = sys.argv[split + 1 :]
    os.execvp(shutil.which(command[0]) or command[0], command)


if __name__ == "__main__":
    main()
