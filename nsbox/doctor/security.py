"""Seccomp and Landlock."""

import ctypes
import errno
import os

from nsbox.doctor import attempt as a
from nsbox.doctor.attempt import Outcome, attempt
from nsbox.doctor.fact import Fact, as_root, install, newer_kernel, read

#: Actions that the shipped profiles use, seccomp(2).
NEEDED_ACTIONS = ("allow", "errno", "kill_process")
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER = 1
_ALLOW = 0x7FFF0000
_LANDLOCK_VERSION = 1
#: What an ABI version of Landlock brought, landlock(7).
LANDLOCK_GAINS = ((1, "files"), (2, "renames"), (3, "truncation"), (4, "TCP"), (5, "ioctl"), (6, "signals"))


class _Filter(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.POINTER(_Filter)))


def _load_filter() -> None:
    allow = _Filter(0x06, 0, 0, _ALLOW)  # BPF_RET|BPF_K
    program = _Program(1, ctypes.pointer(allow))
    a.checked(a.libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    number = _SECCOMP.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, "", "seccomp on this architecture")
    a.syscall("seccomp(SECCOMP_SET_MODE_FILTER)", number, _SET_MODE_FILTER, 0, ctypes.byref(program))


def seccomp(outcome: Outcome, actions: str) -> Fact:
    """``actions`` is the text of /proc/sys/kernel/seccomp/actions_avail."""
    known = actions.split()
    if not outcome.ok:
        reason = f"{outcome.error}: no filter can be loaded"
        return Fact("seccomp", False, False, reason, "boot a kernel that has CONFIG_SECCOMP_FILTER=y", True)
    absent = [name for name in NEEDED_ACTIONS if name not in known] if known else []
    if absent:
        return Fact("seccomp", False, " ".join(known), f"the kernel lacks {', '.join(absent)}", newer_kernel(), True)
    return Fact("seccomp", True, " ".join(known) or True, needed=True)


def libseccomp() -> Fact:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        reason = "libseccomp.so.2 cannot be loaded, so profiles cannot be compiled (those in the cache still work)"
        return Fact("libseccomp", False, False, reason, install("libseccomp"), True)
    try:
        library.seccomp_version.restype = ctypes.POINTER(ctypes.c_uint * 3)
        version = ".".join(str(part) for part in library.seccomp_version().contents)
    except AttributeError:
        return Fact("libseccomp", True, True, needed=True)
    return Fact("libseccomp", True, version, needed=True)


def _landlock_abi() -> int:
    return a.syscall("landlock_create_ruleset", a.LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION)


def landlock(outcome: Outcome, modules: str) -> Fact:
    """``modules`` is the text of /sys/kernel/security/lsm, empty where securityfs is not mounted."""
    if outcome.ok:
        abi = int(outcome.value)
        without = ", ".join(what for first, what in LANDLOCK_GAINS if first > abi)
        return Fact("landlock", True, f"ABI {abi}, without {without}" if without else f"ABI {abi}")
    if outcome.errno == errno.EOPNOTSUPP:
        wanted = f"lsm=landlock,{modules.strip() or 'lockdown,yama,integrity,apparmor'}"
        remedy = (
            f"add {wanted} to GRUB_CMDLINE_LINUX in /etc/default/grub, then: "
            + as_root("update-grub || grub2-mkconfig -o /boot/grub2/grub.cfg")
        )  # fmt: skip
        return Fact("landlock", False, False, "it is built in but was not switched on at boot", remedy)
    if outcome.errno == errno.ENOSYS:
        reason = "the kernel has no Landlock (5.13 and later with CONFIG_SECURITY_LANDLOCK=y), or a filter hides it"
        return Fact("landlock", False, False, reason, newer_kernel())
    remedy = "allow landlock_create_ruleset in the seccomp filter around this process"
    return Fact("landlock", False, False, outcome.error, remedy)


def facts() -> list[Fact]:
    """All facts of this module."""
    return [
        seccomp(attempt(_load_filter), read("/proc/sys/kernel/seccomp/actions_avail")),
        libseccomp(),
        landlock(attempt(_landlock_abi), read("/sys/kernel/security/lsm")),
    ]
