"""What attempts are made of: raw system calls by number, namespaces for the controls, a child to turn on."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)
#: name → the attempt; it raises OSError, or answers something if only part of it worked
ATTACKS: dict[str, Callable[[], object]] = {}
#: the same for those that are told what to attack, after a colon
TOLD: dict[str, Callable[[str], object]] = {}
CONTROL = "--control" in sys.argv

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (1 << n for n in (17, 25, 26, 27, 28, 29, 30))
NEWTIME = 0x80
# x86-64; the generic table of arm64 differs below 424 only.
X86 = os.uname().machine == "x86_64"
NUMBERS: dict[str, int | tuple[int, int]] = {
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
