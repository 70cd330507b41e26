"""Makes the attempts, one threat after the other, and counts what came of them."""

import contextlib
import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nsbox.errors import NsboxError
from nsbox.selftest import attempted
from nsbox.selftest.catalogue import THREATS
from nsbox.selftest.stage import STAGED, Noted, Stage, noted, staged

#: calls that no policy may let through, whatever their arguments
NEVER = (
    *("acct", "add_key", "bpf", "chroot", "clock_adjtime", "clock_settime", "delete_module", "fanotify_init"),
    *("finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "init_module", "kcmp", "kexec_load", "keyctl"),
    *("migrate_pages", "mount", "mount_setattr", "move_mount", "move_pages", "open_by_handle_at", "open_tree"),
    *("perf_event_open", "pidfd_getfd", "pivot_root", "process_madvise", "process_mrelease", "quotactl"),
    *("quotactl_fd", "reboot", "request_key", "setdomainname", "sethostname", "setns", "settimeofday", "swapoff"),
    *("swapon", "syslog", "umount2", "unshare", "userfaultfd", "adjtimex"),
)
#: numbers that no kernel has given to a call
UNKNOWN = range(500, 600)


class Report(NamedTuple):
    """What a self-test found."""

    profile: str
    attempts: tuple[Noted, ...]
    #: threat → why nothing of it was attempted
    left: dict[str, str]
    seconds: float

    def of(self, result: str) -> tuple[Noted, ...]:
        """The attempts that came to this."""
        return tuple(item for item in self.attempts if item.result == result)


def numbers() -> dict[str, int]:
    """Call → number on this processor."""
    from nsbox.selftest.attempts.calls import NUMBERS, X86

    return {name: n[0 if X86 else 1] if isinstance(n, tuple) else n for name, n in NUMBERS.items()}


@staged("K19")
def every_number(stage: Stage) -> Any:
    """Nothing dangerous is executed, what is unknown seems not to exist, and nothing is killed by surprise."""
    said = stage.program(f"sweep:0-{UNKNOWN.stop}").stdout_text.splitlines()
    outcome = {int(line.split()[0]): line.split(" ", 1)[1] for line in said if line[:1].isdigit()}
    known = numbers()
    late = [number for number in (*UNKNOWN, *(known[name] for name in NEVER)) if outcome.get(number) == "signal 14"]
    if late:  # the machine is slow: once more, with patience
        again = ",".join(f"{number}-{number + 1}" for number in late)
        rows = stage.program(f"sweep_slowly:{again}").stdout_text.splitlines()
        outcome |= {int(line.split()[0]): line.split(" ", 1)[1] for line in rows if line[:1].isdigit()}
    bad = {name: outcome.get(known[name], "?") for name in NEVER if outcome.get(known[name]) not in ("EPERM", "ENOSYS")}
    bad |= {str(number): outcome.get(number, "?") for number in UNKNOWN if outcome.get(number) != "ENOSYS"}
    bad |= {str(number): how for number, how in outcome.items() if how == "signal 31"}
    yield noted(
        "K19",
        f"{UNKNOWN.stop} system call numbers",
        works=outcome.get(known["getpid"]) == "ok" and said[-1:] == ["survived"],
        stopped=not bad,
        control="getpid answers",
        inside=", ".join(f"{name} {how}" for name, how in bad.items()) or "none that is dangerous was executed",
    )


def _programmed(stage: Stage) -> list[Noted]:
    """The attempts of one call each, all in one sandbox for each id inside."""
    policy, machine = stage.spec().seccomp, os.uname().machine
    names = [item.name for item in attempted.ATTEMPTS]
    control = stage.outside("--control", *names)
    found = []
    for uid in dict.fromkeys((stage.spec().uid, 0)):
        items = attempted.for_caller(policy, uid, machine)
        inside = stage.inside(*(item.name for item in items), uid=uid)
        who = "as root inside" if uid == 0 else "as an ordinary user inside"
        for item in items:
            shown, seen = control.get(item.name, "not reached"), inside.get(item.name, "not reached")
            result = attempted.judge(item, shown, seen) if item.name in inside else "not shown"
            result = "not shown" if result == "no control" else result
            found.append(Noted(item.threat, f"{item.name.replace('_', ' ')}, {who}", shown, seen, result))
    return found


#: These change the environment of this process for a moment: alone, after all others.
_ALONE = ("S01", "S09")


def _stages(stage: Stage, left: dict[str, str], told: Callable[[str], object]) -> list[Noted]:
    """The attempts that need something on the host's side, four threats at a time: most of them wait."""
    from concurrent.futures import ThreadPoolExecutor

    def attempt(threat: str) -> list[Noted]:
        told(threat)
        try:
            return list(STAGED[threat](stage))
        except (NsboxError, OSError, KeyError) as error:
            left[threat] = f"{type(error).__name__}: {error}"
            return []

    found: list[Noted] = []
    with ThreadPoolExecutor(4) as pool:
        for noted_ in pool.map(attempt, sorted(STAGED.keys() - set(_ALONE))):
            found += noted_
    for threat in _ALONE:
        found += attempt(threat)
    return found


def _folder() -> str:
    """A temporary directory that sandboxes can be given to write in: for root, not every file system will do."""
    from nsbox import api

    candidates = dict.fromkeys((tempfile.gettempdir(), "/var/tmp", "/dev/shm", "/run"))
    for parent in candidates:
        with contextlib.suppress(OSError):
            folder = tempfile.mkdtemp(prefix="nsbox-selftest-", dir=parent)
            os.chmod(folder, 0o755)
            try:
                api.run(["true"], rw=[(folder, "/mnt")])
                return folder
            except NsboxError:
                os.rmdir(folder)
    # None will do: the attempts that need one say why they could not be made.
    return tempfile.mkdtemp(prefix="nsbox-selftest-")


def run(profile: str = "default", told: Callable[[str], object] = lambda _: None) -> Report:
    """Attempt all that is safe on a user's host. ``told`` hears the id of each threat before it is attempted.

    Raises SpecError for an unknown profile, HostError where no sandbox can be had or no Python is there.
    """
    for name in ("on_files", "on_network", "on_limits", "on_secrets"):
        importlib.import_module(f"nsbox.selftest.{name}")
    began = time.monotonic()
    folder = _folder()
    os.chmod(folder, 0o755)
    left = {threat.id: threat.left for threat in THREATS if threat.left}
    try:
        stage = Stage(profile, folder)
        stage.run(["true"])  # what keeps every sandbox from starting is an error, not a finding
        found = _programmed(stage) + _stages(stage, left, told)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    order = [threat.id for threat in THREATS]
    found.sort(key=lambda item: order.index(item.threat))
    shown = {item.threat for item in found}
    left = {threat: why for threat, why in left.items() if threat not in shown}
    return Report(profile, tuple(found), left, time.monotonic() - began)


def verdict(attempts: Sequence[Noted]) -> str:
    """``stopped``: every attempt failed; ``through``: at least one did not."""
    return "through" if any(item.result == "through" for item in attempts) else "stopped"
