"""Which limits the kernel can enforce for this caller, by cgroup v2, v1 or both."""

import os

from nsbox.doctor.fact import Fact, as_root, read
from nsbox.doctor.groups import Survey, layout, survey
from nsbox.doctor.identity import is_privileged
from nsbox.resources.cgroup_fs import Mount, memberships, mounts

#: Where no controller can be had for one of these it is watched by the host side.
LIMITS = ("memory", "pids", "cpu")
_DELEGATE = "systemd-run --user --scope -p Delegate=yes"
_DROP_IN = "/etc/systemd/system/user@.service.d/nsbox.conf"


def describe(mounted: list[Mount]) -> str:
    """The layout in words: which controllers are where."""
    kind = layout(mounted)
    parts = []
    for one in mounted:
        if one.version == 2:
            controllers = " ".join(read(one.point + "/cgroup.controllers").split())
            parts.append(f"v2 at {one.point}: {controllers or 'no controllers'}")
    names = sorted({name for one in mounted for name in one.controllers})
    if names:
        parts.append(f"v1: {' '.join(names)}")
    return f"{kind} ({'; '.join(parts)})" if parts else kind


def own_group(found: Survey, mounted: list[Mount]) -> str:
    """The command that gives this user, and the shell it is typed in, a group where systemd does not."""
    places = found.own or tuple(one.point for one in mounted if one.version == 2)
    switch = "" if found.own else f"echo +cpu +memory +pids > {places[0]}/cgroup.subtree_control; "
    loop = (
        f"for d in {' '.join(places)}; do mkdir -p $d/nsbox && chown -R {os.geteuid()} $d/nsbox"
        " && echo $0 > $d/nsbox/cgroup.procs; done"
    )
    return as_root(switch + loop, "$$")


def delegation(found: Survey, mounted: list[Mount], privileged: bool, systemd: bool, name: str) -> tuple[str, str]:
    """Reason and remedy where the caller has no writable group for a controller, "" for any."""
    if found.layout == "none":
        return "no cgroup file system is mounted", as_root("mount -t cgroup2 none /sys/fs/cgroup")
    refusals = found.refusals
    reason = refusals.get(name) or next(iter(refusals.values()), "no group of this process shows in /sys/fs/cgroup")
    if privileged:
        return reason, "mount cgroups writable (container: --cgroupns=private -v /sys/fs/cgroup:/sys/fs/cgroup:rw)"
    if systemd and found.layout == "v2":
        return reason, f"start it with: {_DELEGATE} nsbox ..."
    if systemd:
        return reason, (
            "the controllers are on cgroup v1, which cannot be delegated: boot with systemd.unified_cgroup_hierarchy=1,"
            f" then {_DELEGATE} nsbox ..."
        )
    return reason, own_group(found, mounted)


def strength(name: str, found: Survey, mounted: list[Mount], privileged: bool, systemd: bool) -> Fact:
    """The fact for one limit: kernel or watched."""
    if name in found.v1 or (found.v2 and name in found.v2.controllers):
        return Fact(f"{name}_limit", True, "kernel")
    if found.v2 is None and not found.v1 and (found.layout == "none" or name in found.known):
        reason, remedy = delegation(found, mounted, privileged, systemd, name)
    elif name not in found.known:
        reason = f"the kernel has no {name} controller, or it was switched off at boot"
        remedy = f"boot without cgroup_disable={name}" + (" and with cgroup_enable=memory" if name == "memory" else "")
    elif found.layout == "v2" and not privileged:
        reason = f"the {name} controller is not delegated to this user"
        command = (
            f"mkdir -p {os.path.dirname(_DROP_IN)} && printf '[Service]\\nDelegate=cpu io memory pids\\n' > {_DROP_IN}"
            " && systemctl daemon-reload"
        )
        remedy = f"{as_root(command)}, log in again, then: {_DELEGATE} nsbox ..."
    else:
        reason, remedy = delegation(found, mounted, privileged, systemd, name)
    return Fact(f"{name}_limit", False, "watched", reason, remedy)


def swap(found: Survey, swaps: str) -> Fact:
    """Whether swap counts against --memory. ``swaps`` is the text of /proc/swaps, one line of it a heading."""
    if len(swaps.splitlines()) < 2:
        return Fact("swap_accounting", True, "no swap")
    group = found.v1.get("memory") or (found.v2 if found.v2 and "memory" in found.v2.controllers else None)
    if group and group.swap:
        return Fact("swap_accounting", True, True)
    if group is None:
        reason = "without a memory controller, memory that was swapped out is not counted"
        return Fact("swap_accounting", False, False, reason, "as for memory_limit, or " + as_root("swapoff -a"))
    reason = "the kernel does not count swap: a sandbox may use more than --memory"
    return Fact("swap_accounting", False, False, reason, "boot with swapaccount=1, or " + as_root("swapoff -a"))


def favordynmods(mounted: list[Mount], found: Survey) -> Fact:
    """Processes are born in a v2 group; into one of v1 they are moved, which waits for a lock of the whole system.

    The option of any hierarchy makes that lock cheap for all of them.
    """
    name = "cgroup_favordynmods"
    if not found.v1:
        return Fact(name, True, "not needed: no process is moved between groups")
    if any("favordynmods" in one.options for one in mounted):
        return Fact(name, True, True)
    v2 = next((one for one in mounted if one.version == 2), None)
    remedy = "boot with cgroup_favordynmods=1 (Linux 6.7 and later)"
    if v2:
        # A remount takes back what it does not name.
        options = ",".join(["remount", *(word for word in v2.options if word not in ("rw", "ro")), "favordynmods"])
        remedy = as_root(f"mount -o {options} {v2.point}")
    return Fact(name, False, False, "moving a process into a v1 group may take 10 ms", remedy)


def facts() -> list[Fact]:
    """All facts of this module."""
    mounted = mounts(read("/proc/self/mountinfo"))
    privileged = is_privileged()
    systemd = os.path.isdir("/run/systemd/system")
    found = survey(mounted, memberships(read("/proc/self/cgroup")), privileged)
    paths = dict.fromkeys(group.path for group in (found.v2, *found.v1.values()) if group)
    reason, remedy = ("", "") if paths else delegation(found, mounted, privileged, systemd, "")
    kill = bool(found.v2 and found.v2.kill)
    no_kill = "" if kill else "there is no cgroup.kill for this caller: the end of pid 1 inside ends everything instead"
    how = remedy or "mount cgroup v2 and use Linux 5.14 or later"
    absent = (reason, remedy) if found.layout == "none" else ("", "")
    return [
        Fact("cgroup_layout", found.layout != "none", describe(mounted), *absent),
        Fact("cgroup_subtree", bool(paths), " ".join(paths) or "none", reason, remedy),
        *(strength(name, found, mounted, privileged, systemd) for name in LIMITS),
        swap(found, read("/proc/swaps")),
        Fact("cgroup_kill", kill, kill, no_kill, "" if kill else how),
        favordynmods(mounted, found),
    ]
