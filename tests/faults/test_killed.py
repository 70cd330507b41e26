"""SIGKILL to the embedding process, or to its helper, at every point of a launch.

What runs inside ends with the owner, within two seconds and without anybody's help. Files and cgroups are removed by
the next process that sweeps: `nsbox gc`, or the first launch of another when nobody has for ten seconds.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import until

import nsbox
from nsbox import _native, errors, probe
from nsbox.resources import cgroup

STAGES = [name for name in _native.STAGES if name not in ("request", "clone", "idmap", "source", "exec", "run")]
pytestmark = pytest.mark.leaves_traces  # each test looks for them by itself, before and after gc

DRIVER = """
import errno, os, signal, sys, threading, time
import nsbox
from nsbox import _native, api, crossing, errors, launch as launching
from nsbox.resources import cgroup, ids, scratch, skeleton
FOLDER = sys.argv[1]

def at():
    print("at", flush=True)

def hang_after(where, name):
    real = getattr(where, name)
    def stuck(*args, **options):
        result = real(*args, **options)
        at()
        time.sleep(60)
        return result
    setattr(where, name, stuck)

def run(*argv, **options):
    return nsbox.run(argv or ["sleep", "391"], scratch=FOLDER, **options)

"""


def stat_of(pid: int) -> list[str]:
    """State, parent and so on (proc_pid_stat(5)); empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def descendants(of: int) -> dict[int, str]:
    """pid → start time of everything below a process."""
    table = {int(name): stat_of(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    below = {of}
    while more := {pid for pid, fields in table.items() if fields and int(fields[1]) in below} - below:
        below |= more
    return {pid: table[pid][19] for pid in below - {of}}


def alive(processes: dict[int, str]) -> list[int]:
    """Which of them still run: a zombie does not, and a reused pid is another's."""
    return [
        pid for pid, start in processes.items() if (now := stat_of(pid)) and now[19] == start and now[0] not in "ZX"
    ]


def left_by(pid: int, folder: Path) -> list[str]:
    """What a dead process has left in the file systems."""
    marks = [f"/nsbox/{pid}-", f"/nsbox-{pid}-", f"/.draft-{pid}-"]
    found = []
    for top in ("/sys/fs/cgroup", str(folder), probe.host().state):
        for directory, names, files in os.walk(top):
            names[:] = [name for name in names if not name.startswith("skeleton-")]
            found += [f"{directory}/{name}" for name in [*names, *files]]
    return [path for path in found if any(mark in path for mark in marks)]


def host() -> tuple[set[str], set[str]]:
    """Mounts and network links, less the links of sandboxes that other tests run meanwhile."""
    links = Path("/proc/net/dev").read_text().splitlines()[2:]
    return set(Path("/proc/self/mountinfo").read_text().splitlines()), {line.split(":")[0].strip() for line in links}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory for scratch directories, in reach of every id: those of pytest are not."""
    path = Path(tempfile.mkdtemp(prefix="killed-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


class Driver:
    """An embedding process that gets itself into a certain state, says so, and stays there."""

    def __init__(self, code: str, folder: Path) -> None:
        self.folder, self.before = folder, host()
        command = [sys.executable, "-c", DRIVER + code, str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.said = self.process.stdout.readline().strip()
        self.inside = descendants(self.process.pid)

    def kill(self) -> None:
        """Kill it; nothing that ran below it may be left two seconds later."""
        self.inside |= descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        assert until(lambda: not alive(self.inside), 2), [
            Path(f"/proc/{p}/comm").read_text() for p in alive(self.inside)
        ]
        assert self.process.stdout
        self.process.stdout.close()

    def collect(self) -> None:
        """`nsbox gc`; nothing is left then. What it says is not looked at: another process may have been faster."""
        subprocess.run([sys.executable, "-m", "nsbox", "gc"], capture_output=True, check=True, cwd="/")
        assert left_by(self.process.pid, self.folder) == []
        assert os.listdir(self.folder) == []
        assert host() == self.before


@pytest.fixture
def driver(folder: Path) -> Iterator[Callable[[str], Driver]]:
    started: list[Driver] = []

    def start(code: str) -> Driver:
        started.append(Driver(code, folder))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        if one.process.stdout:
            one.process.stdout.close()


@pytest.mark.parametrize("stage", STAGES)
def test_the_owner_is_killed_at_each_stage_below(driver: Callable[[str], Driver], stage: str) -> None:
    number = _native.STAGES.index(stage)
    one = driver(f"launching.fault = ({number}, 1)\nthreading.Thread(target=run).start()\nat()")
    assert one.said == "at"
    assert until(lambda: len(descendants(one.process.pid)) >= 2, 10)  # the helper and init
    time.sleep(0.2)  # until it has come to that stage
    one.kill()
    one.collect()


STEPS = {
    "skeleton": ("skeleton", "_make"),
    "scratch": ("scratch", "Scratch"),
    "blob": ("launching", "launch_blob"),
    "pipes": ("launching", "pipe"),
    "helper": ("_native", "zygote"),
    "asked": ("launching", "_ask"),
    "watch": ("api", "Run"),
    "over": ("crossing", "drive"),
}
if os.geteuid() == 0:
    STEPS["ids"] = ("ids.IdRanges", "take")
if cgroup.discover(probe.host().state).strength("pids")[0]:
    STEPS |= {"cgroup": ("cgroup.Hierarchy", "make"), "joined": ("cgroup.Cgroup", "joined")}


@pytest.mark.parametrize("step", STEPS)
def test_the_owner_is_killed_at_each_step_above(driver: Callable[[str], Driver], step: str) -> None:
    where, name = STEPS[step]
    argv = "'true'" if step == "over" else "'sleep', '391'"
    one = driver(f"hang_after({where}, {name!r})\nrun({argv}, hostname='k{os.getpid()}-{step}')")
    assert one.said == "at"
    one.kill()
    one.collect()


def test_the_owner_is_killed_while_the_payload_runs(driver: Callable[[str], Driver]) -> None:
    text = "echo; trap '' TERM HUP INT; sleep 391 | cat & setsid sleep 391 & sleep 391"
    one = driver(f"nsbox.run(['sh', '-c', {text!r}], scratch=FOLDER, on_stdout=lambda _: at())")
    assert one.said == "at"
    time.sleep(0.2)
    one.kill()
    one.collect()


def test_the_owner_is_killed_while_the_helper_has_a_request(driver: Callable[[str], Driver]) -> None:
    code = (
        "run('true')\nos.kill(_native._zygote.pid, signal.SIGSTOP)\nthreading.Thread(target=run).start()\n"
        "time.sleep(0.3)\nprint(_native._zygote.pid, flush=True)"
    )
    one = driver(code)
    one.process.kill()
    one.process.wait()
    os.kill(int(one.said), signal.SIGCONT)
    one.kill()
    one.collect()


def test_the_next_launch_sweeps(driver: Callable[[str], Driver], folder: Path) -> None:
    one = driver("run('sh', '-c', 'echo; sleep 391', on_stdout=lambda _: at())")
    one.kill()
    assert left_by(one.process.pid, folder)
    Path(probe.host().state, "swept").unlink(missing_ok=True)  # or another has just done so, before the kill
    code = "import nsbox; assert nsbox.run(['true']).ok"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
    assert left_by(one.process.pid, folder) == []


def test_a_reader_of_the_output_sees_its_end() -> None:
    """Grandchildren that outlive their owner would hold the caller's pipes open."""
    reader, writer = os.pipe()
    code = "import nsbox; nsbox.run(['sh', '-c', 'sleep 391 | cat'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=writer)
    os.close(writer)
    time.sleep(0.7)
    process.kill()
    process.wait()
    with os.fdopen(reader, "rb") as file:
        assert until(lambda: file.read() == b"", 2)


# The helper is killed -----------------------------------------------------------------------------------------------

HELPER = """
def zygote():
    return _native.zygote().pid

def outcome(**options):
    try:
        result = run(**options)
        return result.reason
    except errors.NsboxError as error:
        return type(error).__name__

run("true")
"""


def answers(code: str, folder: Path) -> list[str]:
    command = [sys.executable, "-c", DRIVER + HELPER + code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert os.listdir(folder) == []
    return done.stdout.split()


def test_the_helper_is_killed_between_launches(folder: Path) -> None:
    code = """
for _ in range(3):
    os.kill(zygote(), signal.SIGKILL)
    time.sleep(0.05)
    print(run("true").reason)
"""
    assert answers(code, folder) == ["exited"] * 3


def test_the_helper_is_killed_with_a_request_before_it(folder: Path) -> None:
    code = """
pid = zygote()
os.kill(pid, signal.SIGSTOP)
threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
print(run("true").reason, run("true").reason)
"""
    assert answers(code, folder) == ["exited", "exited"]


@pytest.mark.parametrize("stage", [*STAGES, "exec"])
def test_the_helper_is_killed_at_each_stage(folder: Path, stage: str) -> None:
    code = f"""
pid = zygote()
launching.fault = ({_native.STAGES.index(stage)}, 1) if {stage!r} != "exec" else None
threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
began = time.monotonic()
ended = outcome(timeout=20)
assert time.monotonic() - began < 15
assert ended not in ("exited", "timeout"), ended
launching.fault = None
print(run("true").reason)
"""
    assert answers(code, folder) == ["exited"]


# Many at once -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_threads_that_launch_while_sandboxes_are_killed() -> None:
    ended: list[str] = []
    stop = threading.Event()

    def launch() -> None:
        while not stop.is_set():
            with contextlib.suppress(errors.NsboxError):
                ended.append(nsbox.run(["sleep", "0.02"], timeout=10).reason)

    nsbox.run(["true"])
    helper = _native.zygote().pid
    threads = [threading.Thread(target=launch) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        for pid in map(int, Path(f"/proc/{helper}/task/{helper}/children").read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join(15)
        assert not thread.is_alive()
    assert set(ended) <= {"exited", "signaled"}
    assert len(ended) > 20
    assert nsbox.run(["true"]).ok
    assert until(lambda: not Path(f"/proc/{helper}/task/{helper}/children").read_text(), 3)


@pytest.mark.slow
def test_one_of_two_busy_owners_is_killed(driver: Callable[[str], Driver]) -> None:
    busy = "at()\nfor _ in range(60): assert run('true').ok\nprint('done', flush=True)"
    many = "ts = [threading.Thread(target=lambda: [run('true') for _ in range(500)]) for _ in range(4)]\n"
    first = driver(many + "[t.start() for t in ts]\ntime.sleep(0.5)\nat()")
    second = driver(busy)
    first.kill()
    subprocess.run([sys.executable, "-m", "nsbox", "gc"], capture_output=True, check=True, cwd="/")
    assert second.process.stdout
    assert second.process.stdout.readline() == "done\n"
    assert second.process.wait(30) == 0
    assert left_by(first.process.pid, first.folder) == []
    assert left_by(second.process.pid, second.folder) == []
