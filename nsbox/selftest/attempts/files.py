"""Attempts on files, devices, identities and what /proc and /sys tell."""

from __future__ import annotations

import ctypes
import os
import stat
import struct

from .calls import ATTACKS, CONTROL, attack, call, libc


# Files
@attack
def write_own_exe() -> object:
    """CVE-2019-5736: the file behind /proc/self/exe, opened for writing once nothing executes it any more."""
    held = os.open("/proc/self/exe", os.O_PATH)
    return os.open(f"/proc/self/fd/{held}", os.O_WRONLY)


@attack
def write_init_exe() -> object:
    return os.open("/proc/1/exe", os.O_WRONLY)


@attack
def make_device() -> object:
    place = f"/tmp/device-{os.getpid()}"
    os.mknod(place, 0o20666, os.makedev(1, 3))
    os.unlink(place)
    return "done"


@attack
def make_block_device() -> object:
    os.mknod(f"/tmp/device-{os.getpid()}", 0o60666, os.makedev(254, 0))
    return "done"


@attack
def regain_capabilities() -> object:
    """capset of everything, then everything that needs one."""
    head, data = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0xFFFFFFFF] * 6)
    if libc.capset(head, data):
        raise OSError(ctypes.get_errno(), "capset")
    return "done"


@attack
def become_root() -> object:
    os.setresuid(0, 0, 0)
    return "done"


@attack
def become_somebody() -> object:
    os.setresgid(5, 5, 5)
    return "done"


# What of /proc and /sys acts on the host when it is written to. Opening is enough to know; nothing is written.
WRITES = {
    "sysrq": "/proc/sysrq-trigger",
    "core_pattern": "/proc/sys/kernel/core_pattern",
    "modprobe": "/proc/sys/kernel/modprobe",
    "host_name": "/proc/sys/kernel/hostname",
    "panic_on_oom": "/proc/sys/vm/panic_on_oom",
    "drop_caches": "/proc/sys/vm/drop_caches",
    "ip_forward": "/proc/sys/net/ipv4/ip_forward",
    "somaxconn": "/proc/sys/net/core/somaxconn",
    "irq_affinity": "/proc/irq/default_smp_affinity",
    "mtrr": "/proc/mtrr",
    "binfmt_misc": "/proc/sys/fs/binfmt_misc/register",
    "user_namespaces": "/proc/sys/user/max_user_namespaces",
    "uevent_helper": "/sys/kernel/uevent_helper",
}
# What tells of the kernel or of others.
READS = {
    "kcore": "/proc/kcore",
    "keys": "/proc/keys",
    "timer_list": "/proc/timer_list",
    "sched_debug": "/proc/sched_debug",
    "kmsg": "/dev/kmsg",
    "firmware": "/sys/firmware",
    "security": "/sys/kernel/security",
    "debug": "/sys/kernel/debug",
    "shadow": "/etc/shadow",
    "machine_id": "/etc/machine-id",
    "host_log": "/var/log",
}


def _write(path: str) -> object:
    held = os.open(path, os.O_WRONLY)
    status = os.fstat(held)
    os.close(held)
    # What is covered by /dev/null may be written to: that is what covering means.
    return "covered" if stat.S_ISCHR(status.st_mode) and status.st_rdev == os.makedev(1, 3) else "done"


def _read(path: str) -> object:
    if os.path.isdir(path):
        return "done" if os.listdir(path) else "empty"
    held = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    return "done" if os.read(held, 100) else "empty"


for _name, _path in WRITES.items():
    ATTACKS[f"write_{_name}"] = lambda _path=_path: _write(_path)  # type: ignore[misc]
for _name, _path in READS.items():
    ATTACKS[f"read_{_name}"] = lambda _path=_path: _read(_path)  # type: ignore[misc]


@attack
def write_proc_by_another_way() -> object:
    """The same entries by way of a thread, of the root link, of a link of one's own."""
    ways = (f"self/task/{os.getpid()}/net/../../../..", "thread-self/../../..", "self/root/proc", "self/cwd/proc")
    os.chdir("/")
    error = OSError(2, "none of them")
    for way in ways:
        try:
            return _write(f"/proc/{way}/sys/kernel/hostname")
        except OSError as failed:
            error = failed
    raise error


@attack
def kernel_addresses() -> object:
    with open("/proc/kallsyms") as symbols:
        return "done" if any(line.split()[0].strip("0") for line in symbols) else "empty"


# Groups of processes
ATTACKS["mount_cgroup"] = lambda: call("mount", b"none", b"/tmp", b"cgroup", 0, 0)
ATTACKS["mount_cgroup2"] = lambda: call("mount", b"none", b"/tmp", b"cgroup2", 0, 0)


@attack
def cgroup_files() -> object:
    """Anything of a cgroup file system, wherever it is mounted."""
    with open("/proc/self/mountinfo") as mounts:
        places = [line.split()[4] for line in mounts if " - cgroup" in line]
    return "done" if any(os.listdir(place) for place in [*places, "/sys/fs/cgroup"]) else "empty"


# Other processes, descriptors
@attack
def processes_of_others() -> object:
    """Processes that are neither init nor our own."""
    own = {1, os.getpid(), os.getppid()}
    others = {int(name) for name in os.listdir("/proc") if name.isdigit()} - own
    # Not listed may still be there: pids are given out in order.
    others |= {pid for pid in range(1, 4096) if pid not in own and os.path.exists(f"/proc/{pid}/stat")}
    return "done" if others else "nobody"


def _leads_out(descriptor: int) -> bool:
    """Whether going up from a directory ends at another root than ours."""
    up = os.open("../" * 40, os.O_PATH | os.O_DIRECTORY, dir_fd=descriptor)
    try:
        return not os.path.samestat(os.fstat(up), os.stat("/"))
    finally:
        os.close(up)


@attack
def directories_of_anybody() -> object:
    """Roots, working directories and descriptors of every process: one of another root is the way out."""
    found = 0
    if CONTROL:  # a root of our own, with a descriptor of the former one left open
        call("mount", b"none", b"/tmp", b"tmpfs", 0, 0)
        os.mkdir("/tmp/proc")
        call("mount", b"/proc", b"/tmp/proc", 0, 4096 | 16384, 0)  # MS_BIND, MS_REC
        os.open("/", os.O_PATH | os.O_DIRECTORY)
        os.chroot("/tmp")
        os.chdir("/")
    for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
        for what in ("cwd", "root", *(f"fd/{number}" for number in range(64))):
            try:
                held = os.open(f"/proc/{pid}/{what}", os.O_PATH)
            except OSError:
                continue
            if stat.S_ISDIR(os.fstat(held).st_mode) and _leads_out(held):
                found += 1
            os.close(held)
    return "done" if found else "none leads out"


# The name is turned round, so that the text of this program holds no match.
MARK = "kram-tseftles-xobsn"[::-1]


@attack
def mark_of_the_caller() -> object:
    """A variable that the caller had, in the environment, arguments or memory of any process."""
    everything = b""
    for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
        for name in ("environ", "cmdline", "auxv", "comm", "status"):
            try:
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    everything += file.read()
            except OSError:
                pass
    return "done" if MARK.encode() in everything + repr(os.environ).encode() else "not found"


# Devices
DEVICES = frozenset(
    "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero console log core".split()  # noqa: SIM905
)


@attack
def other_devices() -> object:
    """Nodes in /dev that are none of the harmless ones."""
    names = set(os.listdir("/dev")) - DEVICES
    terminals = set(os.listdir("/dev/pts")) - {"ptmx"}
    return "done" if names or terminals else "none"


# Terminals, set-id programs
@attack
def host_set_id_program() -> object:
    """Runs what is set-user-id on the host, and looks at who it is."""
    for name in ("su", "mount", "passwd", "sudo", "umount", "newgrp", "chsh"):
        path = f"/usr/bin/{name}"
        if not os.path.exists(path) or not os.stat(path).st_mode & stat.S_ISUID:
            continue
        if os.statvfs(path).f_flag & os.ST_NOSUID:
            return "nosuid"
        return "done"
    raise OSError(2, "no such program")


@attack
def shared_memory_segment() -> object:
    """SysV shared memory under a key that the caller has taken."""
    libc.shmget.restype = ctypes.c_int
    if libc.shmget(0x6E736278, 4096, 0o400) < 0:
        raise OSError(ctypes.get_errno(), "shmget")
    return "done"
