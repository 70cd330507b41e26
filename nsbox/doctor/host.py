"""The kernel and its system calls."""

import errno
import os
import re
import struct
from collections.abc import Callable

from nsbox.doctor.attempt import CLONE3, CLOSE_RANGE, FSOPEN, MOUNT_SETATTR, OPEN_TREE, OPENAT2, attempt, syscall
from nsbox.doctor.fact import Fact, newer_kernel, number, read, sysctl

KERNEL = (5, 12)
#: First kernel with something that has to be done without on older ones.
GAINS = (
    ((5, 14), "cgroup.kill"),
    ((5, 19), "overlay layers on idmapped mounts"),
    ((6, 3), "idmapped tmpfs"),
    ((6, 6), "user extended attributes on tmpfs"),
    ((6, 7), "Landlock rules for TCP"),
)
ARCHITECTURES = ("x86_64", "aarch64")
_AT_FDCWD = -100
_RESOLVE_BENEATH = 0x08
_MFD_EXEC = 0x10


def kernel_version(release: str) -> tuple[int, int]:
    """(major, minor) of a release such as ``6.1.0-13-amd64``; (0, 0) of anything else."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def missing_below(version: tuple[int, int]) -> str:
    """What a kernel of this version does not have yet, in words."""
    return ", ".join(f"{what} ({first[0]}.{first[1]})" for first, what in GAINS if version < first)


def kernel(release: str) -> Fact:
    version = kernel_version(release)
    missing = missing_below(version)
    if version < KERNEL:
        return Fact("kernel", False, release, "nsbox needs Linux 5.12, the first with mount_setattr(2)",
                    newer_kernel(), True)  # fmt: skip
    return Fact("kernel", True, f"{release}, without {missing}" if missing else release, needed=True)


def architecture(machine: str, bits: int) -> Fact:
    if machine in ARCHITECTURES and bits == 64:
        return Fact("architecture", True, machine, needed=True)
    reason = f"nsbox knows {' and '.join(ARCHITECTURES)} with 64-bit programs, this is {machine} with {bits}-bit ones"
    return Fact("architecture", False, machine, reason, "run it with a 64-bit Python on such a machine", True)


# System calls -----------------------------------------------------------------------------------------------------


def _clone3() -> None:
    # A size of 0 is refused (EINVAL) by a kernel that knows the call, before anything is cloned.
    try:
        syscall("clone3", CLONE3, None, 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _openat2() -> None:
    how = struct.pack("QQQ", os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_BENEATH)
    os.close(syscall("openat2", OPENAT2, _AT_FDCWD, b".", how, len(how)))


def _close_range() -> None:
    syscall("close_range", CLOSE_RANGE, 1 << 30, 1 << 30, 0)


def _mount_api() -> None:
    # As an ordinary user these end with EPERM; only their absence matters here. Numbers are checked before privileges
    # are, but a filter of a container engine comes first and says EPERM or ENOSYS.
    for name, call, arguments in (
        ("open_tree", OPEN_TREE, (-1, b"", 0)),
        ("fsopen", FSOPEN, (b"tmpfs", 0x1000)),
        ("mount_setattr", MOUNT_SETATTR, (-1, b"", 0, bytes(32), 0)),
    ):
        try:
            syscall(name, call, *arguments)
        except OSError as error:
            if error.errno == errno.ENOSYS:
                raise


def _memfd_exec() -> None:
    with open("/bin/true", "rb") as file:
        program = file.read()
    try:
        descriptor = os.memfd_create("doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:  # before Linux 6.3 there is no such flag and every memfd may be executed
            raise OSError(error.errno, error.strerror, "memfd_create") from None
        descriptor = os.memfd_create("doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, program)
    pid = os.fork()
    if pid == 0:
        code = errno.EIO
        try:
            os.execve(descriptor, ["true"], {})
        except OSError as error:
            code = error.errno or code
        finally:
            os._exit(code)
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise OSError(abs(code), os.strerror(abs(code)), "execveat of a memfd")


SYSTEM_CALLS: tuple[tuple[str, str, Callable[[], None]], ...] = (
    ("clone3", "5.3", _clone3),
    ("pidfd", "5.3", _pidfd),
    ("openat2", "5.6", _openat2),
    ("close_range", "5.9", _close_range),
    ("mount_api", "5.12", _mount_api),
)
UNFILTER = "give the container the engine's newest seccomp profile, or start it with: --security-opt seccomp=unconfined"


def system_call(name: str, since: str, code: int, error: str) -> Fact:
    """The fact for one system call from the outcome of calling it."""
    if not code:
        return Fact(name, True, True, needed=True)
    if code == errno.ENOSYS:
        reason = f"the kernel does not know it (it came with {since}), or a seccomp filter around this process hides it"
    else:
        reason = f"{error}: a seccomp filter around this process refuses it"
    return Fact(name, False, False, reason, UNFILTER, True)


def memfd(code: int, error: str, setting: int | None) -> Fact:
    if not code:
        return Fact("memfd_exec", True, True, needed=True)
    if setting == 2:
        reason = "vm.memfd_noexec is 2, so the helper cannot run from memory"
        return Fact("memfd_exec", False, False, reason, sysctl("vm.memfd_noexec", 1), True)
    reason = f"{error}: a security module or a seccomp filter keeps the helper from running from memory"
    return Fact("memfd_exec", False, False, reason, "allow execmem/memfd for this program in its policy", True)


def system_calls() -> list[Fact]:
    facts = []
    for name, since, function in SYSTEM_CALLS:
        outcome = attempt(function)
        facts.append(system_call(name, since, outcome.errno, outcome.error))
    outcome = attempt(_memfd_exec)
    if outcome.errno == errno.ENOENT:  # no /bin/true to try it with
        setting = number(read("/proc/sys/vm/memfd_noexec"))
        return [*facts, memfd(errno.EACCES if setting == 2 else 0, "", setting)]
    return [*facts, memfd(outcome.errno, outcome.error, number(read("/proc/sys/vm/memfd_noexec")))]


def facts() -> list[Fact]:
    """All facts of this module."""
    uname = os.uname()
    return [kernel(uname.release), architecture(uname.machine, struct.calcsize("P") * 8), *system_calls()]
