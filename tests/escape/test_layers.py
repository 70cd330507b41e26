"""Layers that stand behind others: each is shown by what it alone does, so that losing it turns a test red."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

import nsbox

Run = Callable[[str], str]

STATUS = """
for pid in ("1", "self"):
    with open(f"/proc/{pid}/status") as file:
        rows = dict(line.rstrip("\\n").split(":\\t", 1) for line in file if ":\\t" in line)
    print(pid, rows["CapInh"], rows["CapPrm"], rows["CapEff"], rows["CapBnd"], rows["CapAmb"], rows["NoNewPrivs"],
          rows["Seccomp"])
"""


@pytest.mark.parametrize("uid", [0, 1000])
def test_K18_init_and_payload_have_no_right_in_any_set(uid: int) -> None:
    """Init is no better than the payload: taken over, it has nothing to give."""
    lines = nsbox.run(["python3", "-c", STATUS], uid=uid).check().stdout_text.splitlines()
    assert len(lines) == 2
    for line in lines:
        words = line.split()
        assert {int(word, 16) for word in words[1:6]} == {0}, line
        assert words[6:8] == ["1", "2"], line


# landlock(7): sixteen domains can be stacked on a process. Each one that is there already is one fewer.
DOMAINS = """
import ctypes, errno, struct
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
def call(number, *words):
    result = libc.syscall(ctypes.c_long(number), *words)
    if result < 0: raise OSError(ctypes.get_errno(), "")
    return result
attributes = struct.pack("Q", 1 << 12)  # make a socket: nothing that Python needs
count = 0
try:
    while count < 20:
        call(446, call(444, attributes, ctypes.c_size_t(len(attributes)), 0), 0)
        count += 1
except OSError as error:
    print(count, errno.errorcode[error.errno])
"""


@pytest.mark.skipif(
    not nsbox.run(["true"]).enforced["landlock"]["how"].startswith("ABI"), reason="this kernel has no Landlock"
)
@pytest.mark.parametrize("profile", ["default", "strict", "permissive"])
def test_the_landlock_domain_is_there(profile: str) -> None:
    made = subprocess.run([sys.executable, "-c", DOMAINS], capture_output=True, text=True, check=True)
    count, name = made.stdout.split()
    assert name == "E2BIG", "the control"
    inside = nsbox.run(["python3", "-c", DOMAINS], profile=profile).stdout_text.split()
    assert inside == [str(int(count) - 1), "E2BIG"]
    assert nsbox.run(["python3", "-c", DOMAINS], landlock=False).stdout_text.split() == [count, "E2BIG"]


MOUNTS = """
for line in open("/proc/self/mountinfo"):
    before, _, after = line.partition(" - ")
    print(before.split()[4], before.split()[5], after.split()[0], ",".join(sorted(before.split()[6:])) or "-")
"""


@pytest.mark.parametrize("uid", [0, 1000])
def test_every_mount_has_its_attributes(uid: int) -> None:
    """Each of nosuid, nodev and read-only where it belongs, and no mount that hears of another's."""
    rows = [line.split() for line in nsbox.run(["python3", "-c", MOUNTS], uid=uid).check().stdout_text.splitlines()]
    places = {row[0] for row in rows}
    proc = {f"/proc/{name}" for name in ("sys", "irq", "bus", "fs") if os.path.isdir(f"/proc/{name}")}
    assert places >= {"/", "/usr", "/dev", "/dev/pts", "/dev/shm", "/proc", "/proc/sys", *proc}
    for place, options, kind, propagation in rows:
        words = set(options.split(","))
        # A device of the host, bound by itself: nothing else is on that mount.
        if kind not in ("devtmpfs", "devpts"):
            assert {"nosuid", "nodev"} <= words, place
        if place in ("/usr", "/dev", *proc):
            assert "ro" in words, place
        assert propagation == "-", place


COVERED = """
import os, stat
for name in ("kcore", "keys", "timer_list", "sysrq-trigger", "latency_stats", "sched_debug", "scsi", "acpi", "asound"):
    path = f"/proc/{name}"
    if not os.path.exists(path): continue
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode): print(name, "empty" if not os.listdir(path) else "open")
    else: print(name, "null" if status.st_rdev == os.makedev(1, 3) else "open")
"""


@pytest.mark.parametrize("uid", [0, 1000])
def test_F09_what_is_covered_is_covered(uid: int) -> None:
    """Permissions would stop most of it as well: here it is the cover itself that is looked for."""
    outside = subprocess.run([sys.executable, "-c", COVERED], capture_output=True, text=True, check=True).stdout
    assert " open" in outside, "the control"
    inside = nsbox.run(["python3", "-c", COVERED], uid=uid).check().stdout_text
    assert inside.count("\n") == outside.count("\n")
    assert " open" not in inside, inside


@pytest.mark.root
def test_K18_groups_of_a_root_caller_stay_outside() -> None:
    """Those of an ordinary caller cannot be dropped: docs/threat-model.md says so."""
    code = """
import nsbox, os
print(os.getgroups(), nsbox.run(['grep', '^Groups:', '/proc/self/status']).stdout_text.split())
"""
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    made = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        extra_groups=[61111, 61112],
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout == "[61111, 61112] ['Groups:']\n", made.stdout


def _held(pid: int) -> list[str]:
    """What the descriptors of a sandbox's init lead to; "own" for what is in the sandbox's own file systems."""
    host = {os.stat(place).st_dev for place in ("/", "/run", "/proc", "/dev", "/tmp")}
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        target = os.readlink(f"/proc/{pid}/fd/{name}")
        own = target.startswith("/") and os.stat(f"/proc/{pid}/fd/{name}").st_dev not in host
        found.append("own" if own else target)
    return found


@pytest.mark.root
def test_F02_init_holds_no_directory_of_the_host() -> None:
    """Whoever takes init over finds sockets, pipes, /dev/null and the sandbox's own root. Only root can look."""
    from nsbox import _native

    found: list[list[str]] = []

    def look(_: bytes) -> None:
        zygote = _native.zygote().pid
        with open(f"/proc/{zygote}/task/{zygote}/children") as children:
            found.extend(_held(pid) for pid in map(int, children.read().split()) if os.path.exists(f"/proc/{pid}/fd"))

    held = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert nsbox.run(["sh", "-c", "echo; sleep 0.2"], on_stdout=look).ok
        assert os.readlink(f"/proc/self/fd/{held}") == "/", "the control: we hold one"
    finally:
        os.close(held)
    assert found
    kinds = {target.partition(":")[0] for each in found for target in each}
    assert kinds <= {"socket", "pipe", "anon_inode", "/dev/null", "own"}, kinds
