"""The words for a set-up that failed: which step, of what, and what usually mends it."""

from __future__ import annotations

import errno as _errno
import os

from nsbox import _native
from nsbox.errors import NsboxError, SandboxUnavailable, SetupError
from nsbox.light import TYPE_CHECKING, contextlib
from nsbox.prepared import Prepared

if TYPE_CHECKING:
    from typing import Any

_KERNEL = "/proc/sys/kernel"


def _setting(name: str) -> str:
    """The value of a setting of the kernel; "" where it has none of that name."""
    try:
        with open(f"{_KERNEL}/{name}", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _restriction() -> str:
    """The setting that keeps ordinary users from having user namespaces of use, in words; "" if there is none.

    AppArmor lets a namespace be made and then denies what it is for, so that any later step may be the first to fail.
    """
    name = "apparmor_restrict_unprivileged_userns"
    if _setting(name) == "1":
        return (
            f"kernel.{name} is 1: AppArmor takes the privileges of user namespaces away; run as root: sysctl -w"
            f" kernel.{name}=0, or allow it to this program by a profile (docs/hardening.md)"
        )
    name = "unprivileged_userns_clone"
    return f"kernel.{name} is 0; run as root: sysctl -w kernel.{name}=1" if _setting(name) == "0" else ""


def _remedy(stage: str, err: int, prepared: Prepared) -> str:
    """What usually mends an error of this kind at this stage."""
    if err in (_errno.EPERM, _errno.EACCES) and stage != "source" and not prepared.host.privileged:
        if found := _restriction():
            return found
    if stage == "idmap" and err in (_errno.EPERM, _errno.EACCES, _errno.EINVAL):
        return "this host restricts user namespaces: run nsbox doctor for the setting and the command that mends it"
    if stage in ("source", "hostname", "scratch", "mount", "pivot") and err == _errno.EPERM:
        return (
            "a security policy around this process forbids mounts: start the container with --security-opt"
            " seccomp=unconfined --security-opt apparmor=unconfined, a service with @mount in SystemCallFilter="
        )
    if stage == "source" and err == _errno.EINVAL:
        return _no_view(prepared)
    if stage == "source" and err in (_errno.ENOENT, _errno.EACCES, _errno.ELOOP):
        return "name a path that exists and that you may read"
    if stage == "scratch" and err == _errno.EACCES:
        return "every directory above the scratch one must let anybody pass (chmod a+x): the sandbox's ids are its own"
    if stage == "mount" and err in (_errno.EROFS, _errno.EACCES):
        return (
            "the place does not exist inside, and none is made where the host's own files are shown: choose another DST"
        )
    if stage == "mount" and err == _errno.ELOOP:
        return "the place is a symbolic link that leads nowhere inside; choose another DST"
    return ""


def _no_view(prepared: Prepared) -> str:
    """Why a source cannot be shown with other ids, or copy-on-write."""
    if not prepared.host.privileged:
        return "a copy-on-write view cannot contain other mounts: name a directory without any beneath it"
    return (
        "its file system does not take idmapped mounts (ext4, xfs and btrfs do, tmpfs since Linux 6.3, overlayfs and 9p"
        " do not): keep it on one that does (in a container: on a volume), show it with --ro, or run as an ordinary"
        " user"
    )


def _exhausted() -> str:
    """What to do about a limit on namespaces, by the name of the setting that is 0, if one is."""
    for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
        with contextlib.suppress(OSError), open(f"/proc/sys/user/max_{kind}_namespaces", encoding="ascii") as file:
            if file.read().strip() == "0":
                name = f"user.max_{kind}_namespaces"
                return f"{name} is 0; run as root: sysctl -w {name}=15000 (and write that to /etc/sysctl.d to keep it)"
    return (
        "a limit on namespaces is reached: close sandboxes, or raise sysctl user.max_user_namespaces and its siblings"
    )


def _no_namespaces(err: int) -> SandboxUnavailable:
    """Why this host, or what is around this process, lets it have no namespaces."""
    if err in (_errno.ENOSPC, _errno.EUSERS):
        reason, remedy = os.strerror(err), _exhausted()
    else:
        from nsbox.doctor import namespaces

        reason, remedy = namespaces.why_no_user_namespace(err, os.strerror(err), namespaces.settings(fork=False))
    return SandboxUnavailable(f"namespaces cannot be made here: {reason}", remedy=remedy, errno=err)


def _no_proc(err: int) -> SandboxUnavailable:
    """Why no new procfs can be mounted. The host's would show the host's processes, and is never shown instead."""
    from nsbox.doctor import namespaces
    from nsbox.doctor.attempt import Outcome
    from nsbox.doctor.fact import read

    fact = namespaces.fresh_proc(Outcome(None, err), namespaces.covered(read("/proc/self/mountinfo")))
    return SandboxUnavailable(f"no /proc of its own can be mounted: {fact.reason}", remedy=fact.remedy, errno=err)


def failure(prepared: Prepared, message: Any) -> NsboxError:
    """The error for a NSB_MSG_FAILED message."""
    number, op, err = message.stage, message.op, -message.err
    stage = _native.STAGES[number] if number < len(_native.STAGES) else "request"
    plan = prepared.plan
    subject = plan.ops[op] if op < len(plan.ops) else None
    remedy = _remedy(stage, err, prepared)
    if stage == "exec" and err in (_errno.EMFILE, _errno.EINVAL, _errno.EBADF):
        remedy = "allow more open files (files), or deliver secrets as files"
        return SetupError("the descriptors of the secrets", err, remedy=remedy)
    if stage == "exec":
        return SetupError(
            "the working directory", err, target=plan.cwd, remedy="use --cwd with a directory that exists inside"
        )
    if stage in ("clone", "network") and err in (_errno.EPERM, _errno.ENOSYS, _errno.ENOSPC, _errno.EUSERS):
        return _no_namespaces(err)
    if stage == "mount" and err in (_errno.EPERM, _errno.EACCES) and subject and subject.kind == "proc":
        return _no_proc(err)
    return SetupError(stage, err, target=subject.describe() if subject else "", remedy=remedy)


def vanished() -> SandboxUnavailable:
    return SandboxUnavailable("the sandbox ended while it was set up", remedy="run: nsbox doctor")
