"""The kernel, its system calls, the caller, and what the host itself is."""

import errno
import functools
import os
import re
import resource
import struct
from collections.abc import Callable

from nsbox.doctor.attempt import CLONE3, CLOSE_RANGE, FSOPEN, MOUNT_SETATTR, OPENAT2, OPEN_TREE, attempt, syscall
from nsbox.doctor.fact import Fact, as_root, install, number, read, sysctl

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
#: Without these a uid of 0 is not root to nsbox (capabilities(7)).
ROOT_CAPABILITIES = ("chown", "setgid", "setuid", "sys_admin")
_CAPABILITY_NUMBERS = {"chown": 0, "setgid": 6, "setuid": 7, "sys_admin": 21}
_AT_FDCWD = -100
_RESOLVE_BENEATH = 0x08
_MFD_EXEC = 0x10
_FEW_DESCRIPTORS = 256


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
                    install("kernel"), True)  # fmt: skip
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


# The caller -------------------------------------------------------------------------------------------------------


def effective_capabilities() -> tuple[set[str], bool]:
    """Names of the capabilities in the effective set, and whether they are all that the kernel has."""
    mask = re.search(r"^CapEff:\s*([0-9a-f]+)", read("/proc/self/status"), re.MULTILINE)
    bits = int(mask[1], 16) if mask else 0
    try:
        import prctl
    except ImportError:
        return {name for name, bit in _CAPABILITY_NUMBERS.items() if bits >> bit & 1}, False
    last = number(read("/proc/sys/kernel/cap_last_cap")) or 40
    known = {name for name, bit in zip(prctl.ALL_CAP_NAMES, prctl.ALL_CAPS, strict=True) if bit <= last}
    held = {name for name in known if getattr(prctl.cap_effective, name)}
    return held, held == known


def privileged(uid: int, capabilities: set[str], uid_map: str) -> bool:
    """Whether a caller is root in the sense that matters: it may map ids that are not its own, and mount."""
    extents = [[int(word) for word in line.split()] for line in uid_map.splitlines()]
    whole = any(first == 0 and count >= 1 << 31 for first, _, count in extents)
    return uid == 0 and whole and capabilities.issuperset(ROOT_CAPABILITIES)


@functools.cache
def _is_privileged(uid: int, pid: int) -> bool:
    return privileged(uid, effective_capabilities()[0], read("/proc/self/uid_map"))


def is_privileged() -> bool:
    """``privileged`` for the caller as it is now."""
    return _is_privileged(os.geteuid(), os.getpid())


def caller(uid: int, gid: int, capabilities: set[str], complete: bool, uid_map: str) -> Fact:
    """For whom the facts are. Being root of a container or without capabilities is being an ordinary user."""
    held = "every capability" if complete else f"{len(capabilities)} capabilities" if capabilities else "no capability"
    value = f"uid {uid}, gid {gid}, {held}"
    if uid != 0 or privileged(uid, capabilities, uid_map):
        return Fact("caller", True, value)
    if absent := sorted(set(ROOT_CAPABILITIES) - capabilities):
        reason = f"uid 0 without {', '.join('CAP_' + name.upper() for name in absent)} is treated as an ordinary user"
        flags = " ".join(f"--cap-add {name.upper()}" for name in absent)
        return Fact("caller", False, value, reason, f"in a container: start it with {flags}")
    reason = "root of a user namespace that maps only some ids is treated as an ordinary user"
    return Fact("caller", False, value, reason, "run nsbox in the initial user namespace")


def open_files(soft: int, hard: int) -> Fact:
    infinite = resource.RLIM_INFINITY
    value = "unlimited" if soft == infinite else f"{soft} (up to {'any number' if hard == infinite else hard})"
    if soft == infinite or soft >= _FEW_DESCRIPTORS:
        return Fact("open_files", True, value)
    reason = f"each running sandbox needs about 10 descriptors; {soft} are few"
    wanted = 4096
    if hard == infinite or hard >= wanted:
        return Fact("open_files", False, value, reason, f"ulimit -n {wanted}")
    return Fact("open_files", False, value, reason, as_root(f"prlimit --pid $PPID --nofile={wanted}:{wanted}"))


def overcommit(setting: int | None) -> Fact:
    """vm.overcommit_memory, proc_sys_vm(5)."""
    words = {0: "heuristic", 1: "always", 2: "never"}
    value = f"{setting} ({words.get(setting, 'unknown')})" if setting is not None else "unknown"
    if setting != 2:
        return Fact("memory_overcommit", True, value)
    reason = "with strict accounting, programs that reserve much address space fail long before they reach --memory"
    return Fact("memory_overcommit", False, value, reason, sysctl("vm.overcommit_memory", 0))


# What the host is -------------------------------------------------------------------------------------------------


def container_kind(files: set[str], systemd: str, init_environment: str, cgroups: str, release: str) -> str:
    """The kind of container around this process, "" where none shows.

    ``files`` are those of /.dockerenv and /run/.containerenv that exist, ``systemd`` is the text of
    /run/systemd/container, ``init_environment`` that of /proc/1/environ, ``cgroups`` that of /proc/1/cgroup.
    """
    for entry in init_environment.split("\0"):
        if entry.startswith("container="):
            return entry.partition("=")[2] or "unknown"
    if systemd.strip():
        return systemd.strip()
    if "/run/.containerenv" in files:
        return "podman"
    if "KUBERNETES_SERVICE_HOST=" in init_environment or "/kubepods" in cgroups:
        return "kubernetes"
    if "/.dockerenv" in files or "/docker/" in cgroups or "/docker-" in cgroups:
        return "docker"
    if "/lxc/" in cgroups or "/lxc.payload" in cgroups:
        return "lxc"
    return "wsl" if "microsoft" in release.lower() else ""


def machine_kind(cpuinfo: str, vendor: str, product: str, hypervisor: str, compatible: str) -> str:
    """The hypervisor below this kernel, "" where none shows: from /proc/cpuinfo, DMI, /sys/hypervisor, device tree."""
    names = {
        "qemu": "qemu", "kvm": "kvm", "vmware": "vmware", "innotek": "virtualbox", "virtualbox": "virtualbox",
        "xen": "xen", "microsoft": "hyper-v", "amazon ec2": "amazon", "google": "google", "bochs": "bochs",
        "parallels": "parallels", "apple virtualization": "apple", "openstack": "openstack", "firecracker": "firecracker",
    }  # fmt: skip
    flags = re.search(r"^flags\s*:.*\bhypervisor\b", cpuinfo, re.MULTILINE) is not None
    if hypervisor.strip():
        return hypervisor.strip()
    bare_cloud = "amazon ec2" in vendor.lower() and ".metal" in product
    for text in (vendor, product, compatible):
        for word, kind in names.items():
            # Hypervisors' vendors make computers too: believe DMI on x86 only with the processor's own flag.
            if word in text.lower() and not bare_cloud and (flags or not cpuinfo.count("vendor_id")):
                return kind
    return "yes, of an unknown kind" if flags else ""


def container() -> str:
    """``container_kind`` of this process."""
    files = {path for path in ("/.dockerenv", "/run/.containerenv") if os.path.exists(path)}
    return container_kind(
        files,
        read("/run/systemd/container") or os.environ.get("container", ""),  # noqa: SIM112 - that is its name
        read("/proc/1/environ"),
        read("/proc/1/cgroup"),
        os.uname().release,
    )


def virtual_machine() -> str:
    """``machine_kind`` of this host."""
    dmi = "/sys/class/dmi/id/"
    return machine_kind(
        read("/proc/cpuinfo", 8192),
        read(dmi + "sys_vendor"),
        read(dmi + "product_name"),
        read("/sys/hypervisor/type"),
        read("/proc/device-tree/hypervisor/compatible"),
    )


def facts() -> list[Fact]:
    """All facts of this module."""
    uname = os.uname()
    capabilities, complete = effective_capabilities()
    return [
        caller(os.geteuid(), os.getegid(), capabilities, complete, read("/proc/self/uid_map")),
        kernel(uname.release),
        architecture(uname.machine, struct.calcsize("P") * 8),
        Fact("container", True, container() or "none"),
        Fact("virtual_machine", True, virtual_machine() or "none"),
        *system_calls(),
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        overcommit(number(read("/proc/sys/vm/overcommit_memory"))),
    ]
