"""The attacks, as a program: ``attacks.py [--control] NAME`` attempts one and prints what came of it.

``done`` means that it worked, else the name of the errno. It needs nothing but a Python interpreter, and runs inside a
sandbox and, as the positive control, outside. With ``--control`` it first enters namespaces of its own, where it has
every capability: so a control shows that the call works without ever touching the host.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import pty
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)
ATTACKS: dict[str, Callable[[], object]] = {}
CONTROL = "--control" in sys.argv

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (1 << n for n in (17, 25, 26, 27, 28, 29, 30))
NEWTIME = 0x80
# x86-64; the generic table of arm64 differs below 424 only.
X86 = os.uname().machine == "x86_64"
NUMBERS = {
    "ptrace": (101, 117),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "clone": (56, 220),
    "personality": (135, 92),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "syslog": (103, 116),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "mkdirat": (258, 34),
    "fanotify_init": (300, 262),
    "ioctl": (16, 29),
    "getpid": (39, 172),
    "prctl": (157, 167),
    "pidfd_open": 434,
    "clone3": 435,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
    "memfd_secret": 447,
    "quotactl_fd": 443,
    "process_mrelease": 448,
    "open_tree_attr": 467,
}


def call(name: str, *arguments: object) -> int:
    """The raw system call; raises OSError."""
    number = NUMBERS[name]
    if isinstance(number, tuple):
        number = number[0 if X86 else 1]
    words = [ctypes.c_void_p(a & (1 << 64) - 1) if isinstance(a, int) else a for a in arguments]
    ctypes.set_errno(0)
    result: int = libc.syscall(ctypes.c_long(number), *words)
    if result == -1 and ctypes.get_errno():
        raise OSError(ctypes.get_errno(), name)
    return result


def attack(function: Callable[[], object]) -> Callable[[], object]:
    """Registers an attack; it raises OSError, or answers something if only part of it worked."""
    ATTACKS[function.__name__] = function
    return function


def simple(name: str, *arguments: object, label: str = "") -> None:
    """An attack of one call."""
    ATTACKS[label or name] = lambda: call(name, *arguments)


def enter_namespaces() -> None:
    """Root over namespaces of its own, for the positive controls."""
    uid, gid = os.getuid(), os.getgid()
    call("unshare", NEWUSER | NEWNS | NEWUTS | NEWIPC | NEWNET)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    call("mount", b"none", b"/", 0, 1 << 18 | 1 << 14, 0)  # MS_PRIVATE, MS_REC


def child() -> int:
    """A process of our own to turn calls on: they must work there, so that a refusal elsewhere means something."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        null = os.open("/dev/null", os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        os.write(writer, b".")
        signal.pause()
    os.read(reader, 1)
    return pid


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


# K11
def netlink(protocol: int, kind: int, payload: bytes) -> Callable[[], object]:
    def attempt() -> object:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
        sock.settimeout(3)
        sock.send(struct.pack("IHHII", 16 + len(payload), kind, 5, 1, 0) + payload)
        answer = sock.recv(4096)
        code = struct.unpack_from("i", answer, 16)[0]
        if code:
            raise OSError(-code, "netlink")
        return "done"

    return attempt


ATTACKS["link_down"] = netlink(0, 16, struct.pack("BxHiII", 0, 0, 1, 0, 1))
ATTACKS["address_add"] = netlink(0, 20, struct.pack("BBBBI", 2, 8, 0, 0, 1) + struct.pack("HH4B", 8, 2, 10, 9, 8, 7))
ATTACKS["route_add"] = netlink(
    0, 24, struct.pack("BBBBBBBBI", 2, 0, 0, 0, 254, 4, 253, 1, 0) + struct.pack("HHI", 8, 4, 1)
)
ATTACKS["link_new"] = netlink(
    0, 16, struct.pack("BxHiII", 0, 0, 0, 0, 0) + struct.pack("HH", 16, 18) + struct.pack("HH6sxx", 10, 1, b"dummy\0")
)
ATTACKS["netfilter_list"] = lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
ATTACKS["audit"] = lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 9)
ATTACKS["uevent"] = lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15)
ATTACKS["sock_diag"] = lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4)

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


@attack
def pivot_root() -> object:
    if CONTROL:
        call("mount", b"none", b"/tmp", b"tmpfs", 0, 0)
    os.chdir("/tmp")
    return call("pivot_root", b".", b".")


@attack
def remount_usr_writable() -> object:
    call("mount", b"none", b"/usr", 0, 32 | 4096, 0)
    with open("/usr/nsbox-was-here", "w"):
        return "done"


@attack
def double_chroot() -> object:
    """The classic: a descriptor outside a chroot, then up."""
    held = os.open("/", os.O_RDONLY)
    os.makedirs("/tmp/jail", exist_ok=True)
    os.chroot("/tmp/jail")
    os.fchdir(held)
    for _ in range(40):
        os.chdir("..")
    os.chroot(".")
    return "done"


# K13
def sockets(family: int, kind: int, protocol: int = 0) -> Callable[[], object]:
    return lambda: socket.socket(family, kind, protocol)


SOCKETS = {
    "vsock": (40, 1),
    "alg": (38, 5),
    "packet": (17, 3),
    "packet_dgram": (17, 2),
    "xdp": (44, 3),
    "bluetooth": (31, 3),
    "raw_ip": (2, 3, 255),
    "raw_icmp": (2, 3, 1),
    "raw_ip6": (10, 3, 58),
    "sctp": (2, 1, 132),
    "dccp": (2, 6, 33),
    "udplite": (2, 2, 136),
    "mptcp": (2, 1, 262),
    "can": (29, 3, 1),
    "tipc": (30, 1),
    "rds": (21, 5),
    "kcm": (41, 2),
    "smc": (43, 1),
    "qipcrtr": (42, 2),
    "ax25": (3, 5),
    "x25": (9, 5),
    "llc": (26, 1),
    "pppox": (24, 1),
    "phonet": (35, 2),
    "nfc": (39, 5),
    "ieee802154": (36, 2),
    "caif": (37, 5),
    "rxrpc": (33, 2),
    "key": (15, 3, 2),
    "unspecified": (0, 1),
    "packet_in_inet": (2, 10, 0x0300),
}
for _name, _parts in SOCKETS.items():
    ATTACKS[f"socket_{_name}"] = sockets(*_parts)
ATTACKS["socket_high"] = lambda: (
    libc.syscall(41 if X86 else 198, ctypes.c_ulong(0x100000000 | 40), 1, 0) >= 0 or errno_raise()
)


def errno_raise() -> object:
    raise OSError(ctypes.get_errno(), "call")


# K14, K15
def terminal(request: int, argument: bytes) -> Callable[[], object]:
    def attempt() -> object:
        _, slave = pty.openpty()
        os.setsid() if os.getsid(0) != os.getpid() else None
        fcntl.ioctl(slave, 0x540E, 0)  # TIOCSCTTY
        return call("ioctl", slave, request, argument)

    return attempt


ATTACKS["tiocsti"] = terminal(0x5412, b"x")
ATTACKS["tiocsti_high"] = terminal(0x1_0000_5412, b"x")
ATTACKS["tioclinux"] = terminal(0x541C, b"\6")
ATTACKS["tioclinux_high"] = terminal(0xFFFF_FFFF_0000_541C, b"\6")
ATTACKS["tiocsetd"] = terminal(0x5423, struct.pack("i", 0))
ATTACKS["tioccons"] = terminal(0x541D, b"")
ATTACKS["open_tty"] = lambda: os.open("/dev/tty", os.O_RDWR)
ATTACKS["steal_tty"] = lambda: [fcntl.ioctl(fd, 0x540E, 1) for fd in range(3)]

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
    return os.mknod(f"/tmp/device-{os.getpid()}", 0o60666, os.makedev(254, 0))


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


def sweep(numbers: list[int]) -> None:
    """Every system call number, each in a child of its own, with arguments that mean nothing: number → outcome."""
    words = [ctypes.c_long(-1)] * 6
    for number in numbers:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            signal.alarm(2)
            own = os.getpid()
            ctypes.set_errno(0)
            result = libc.syscall(ctypes.c_long(number), *words)
            if os.getpid() != own:  # the call was a fork
                os._exit(0)
            text = "ok" if result != -1 or not ctypes.get_errno() else errno.errorcode.get(ctypes.get_errno(), "?")
            os.write(writer, text.encode())
            os._exit(0)
        os.close(writer)
        told = os.read(reader, 100).decode()
        os.close(reader)
        status = os.waitpid(pid, 0)[1]
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "ended"
        print(number, told or how, flush=True)
    print("survived")


def main() -> None:
    name = sys.argv[-1]
    if name.startswith("sweep:"):
        first, last = name.removeprefix("sweep:").split("-")
        return sweep(list(range(int(first, 0), int(last, 0))))
    if CONTROL:
        enter_namespaces()
    try:
        outcome = ATTACKS[name]()
        print(outcome if isinstance(outcome, str) else "done")
    except OSError as error:
        print(errno.errorcode.get(error.errno or 0, error.errno))


if __name__ == "__main__":
    main()
