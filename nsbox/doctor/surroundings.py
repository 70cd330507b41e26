"""What is around nsbox: a container, a virtual machine, and the limits that the caller got from there."""

import os
import re
import resource

from nsbox.doctor.fact import Fact, as_root, number, read, sysctl

_FEW_DESCRIPTORS = 256


def open_files(soft: int, hard: int) -> Fact:
    infinite = resource.RLIM_INFINITY
    value = "unlimited" if soft == infinite else f"{soft} (up to {'any number' if hard == infinite else hard})"
    if soft == infinite or soft >= _FEW_DESCRIPTORS:
        return Fact("open_files", True, value)
    reason = f"each running sandbox needs about 10 descriptors; {soft} are few"
    wanted = 4096
    if hard == infinite or hard >= wanted:
        return Fact("open_files", False, value, reason, f"ulimit -n {wanted}")
    return Fact("open_files", False, value, reason, as_root(f"prlimit --pid $0 --nofile={wanted}:{wanted}", "$$"))


def overcommit(setting: int | None) -> Fact:
    """vm.overcommit_memory, proc_sys_vm(5)."""
    words = {0: "heuristic", 1: "always", 2: "never"}
    value = f"{setting} ({words.get(setting, 'unknown')})" if setting is not None else "unknown"
    if setting != 2:
        return Fact("memory_overcommit", True, value)
    reason = "with strict accounting, programs that reserve much address space fail long before they reach --memory"
    return Fact("memory_overcommit", False, value, reason, sysctl("vm.overcommit_memory", 0))


def core_pattern(pattern: str) -> Fact:
    """kernel.core_pattern, core(5): a pipe is run for every crash inside, whatever the limit on core files is."""
    program = pattern.strip()
    if not program.startswith("|"):
        return Fact("core_pattern", True, program or "none")
    reason = f"for every crash inside the kernel runs {program[1:].split()[0]} on the host, on what the payload wrote"
    return Fact("core_pattern", False, program, reason, sysctl("kernel.core_pattern", "core"))


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
        "parallels": "parallels", "apple virtualization": "apple", "openstack": "openstack",
        "firecracker": "firecracker",
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
    return [
        Fact("container", True, container() or "none"),
        Fact("virtual_machine", True, virtual_machine() or "none"),
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        core_pattern(read("/proc/sys/kernel/core_pattern")),
        overcommit(number(read("/proc/sys/vm/overcommit_memory"))),
    ]
