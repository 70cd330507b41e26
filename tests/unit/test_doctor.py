"""What `nsbox doctor` concludes from what it reads, and that its attempts agree with each other on this host."""

import errno
import json
import os
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsbox import doctor
from nsbox.doctor import (
    Fact,
    cgroups,
    fact,
    filesystems,
    groups,
    host,
    identity,
    namespaces,
    network,
    security,
    surroundings,
)
from nsbox.doctor import attempt as a
from nsbox.doctor.attempt import Outcome, attempt
from nsbox.doctor.render import render, to_json, verdict
from nsbox.resources.cgroup_fs import Mount, memberships, mounts

ORDINARY_UID = 61234
PATIENT = 30.0  # seconds, for whole runs of the doctor in a child
FAILED = Outcome(None, errno.EPERM, "the step")

DEBIAN = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\nID=debian\n'
UBUNTU = 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n'
FEDORA = "ID=fedora\nVERSION_ID=40\n"
ROCKY = 'ID="rocky"\nID_LIKE="rhel centos fedora"\n'
SUSE = 'ID="opensuse-leap"\nID_LIKE="suse opensuse"\n'


# The kernel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "release, version",
    [
        ("6.1.0-13-amd64", (6, 1)),
        ("5.15.153.1-microsoft-standard-WSL2", (5, 15)),
        ("6.18-rc3", (6, 18)),
        ("nonsense", (0, 0)),
    ],
)
def test_kernel_version(release: str, version: tuple[int, int]) -> None:
    assert host.kernel_version(release) == version


def test_kernel_too_old() -> None:
    old = host.kernel("5.10.0-28-amd64")
    assert (old.ok, old.needed) == (False, True)
    assert "5.12" in old.reason
    assert old.remedy


@pytest.mark.parametrize(
    "release, absent, present",
    [
        ("5.12.0", ["cgroup.kill", "overlay layers", "idmapped tmpfs", "extended attributes"], []),
        ("6.1.0", ["idmapped tmpfs", "extended attributes"], ["overlay layers", "cgroup.kill"]),
        ("6.12.0", [], ["without"]),
    ],
)
def test_kernel_names_what_it_lacks(release: str, absent: list[str], present: list[str]) -> None:
    found = host.kernel(release)
    assert found.ok
    assert all(what in str(found.value) for what in absent)
    assert not any(what in str(found.value) for what in present)


def test_architecture() -> None:
    assert host.architecture("aarch64", 64).ok
    assert not host.architecture("x86_64", 32).ok
    assert not host.architecture("riscv64", 64).ok


@pytest.mark.parametrize("code, word", [(errno.ENOSYS, "does not know"), (errno.EPERM, "refuses")])
def test_system_call_refused(code: int, word: str) -> None:
    found = host.system_call("clone3", "5.3", code, "clone3: failed")
    assert not found.ok
    assert word in found.reason


def test_memfd_forbidden_by_sysctl() -> None:
    found = host.memfd(errno.EACCES, "memfd_create: Permission denied", 2)
    assert "vm.memfd_noexec is 2" in found.reason
    assert "sysctl -w vm.memfd_noexec=1" in found.remedy
    assert fact.SYSCTL_FILE in found.remedy


# Remedies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, command",
    [(DEBIAN, "apt-get install"), (UBUNTU, "apt-get install"), (FEDORA, "dnf install"), (ROCKY, "dnf install"),
     (SUSE, "zypper install"), ("ID=arch\n", "pacman -S"), ("ID=alpine\n", "apk add"), ("", "apt-get install")],
)  # fmt: skip
def test_package_manager(text: str, command: str) -> None:
    assert fact.package_manager(text) == command


@pytest.mark.parametrize(
    "text, machine, words",
    [
        (DEBIAN, "x86_64", "-t bookworm-backports linux-image-amd64"),
        (DEBIAN, "aarch64", "linux-image-arm64"),
        (UBUNTU, "x86_64", "linux-generic-hwe-24.04"),
        (FEDORA, "x86_64", "dnf upgrade kernel"),
        ("", "x86_64", "apt-get install linux-image-amd64"),
    ],
)
def test_newest_kernel(text: str, machine: str, words: str) -> None:
    assert words in fact.newest_kernel(text, machine)


def test_sudo_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    remedy = fact.sysctl("kernel.unprivileged_userns_clone", 1)
    assert remedy.startswith("sudo sh -c '")
    assert "sysctl -w kernel.unprivileged_userns_clone=1 && echo" in remedy


# The caller -------------------------------------------------------------------------------------------------------

WHOLE = "         0          0 4294967295\n"
ENOUGH = {"chown", "setgid", "setuid", "sys_admin"}


@pytest.mark.parametrize(
    "uid, capabilities, uid_map, expected",
    [(0, ENOUGH, WHOLE, True), (0, {"chown"}, WHOLE, False), (0, ENOUGH, "0 100000 65536\n", False),
     (1000, ENOUGH, WHOLE, False)],
)  # fmt: skip
def test_privileged(uid: int, capabilities: set[str], uid_map: str, expected: bool) -> None:
    assert identity.privileged(uid, capabilities, uid_map) is expected


def test_groups_that_stay_with_the_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    found = identity.mighty_groups({"a", "docker", "sudo"}, "a", False)
    assert (found.ok, found.needed, found.value) == (False, False, "docker, sudo")
    assert "gpasswd -d a docker; gpasswd -d a sudo" in found.remedy
    assert identity.mighty_groups({"a"}, "a", False).ok
    assert identity.mighty_groups({"docker"}, "root", True).ok


@pytest.mark.parametrize(
    "pattern, ok", [("core\n", True), ("", True), ("|/usr/lib/systemd/systemd-coredump %P %u\n", False)]
)
def test_core_pattern(pattern: str, ok: bool) -> None:
    found = surroundings.core_pattern(pattern)
    assert found.ok is ok
    if not ok:
        assert "runs /usr/lib/systemd/systemd-coredump on the host" in found.reason
        assert "sysctl -w kernel.core_pattern=core" in found.remedy


def test_caller() -> None:
    assert identity.caller(1000, 1000, set(), False, WHOLE).ok
    assert identity.caller(0, 0, ENOUGH, True, WHOLE).value == "uid 0, gid 0, every capability"
    stripped = identity.caller(0, 0, {"chown", "setuid", "setgid"}, False, WHOLE)
    assert "CAP_SYS_ADMIN" in stripped.reason
    assert "--cap-add SYS_ADMIN" in stripped.remedy
    assert "only some ids" in identity.caller(0, 0, ENOUGH, False, "0 100000 65536\n").reason


SUBUID = "# ranges\nann:100000:65536\nbob:165536:65536\n1000:231072:65536\nbroken:line\n"


def test_ranges() -> None:
    assert identity.ranges(SUBUID, {"ann", "1000"}) == [(100000, 65536), (231072, 65536)]
    assert identity.ranges(SUBUID, {"broken"}) == []
    assert identity.next_free(SUBUID, "ann:900000:10\n") == 900010
    assert identity.next_free("") == 100000


def test_id_ranges_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = identity.id_ranges(1000, "ann", SUBUID, SUBUID, [None, "/usr/bin/newgidmap"])
    assert absent is not None
    assert "not installed" in absent.reason
    bare = identity.id_ranges(1000, "ann", SUBUID, SUBUID, ["/bin/true", "/bin/true"])
    assert bare is not None
    assert "chmod u+s" in bare.remedy
    monkeypatch.setattr(identity, "_privileged_helper", lambda path: True)
    none = identity.id_ranges(1001, "carl", SUBUID, "", ["/a", "/b"])
    assert none is not None
    assert "usermod --add-subuids 296608-362143 --add-subgids 296608-362143 carl" in none.remedy
    nameless = identity.id_ranges(1001, "1001", SUBUID, "", ["/a", "/b"])
    assert nameless is not None
    assert "usermod" not in nameless.remedy
    assert identity.id_ranges(1000, "zed", SUBUID, SUBUID, ["/a", "/b"]) is None  # by number


# Namespaces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, found, reason, remedy",
    [
        (errno.ENOSPC, {"maximum": 0}, "max_user_namespaces is 0", "sysctl -w user.max_user_namespaces="),
        (errno.ENOSPC, {"maximum": 5}, "= 5 are in use", "user.max_user_namespaces=16384"),
        (errno.EINVAL, {}, "without user namespaces", "CONFIG_USER_NS"),
        (errno.EPERM, {"clone": 0}, "unprivileged_userns_clone is 0", "kernel.unprivileged_userns_clone=1"),
        (errno.EPERM, {"chrooted": True}, "chroot", "outside the chroot"),
        (errno.EACCES, {"apparmor": 1}, "AppArmor", "kernel.apparmor_restrict_unprivileged_userns=0"),
        (errno.EPERM, {"container": "docker"}, "docker container", "seccomp=unconfined"),
        (errno.EPERM, {"apparmor": 1, "ordinary": False}, "the step", "security policy"),
        (errno.EPERM, {}, "the step", "security policy"),
        (errno.ENOSYS, {"filtered": True}, "seccomp filter", "RestrictNamespaces=no"),
        (errno.EPERM, {"filtered": True, "container": "podman"}, "the podman container's", "seccomp=unconfined"),
    ],
)
def test_why_no_user_namespace(code: int, found: dict[str, Any], reason: str, remedy: str) -> None:
    got = namespaces.why_no_user_namespace(code, "the step", namespaces.Settings(**found))
    assert reason in got[0]
    assert remedy in got[1]


@pytest.mark.parametrize(
    "code, maximum, remedy",
    [
        (errno.ENOSPC, 0, "user.max_net_namespaces=16384"),
        (errno.EINVAL, 9, "CONFIG_NET_NS"),
        (errno.EPERM, 9, "filter"),
    ],
)
def test_namespace_refused(code: int, maximum: int, remedy: str) -> None:
    found = namespaces.namespace("net", "net", True, code, maximum)
    assert (found.name, found.ok, found.needed) == ("net_namespace", False, True)
    assert remedy in found.remedy


MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /proc/sys/fs/binfmt_misc rw - autofs systemd-1 rw
31 22 0:21 /sys /proc/sys ro - proc proc rw
32 22 0:41 / /proc/kcore ro - tmpfs tmpfs ro
33 27 0:42 / /tmp rw - tmpfs tmpfs rw
34 27 0:43 / /srv/a\\040b rw - btrfs /dev/vdb rw
35 27 0:44 / /srv/x rw shared:1 - overlay overlay rw,lowerdir=/l - y
"""


def test_mountinfo() -> None:
    assert namespaces.covered(MOUNTS) == ["/proc/kcore", "/proc/sys"]
    assert not namespaces.is_chrooted(MOUNTS)
    assert namespaces.is_chrooted("22 27 0:21 / /proc rw,relatime - proc proc rw\n")
    assert not namespaces.is_chrooted("")


@pytest.mark.parametrize(
    "path, kind",
    [("/", "ext4"), ("/tmp", "tmpfs"), ("/tmp/x", "tmpfs"), ("/tmpfile", "ext4"), ("/srv/a b/c", "btrfs"),
     ("/srv/x", "overlay")],
)  # fmt: skip
def test_file_system_of(path: str, kind: str) -> None:
    assert filesystems.file_system_of(path, MOUNTS) == kind


def test_fresh_proc_masked() -> None:
    found = namespaces.fresh_proc(FAILED, ["/proc/kcore", "/proc/sys"])
    assert "mounted over /proc/kcore, /proc/sys" in found.reason
    assert "systempaths=unconfined" in found.remedy
    assert namespaces.fresh_proc(FAILED, []).reason == "the step: Operation not permitted"


# File systems -----------------------------------------------------------------------------------------------------


def test_overlay_facts() -> None:
    assert filesystems.overlay(Outcome(True)).ok
    assert "modprobe overlay" in filesystems.overlay(Outcome(None, errno.ENODEV, "mount")).remedy
    assert not filesystems.tmpfs_xattr(Outcome(None), replaces=False).ok
    assert "overlayfs itself" in filesystems.scratch("/tmp", "overlay", FAILED).reason
    assert "the step" in filesystems.scratch("/tmp", "nfs", FAILED).reason
    assert "user.*" in filesystems.scratch("/tmp", "tmpfs", Outcome(False)).reason
    assert filesystems.scratch("/tmp", "ext4", Outcome(True)).value == "/tmp (ext4)"


def test_idmapped_facts() -> None:
    paths = {"/usr": "ext4", "/tmp": "overlay"}
    codes = {"/usr": 0, "/tmp": errno.EINVAL, "tmpfs": errno.EINVAL, "layers": 0}
    main, tmpfs, layers = filesystems.idmapped(paths, Outcome(codes))
    assert main.value == "/usr (ext4) yes, /tmp (overlay) no"
    assert main.reason.startswith("overlay cannot be idmapped")
    assert (tmpfs.ok, layers.ok) == (False, True)
    assert "6.3" in tmpfs.reason
    assert not any(found.ok for found in filesystems.idmapped(paths, FAILED))


@pytest.mark.parametrize(
    "uid, runtime, writable, path",
    [(0, "/run/user/0", {"/run"}, "/run/nsbox"), (0, "/run/user/0", {"/run/user/0"}, "/run/user/0/nsbox"),
     (7, "/run/user/7", {"/run/user/7"}, "/run/user/7/nsbox"), (7, "/run/user/7", set(), "/tmp/nsbox-7"),
     (7, "relative", {"relative"}, "/tmp/nsbox-7")],
)  # fmt: skip
def test_state_path(monkeypatch: pytest.MonkeyPatch, uid: int, runtime: str, writable: set[str], path: str) -> None:
    monkeypatch.setattr("os.geteuid", lambda: uid)
    monkeypatch.setattr("os.access", lambda name, _: name in writable)
    monkeypatch.setattr("os.path.exists", lambda _: False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    assert filesystems.state_path() == path


def test_cache_path() -> None:
    assert filesystems.cache_path("/home/a", "") == "/home/a/.cache/nsbox"
    assert filesystems.cache_path("/home/a", "relative") == "/home/a/.cache/nsbox"
    assert filesystems.cache_path("/home/a", "/c") == "/c/nsbox"


def test_directory_must_be_private(tmp_path: Path) -> None:
    uid = tmp_path.stat().st_uid
    tmp_path.chmod(0o700)
    assert filesystems.why_unusable(str(tmp_path), uid) == ("", "")
    assert filesystems.why_unusable(str(tmp_path / "not" / "yet"), uid) == ("", "")
    assert filesystems.why_unusable(str(tmp_path), uid + 1)[0]
    tmp_path.chmod(0o755)
    reason, remedy = filesystems.why_unusable(str(tmp_path), uid)
    assert "mode 755" in reason
    assert remedy == f"chmod 700 {tmp_path}"
    assert list(tmp_path.iterdir()) == []


# Seccomp, Landlock ------------------------------------------------------------------------------------------------


def test_seccomp_actions() -> None:
    assert security.seccomp(Outcome(None), "kill_process errno allow").ok
    assert security.seccomp(Outcome(None), "").ok
    assert "kill_process" in security.seccomp(Outcome(None), "errno allow").reason
    assert "CONFIG_SECCOMP_FILTER" in security.seccomp(FAILED, "").remedy


@pytest.mark.parametrize(
    "code, remedy",
    [(errno.EOPNOTSUPP, "lsm=landlock,yama,apparmor"), (errno.ENOSYS, "reboot"), (errno.EPERM, "filter")],
)
def test_landlock_missing(code: int, remedy: str) -> None:
    assert remedy in security.landlock(Outcome(None, code, "landlock_create_ruleset"), "yama,apparmor\n").remedy


def test_landlock_abi() -> None:
    assert security.landlock(Outcome(3), "").value == "ABI 3, without TCP, ioctl, signals"
    assert security.landlock(Outcome(9), "").value == "ABI 9"


# Containers, machines, limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, kind",
    [
        ((set(), "", "PATH=/bin\0container=lxc\0", "", "6.1"), "lxc"),
        ((set(), "systemd-nspawn\n", "", "", "6.1"), "systemd-nspawn"),
        (({"/.dockerenv"}, "", "", "", "6.1"), "docker"),
        (({"/run/.containerenv"}, "", "", "", "6.1"), "podman"),
        ((set(), "", "", "12:pids:/docker/abc\n", "6.1"), "docker"),
        ((set(), "", "", "0::/kubepods/burstable/pod1\n", "6.1"), "kubernetes"),
        ((set(), "", "", "0::/init.scope\n", "5.15.1-microsoft-standard-WSL2"), "wsl"),
        ((set(), "", "HOME=/\0", "0::/init.scope\n", "6.1.0-amd64"), ""),
    ],
)
def test_container_kind(arguments: tuple[set[str], str, str, str, str], kind: str) -> None:
    assert surroundings.container_kind(*arguments) == kind


VIRTUAL = "vendor_id\t: GenuineIntel\nflags\t\t: fpu vme hypervisor lahf_lm\n"
BARE = "vendor_id\t: GenuineIntel\nflags\t\t: fpu vme lahf_lm\n"


@pytest.mark.parametrize(
    "arguments, kind",
    [
        ((VIRTUAL, "QEMU\n", "Standard PC\n", "", ""), "qemu"),
        ((VIRTUAL, "", "", "", ""), "yes, of an unknown kind"),
        ((VIRTUAL, "Amazon EC2\n", "m5.large\n", "", ""), "amazon"),
        ((VIRTUAL, "", "", "xen\n", ""), "xen"),
        ((BARE, "Microsoft Corporation\n", "Surface\n", "", ""), ""),
        ((BARE, "Dell Inc.\n", "", "", ""), ""),
        (("processor : 0\nFeatures : fp\n", "", "", "", "linux,kvm"), "kvm"),
    ],
)
def test_machine_kind(arguments: tuple[str, str, str, str, str], kind: str) -> None:
    assert surroundings.machine_kind(*arguments) == kind


def test_small_limits() -> None:
    assert surroundings.open_files(1024, 4096).ok
    assert surroundings.open_files(64, 1 << 20).remedy == "ulimit -n 4096"
    assert "prlimit" in surroundings.open_files(64, 64).remedy
    assert surroundings.overcommit(0).ok
    assert surroundings.overcommit(None).ok
    assert "vm.overcommit_memory=0" in surroundings.overcommit(2).remedy


# Control groups ---------------------------------------------------------------------------------------------------

UNIFIED = "25 20 0:23 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
HYBRID = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""


def test_hierarchies() -> None:
    (one,) = mounts(UNIFIED)
    assert (one.version, one.point, "nsdelegate" in one.options) == (2, "/sys/fs/cgroup", True)
    found = mounts(HYBRID)
    assert [sorted(each.controllers) for each in found] == [["cpu", "cpuacct"], ["memory"], [], []]
    (odd,) = mounts(
        UNIFIED.replace("cgroup2", "cgroup").replace("nsdelegate,memory_recursiveprot", "pids,xattr,favordynmods")
    )
    assert odd.controllers == {"pids"}
    assert groups.layout(found) == "hybrid"
    assert groups.layout([one]) == "v2"
    assert groups.layout(found[:2]) == "v1"
    assert groups.layout([]) == "none"


def test_memberships() -> None:
    found = memberships("4:memory:/a:b\n3:cpu,cpuacct:/c\n0::/user.slice\n")
    assert found == {"memory": "/a:b", "cpu": "/c", "cpuacct": "/c", "": "/user.slice"}


@pytest.mark.parametrize(
    "root, path, expected",
    [
        ("/", "/a/b", "/m/a/b"),
        ("/", "/", "/m"),
        ("/docker/abc", "/docker/abc/x", "/m/x"),
        ("/docker/abc", "/docker/abc", "/m"),
        ("/docker/abc", "/docker/abcd", None),
        ("/", "/../other", None),
    ],
)
def test_group_directory(root: str, path: str, expected: str | None) -> None:
    assert Mount(2, "/m", root, frozenset()).directory(path) == expected


def surveyed(kind: str, **changes: Any) -> groups.Survey:
    empty = groups.Survey(kind, None, {}, {}, {"cpu", "memory", "pids"})
    return empty._replace(**changes)


@pytest.mark.parametrize(
    "found, privileged, systemd, value, remedy",
    [
        (surveyed("v2", v2=groups.Group("/g", ("memory",))), False, True, "kernel", ""),
        (surveyed("hybrid", v1={"memory": groups.Group("/g", ("memory",))}), True, True, "kernel", ""),
        (surveyed("v2"), False, True, "watched", "systemd-run --user --scope -p Delegate=yes"),
        (surveyed("hybrid"), False, True, "watched", "systemd.unified_cgroup_hierarchy=1"),
        (surveyed("v2"), False, False, "watched", "cgroup.subtree_control"),
        (surveyed("hybrid", own=("/m/own",)), False, False, "watched", "for d in /m/own; do mkdir -p $d/nsbox"),
        (surveyed("v2"), True, True, "watched", "mount cgroups writable"),
        (surveyed("none"), True, False, "watched", "mount -t cgroup2"),
        (surveyed("v2", v2=groups.Group("/g", ("pids",))), False, True, "watched", "Delegate=cpu io memory pids"),
        (surveyed("v2", v2=groups.Group("/g", ()), known={"cpu"}), True, True, "watched", "cgroup_enable=memory"),
    ],
)
def test_memory_strength(found: groups.Survey, privileged: bool, systemd: bool, value: str, remedy: str) -> None:
    got = cgroups.strength("memory", found, mounts(UNIFIED), privileged, systemd)
    assert (got.name, got.value, got.ok) == ("memory_limit", value, value == "kernel")
    assert remedy in got.remedy
    assert bool(got.reason) is not got.ok


def test_swap() -> None:
    heading, area = "Filename Type Size Used Priority\n", "/dev/sda2 partition 1 0 -2\n"
    group = groups.Group("/g", ("memory",))
    assert cgroups.swap(surveyed("v2"), heading).value == "no swap"
    assert not cgroups.swap(surveyed("v2"), heading + area).ok
    assert not cgroups.swap(surveyed("v1", v1={"memory": group}), heading + area).ok
    assert cgroups.swap(surveyed("v2", v2=group._replace(swap=True)), heading + area).ok


def test_favordynmods() -> None:
    moved = surveyed("hybrid", v1={"memory": groups.Group("/g", ("memory",))})
    assert cgroups.favordynmods(mounts(UNIFIED), surveyed("v2")).ok
    slow = cgroups.favordynmods(mounts(UNIFIED), moved)
    assert "mount -o remount,nsdelegate,memory_recursiveprot,favordynmods /sys/fs/cgroup" in slow.remedy
    assert cgroups.favordynmods(mounts(UNIFIED.replace("nsdelegate", "favordynmods")), moved).ok


# Netlink ----------------------------------------------------------------------------------------------------------


def test_netlink_errors() -> None:
    acknowledged = network.message(2, 0, 7, struct.pack("=i", 0) + bytes(16))
    refused = network.message(2, 0, 8, struct.pack("=i", -errno.EEXIST) + bytes(16))
    other = network.message(3, 0, 9, b"")
    assert network.errors(acknowledged + other + refused) == [(7, 0), (8, errno.EEXIST)]
    assert network.errors(b"") == network.errors(acknowledged[:10]) == network.errors(acknowledged[:-1]) == []


def test_attributes_are_padded() -> None:
    assert network.attribute(1, b"abc") == b"\x07\x00\x01\x00abc\x00"
    assert len(network.nested(4, network.attribute(1, b"a"))) == 12


def test_network_facts() -> None:
    assert "nf_tables" in network.nf_tables(Outcome(None, errno.EPROTONOSUPPORT, "socket")).remedy
    assert "AF_NETLINK" in network.nf_tables(FAILED).remedy
    assert "modprobe -a nft_tproxy nft_socket" in network.nft_tproxy(FAILED).remedy
    assert "modprobe -a veth" in network.veth(Outcome(None, errno.EOPNOTSUPP, "RTM_NEWLINK")).remedy
    assert "NET_ADMIN" in network.veth(FAILED).remedy
    assert network.ip_forward(0, privileged=False).ok
    assert "net.ipv4.ip_forward=1" in network.ip_forward(0, privileged=True).remedy
    assert network.forward_rules(["docker"], privileged=False).ok
    assert "docker" in network.forward_rules(["docker"], privileged=True).reason
    assert network.forward_rules([], privileged=True).value is True
    assert "nf_tables" in network.forward_rules(OSError(93, "x"), privileged=True).remedy
    assert network.uplink({"IPv4": "eth0", "IPv6": "eth1"}).value == "IPv4 by eth0, IPv6 by eth1"
    assert "ip route add default" in network.uplink({}).remedy
    assert not network.uplink(OSError(97, "x")).ok


def test_uplinks_of_this_host() -> None:
    found = network.find_uplinks()
    assert set(found) <= {"IPv4", "IPv6"}
    with open("/proc/net/route", encoding="ascii") as file:
        rows = [line.split() for line in file][1:]
    assert ("IPv4" in found) == any((row[1], row[7]) == ("00000000", "00000000") for row in rows)


# Attempts ---------------------------------------------------------------------------------------------------------


def raises(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


def test_attempt_returns_a_value() -> None:
    assert attempt(lambda: {"a": [1, True, None]}) == Outcome({"a": [1, True, None]})


def test_attempt_names_the_error() -> None:
    outcome = attempt(raises(OSError(errno.EBUSY, "busy", "the step")))
    assert (outcome.ok, outcome.error) == (False, "the step: Device or resource busy")
    assert not attempt(raises(ValueError("odd"))).ok
    assert not attempt(raises(KeyboardInterrupt())).ok


def test_attempt_that_hangs_or_dies() -> None:
    assert attempt(lambda: time.sleep(600), patience=0.1).errno == errno.ETIMEDOUT
    assert "SIGKILL" in attempt(lambda: os.kill(os.getpid(), signal.SIGKILL)).step
    assert attempt(lambda: os._exit(3)).errno


def test_attempt_where_children_reap_themselves() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert attempt(lambda: 5).value == 5
    finally:
        signal.signal(signal.SIGCHLD, before)


# For people and for programs --------------------------------------------------------------------------------------

SAMPLE = [
    Fact("caller", True, "uid 1000, gid 1000, no capability"),
    Fact("seccomp", True, True, needed=True),
    Fact("memory_limit", False, "watched", "a reason of some length " * 6, "delegate " + "x" * 90),
    Fact("cpu_limit", False, "none", "no controller", "delegate " + "x" * 90),
]


def test_json_form() -> None:
    found = json.loads(to_json(SAMPLE))
    assert list(found) == ["facts"]
    assert found["facts"][1] == {"name": "seccomp", "ok": True, "value": True, "reason": "", "remedy": ""}


@pytest.mark.parametrize("width", [20, 60, 200])
def test_render_wraps(width: int) -> None:
    text = render(SAMPLE, False, width=width, encoding="utf-8", uid=1000)
    remedy = f"→ {SAMPLE[2].remedy}"
    assert text.count(remedy) == 1, "once, in one piece"
    assert "→ as for memory limit" in text
    lines = [line for line in text.splitlines()[:-1] if remedy not in line]
    assert max(map(len, lines)) <= max(40, min(width, 110))
    assert text.startswith("✓ caller")
    assert "! memory limit" in text
    assert "✗" not in text
    assert "\033" not in text


def test_render_plain_encodings_and_colour() -> None:
    text = render([*SAMPLE, Fact("proc", False, False, "gone", "mount it", True)], True, width=80, encoding="latin-1")
    text.encode("ascii")
    assert "\033[31mx\033[0m proc" in text
    render(SAMPLE, False, encoding="no such encoding").encode("ascii")


def test_verdict() -> None:
    delegate = SAMPLE[2].remedy
    assert verdict(SAMPLE, 1000) == (
        "Sandboxes can run here as an ordinary user; memory is watched, not enforced by the kernel,"
        f" and cpu is not limited: {delegate}"
    )
    assert verdict([*SAMPLE, Fact("proc", False, False, "gone", "mount it", True)], 0) == (
        "Sandboxes cannot run here: gone: mount it"
    )
    assert (
        verdict(SAMPLE[:2], 1000)
        == "Sandboxes can run here as an ordinary user, with everything that nsbox can enforce"
    )
    assert "as root with every limit" in verdict([SAMPLE[1], Fact("ip_forward", False, False, "off", "on")], 0)
    assert "\n" not in verdict(SAMPLE, 0)


# This host --------------------------------------------------------------------------------------------------------


def _all_facts() -> list[Fact]:
    return doctor.facts()


def _as_ordinary_user() -> list[Fact]:
    os.setgroups([])
    os.setresgid(ORDINARY_UID, ORDINARY_UID, ORDINARY_UID)
    os.setresuid(ORDINARY_UID, ORDINARY_UID, ORDINARY_UID)
    return doctor.facts()


def facts_of(function: Callable[[], list[Fact]]) -> dict[str, Fact]:
    outcome = attempt(function, patience=PATIENT)
    assert outcome.ok, outcome.error
    found = [Fact(*fields) for fields in outcome.value]
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}


@pytest.fixture(scope="module", params=["this caller", "an ordinary user"])
def facts_by_caller(request: pytest.FixtureRequest) -> dict[str, Fact]:
    if request.param == "this caller":
        return facts_of(_all_facts)
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user; the other half runs as this one")
    import prctl  # noqa: F401 - what the other user's process could not read from here

    return facts_of(_as_ordinary_user)


def test_every_fact_is_whole(facts_by_caller: dict[str, Fact]) -> None:
    for one in facts_by_caller.values():
        assert one.name.replace("_", "").isalnum()
        assert isinstance(one.value, str | int | bool)
        assert bool(one.reason) is not one.ok, one
        assert bool(one.remedy) is not one.ok, one
    render(list(facts_by_caller.values()), True)
    json.loads(to_json(list(facts_by_caller.values())))


def test_facts_agree(facts_by_caller: dict[str, Fact]) -> None:
    found = facts_by_caller
    kernel = host.kernel_version(os.uname().release)
    assert found["kernel"].ok is (kernel >= (5, 12))
    kinds = [name for name in found if name.endswith("_namespace")]
    assert bool(kinds) is found["user_namespaces"].ok
    if not found["user_namespaces"].ok:
        return
    if found["overlay"].ok:
        assert found["mount_namespace"].ok
    if found["nf_tables"].ok:
        assert found["net_namespace"].ok
    if kernel < (6, 6):
        assert not found["tmpfs_user_xattr"].ok
    limits = [found[f"{name}_limit"].value == "kernel" for name in ("memory", "pids", "cpu")]
    assert found["cgroup_subtree"].ok or not any(limits)


def test_nothing_is_left() -> None:
    def traces() -> tuple[set[str], set[str], str]:
        groups_now = {str(path) for path in Path("/sys/fs/cgroup").glob("**/nsbox-doctor*")}
        temporary = {name for name in os.listdir("/tmp") if name.startswith("nsbox-doctor")}
        return groups_now, temporary, Path("/proc/self/mountinfo").read_text()

    before, descriptors = traces(), len(os.listdir("/proc/self/fd"))
    facts_of(_all_facts)
    assert traces() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def _without_user_namespaces() -> list[Fact]:
    a.enter_user_namespace()
    a.write("/proc/sys/user/max_user_namespaces", "0")
    return namespaces.facts()


def _with_covered_proc() -> list[Fact]:
    a.enter_user_namespace(a.CLONE_NEWNS, "CLONE_NEWNS")
    a.mount("none", "/proc/irq", "tmpfs")
    return namespaces.facts()


def test_no_user_namespaces_left() -> None:
    if not attempt(a.enter_user_namespace).ok:
        pytest.skip("needs a user namespace to set its own limit in")
    found = facts_of(_without_user_namespaces)
    assert list(found) == ["proc", "user_namespaces"]
    assert found["user_namespaces"].reason == "user.max_user_namespaces is 0"


def test_covered_proc_is_found() -> None:
    if not attempt(a.enter_user_namespace).ok:
        pytest.skip("needs a user namespace to cover parts of /proc in")
    found = facts_of(_with_covered_proc)
    assert not found["fresh_proc"].ok
    assert "/proc/irq" in found["fresh_proc"].reason


def _in_a_chroot() -> list[Fact]:
    a.unshare(a.CLONE_NEWNS, "CLONE_NEWNS")
    a.mount("none", "/", None, a.MS_REC | a.MS_PRIVATE)
    a.mount("/", "/mnt", None, a.MS_BIND | a.MS_REC)
    os.chroot("/mnt")
    return namespaces.facts()


@pytest.mark.root
def test_chroot_is_found() -> None:
    found = facts_of(_in_a_chroot)
    assert "in a chroot" in found["user_namespaces"].reason


def _without_proc() -> list[Fact]:
    a.enter_user_namespace(a.CLONE_NEWNS, "CLONE_NEWNS")
    a.mount("none", "/proc", "tmpfs")
    return doctor.facts()


def test_missing_proc_is_found() -> None:
    if not attempt(a.enter_user_namespace).ok:
        pytest.skip("needs a user namespace to hide /proc in")
    found = facts_of(_without_proc)
    assert verdict(list(found.values()), 0).startswith("Sandboxes cannot run here: /proc is not mounted: ")
