"""Processors, priorities, device bandwidth and the grace before the kill: limits that are asked for by choice."""

import os
import time
from pathlib import Path

import pytest

import nsbox
from nsbox import probe
from nsbox.errors import HostError, SpecError
from nsbox.resources import cgroup

SHOW = "nproc; nice; grep Cpus_allowed_list /proc/self/status; taskset -p 3 $$ 2>&1 >/dev/null"


def test_processors_are_chosen_and_stay_so() -> None:
    number = max(os.sched_getaffinity(0))
    result = nsbox.run(["sh", "-c", SHOW], cpuset=str(number))
    count, _, allowed, refused = result.stdout_text.splitlines()
    assert count == "1"
    assert allowed.split()[-1] == str(number)
    assert "Operation not permitted" in refused


def test_without_a_choice_all_processors_can_be_seen() -> None:
    """The control of the test above: what is not asked for is not done."""
    result = nsbox.run(["sh", "-c", "grep Cpus_allowed_list /proc/self/status"], cpus="unlimited")
    listed = result.stdout_text.split()[-1]
    assert nsbox.Spec(cpuset=listed).processors() == os.sched_getaffinity(0)


def test_priorities_are_lowered() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    result = nsbox.run(["sh", "-c", "nice; ionice"], nice=min(19, before + 5), ionice="idle")
    assert result.stdout_text.split() == [str(min(19, before + 5)), "idle"]


@pytest.mark.parametrize(
    "options, named",
    [
        ({"nice": -1}, "nice"),
        ({"nice": 20}, "nice"),
        ({"ionice": "realtime"}, "ionice"),
        ({"cpuset": "1-"}, "cpuset"),
        ({"cpuset": ""}, "cpuset"),
        ({"grace": "soon"}, "grace"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        nsbox.Spec(**options)  # type: ignore[arg-type]


def test_processors_that_are_not_there_are_refused() -> None:
    with pytest.raises(HostError, match="choose from"):
        nsbox.run(["true"], cpuset="8000")


def test_a_grace_lets_the_command_end_by_itself() -> None:
    code = "trap 'echo bye; exit 3' TERM; echo ready; sleep 30 & wait"
    result = nsbox.run(["sh", "-c", code], timeout=0.5, grace=20)
    assert (result.reason, result.exit_code, result.stdout) == ("timeout", 3, b"ready\nbye\n")
    assert result.status == 124


def test_who_ignores_the_grace_is_killed_after_it() -> None:
    began = time.monotonic()
    result = nsbox.run(["sh", "-c", "trap '' TERM; sleep 60; sleep 60"], timeout=0.3, grace=0.3)
    assert (result.reason, result.signal) == ("timeout", 9)
    assert time.monotonic() - began < 30


def test_without_a_grace_there_is_no_term() -> None:
    result = nsbox.run(["sh", "-c", "trap 'echo bye' TERM; sleep 30 & wait"], timeout=0.3)
    assert (result.stdout, result.signal) == (b"", 9)


def test_device_bandwidth(tmp_path: Path) -> None:
    state = probe.host().state
    available, how, _ = cgroup.discover(state).strength("io")
    folder = tmp_path / "shared"
    folder.mkdir()
    if not available:
        with pytest.raises(HostError, match="io: the bandwidth"):
            nsbox.run(["true"], io="1M")
        assert nsbox.run(["true"], io="1M", degrade=["io"]).enforced["io"]["strength"] == "none"
        return
    if probe.block_device(str(folder)) is None:
        pytest.skip(f"{folder} is on no block device, so there is none to limit ({how})")
    command = "dd if=/dev/zero of=/m/x bs=1M count=4 oflag=direct"
    began = time.monotonic()
    limited = nsbox.run(["sh", "-c", command], rw=[(str(folder), "/m")], io="2M", timeout=60)
    assert limited.ok, limited.stderr_text
    # A limit from below, which load can only lengthen.
    assert time.monotonic() - began > 1.0
    assert limited.enforced["io"]["strength"] == "kernel"
