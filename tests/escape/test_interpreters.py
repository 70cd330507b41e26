"""Interpreters that were forked from a template outside: what they could reach through it, and that they are confined
as every payload is. First the control, then the attempt inside."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nsbox
from nsbox.selftest import attempted

from .conftest import FOLDER, program

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
# What status(5) tells of an identity and of what was given up.
CONFINEMENT = (
    *("Uid", "Gid", "Groups", "Umask", "NoNewPrivs", "Seccomp", "Seccomp_filters", "CapInh", "CapPrm", "CapEff"),
    *("CapBnd", "CapAmb", "Threads", "SigBlk", "ShdPnd"),
)


@pytest.fixture
def pool() -> Iterator[nsbox.PythonPool]:
    with nsbox.PythonPool(size=1, timeout=60) as made:
        yield made


def answers(pool: nsbox.PythonPool, code: str, **options: Any) -> Any:
    result = pool.run(code, **options)
    assert result.exception is None, result.exception.traceback
    return result.value


def test_every_attempt_comes_to_the_same_as_in_any_sandbox() -> None:
    names = [item.name for item in attempted.for_caller("default", 1000, os.uname().machine)]
    assert len(names) > 150
    usual = program(*names, timeout=120)
    code = (
        "import runpy, sys\nsys.path.insert(0, '/selftest')\nsys.argv = ['attempts', *names]\n"
        "runpy.run_module('attempts', run_name='__main__')"
    )
    with nsbox.PythonPool(size=1, timeout=120, ro=[(str(FOLDER / "attempts"), "/selftest/attempts")]) as pool:
        parked = pool.run(code, inputs={"names": names})
    assert parked.exception is None, parked.exception.traceback
    found = [dict(line.split(" ", 1) for line in run.stdout_text.splitlines()) for run in (usual, parked)]
    assert set(found[0]) == set(found[1]) == set(names)
    assert {name: (found[0][name], found[1][name]) for name in names if found[0][name] != found[1][name]} == {}


def test_it_has_given_up_what_every_payload_has(pool: nsbox.PythonPool) -> None:
    usual = nsbox.run(["python3", "-c", "print(open('/proc/self/status').read())"]).stdout_text
    parked = answers(pool, "open('/proc/self/status').read()")
    own = Path("/proc/self/status").read_text()

    def fields(status: str) -> dict[str, str]:
        return dict(line.split(":\t", 1) for line in status.splitlines() if line.split(":")[0] in CONFINEMENT)

    assert fields(parked) == fields(usual)
    assert fields(own)["Seccomp"] != "2" or fields(own)["NoNewPrivs"] != "1"


def test_limits_are_those_of_a_payload(pool: nsbox.PythonPool) -> None:
    code = "import resource\nprint(sorted((n, resource.getrlimit(getattr(resource, n))) for n in dir(resource)"
    code += " if n.startswith('RLIMIT_')))"
    usual = nsbox.run(["python3", "-c", code], timeout=60).stdout_text
    assert pool.run(code).stdout_text == usual


def test_all_its_namespaces_are_its_sandbox_s(pool: nsbox.PythonPool) -> None:
    inside = answers(pool, f"import os\n{{n: os.readlink('/proc/self/ns/' + n) for n in {NAMESPACES!r}}}")
    ours = {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}
    assert not set(inside.values()) & set(ours.values())
    lease = pool._stock.take()
    try:
        own = {name: os.stat(f"/proc/{lease.interpreter.inside}/ns/{name}").st_ino for name in NAMESPACES}
        assert own == lease.identity["namespaces"]
        root = os.stat(f"/proc/{lease.interpreter.inside}/root/")
        assert (root.st_dev, root.st_ino) == (
            os.fstat(lease.handle.root_fd).st_dev,
            os.fstat(lease.handle.root_fd).st_ino,
        )
    finally:
        pool._discard(lease)


def test_cgroups_are_its_sandbox_s(pool: nsbox.PythonPool) -> None:
    lease = pool._stock.take()
    try:
        of = {pid: Path(f"/proc/{pid}/cgroup").read_text() for pid in lease.interpreter.roots}
        assert len(set(of.values())) == 1
        if lease.handle.cgroup is not None:
            assert of[lease.interpreter.inside] != Path("/proc/self/cgroup").read_text()
    finally:
        pool._discard(lease)


def test_it_has_no_descriptor_but_its_own(pool: nsbox.PythonPool) -> None:
    code = "import os\n{n: os.readlink('/proc/self/fd/' + n) for n in os.listdir('/proc/self/fd') if n != '4'}"
    found = answers(pool, code)
    assert sorted(found) == ["0", "1", "2", "3"]
    assert found["0"] == "/dev/null"
    assert found["1"].startswith("pipe:")
    assert found["2"].startswith("pipe:")
    assert found["3"].startswith("socket:")


def test_it_sees_itself_and_init_alone(pool: nsbox.PythonPool) -> None:
    code = "import os\nsorted(int(n) for n in os.listdir('/proc') if n.isdigit())"
    assert str(os.getpid()) in os.listdir("/proc")
    found = answers(
        pool, code + "\n[n for n in os.listdir('/proc') if n.isdigit()] + [str(os.getpid()), str(os.getppid())]"
    )
    assert sorted(set(found)) == sorted({"1", found[-2], "0"})
    assert found[-1] == "0"


EXECUTABLE = """
import os

def attempt(call):
    try:
        call()
        return "done"
    except OSError as error:
        return error.strerror

exe = "/proc/self/exe"
mode = os.stat(exe).st_mode & 0o7777
found = {
    "chmod": attempt(lambda: os.chmod(exe, mode)),
    "utime": attempt(lambda: os.utime(exe)),
    "setxattr": attempt(lambda: os.setxattr(exe, "user.mark", b"1")),
    "truncate": attempt(lambda: os.truncate(exe, os.stat(exe).st_size)),
    "write": attempt(lambda: os.close(os.open(exe, os.O_WRONLY))),
    "maps": attempt(lambda: [os.stat(f"/proc/self/map_files/{n}") for n in os.listdir("/proc/self/map_files")]),
    "init": attempt(lambda: os.stat("/proc/1/exe")),
}
found
"""


def test_the_interpreter_cannot_be_changed_through_the_link_to_it(tmp_path: Path) -> None:
    """The executable is the host's file, which may belong to the caller: what /proc/self/exe leads to is a mount of the
    template's, and read-only there. Outside the same user may change it."""
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", "--copies", "--without-pip", str(tmp_path / "own")], check=True)
    python = str(tmp_path / "own/bin/python")
    outside = subprocess.run([python, "-c", EXECUTABLE + "\nprint(found)"], capture_output=True, text=True, check=True)
    control = ast.literal_eval(outside.stdout)
    assert control["chmod"] == control["utime"] == "done", control
    before = os.stat(python)
    with nsbox.PythonPool(python=python, size=1) as pool:
        inside = answers(pool, EXECUTABLE)
    assert "done" not in inside.values()
    assert inside["chmod"] == inside["utime"] == os.strerror(30)
    after = os.stat(python)
    assert (after.st_mode, after.st_mtime_ns, after.st_size) == (before.st_mode, before.st_mtime_ns, before.st_size)


def test_nothing_of_the_template_is_left_to_read(pool: nsbox.PythonPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is a copy of the template's, which was started without any variable of the caller's."""
    monkeypatch.setenv("NSBOX_TEST_SECRET", "".join(("mark-", "of-the", "-caller")))
    search = (
        "import os, re\nfound = 0\nneedle = ''.join(['mark-', 'of-the', '-caller']).encode()\nkeep = needle\n"
        "with open('/proc/self/mem', 'rb', 0) as memory:\n    for line in open('/proc/self/maps'):\n"
        "        low, high = (int(n, 16) for n in line.split()[0].split('-'))\n"
        "        if 'r' not in line.split()[1] or '[v' in line: continue\n"
        "        try:\n            memory.seek(low)\n            found += memory.read(high - low).count(needle)\n"
        "        except (OSError, ValueError, OverflowError): pass\n"
    )
    outside = subprocess.run(
        [sys.executable, "-c", search + "print(found)"], capture_output=True, text=True, check=True
    )
    with nsbox.PythonPool(size=1) as started_now:
        inside = answers(started_now, search + "found")
    # In both the needle itself, put together, is in memory; outside the environment has it too.
    assert int(outside.stdout) > inside
    assert inside >= 1


def test_writing_where_a_payload_may_not(pool: nsbox.PythonPool) -> None:
    code = (
        "import os\nfound = []\nfor path in ('/etc/mark', '/usr/mark', '/proc/sys/kernel/hostname', '/mark'):\n"
        "    try:\n        open(path, 'w').close()\n        found.append(path)\n    except OSError: pass\n"
        "open('/tmp/mark', 'w').close()\nfound"
    )
    assert answers(pool, code) == []


def test_memory_is_watched_where_no_controller_is(tmp_path: Path) -> None:
    """An interpreter is not a descendant of init: whoever adds memory up must find it all the same."""
    code = (
        "import os, mmap, time\nkept = []\nfor _ in range(4):\n    if os.fork() == 0:\n"
        "        m = mmap.mmap(-1, 60 << 20)\n        for at in range(0, 60 << 20, 4096): m[at] = 1\n"
        "        time.sleep(30)\ntime.sleep(30)"
    )
    with nsbox.PythonPool(size=1, memory="120M", timeout=25) as pool:
        result = pool.run(code)
    assert result.reason == "memory", (result.reason, result.limits_hit, result.stderr_text)


_BY_HANDLE = """
import ctypes, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)

def call(*args):
    ret = libc.syscall(*args)
    if ret > 2:
        os.close(ret)
    return 0 if ret >= 0 else ctypes.get_errno()

def by_handle(fd):
    # pidfd_send_signal(2) of nothing, of SIGURG, which is ignored; pidfd_getfd(2); setns(2) into the mount namespace
    return {"ask": call(424, fd, 0, 0, 0), "signal": call(424, fd, 23, 0, 0), "getfd": call(438, fd, 0, 0),
            "setns": call(308, fd, 0x20000)}
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of the system calls are those of x86_64")
@pytest.mark.parametrize("options", [{}, {"seccomp": "permissive", "landlock": False}], ids=str)
def test_a_handle_of_the_embedding_process_is_good_for_nothing(options: dict[str, Any]) -> None:
    """The socket that an interpreter is asked on was made here, so SO_PEERPIDFD (77) answers a pidfd of us."""
    control: dict[str, Any] = {}
    exec(_BY_HANDLE, control)
    fd = os.pidfd_open(os.getpid())
    outside = control["by_handle"](fd)
    os.close(fd)
    assert (outside["ask"], outside["signal"], outside["getfd"]) == (0, 0, 0)
    code = (
        "try:\n    fd = struct.unpack('i', socket.socket(fileno=3).getsockopt(1, 77, 4))[0]\n"
        "except OSError as error:\n    found = error.errno\n"
        "else:\n    found = by_handle(fd)\n"
        "print(found, flush=True)\nos._exit(0)\n"  # the socket object has taken the descriptor
    )
    with nsbox.PythonPool(size=1, timeout=60, **options) as made:
        text = made.run(_BY_HANDLE + code).stdout_text
    found = ast.literal_eval(text)
    if found == 92:  # ENOPROTOOPT: Linux before 6.5
        return
    assert set(found) == set(outside)
    assert all(found.values()), found
