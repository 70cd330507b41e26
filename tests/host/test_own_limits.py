"""Limits of single commands in a sandbox that stays, the groups that hold them, and what holds while nobody waits."""

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import until

from nsbox import watch
from nsbox.box import Sandbox
from nsbox.errors import HostError, SandboxUnavailable, SpecError

HOG = [
    "python3",
    "-c",
    "import time\nx = bytearray(100 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(71)",
]
FORKS = "i=0; while [ $i -lt 40 ]; do sleep 71 & i=$((i+1)); done; sleep 71"
PATIENCE_S = 30
SPIN = "while :; do :; done"


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox(timeout=30) as made:
        yield made


def groups_of(box: Sandbox) -> bool:
    return box._handle is not None and box._handle.groups is not None


def strength(box: Sandbox) -> str:
    return "kernel" if groups_of(box) else "watched"


@pytest.fixture
def grouped(box: Sandbox) -> Sandbox:
    if not groups_of(box):
        pytest.skip("no cgroup can be made by this caller")
    return box


# ---- limits of one command ---------------------------------------------------------------------------------------


def test_memory_of_one_command(box: Sandbox) -> None:
    other = box.popen(["sleep", "71"])
    result = box.run(HOG, memory="40M")
    assert (result.reason, result.status) == ("memory", 137)
    (hit,) = [hit for hit in result.limits_hit if hit["limit"] == "memory"]
    assert hit["value"] == 40 << 20
    assert result.enforced["memory"]["strength"] == strength(box)
    assert other.poll() is None, "the others go on"
    assert box.run(["true"], memory="40M").ok
    assert box.run(["python3", "-c", "x = bytearray(100 << 20)"]).ok, "the box's own limit still is the higher one"


def test_memory_of_a_child_of_a_command_that_goes_on(box: Sandbox) -> None:
    result = box.run("python3 -c 'import time; x = bytearray(100 << 20); time.sleep(9)'; sleep 71", memory="40M")
    assert result.reason == "memory"


def test_processes_of_one_command(box: Sandbox) -> None:
    result = box.run(FORKS, pids=10, timeout=3)
    assert result.reason in (("timeout", "exited") if groups_of(box) else ("pids",))
    assert [hit["value"] for hit in result.limits_hit if hit["limit"] == "pids"] == [10]
    assert result.enforced["pids"]["strength"] == strength(box)
    assert box.run("for i in 1 2 3 4 5 6; do sleep 0.2 & done; wait", pids=10).ok


def test_processor_time_of_one_command(box: Sandbox) -> None:
    result = box.run(SPIN, cpu_time=0.5)
    assert result.reason == "cpu_time"
    assert [hit["value"] for hit in result.limits_hit if hit["limit"] == "cpu_time"] == [0.5]
    assert box.run(["true"], cpu_time=0.5).ok


def test_processor_time_is_not_charged_to_another_command(box: Sandbox) -> None:
    spinning, handle = box.popen(SPIN), box._handle
    assert handle is not None
    assert until(
        lambda: box.run(["sleep", "0.3"], cpu_time=0.5).ok and watch.sample(handle.pid).cpu_s > 0.6, seconds=20
    )
    spinning.kill()
    assert spinning.wait().reason == "cancelled"


def test_processors_of_one_command(box: Sandbox) -> None:
    if not groups_of(box):
        with pytest.raises(HostError, match="cpus"):
            box.run(["true"], cpus=0.2)
        return
    result = box.run(SPIN, cpus=0.2, timeout=2)
    used = (result.usage["cpu_user_s"] or 0) + (result.usage["cpu_system_s"] or 0)
    assert 0 < used < 0.8
    assert result.enforced["cpu"]["strength"] == "kernel"
    # A busy host may have given it less than its share.
    assert "cpu" in [hit["limit"] for hit in result.limits_hit] or used < 0.4


@pytest.mark.parametrize(
    ("option", "value"), [("memory", "1G"), ("pids", 1000), ("cpus", 2), ("cpu_time", 31), ("memory", "unlimited")]
)
def test_never_more_than_the_box(box: Sandbox, option: str, value: Any) -> None:
    with pytest.raises(SpecError, match=f"{option}: .*{value}.* for one command is more than the sandbox's"):
        box.run(["true"], **{option: value})
    with pytest.raises(SpecError, match=option):
        box.run(["true"], **{option: -1})


def test_all_commands_together_keep_within_the_box() -> None:
    with Sandbox(memory="150M", timeout=8) as box:
        hogs = [box.popen(HOG, memory="140M") for _ in range(2)]
        assert "memory" in [process.wait().reason for process in hogs]
        assert box.is_running
        assert box.run(["true"]).ok


# ---- groups ------------------------------------------------------------------------------------------------------


def own_group(box: Sandbox) -> str:
    """Of a command: its group in the hierarchy that ends it."""
    lines = dict(line.split(":", 2)[1:] for line in box.run(["cat", "/proc/self/cgroup"]).stdout_text.splitlines())
    return lines.get("freezer") or lines[""]


def test_each_command_has_its_own_group(grouped: Sandbox) -> None:
    first = grouped.popen("cat /proc/self/cgroup; sleep 71")
    assert until(lambda: first.poll() or first.watched.stdout.total > 5, PATIENCE_S)
    assert own_group(grouped) not in (
        "/",
        *(line.split(":", 2)[2] for line in first.watched.stdout.data.decode().split()),
    )


def test_a_group_cannot_be_written_to_from_inside(grouped: Sandbox) -> None:
    found = grouped.run("ls -l /proc/self/fd; ls -A /sys/fs/cgroup; mount | grep -c cgroup").stdout_text
    assert "cgroup.procs" not in found
    assert "tasks" not in found
    assert found.endswith("0\n")
    # Nor by way of the watcher, which is the same user.
    assert "cgroup" not in grouped.run("ls -l /proc/[0-9]*/fd; cat /proc/1/environ").stdout_text


def test_groups_are_used_again(grouped: Sandbox) -> None:
    seen = set()
    for number in range(30):
        seen.add(own_group(grouped))
        assert grouped.run(["sh", "-c", f"echo {number} > /tmp/{number}"]).ok
    assert len(seen) <= 6


def test_what_killed_or_stopped_the_watchers_costs_one_command(grouped: Sandbox) -> None:
    for script in ("kill -STOP -1", "kill -KILL -1", "kill -STOP $PPID; sleep 71", "kill -KILL $PPID; sleep 71"):
        result = grouped.run(script, timeout=1)
        assert result.reason in ("timeout", "signaled", "exited"), script
        for _ in range(3):
            assert grouped.run(["echo", "fine"], timeout=10).stdout == b"fine\n", script
        assert grouped.run(["pgrep", "-f", "sleep 71"]).stdout == b""


def test_a_fork_bomb_is_killed_and_the_box_lives(grouped: Sandbox) -> None:
    result = grouped.run(":(){ :|:& };: ; sleep 71", timeout=1)
    assert result.reason in ("timeout", "exited")
    assert until(lambda: len(grouped.processes()) <= 2, PATIENCE_S)
    assert grouped.run(["true"]).ok


def test_figures_of_a_command_are_its_own(grouped: Sandbox) -> None:
    assert grouped.run(["python3", "-c", "x = bytearray(60 << 20)"]).ok
    for _ in range(4):
        small = grouped.run(["true"])
        assert (small.usage["memory_peak_bytes"] or 0) < 20 << 20
        large = grouped.run(["python3", "-c", "x = bytearray(60 << 20)"])
        assert (large.usage["memory_peak_bytes"] or 0) > 50 << 20


def test_what_stays_in_the_background_stays_in_its_group(grouped: Sandbox) -> None:
    for _ in range(5):
        assert grouped.run("sleep 71 >/dev/null 2>&1 &", background=True).ok
    for _ in range(5):
        assert grouped.run(["true"]).ok
    assert grouped.run(["pgrep", "-c", "-f", "sleep 71"]).stdout == b"5\n"


def test_nothing_is_left_of_the_groups(grouped: Sandbox) -> None:
    handle = grouped._handle
    assert handle is not None
    assert handle.cgroup is not None
    paths = handle.cgroup.paths
    grouped.run(["true"], memory="100M")
    grouped.run("sleep 71 &", background=True)
    assert all(map(os.path.isdir, paths))
    grouped.close()
    assert until(lambda: not any(map(os.path.isdir, paths)), PATIENCE_S)


# ---- while nobody waits ------------------------------------------------------------------------------------------


def test_a_time_limit_holds_while_nobody_waits(box: Sandbox) -> None:
    process = box.popen("sleep 71 & sleep 71", timeout=0.3)
    assert until(lambda: b"sleep" not in b"".join(map(command_line, box.processes())), PATIENCE_S)
    assert process.wait().reason == "timeout"


def test_processor_time_holds_while_nobody_waits(box: Sandbox) -> None:
    process = box.popen(SPIN, cpu_time=0.3)
    assert until(lambda: b"while" in b"".join(map(command_line, box.processes())), PATIENCE_S), "the control: it runs"
    assert until(lambda: b"while" not in b"".join(map(command_line, box.processes())), PATIENCE_S)
    assert process.wait().reason == "cpu_time"


def test_limits_hold_for_a_command_that_stops_its_watcher_first(box: Sandbox) -> None:
    """Without cgroups its processes are found by what the watcher tells of it."""
    for _ in range(3):
        result = box.run(f"kill -STOP $PPID; {SPIN}", cpu_time=0.5, timeout=25)
        assert result.reason in ("cpu_time", "error")
    assert box.run(["true"]).ok


def test_a_kill_is_seen_through_while_nobody_waits(box: Sandbox) -> None:
    process = box.popen("kill -STOP $PPID; sleep 71")
    assert until(lambda: b"sleep\x0071" in b"".join(map(command_line, box.processes())), PATIENCE_S)
    process.kill()
    assert until(lambda: b"sleep\x0071" not in b"".join(map(command_line, box.processes())), PATIENCE_S)


def command_line(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


@pytest.fixture
def watched(request: pytest.FixtureRequest) -> Iterator[tuple[Sandbox, list[dict[str, Any]]]]:
    """A box whose memory is looked at by the host side, and its log."""
    events: list[dict[str, Any]] = []
    with Sandbox(timeout=30, memory="64M", log=events.append) as made:
        if groups_of(made):
            pytest.skip("the kernel holds memory for this caller")
        yield made, events


def test_memory_of_the_background_ends_the_box(watched: tuple[Sandbox, list[dict[str, Any]]]) -> None:
    box, events = watched
    hog = 'python3 -c "import time; time.sleep(0.5); x = bytearray(200 << 20); time.sleep(71)" >/dev/null 2>&1 &'
    assert box.run(hog, background=True).ok
    assert until(lambda: not box.is_running, PATIENCE_S)
    with pytest.raises(SandboxUnavailable, match="memory limit"):
        box.run(["true"])
    box.close()
    assert [event["limit"] for event in events if event["event"] == "limit"] == ["memory"]
    assert [event["reason"] for event in events if event["event"] == "sandbox.end"] == ["memory"]


def test_memory_of_a_command_that_nobody_polls_ends_it(watched: tuple[Sandbox, list[dict[str, Any]]]) -> None:
    box, _ = watched
    process = box.popen(HOG)
    assert until(lambda: len(watch.processes(box._handle.pid)) == 1 if box._handle else False, PATIENCE_S)
    assert process.wait().reason == "memory"
    assert box.run(["true"]).ok


def test_one_thread_looks_at_all_boxes() -> None:
    boxes = [Sandbox(timeout=30) for _ in range(4)]
    try:
        before = threading.active_count()
        running = [box.popen(["sleep", "71"]) for box in boxes]
        time.sleep(0.5)
        assert threading.active_count() <= before + 1
        assert all(process.poll() is None for process in running)
    finally:
        for box in boxes:
            box.close()


def test_what_ended_in_time_and_is_looked_at_late_was_no_timeout(box: Sandbox) -> None:
    process = box.popen("echo done; exit 3", timeout=2)
    time.sleep(2.5)
    result = process.wait()
    assert (result.reason, result.exit_code, result.stdout) == ("exited", 3, b"done\n")
    assert result.limits_hit == []
