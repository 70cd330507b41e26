"""Who the caller is, and which ids its sandboxes can have."""

import errno
import os
import re
import stat

from nsbox import probe
from nsbox.doctor import attempt as a
from nsbox.doctor.attempt import attempt
from nsbox.doctor.fact import Fact, as_root, install, number, read
from nsbox.resources.ids import FIRST, SIZE

#: Without these a uid of 0 is not root to nsbox (capabilities(7)).
ROOT_CAPABILITIES = ("chown", "setgid", "setuid", "sys_admin")
_CAPABILITY_NUMBERS = {"chown": 0, "setgid": 6, "setuid": 7, "sys_admin": 21}


def effective_capabilities() -> tuple[set[str], bool]:
    """Names of the capabilities in the effective set, and whether they are all that the kernel has."""
    bits = probe.effective_capabilities() if os.path.exists("/proc/self/status") else 0
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
    return uid == 0 and probe.whole_range_mapped(uid_map) and capabilities.issuperset(ROOT_CAPABILITIES)


def is_privileged() -> bool:
    """``privileged`` for the caller as it is now; without /proc, by which it is told, nobody is."""
    try:
        return probe.is_privileged()
    except OSError:
        return False


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


#: Groups whose members are root, or read what only root should, in all but name; of common distributions.
MIGHTY_GROUPS = frozenset(
    ("adm", "disk", "docker", "incus-admin", "kmem", "libvirt", "lxd", "shadow", "sudo", "systemd-journal", "wheel")
)


def mighty_groups(held: set[str], user: str, privileged: bool) -> Fact:
    """Supplementary groups of an ordinary caller stay with what runs inside: user_namespaces(7) says why."""
    if privileged:
        return Fact("groups", True, "not needed: root's sandboxes have none")
    found = sorted(held & MIGHTY_GROUPS)
    if not found:
        return Fact("groups", True, "none that matters")
    reason = (
        f"what runs inside keeps {', '.join(found)}: files and sockets of such a group that are mounted can be used"
    )
    remedy = (
        as_root("; ".join(f"gpasswd -d {user} {name}" for name in found)) + ", or run agents as a user of their own"
    )
    return Fact("groups", False, ", ".join(found), reason, remedy)


def _groups() -> set[str]:
    import grp

    found = set()
    for number_ in os.getgroups():
        try:
            found.add(grp.getgrgid(number_).gr_name)
        except KeyError:
            found.add(str(number_))
    return found


# Ranges of ids ----------------------------------------------------------------------------------------------------


def ranges(text: str, names: set[str]) -> list[tuple[int, int]]:
    """(first, count) of the lines of subuid(5) that belong to one of ``names``: a user's name and its uid."""
    found = []
    for line in text.splitlines():
        fields = line.strip().split(":")
        if len(fields) == 3 and fields[0] in names and fields[1].isdigit() and fields[2].isdigit():
            found.append((int(fields[1]), int(fields[2])))
    return found


def next_free(*texts: str) -> int:
    """The first id above all ranges of some subuid(5) files, 100000 at least."""
    spans = (match for text in texts for match in re.finditer(r"^[^:#]*:(\d+):(\d+)\s*$", text, re.MULTILINE))
    return max([100000, *(int(span[1]) + int(span[2]) for span in spans)])


def _mapped_by_helpers(first: int, first_gid: int) -> None:
    import subprocess

    with a.held_namespace() as pid:
        for tool, own, start in (("newuidmap", os.geteuid(), first), ("newgidmap", os.getegid(), first_gid)):
            command = [tool, str(pid), "0", str(own), "1", "1", str(start), "1000"]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=a.PATIENCE)
            if done.returncode:
                raise OSError(errno.EPERM, "", done.stderr.strip() or tool)


def _mapped_by_root() -> None:
    with a.held_namespace() as pid:
        for name in ("uid_map", "gid_map"):
            a.write(f"/proc/{pid}/{name}", f"0 {FIRST} {SIZE}")


def _privileged_helper(path: str) -> bool:
    """Whether a program is setuid or has file capabilities."""
    try:
        return bool(os.stat(path).st_mode & stat.S_ISUID) or "security.capability" in os.listxattr(path)
    except OSError:
        return False


def id_ranges(uid: int, user: str, subuid: str, subgid: str, paths: list[str | None]) -> Fact | None:
    """What is missing for newuidmap(1) and newgidmap(1), None where all is there to try them."""
    if None in paths:
        return Fact("id_range", False, False, "newuidmap and newgidmap are not installed", install("uidmap"))
    if bare := [path for path in paths if path and not _privileged_helper(path)]:
        reason = f"{bare[0]} is neither setuid root nor has file capabilities"
        return Fact("id_range", False, False, reason, as_root(f"chmod u+s {' '.join(bare)}"))
    names = {user, str(uid)}
    if not ranges(subuid, names) or not ranges(subgid, names):
        first = next_free(subuid, subgid)
        span = f"{first}-{first + SIZE - 1}"
        remedy = as_root(
            f"usermod --add-subuids {span} --add-subgids {span} {user}"
            if user != str(uid)  # usermod(8) wants a user with a name
            else f"echo {uid}:{first}:{SIZE} | tee -a /etc/subuid >> /etc/subgid"
        )
        return Fact("id_range", False, False, f"/etc/subuid and /etc/subgid have no range for {user}", remedy)
    return None


def _user() -> str:
    """The caller's name, or its uid as text."""
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def id_range() -> Fact:
    """Whether a sandbox can have ids of its own, beyond the caller's single one."""
    if is_privileged():
        outcome = attempt(_mapped_by_root)
        if outcome.ok:
            return Fact("id_range", True, f"{FIRST}+{SIZE} and those above", needed=True)
        remedy = "run nsbox in the initial user namespace, with CAP_SETUID and CAP_SETGID"
        return Fact("id_range", False, False, outcome.error, remedy, True)
    import shutil

    uid, user = os.geteuid(), _user()
    subuid, subgid = read("/etc/subuid"), read("/etc/subgid")
    missing = id_ranges(uid, user, subuid, subgid, [shutil.which("newuidmap"), shutil.which("newgidmap")])
    if missing:
        return missing
    first, count = ranges(subuid, {user, str(uid)})[0]
    outcome = attempt(lambda: _mapped_by_helpers(first, ranges(subgid, {user, str(uid)})[0][0]))
    if outcome.ok:
        return Fact("id_range", True, f"{first}+{count}")
    remedy = "allow setuid programs here: no nosuid mount of /usr, no no_new_privs around this process"
    return Fact("id_range", False, False, outcome.step or outcome.error, remedy)


def facts(user_namespaces: bool) -> list[Fact]:
    """All facts of this module; ranges of ids only where there are user namespaces to map them in."""
    capabilities, complete = effective_capabilities()
    who = caller(os.geteuid(), os.getegid(), capabilities, complete, read("/proc/self/uid_map"))
    member = mighty_groups(_groups(), _user(), is_privileged())
    return [who, member, *([id_range()] if user_namespaces else [])]
