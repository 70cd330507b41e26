"""K01–K19: attempts on the kernel's interface. First the control, outside; then the attack, inside."""

import contextlib
import functools
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nsbox
from nsbox.selftest import attempted, runner

from .conftest import FOLDER, Attempt, program

x86_only = pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 has these entry points")


POLICIES = ("strict", "default", "permissive")
BAD = ("through", "no control")
every_policy = pytest.mark.parametrize("policy", POLICIES)
every_id = pytest.mark.parametrize("uid", [0, 1000])


@functools.cache
def outside(threat: str) -> dict[str, str]:
    """The controls of a threat's attempts."""
    words = [sys.executable, "-m", "attempts", "--control", *(item.name for item in attempted.of(threat))]
    made = subprocess.run(words, cwd=FOLDER, capture_output=True, text=True, timeout=120, start_new_session=True)
    assert made.returncode == 0, made.stderr
    return dict(line.split(" ", 1) for line in made.stdout.splitlines())


def attempt(threat: str, policy: str = "default", uid: int = 1000) -> None:
    """Every attempt of a threat: each control must show that it works outside, the sandbox stop all of them."""
    items = [item for item in attempted.for_caller(policy, uid, os.uname().machine) if item.threat == threat]
    shown = outside(threat)
    result = program(*(item.name for item in items), seccomp=policy, uid=uid, timeout="60s")
    assert result.ok, (result, result.stderr_text)
    seen = dict(line.split(" ", 1) for line in result.stdout_text.splitlines())
    verdicts = {
        item.name: attempted.judge(item, shown[item.name], seen.get(item.name, "not reached")) for item in items
    }
    bad = {name: (verdict, shown[name], seen.get(name)) for name, verdict in verdicts.items() if verdict in BAD}
    assert bad == {}, "attempt: (verdict, outside, inside)"
    if set(verdicts.values()) == {"absent"}:
        pytest.skip(f"this kernel has nothing of it: {shown}")


@pytest.mark.parametrize("policy", attempted.LET_THROUGH)
def test_what_a_policy_lets_through_is_what_it_says(policy: str, inside: Attempt) -> None:
    for name in attempted.LET_THROUGH[policy]:
        # EINVAL: Yama is not in this kernel, so nobody may choose who traces him.
        assert inside(name, seccomp=policy) in ("done", "EINVAL")


@every_policy
@every_id
def test_K01_io_uring(policy: str, uid: int) -> None:
    attempt("K01", policy, uid)


@x86_only
@every_policy
@every_id
def test_K02_compat_entry(policy: str, uid: int) -> None:
    attempt("K02", policy, uid)


@every_policy
@every_id
def test_K03_other_numbers(policy: str, uid: int) -> None:
    attempt("K03", policy, uid)


@every_policy
@every_id
def test_K04_clone3(policy: str, uid: int) -> None:
    attempt("K04", policy, uid)


@every_policy
@every_id
def test_K05_new_namespaces(policy: str, uid: int) -> None:
    attempt("K05", policy, uid)


@every_policy
@every_id
def test_K06_setns(policy: str, uid: int) -> None:
    attempt("K06", policy, uid)


@every_policy
@every_id
def test_K07_kernel_code_and_insight(policy: str, uid: int) -> None:
    attempt("K07", policy, uid)


@every_policy
@every_id
def test_K08_keyrings(policy: str, uid: int) -> None:
    attempt("K08", policy, uid)


@every_policy
@every_id
def test_K09_init_cannot_be_reached(policy: str, uid: int) -> None:
    attempt("K09", policy, uid)


@every_policy
@every_id
def test_K10_other_processes(policy: str, uid: int) -> None:
    attempt("K10", policy, uid)


@every_policy
@every_id
def test_K11_the_network_cannot_be_changed(policy: str, uid: int) -> None:
    attempt("K11", policy, uid)


@every_policy
@every_id
def test_K12_mounts(policy: str, uid: int) -> None:
    attempt("K12", policy, uid)


@every_policy
@every_id
def test_K13_sockets_of_other_kinds(policy: str, uid: int) -> None:
    attempt("K13", policy, uid)


@every_policy
@every_id
def test_K14_terminal_requests(policy: str, uid: int) -> None:
    attempt("K14", policy, uid)


@every_policy
@every_id
def test_K15_tioclinux(policy: str, uid: int) -> None:
    attempt("K15", policy, uid)


@every_policy
@every_id
def test_K16_personality(policy: str, uid: int) -> None:
    attempt("K16", policy, uid)


@every_policy
@every_id
def test_K17_state_of_the_host(policy: str, uid: int) -> None:
    attempt("K17", policy, uid)


@every_policy
@every_id
def test_K18_rights_cannot_be_regained(policy: str, uid: int) -> None:
    attempt("K18", policy, uid)


@x86_only
def test_K03_x32_numbers(control: Attempt, inside: Attempt) -> None:
    assert control("plain_number") == "done"
    assert inside("plain_number") == "done"
    assert inside("x32_number") in ("not executed", f"signal {signal.SIGSYS}")


def test_K04_threads_start_all_the_same() -> None:
    assert (
        nsbox.run(
            ["python3", "-c", "import threading; t = threading.Thread(target=print, args=('ok',)); t.start(); t.join()"]
        ).stdout
        == b"ok\n"
    )


def test_K09_permissive_can_trace_its_own(inside: Attempt) -> None:
    """So that the refusals above mean init and not the call."""
    assert inside("ptrace_own_child", seccomp="permissive") == "done"
    assert inside("ptrace_own_child") == "EPERM"


@pytest.mark.parametrize("uid", [0, 1000])
def test_K09_init_survives_every_signal(uid: int, inside: Attempt) -> None:
    assert inside("signals_to_init", uid=uid) == "init lives"


def test_K09_limits_put_on_init_end_nothing_but_the_sandbox(inside: Attempt) -> None:
    before = time.monotonic()
    assert inside("limits_of_init", timeout=60) == "done"
    assert time.monotonic() - before < 50


@pytest.fixture
def terminal() -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """An embedder with a controlling terminal, whose other end we hold, that attempts to reach it from inside."""
    code = """
import nsbox, sys
for name in ("open_tty", "steal_tty", "tiocsti"):
    for fd in range(3):
        result = nsbox.run(["python3", "-m", "attempts", name], ro=[(sys.argv[1], "/s/attempts")], cwd="/s")
        print("inside", result.stdout_text.strip(), flush=True)
result = nsbox.run(["sh", "-c", "ps -o sid=,tpgid=,tty= -p $$; ls /dev/pts"])
print("session", result.stdout_text.split(), flush=True)
"""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import fcntl; fcntl.ioctl(0, 0x540E, 0)\nprint('control', open('/dev/tty').fileno() > 0)\n{code}",
            str(FOLDER / "attempts"),
        ],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    yield master, process
    process.kill()
    process.wait()
    os.close(master)


def test_K14_the_caller_s_terminal_is_out_of_reach(terminal: tuple[int, "subprocess.Popen[bytes]"]) -> None:
    master, _ = terminal
    seen = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while select.select([master], [], [], 30)[0]:
            seen += os.read(master, 65536)
    lines = seen.decode().split("\r\n")
    assert lines[0] == "control True", seen
    assert lines[1:10] == ["inside open_tty ENXIO"] * 3 + ["inside steal_tty ENOTTY"] * 3 + ["inside tiocsti EPERM"] * 3
    assert lines[10].startswith("session ['2', '-1', '?'") or "'?'" in lines[10]
    assert "'ptmx'" in lines[10]
    assert "'0'" not in lines[10], "the host's terminals are listed"


@every_id
def test_K18_no_capability_in_any_set(uid: int) -> None:
    lines = nsbox.run(["cat", "/proc/self/status"], uid=uid).check().stdout_text.splitlines()
    sets = {line.split()[0]: int(line.split()[1], 16) for line in lines if line.startswith("Cap")}
    assert sets == dict.fromkeys(("CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"), 0)


@pytest.fixture
def set_id_tree() -> Iterator[Path]:
    """A tree that every user can reach, with programs that gain root: one by its mode, one by a file capability."""
    folder = Path(tempfile.mkdtemp(prefix="setid-"))
    folder.chmod(0o755)
    for name in ("mode", "capability"):
        shutil.copyfile("/usr/bin/cat", folder / name)
        (folder / name).chmod(0o4755 if name == "mode" else 0o755)
    # VFS_CAP_REVISION_2 with the effective flag, CAP_CHOWN and CAP_DAC_OVERRIDE: capabilities(7)
    os.setxattr(folder / "capability", "security.capability", bytes.fromhex("0100000203000000000000000000000000000000"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.root
@pytest.mark.parametrize("program", ["mode", "capability"])
@pytest.mark.parametrize("mount", ["ro", "rw", "workspace"])
def test_K18_set_id_programs_gain_nothing(program: str, mount: str, set_id_tree: Path) -> None:
    shown = subprocess.run(
        [str(set_id_tree / program), "/proc/self/status"],
        user=61234,
        group=61234,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    fields = dict(line.split(":\t") for line in shown.splitlines())
    assert fields["Uid"].split()[1] == "0" or int(fields["CapEff"], 16), "the control: it works outside"
    where = {"ro": [(str(set_id_tree), "/work")], "rw": [(str(set_id_tree), "/work")], "workspace": str(set_id_tree)}[
        mount
    ]
    given: dict[str, Any] = {mount: where}
    result = nsbox.run([f"/work/{program}", "/proc/self/status"], **given).check()
    fields = dict(line.split(":\t") for line in result.stdout_text.splitlines())
    assert fields["Uid"].split() == ["1000"] * 4
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == int(fields["CapBnd"], 16) == 0


def test_K18_the_host_s_own_set_id_programs_gain_nothing() -> None:
    found = [path for path in Path("/usr/bin").iterdir() if not path.is_symlink() and path.stat().st_mode & 0o4000]
    if not found:
        pytest.skip("this host has no set-user-id program in /usr/bin")
    options = nsbox.run(["findmnt", "-no", "OPTIONS", "/usr"]).stdout_text if shutil.which("findmnt") else ""
    mounts = nsbox.run(["cat", "/proc/self/mountinfo"]).check().stdout_text
    assert [line for line in mounts.splitlines() if line.split()[4] == "/usr" and "nosuid" in line.split()[5]], options
    # unshare(1)-like: su asks for a password before it complains, mount complains at once.
    if Path("/usr/bin/mount").exists() and Path("/usr/bin/mount").stat().st_mode & 0o4000:
        assert not nsbox.run(["mount", "-t", "tmpfs", "none", "/tmp"]).ok


def swept(ranges: str, **options: Any) -> dict[int, str]:
    """Number → what came of the call with arguments that mean nothing."""
    result = program(f"sweep:{ranges}", timeout=120, cpu_time=60, **options)
    assert result.ok, result.stderr_text
    lines = result.stdout_text.splitlines()
    assert lines[-1] == "survived"
    return {int(line.split()[0]): line.split(" ", 1)[1] for line in lines[:-1]}


def executed(outcome: dict[int, str]) -> set[int]:
    """What the kernel has looked at: anything but the answers of the filter."""
    return {number for number, how in outcome.items() if how not in ("EPERM", "ENOSYS")}


@functools.cache
def all_numbers(policy: str) -> dict[int, str]:
    """Every number below 600, under a policy."""
    return swept("0-600", seccomp=policy)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_K19_every_number(policy: str) -> None:
    outcome, known = all_numbers(policy), runner.numbers()
    assert len(outcome) == 600
    assert outcome[known["getpid"]] == "ok", "the control"
    assert [number for number, how in outcome.items() if how == f"signal {signal.SIGSYS}"] == []
    never = {name: outcome[known[name]] for name in runner.NEVER}
    assert {name: how for name, how in never.items() if how != "EPERM"} == {}
    tracing = {name: outcome[known[name]] for name in ("ptrace", "process_vm_readv", "process_vm_writev")}
    assert policy == "permissive" or set(tracing.values()) == {"EPERM"}
    seem_absent = {name: outcome[known[name]] for name in ("clone3", "io_uring_setup")}
    assert set(seem_absent.values()) == {"ENOSYS"}
    assert {number: outcome[number] for number in runner.UNKNOWN if outcome[number] != "ENOSYS"} == {}


def test_K19_control_what_is_dangerous_is_there_outside() -> None:
    """Asked by root over namespaces of its own the kernel answers, so a refusal inside is the sandbox's."""
    names = [name for name in runner.NEVER if any(item.name == name for item in attempted.ATTEMPTS)]
    assert len(names) > 30
    shown = {name: outside(attempted.by_name(name).threat)[name] for name in names}
    there = [name for name in names if shown[name] not in attempted.ABSENT]
    assert len(there) >= len(names) - 5, set(names) - set(there)


@pytest.mark.slow
def test_K19_policies_are_ordered() -> None:
    strict, default, permissive = (executed(all_numbers(policy)) for policy in POLICIES)
    assert strict <= default, sorted(strict - default)
    assert default <= permissive, sorted(default - permissive)
    assert strict != default != permissive


@x86_only
@pytest.mark.parametrize("policy", POLICIES)
def test_K19_every_x32_number(policy: str) -> None:
    assert set(swept("0x40000000-0x40000258", seccomp=policy).values()) <= {"ENOSYS", f"signal {signal.SIGSYS}"}


def test_K19_numbers_beyond_any_table() -> None:
    firsts = (600, 1000, 0x3FFFFFF0, 0x7FFFFFF0, 0xFFFFFFE0)
    assert set(swept(",".join(f"{first}-{first + 16}" for first in firsts)).values()) == {"ENOSYS"}
