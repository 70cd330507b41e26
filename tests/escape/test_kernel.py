"""K01–K19: attempts on the kernel's interface. First the control, outside; then the attack, inside."""

import contextlib
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

from . import attacks
from .conftest import Attempt

WORKS = ("done",)
# The call is there and looks at its arguments; what it lacks outside is a right or an object, not the call itself.
EXISTS = (
    "done",
    "EPERM",
    "EACCES",
    "EINVAL",
    "EBADF",
    "ENOENT",
    "ENOTTY",
    "ENOKEY",
    "ENOTSUP",
    "EFAULT",
    "ENOEXEC",
    "ENODEV",
    "ENETDOWN",
)
x86_only = pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 has these entry points")


def attempt(
    name: str, control: Attempt, inside: Attempt, expected: tuple[str, ...], answers: tuple[str, ...], **options: object
) -> None:
    """The control must answer as expected (a kernel without the call is skipped), the sandbox one of ``answers``."""
    shown = control(name)
    if shown in ("ENOSYS", "EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT"):
        assert inside(name, **options) in (*answers, shown)
        pytest.skip(f"{name}: this kernel says {shown} to everybody")
    assert shown in expected, f"the control of {name} came to {shown}"
    assert inside(name, **options) in answers


@pytest.mark.parametrize("name", ["io_uring_setup", "io_uring_enter", "io_uring_register"])
def test_K01_io_uring(name: str, control: Attempt, inside: Attempt) -> None:
    attempt(name, control, inside, EXISTS, ("ENOSYS",))


@x86_only
def test_K02_int_0x80(control: Attempt, inside: Attempt) -> None:
    shown = control("int_0x80")
    if shown != "done":
        pytest.skip("this kernel has no 32-bit entry (CONFIG_IA32_EMULATION)")
    assert inside("int_0x80") in ("not executed", f"signal {signal.SIGSYS}")


@x86_only
def test_K03_x32_numbers(control: Attempt, inside: Attempt) -> None:
    assert control("plain_number") == "done"
    assert inside("plain_number") == "done"
    assert inside("x32_number") in ("not executed", f"signal {signal.SIGSYS}")


def test_K03_high_half_of_the_number(control: Attempt, inside: Attempt) -> None:
    assert control("high_half_number") == "done"
    assert inside("high_half_number") in ("EPERM", "ENOSYS")


def test_K04_clone3(control: Attempt, inside: Attempt) -> None:
    attempt("clone3_namespaces", control, inside, WORKS, ("ENOSYS",))
    assert (
        nsbox.run(
            ["python3", "-c", "import threading; t = threading.Thread(target=print, args=('ok',)); t.start(); t.join()"]
        ).stdout
        == b"ok\n"
    )


@pytest.mark.parametrize("how", ["unshare", "clone", "clone_high"])
@pytest.mark.parametrize("kind", sorted(attacks.NAMESPACES))
def test_K05_new_namespaces(kind: str, how: str, control: Attempt, inside: Attempt) -> None:
    attempt(f"{how}_{kind}", control, inside, WORKS, ("EPERM",))


@pytest.mark.parametrize("name", ["unshare_time", "unshare_high"])
def test_K05_other_namespaces(name: str, control: Attempt, inside: Attempt) -> None:
    attempt(name, control, inside, EXISTS, ("EPERM",))


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("policy", ["strict", "permissive"])
def test_K05_user_namespace_under_every_policy(policy: str, uid: int, inside: Attempt) -> None:
    assert inside("unshare_user", seccomp=policy, uid=uid) == "EPERM"
    assert inside("clone_user", seccomp=policy, uid=uid) == "EPERM"


@pytest.mark.parametrize("kind", ["mnt", "net", "uts", "ipc", "pid", "cgroup", "pidfd"])
def test_K06_setns(kind: str, control: Attempt, inside: Attempt) -> None:
    attempt(f"setns_{kind}", control, inside, EXISTS, ("EPERM",))


KERNEL = [
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "kexec_load",
    "init_module",
    "finit_module",
    "delete_module",
    "memfd_secret",
    "syslog",
]


@pytest.mark.parametrize("name", KERNEL)
def test_K07_kernel_code_and_insight(name: str, control: Attempt, inside: Attempt) -> None:
    attempt(name, control, inside, EXISTS, ("EPERM",))


@pytest.mark.parametrize("name", ["add_key", "request_key", "keyctl", "keyctl_session"])
def test_K08_keyrings(name: str, control: Attempt, inside: Attempt) -> None:
    attempt(name, control, inside, EXISTS, ("EPERM",))


INIT = ["ptrace_attach", "ptrace_seize", "process_vm_readv", "process_vm_writev", "pidfd_getfd"]
INIT += ["open_mem", "open_environ", "open_maps", "open_exe", "open_root", "open_cwd", "list_fd", "open_fd", "open_ns"]


@pytest.mark.parametrize("policy", ["default", "permissive"])
@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("name", INIT)
def test_K09_init_cannot_be_reached(name: str, uid: int, policy: str, control: Attempt, inside: Attempt) -> None:
    attempt(name, control, inside, WORKS, ("EPERM", "EACCES"), uid=uid, seccomp=policy)


def test_K09_permissive_can_trace_its_own(inside: Attempt) -> None:
    """So that the refusals above mean init and not the call."""
    assert inside("ptrace_own_child", seccomp="permissive") == "done"
    assert inside("ptrace_own_child") == "EPERM"


@pytest.mark.parametrize("uid", [0, 1000])
def test_K09_init_survives_every_signal(uid: int, inside: Attempt) -> None:
    assert inside("signals_to_init", uid=uid) == "init lives"


def test_K09_limits_put_on_init_end_nothing_but_the_sandbox(inside: Attempt) -> None:
    before = time.monotonic()
    assert inside("limits_of_init", timeout=5) == "done"
    assert time.monotonic() - before < 4


@pytest.mark.parametrize("name", ["process_madvise", "process_mrelease", "move_pages", "migrate_pages", "kcmp"])
def test_K10_other_processes(name: str, control: Attempt, inside: Attempt) -> None:
    attempt(name, control, inside, EXISTS, ("EPERM",))


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("name", ["link_down", "address_add", "route_add", "link_new"])
def test_K11_the_network_cannot_be_changed(name: str, uid: int, control: Attempt, inside: Attempt) -> None:
    attempt(name, control, inside, (*EXISTS, "EOPNOTSUPP"), ("EPERM",), uid=uid)


@pytest.mark.parametrize("name", ["netfilter_list", "audit", "uevent", "sock_diag"])
def test_K11_other_netlink(name: str, control: Attempt, inside: Attempt) -> None:
    attempt(name, control, inside, WORKS, ("EAFNOSUPPORT", "EPROTONOSUPPORT"))


MOUNTS = [
    "mount",
    "mount_bind",
    "mount_propagation",
    "umount2",
    "fsopen",
    "fspick",
    "open_tree",
    "open_tree_attr",
    "mount_setattr",
]
MOUNTS += ["fsmount", "fsconfig", "move_mount", "chroot", "pivot_root", "remount_usr_writable", "double_chroot"]


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("name", MOUNTS)
def test_K12_mounts(name: str, uid: int, control: Attempt, inside: Attempt) -> None:
    attempt(name, control, inside, EXISTS, ("EPERM",), uid=uid)


@pytest.mark.parametrize("uid", [0, 1000])
def test_K13_sockets_of_other_kinds(uid: int, control: Attempt, inside: Attempt) -> None:
    """All in one test: most hosts have a few of them, and each is refused the same way."""
    shown = {name: control(f"socket_{name}") for name in ("packet", "raw_ip", "vsock")}
    assert "done" in shown.values(), f"the control: this host makes none of them: {shown}"
    refused = ("EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT", "EPERM")
    names = [name for name in attacks.ATTACKS if name.startswith("socket_")]
    outcomes = {name: inside(name, uid=uid) for name in names}
    assert {name: outcome for name, outcome in outcomes.items() if outcome not in refused} == {}


@pytest.mark.parametrize("name", ["tiocsti", "tiocsti_high", "tiocsetd", "tioccons"])
def test_K14_terminal_requests(name: str, control: Attempt, inside: Attempt) -> None:
    # EIO: dev.tty.legacy_tiocsti is off and the caller has no CAP_SYS_ADMIN in the first namespace.
    attempt(name, control, inside, (*EXISTS, "EIO"), ("EPERM",))


@pytest.fixture
def terminal() -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """An embedder with a controlling terminal, whose other end we hold, that attempts to reach it from inside."""
    code = """
import nsbox, sys
for name in ("open_tty", "steal_tty", "tiocsti"):
    for fd in range(3):
        result = nsbox.run(["python3", "/attacks.py", name], ro=[(sys.argv[1], "/attacks.py")])
        print("inside", name, result.stdout_text.strip(), flush=True)
result = nsbox.run(["sh", "-c", "ps -o sid=,tpgid=,tty= -p $$; ls /dev/pts"])
print("session", result.stdout_text.split(), flush=True)
"""
    master, slave = pty.openpty()
    program = attacks.__file__
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import fcntl; fcntl.ioctl(0, 0x540E, 0)\nprint('control', open('/dev/tty').fileno() > 0)\n{code}",
            program,
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


@pytest.mark.parametrize("name", ["tioclinux", "tioclinux_high"])
def test_K15_tioclinux(name: str, control: Attempt, inside: Attempt) -> None:
    attempt(name, control, inside, EXISTS, ("EPERM",))


@pytest.mark.parametrize("name", ["read_implies_exec", "addr_no_randomize", "mmap_page_zero", "personality_high"])
def test_K16_personality(name: str, control: Attempt, inside: Attempt) -> None:
    attempt(name, control, inside, WORKS, ("EPERM",))


HOST = [
    "settimeofday",
    "clock_settime",
    "adjtimex",
    "clock_adjtime",
    "sethostname",
    "setdomainname",
    "reboot",
    "swapon",
    "swapoff",
]
HOST += [
    "quotactl",
    "quotactl_fd",
    "acct",
    "open_by_handle_at",
    "fanotify_init",
    "prctl_set_mm",
    "prctl_set_ptracer",
    "prctl_securebits",
]


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("name", HOST)
def test_K17_state_of_the_host(name: str, uid: int, control: Attempt, inside: Attempt) -> None:
    attempt(name, control, inside, EXISTS, ("EPERM",), uid=uid)


def status_field(name: str, **options: Any) -> str:
    """A line of /proc/self/status inside."""
    result = nsbox.run(["cat", "/proc/self/status"], **options)
    return dict(line.split(":\t") for line in result.check().stdout_text.splitlines() if ":\t" in line)[name]


@pytest.mark.parametrize("uid", [0, 1000])
def test_K18_capabilities_cannot_be_regained(uid: int, control: Attempt, inside: Attempt) -> None:
    assert control("become_root") == "done"
    assert inside("regain_capabilities", uid=uid) == "EPERM"
    assert inside("prctl_no_new_privs_off", uid=uid) == "EINVAL"
    if uid:
        assert inside("become_root", uid=uid) in ("EPERM", "EINVAL")
    assert inside("become_somebody", uid=uid) in ("EPERM", "EINVAL")
    for field in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status_field(field, uid=uid), 16) == 0, field


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


DANGEROUS = [
    *["ptrace", "syslog", "acct", "add_key", "bpf", "chroot", "clock_adjtime", "clock_settime", "delete_module"],
    *["fanotify_init", "finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "init_module", "kcmp"],
    *[
        "kexec_load",
        "keyctl",
        "migrate_pages",
        "mount",
        "mount_setattr",
        "move_mount",
        "move_pages",
        "open_by_handle_at",
    ],
    *["open_tree", "perf_event_open", "pidfd_getfd", "pivot_root", "process_madvise", "process_mrelease"],
    *["process_vm_readv", "process_vm_writev", "quotactl", "quotactl_fd", "reboot", "request_key", "setdomainname"],
    *["sethostname", "setns", "settimeofday", "swapoff", "swapon", "umount2", "unshare", "userfaultfd"],
    *["adjtimex"],
]


def swept(result: nsbox.Result) -> dict[int, str]:
    assert result.ok, result.stderr_text
    lines = result.stdout_text.splitlines()
    assert lines[-1] == "survived"
    return {int(line.split()[0]): line.split(" ", 1)[1] for line in lines[:-1]}


@pytest.mark.slow
def test_K19_every_number(inside: Attempt) -> None:
    known: dict[str, Any] = {
        key: value[0 if attacks.X86 else 1] if isinstance(value, tuple) else value
        for key, value in attacks.NUMBERS.items()
    }
    script = [(attacks.__file__, "/attacks.py")]
    outcome = swept(nsbox.run(["python3", "/attacks.py", "sweep:0-600"], ro=script, timeout=60))
    assert len(outcome) == 600
    assert [number for number, how in outcome.items() if how == f"signal {signal.SIGSYS}"] == []
    assert {name: outcome[known[name]] for name in DANGEROUS if outcome[known[name]] != "EPERM"} == {}
    assert {
        name: outcome[known[name]] for name in ("clone3", "io_uring_setup") if outcome[known[name]] != "ENOSYS"
    } == {}
    assert {number: outcome[number] for number in range(480, 600) if outcome[number] != "ENOSYS"} == {}
    assert outcome[known["getpid"]] == "ok"


@x86_only
def test_K19_every_x32_number() -> None:
    result = nsbox.run(
        ["python3", "/attacks.py", "sweep:0x40000000-0x40000258"], ro=[(attacks.__file__, "/attacks.py")], timeout=60
    )
    assert set(swept(result).values()) <= {"ENOSYS", f"signal {signal.SIGSYS}"}


@pytest.mark.parametrize("first", [600, 1000, 0x3FFFFFF0, 0x7FFFFFF0, 0xFFFFFFE0])
def test_K19_numbers_beyond_any_table(first: int) -> None:
    result = nsbox.run(
        ["python3", "/attacks.py", f"sweep:{first}-{first + 16}"], ro=[(attacks.__file__, "/attacks.py")]
    )
    assert set(swept(result).values()) == {"ENOSYS"}
