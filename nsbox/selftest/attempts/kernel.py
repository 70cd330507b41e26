"""Attempts on the kernel's interface: calls, namespaces, processes, mounts, the state of the host."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable

from .calls import (
    ATTACKS,
    CONTROL,
    NEWCGROUP,
    NEWIPC,
    NEWNET,
    NEWNS,
    NEWPID,
    NEWTIME,
    NEWUSER,
    NEWUTS,
    X86,
    attack,
    call,
    child,
    libc,
    simple,
)

# K01
simple("io_uring_setup", 8, ctypes.create_string_buffer(256))
simple("io_uring_enter", 2, 1, 0, 0, 0)
simple("io_uring_register", 2, 999, 0, 0)


# K02, K03: each would make a directory; that it exists afterwards is the proof, whatever the call answered.
def made_directory(make: Callable[[bytes], None]) -> object:
    place = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"made-{os.getpid()}")
    pid = os.fork()
    if pid == 0:
        make(place.encode())
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.path.isdir(place):
        os.rmdir(place)
        return "done"
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "not executed"


@attack
def int_0x80() -> object:
    def make(path: bytes) -> None:
        low = libc.mmap
        low.restype = ctypes.c_void_p
        memory = low(None, 4096, 3, 0x40 | 0x22, -1, 0)  # MAP_32BIT, so that 32 bits can point at it
        ctypes.memmove(memory, path + b"\0", len(path) + 1)
        page = mmap.mmap(-1, 4096, prot=7)
        page.write(bytes.fromhex("53 89f8 89f3 89d1 cd80 4898 5b c3"))
        entry = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_long)
        entry(ctypes.addressof(ctypes.c_char.from_buffer(page)))(39, memory, 0o700)  # mkdir of i386

    return made_directory(make)


@attack
def plain_number() -> object:
    return made_directory(lambda path: libc.syscall(83, path, 0o700) and None)


@attack
def x32_number() -> object:
    return made_directory(lambda path: libc.syscall(0x40000000 | 83, path, 0o700) and None)


@attack
def high_half_number() -> object:
    """The kernel looks at the low half of rax only; a filter must not see another number than the kernel does."""
    if libc.syscall(ctypes.c_long(0x5_0000_0000 | (272 if X86 else 97)), NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    return "done"


# K04, K05
@attack
def clone3_namespaces() -> object:
    arguments = struct.pack("11Q", NEWUSER, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)
    pid = call("clone3", arguments, len(arguments))
    if pid == 0:
        os._exit(0)
    return os.waitpid(pid, 0)[1] or "done"


def clone_with(flags: int) -> Callable[[], object]:
    def attempt() -> object:
        pid = call("clone", flags | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return "done"

    return attempt


NAMESPACES = {
    "user": NEWUSER,
    "mnt": NEWNS,
    "net": NEWNET,
    "pid": NEWPID,
    "ipc": NEWIPC,
    "uts": NEWUTS,
    "cgroup": NEWCGROUP,
}
for _name, _flag in NAMESPACES.items():
    simple("unshare", _flag, label=f"unshare_{_name}")
    ATTACKS[f"clone_{_name}"] = clone_with(_flag)
    ATTACKS[f"clone_high_{_name}"] = clone_with(_flag | 1 << 40)
simple("unshare", NEWTIME, label="unshare_time")
simple("unshare", NEWUSER | 1 << 40, label="unshare_high")


# K06
def setns_to(name: str) -> Callable[[], object]:
    return lambda: call("setns", os.open(f"/proc/self/ns/{name}", os.O_RDONLY), 0)


for _name in ("mnt", "net", "uts", "ipc", "pid", "cgroup"):
    ATTACKS[f"setns_{_name}"] = setns_to(_name)
ATTACKS["setns_pidfd"] = lambda: call("setns", call("pidfd_open", os.getpid(), 0), NEWUTS | NEWNET)

# K07
simple("bpf", 0, ctypes.create_string_buffer(128), 128)
simple("perf_event_open", struct.pack("II120x", 1, 128), 0, -1, -1, 0)
simple("userfaultfd", 1)
simple("kexec_load", 0, 0, 0, 0xFFFF)
simple("init_module", b"", 0, b"")
simple("finit_module", -1, b"", 0)
simple("delete_module", b"nsbox_no_such_module", 0o4000)
simple("memfd_secret", 0)
simple("syslog", 10, 0, 0)

# K08
simple("add_key", b"user", b"nsbox", b"x", 1, -2)
simple("request_key", b"user", b"nsbox-none", 0, -2)
simple("keyctl", 1, 0)
simple("keyctl", 0, -3, 1, label="keyctl_session")


# K09, K10
def target() -> int:
    """The sandbox's init; in a control, a child."""
    return child() if CONTROL else 1


simple_target: dict[str, Callable[[int], object]] = {
    "ptrace_attach": lambda pid: call("ptrace", 16, pid, 0, 0),
    "ptrace_seize": lambda pid: call("ptrace", 0x4206, pid, 0, 0),
    "pidfd_getfd": lambda pid: call("pidfd_getfd", call("pidfd_open", pid, 0), 1, 0),
    "kcmp": lambda pid: call("kcmp", os.getpid(), pid, 0, 0, 0),
    "move_pages": lambda pid: call("move_pages", pid, 0, 0, 0, 0, 0),
    "migrate_pages": lambda pid: call("migrate_pages", pid, 8, struct.pack("Q", 1), struct.pack("Q", 1)),
    "process_madvise": lambda pid: call("process_madvise", call("pidfd_open", pid, 0), 0, 0, 20, 0),
    "process_mrelease": lambda pid: call("process_mrelease", call("pidfd_open", pid, 0), 0),
    "open_mem": lambda pid: os.open(f"/proc/{pid}/mem", os.O_RDWR),
    "open_environ": lambda pid: os.open(f"/proc/{pid}/environ", os.O_RDONLY),
    "open_maps": lambda pid: os.open(f"/proc/{pid}/maps", os.O_RDONLY),
    "open_exe": lambda pid: os.open(f"/proc/{pid}/exe", os.O_RDONLY),
    "open_root": lambda pid: os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY),
    "open_cwd": lambda pid: os.open(f"/proc/{pid}/cwd", os.O_PATH | os.O_DIRECTORY),
    "list_fd": lambda pid: os.listdir(f"/proc/{pid}/fd"),
    "open_fd": lambda pid: os.open(f"/proc/{pid}/fd/1", os.O_PATH),
    "open_ns": lambda pid: os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY),
}
for _name, _on in simple_target.items():
    ATTACKS[_name] = lambda _on=_on: _on(target())  # type: ignore[misc]


@attack
def ptrace_own_child() -> object:
    return call("ptrace", 16, child(), 0, 0)


def transfer(number: str) -> Callable[[], object]:
    """process_vm_readv or writev: of our own buffer in a child, of where the helper's code lies in pid 1."""

    def attempt() -> object:
        buffer = ctypes.create_string_buffer(16)
        local = struct.pack("QQ", ctypes.addressof(buffer), 16)
        remote = struct.pack("QQ", ctypes.addressof(buffer) if CONTROL else 0x400000, 16)
        return call(number, target(), local, 1, remote, 1, 0)

    return attempt


ATTACKS["process_vm_readv"], ATTACKS["process_vm_writev"] = transfer("process_vm_readv"), transfer("process_vm_writev")


@attack
def limits_of_init() -> object:
    """The same user may set init's limits; what must not come of it is a hung or escaped sandbox."""
    libc.prlimit(1, 7, struct.pack("QQ", 0, 0), None)
    libc.prlimit(1, 0, struct.pack("QQ", 1, 1), None)
    return "done"


@attack
def signals_to_init() -> object:
    for number in signal.valid_signals():
        with contextlib.suppress(OSError):
            os.kill(1, number)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    information = struct.pack("iii4xiI112x", 15, 0, -1, 0, 0)  # SI_QUEUE, as if from outside: si_pid 0
    libc.syscall(ctypes.c_long(129 if X86 else 138), 1, 10, information)
    for _ in range(100):
        time.sleep(0.01)
        with open("/proc/1/status") as status:
            if "State:\tS" in status.read():
                return "init lives"
    return "init is stopped"


# K12
simple("mount", b"none", b"/tmp", b"tmpfs", 0, 0)
simple("mount", b"/usr", b"/tmp", 0, 4096, 0, label="mount_bind")
simple("mount", b"none", b"/usr" if not CONTROL else b"/", 0, 1 << 18, 0, label="mount_propagation")
simple("umount2", b"/proc", 2)
simple("fsopen", b"tmpfs", 1)
simple("fspick", -100, b"/", 0)
simple("open_tree", -100, b"/", 1)
simple("open_tree_attr", -100, b"/tmp", 1, 0, 0)
simple("mount_setattr", -100, b"/", 0, struct.pack("4Q", 0, 1, 0, 0), 32)
simple("fsmount", -1, 1, 0)
simple("fsconfig", -1, 6, 0, 0, 0)
simple("move_mount", -100, b"/tmp", -100, b"/var/tmp", 0)
simple("chroot", b"/tmp")


def own(place: bytes) -> None:
    """In a control, which may be root's: another file system there, so that the host's is not written to."""
    if CONTROL:
        call("mount", b"none", place, b"tmpfs", 0, 0)


@attack
def pivot_root() -> object:
    own(b"/tmp")
    os.chdir("/tmp")
    return call("pivot_root", b".", b".")


@attack
def remount_usr_writable() -> object:
    own(b"/usr")
    call("mount", b"none", b"/usr", 0, 32 | 4096, 0)
    with open("/usr/nsbox-was-here", "w"):
        return "done"


@attack
def double_chroot() -> object:
    """The classic: a descriptor outside a chroot, then up."""
    own(b"/tmp")
    held = os.open("/", os.O_RDONLY)
    os.makedirs("/tmp/jail", exist_ok=True)
    os.chroot("/tmp/jail")
    os.fchdir(held)
    for _ in range(40):
        os.chdir("..")
    os.chroot(".")
    return "done"


# K16
simple("personality", 0x0400000, label="read_implies_exec")
simple("personality", 0x0040000, label="addr_no_randomize")
simple("personality", 0x0100000, label="mmap_page_zero")
simple("personality", 0x1_0040_0000, label="personality_high")

# K17: arguments that change nothing should one be let through.
simple("settimeofday", 0, struct.pack("ii", 0, 0))
simple("clock_settime", 0, struct.pack("qq", 0, -1))
simple("adjtimex", ctypes.create_string_buffer(256))
simple("clock_adjtime", 0, ctypes.create_string_buffer(256))
simple("sethostname", b"mine", 4)
simple("setdomainname", b"mine", 4)
simple("reboot", 0, 0, 0, 0)
simple("swapon", b"/nonexistent", 0)
simple("swapoff", b"/nonexistent")
simple("quotactl", 0xFFFF, 0, 0, 0)
simple("quotactl_fd", -1, 0, 0, 0)
simple("acct", b"/nonexistent")
simple("open_by_handle_at", -100, struct.pack("Ii8x", 8, 1), 0)
simple("fanotify_init", 0x200, 0)
simple("prctl", 35, 1, 0, 0, 0, label="prctl_set_mm")
simple("prctl", 0x59616D61, -1, 0, 0, 0, label="prctl_set_ptracer")
simple("prctl", 28, 0, 0, 0, 0, label="prctl_securebits")
simple("prctl", 38, 0, 0, 0, 0, label="prctl_no_new_privs_off")
