"""Limits of real groups, met by real processes."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nsbox
from nsbox import probe
from nsbox.errors import HostError
from nsbox.resources.cgroup import Cgroup, Hierarchy, Wanted, discover, sweep
from nsbox.resources.cgroup_find import look

MIB = 1 << 20
UNLIMITED = Wanted(None, None, None)


def need(*limits: str) -> None:
    """Skip where this caller cannot make groups at all, or none with these limits."""
    found = look()
    if not found.v1 and not found.v2:
        pytest.skip("{}; {}".format(*found.refusals["memory"]))
    for limit in limits:
        if limit in found.refusals:
            pytest.skip("{}; {}".format(*found.refusals[limit]))


@pytest.fixture
def hierarchy(tmp_path: Path) -> Iterator[Hierarchy]:
    """One of this test alone, so that what it prepared is gone afterwards."""
    made = Hierarchy(str(tmp_path), look())
    yield made
    made.close()


@contextlib.contextmanager
def group(hierarchy: Hierarchy, wanted: Wanted) -> Iterator[Cgroup]:
    made = hierarchy.make(wanted, "test")
    try:
        yield made
    finally:
        made.kill()
        assert made.release(5)


def start(made: Cgroup, work: Callable[[], object]) -> int:
    """A forked child that joins the group as pid 1 of a sandbox does, then does ``work``."""
    pid = os.fork()
    if pid:
        return pid
    try:
        for fd in made.join:
            os.write(fd, b"0")
        if made.into >= 0:
            # Where clone3(2) is not at hand: a process that is alone may move itself just as well.
            fd = os.open("cgroup.procs", os.O_WRONLY, dir_fd=made.into)
            os.write(fd, b"0")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        work()
    except BaseException:
        os._exit(3)
    os._exit(0)


def end_of(pid: int) -> int:
    """As Popen.returncode: negative is a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def spin(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def test_memory_hog_is_killed_and_counted(hierarchy: Hierarchy) -> None:
    need("memory")
    with group(hierarchy, Wanted(32 * MIB, None, None)) as made:
        assert end_of(start(made, lambda: bytearray(200 * MIB))) == -signal.SIGKILL
        counters = made.counters()
    assert counters["oom_kills"] is not None
    assert counters["oom_kills"] >= 1
    assert counters["memory_peak_bytes"] is None or 24 * MIB <= counters["memory_peak_bytes"] <= 32 * MIB


def test_memory_that_is_not_touched_costs_nothing(hierarchy: Hierarchy) -> None:
    need("memory")

    def reserve() -> None:
        import mmap

        # MAP_NORESERVE, as Go and Java have it: the test is not about vm.overcommit_memory.
        mmap.mmap(-1, 8 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)

    with group(hierarchy, Wanted(64 * MIB, None, None)) as made:
        assert end_of(start(made, reserve)) == 0
        assert made.counters()["oom_kills"] == 0


def test_processes_are_refused_and_counted(hierarchy: Hierarchy) -> None:
    need("pids")

    def multiply() -> None:
        made = 0
        try:
            for _ in range(20):
                if os.fork() == 0:
                    time.sleep(0.2)
                    os._exit(0)
                made += 1
        except BlockingIOError:  # EAGAIN
            os._exit(made)

    with group(hierarchy, Wanted(None, 5, None)) as made:
        assert end_of(start(made, multiply)) == 4
        counters = made.counters()
    assert counters["pids_events"]
    assert counters["pids_peak"] in (5, None)


def test_cpu_time_is_limited_and_counted(hierarchy: Hierarchy) -> None:
    need("cpu")
    with group(hierarchy, Wanted(None, None, 0.5)) as made:
        began = time.monotonic()
        children = [start(made, lambda: spin(1.5)) for _ in range(2)]
        ends = [end_of(child) for child in children]
        wall = time.monotonic() - began
        counters = made.counters()
        usage = made.cpu_usage_us()
    assert ends == [0, 0]
    assert usage is not None
    assert usage / 1e6 / wall <= 0.5 * 1.15  # less, where others use the processors as well
    assert usage == counters["cpu_usage_us"]
    assert counters["cpu_throttled_count"]
    assert counters["cpu_throttled_us"]
    user, system = counters["cpu_user_us"], counters["cpu_system_us"]
    assert user is not None and system is not None  # noqa: PT018
    assert user + system == pytest.approx(usage, rel=0.1)


def test_the_report_tells_how_long_was_waited() -> None:
    """Only a tree of version 2 tells (PSI), if the kernel was built with that and started with it."""
    need("cpu")
    with group(discover(probe.host().state), Wanted(None, None, 0.5)) as made:
        tells = made.counters()["pressure_cpu_us"] is not None
    spin = "while :; do :; done & while :; do :; done"
    usage = nsbox.run(["timeout", "1", "sh", "-c", spin], cpus=0.5, timeout="2m", cpu_time="2m").usage
    for name in ("pressure_cpu_s", "pressure_io_s", "pressure_memory_s"):
        assert (usage[name] is not None) == tells
    assert not tells or usage["pressure_cpu_s"] > 0, "two that want what is half of one"


def test_limits_change_while_it_runs(hierarchy: Hierarchy) -> None:
    need("memory", "pids")

    def fill() -> None:
        time.sleep(0.2)
        bytearray(64 * MIB)

    with group(hierarchy, Wanted(32 * MIB, 8, None)) as made:
        child = start(made, fill)
        made.set(Wanted(128 * MIB, 8, None))
        assert end_of(child) == 0
        child = start(made, fill)
        made.set(Wanted(48 * MIB, 8, None))
        assert end_of(child) == -signal.SIGKILL
        made.set(UNLIMITED)
        assert end_of(start(made, fill)) == 0


def test_freeze_thaw_kill(hierarchy: Hierarchy) -> None:
    need()
    with group(hierarchy, UNLIMITED) as made:
        child = start(made, lambda: spin(30))
        time.sleep(0.05)
        assert made.freeze()
        before = made.cpu_usage_us()
        time.sleep(0.1)
        assert made.cpu_usage_us() == before
        assert made.thaw()
        time.sleep(0.1)
        after = made.cpu_usage_us()
        assert before is not None and after is not None  # noqa: PT018
        assert after > before
        assert made.freeze()
        assert made.kill()  # frozen or not
        assert end_of(child) == -signal.SIGKILL


def test_kill_ends_a_fork_bomb(hierarchy: Hierarchy) -> None:
    need("pids")

    def bomb() -> None:
        while True:
            with contextlib.suppress(OSError):
                os.fork()

    with group(hierarchy, Wanted(None, 40, 1.0)) as made:
        child = start(made, bomb)
        time.sleep(0.3)
        assert made.kill()
        assert end_of(child) == -signal.SIGKILL
        assert made.release(5)


def test_events_wake_the_supervisor(hierarchy: Hierarchy) -> None:
    need("memory", "pids")

    def too_many() -> None:
        for _ in range(3):
            if os.fork() == 0:
                time.sleep(0.1)
                os._exit(0)

    with group(hierarchy, Wanted(32 * MIB, 3, None)) as made:
        events = {kind: (fd, mask) for fd, mask, kind in made.event_fds()}
        works = {"memory": lambda: bytearray(200 * MIB), "pids": too_many}
        assert "memory" in events
        for kind, (fd, mask) in events.items():
            poll = select.poll()
            poll.register(fd, mask)
            made.drain(fd)
            assert not poll.poll(0)
            end_of(start(made, works[kind]))
            assert poll.poll(1000), kind
            time.sleep(0.05)  # at most one announcement in 10 ms: what came closer together is announced later
            made.drain(fd)
            assert not poll.poll(0)


def test_release_waits_for_the_dying_and_says_when_it_cannot(hierarchy: Hierarchy) -> None:
    need()
    made = hierarchy.make(UNLIMITED, "busy")
    child = start(made, lambda: time.sleep(30))
    time.sleep(0.05)
    began = time.monotonic()
    assert not made.release(0.1)
    assert time.monotonic() - began < 20, "it has waited for its end"
    os.kill(child, signal.SIGKILL)
    end_of(child)
    hierarchy.refill()
    assert not hierarchy.left
    assert made.release()
    assert not any(map(os.path.exists, made.paths))


def test_ready_groups_are_used_once(hierarchy: Hierarchy) -> None:
    need("pids")
    wanted = Wanted(None, 7, None)
    first = hierarchy.make(wanted, "first")
    hierarchy.refill()
    ready = [hierarchy.make(wanted, "next") for _ in range(2)]
    other = hierarchy.make(Wanted(None, 9, None), "other")
    paths = {path for made in (first, *ready, other) for path in made.paths}
    assert len(paths) == 4 * len(first.paths)
    assert all("-ready" in path for made in ready for path in made.paths)
    hierarchy.refill()  # for the last kind that was asked for
    for made in (first, *ready, other):
        assert made.release()
    again = hierarchy.make(Wanted(None, 9, None), "again")
    assert not paths & {*again.paths}
    assert again.release()


def test_a_refill_that_the_end_of_the_process_overtakes_leaves_nothing(
    hierarchy: Hierarchy, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("pids")
    assert hierarchy.make(Wanted(None, 7, None), "first").release()
    make, paths = hierarchy._fresh, []

    def overtaken(wanted: Wanted, name: str) -> Cgroup:
        hierarchy.close()
        made = make(wanted, name)
        paths.extend(made.paths)
        return made

    monkeypatch.setattr(hierarchy, "_fresh", overtaken)
    hierarchy.refill()
    assert paths
    assert not any(map(os.path.exists, paths))


def test_descriptors_are_closed(hierarchy: Hierarchy) -> None:
    need()
    hierarchy.make(UNLIMITED, "warm").release()
    before = sorted(os.listdir("/proc/self/fd"))
    with group(hierarchy, UNLIMITED) as made:
        made.counters()
        made.event_fds()
        made.joined()
        assert made.join == ()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_same_process_same_facts(tmp_path: Path) -> None:
    first = discover(str(tmp_path))
    assert discover(str(tmp_path)) is first
    pid = os.fork()
    if pid == 0:
        os._exit(discover(str(tmp_path)) is first)
    assert end_of(pid) == 0


# What a killed owner leaves -----------------------------------------------------------------------------------------

OWNER = """
import os, sys, time
from nsbox.resources.cgroup import Wanted, discover
hierarchy = discover(sys.argv[1])
made = hierarchy.make(Wanted(None, None, None), "orphan")
hierarchy.refill()
if os.fork() == 0:
    for fd in made.join:
        os.write(fd, b"0")
    if made.into >= 0:
        os.write(os.open("cgroup.procs", os.O_WRONLY, dir_fd=made.into), b"0")
    time.sleep(60)
    os._exit(0)
time.sleep(0.2)
print(*made.paths, flush=True)
time.sleep(60)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    need()
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    paths = process.stdout.readline().split()
    yield process, paths
    process.kill()
    process.wait()
    process.stdout.close()
    sweep(str(tmp_path))


def test_sweep_removes_what_a_dead_owner_left(owner: tuple[subprocess.Popen[str], list[str]], tmp_path: Path) -> None:
    process, paths = owner
    assert paths
    mine = f"of process {process.pid},"

    def swept() -> list[str]:
        return [line for line in sweep(str(tmp_path)) if mine in line]

    assert swept() == []
    assert all(map(os.path.isdir, paths))
    process.kill()  # not waited for yet: a zombie owns nothing
    deadline = time.monotonic() + 5
    lines: list[str] = []  # it may die between the looks at two hierarchies
    while len(lines) < len(paths) and time.monotonic() < deadline:
        lines += swept()
        time.sleep(0.01)
    assert len(lines) == len(paths)
    assert all(f"{mine} which is gone: removed" in line for line in lines), lines
    assert not any(map(os.path.exists, paths))
    assert not any(os.path.exists(os.path.dirname(path)) for path in paths)


@pytest.mark.root
def test_sweep_in_another_pid_namespace_leaves_live_owners(
    owner: tuple[subprocess.Popen[str], list[str]], tmp_path: Path
) -> None:
    _, paths = owner
    code = "import sys; from nsbox.resources.cgroup import sweep; print(sweep(sys.argv[1]))"
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert all(map(os.path.isdir, paths))


def test_a_limit_that_nothing_enforces_is_refused(tmp_path: Path) -> None:
    found = look()._replace(refusals=dict.fromkeys(("memory", "pids", "cpu", "io"), ("no reason", "do nothing")))
    with pytest.raises(HostError, match="the memory limit cannot be enforced: no reason; do nothing"):
        Hierarchy(str(tmp_path), found).make(Wanted(MIB, None, None), "x")
