"""Every limit, attempted for real: what happens inside, what the report says of it, what the host feels.

Where the kernel holds limits for this caller, each attempt is made a second time as on a host that has no controllers,
so that what is watched is tried by root as well.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import nsbox
from nsbox import prepared
from nsbox.errors import HostError
from nsbox.resources import cgroup
from nsbox.resources.cgroup_find import look

MIB = 1 << 20
CORES = len(os.sched_getaffinity(0))
#: what the kernel can hold for this caller
HELD = {"memory", "pids", "cpu"} - look().refusals.keys()
REFUSAL = (False, "no controller, as far as this test goes", "run it elsewhere")


@pytest.fixture(params=["found", "watched"] if HELD else ["found"], autouse=True)
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The limits that the kernel holds in this test: those that it can, and then none."""
    if request.param == "found":
        yield HELD
        return
    prepared._prepare.cache_clear()
    monkeypatch.setattr(cgroup.Hierarchy, "strength", lambda *_: REFUSAL)
    yield set()
    prepared._prepare.cache_clear()


def python(code: str, **options: object) -> nsbox.Result:
    return nsbox.run(["python3", "-c", code], **options)


def shell(text: str, **options: object) -> nsbox.Result:
    return nsbox.run(["sh", "-c", text], **options)


def touched(result: nsbox.Result) -> dict[str, int]:
    """limit → how often it was touched. Being slowed down is not of interest here."""
    return {hit["limit"]: hit["count"] for hit in result.limits_hit if hit["limit"] != "cpu"}


def strength(result: nsbox.Result, layer: str) -> str:
    return result.enforced[layer]["strength"]


def cpu_s(result: nsbox.Result) -> float:
    return float(result.usage["cpu_user_s"] or 0) + float(result.usage["cpu_system_s"] or 0)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Sampler(threading.Thread):
    """Calls something again and again until the end of the block; keeps what it answered."""

    def __init__(self, call, pause: float = 0.005) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.call, self.pause, self.values, self.over = call, pause, [], threading.Event()

    def run(self) -> None:
        while not self.over.wait(self.pause):
            self.values.append(self.call())

    def __enter__(self) -> "Sampler":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()


# Memory -------------------------------------------------------------------------------------------------------------

HOGS = {
    "private": "x = bytearray(300 << 20)",
    "grows": "x = []\nwhile sum(map(len, x)) < 300 << 20: x.append(bytearray(1 << 20))",
    "memfd": "import os\nfd = os.memfd_create('x')\nfor _ in range(300): os.write(fd, bytes(1 << 20))",
    "shared": "import mmap\nm = mmap.mmap(-1, 300 << 20)\nfor i in range(0, len(m), 4096): m[i] = 1",
    "shm": "f = open('/dev/shm/x', 'wb')\nfor _ in range(300): f.write(bytes(1 << 20))",
    "tmp": "f = open('/tmp/x', 'wb')\nfor _ in range(300): f.write(bytes(1 << 20))",
    "many": "import os, time\nfor _ in range(10):\n  if os.fork() == 0:\n    x = bytearray(30 << 20); time.sleep(20)",
}


@pytest.mark.parametrize("hog", HOGS)
def test_a_memory_hog_is_ended_and_named(held: set[str], hog: str) -> None:
    # One that is refused (ENOSPC where nothing counts a tmpfs) stays as it is: what it has taken is still too much.
    code = f"import time\ntry:\n  exec({HOGS[hog]!r})\nexcept OSError: pass\ntime.sleep(20)"
    result = python(code, memory="64M", disk="1G", timeout=15)
    assert (result.reason, result.status) == ("memory", 137), result.limits_hit
    assert touched(result)["memory"] >= 1
    assert next(hit["value"] for hit in result.limits_hit if hit["limit"] == "memory") == 64 * MIB
    assert strength(result, "memory") == ("kernel" if "memory" in held else "watched")
    if "memory" in held:
        # Resident is also what is shared with others and not charged here: the interpreter in the page cache.
        assert 32 * MIB < result.usage["memory_peak_bytes"] <= 96 * MIB  # type: ignore[operator]


def test_page_cache_is_no_reason_to_be_killed(held: set[str], tmp_path: Path) -> None:
    # Not on tmpfs, where the pages of a file are memory that cannot be given back.
    (tmp_path / "d").mkdir()
    big = tmp_path / "big"
    big.write_bytes(b"x" * 150 * MIB)
    text = "cat /big | wc -c; dd if=/big of=/d/copy bs=1M 2>&-; wc -c < /d/copy"
    result = shell(text, memory="48M", timeout=60, ro=[(big, "/big")], rw=[(tmp_path / "d", "/d")])
    assert result.ok, (result.limits_hit, result.stderr)
    assert result.stdout.split() == [b"157286400"] * 2
    assert "memory" not in touched(result)


def test_a_child_out_of_memory_behind_a_shell_that_succeeds() -> None:
    result = shell("python3 -c 'import time; x = bytearray(300 << 20); time.sleep(9)'; exit 0", memory="64M")
    assert (result.reason, result.status) == ("memory", 137)
    assert "memory" in touched(result)


def test_a_run_ends_when_its_memory_is_out_whoever_lives_on() -> None:
    began = time.monotonic()
    result = shell("python3 -c 'import time; x = bytearray(300 << 20); time.sleep(60)'; sleep 60", memory="64M")
    assert time.monotonic() - began < 30
    assert (result.reason, result.status) == ("memory", 137)


def test_kill_9_is_not_out_of_memory() -> None:
    result = shell("kill -9 $$", memory="64M")
    assert (result.reason, result.signal, result.status) == ("signaled", signal.SIGKILL, 137)
    assert touched(result) == {}
    result = shell("sh -c 'kill -9 $$'; echo $?", memory="64M")
    assert (result.reason, result.status, result.stdout) == ("exited", 0, b"137\n")
    assert touched(result) == {}


@pytest.mark.parametrize(
    "argv, out",
    [
        (["node", "-e", "console.log('ok')"], "stdout"),
        (["java", "-version"], "stderr"),
        (["python3", "-c", "import mmap; m = mmap.mmap(-1, 8 << 30, mmap.MAP_PRIVATE | 0x4020); print(1)"], "stdout"),
    ],
    ids=["node", "java", "mmap"],
)
def test_address_space_is_not_memory(argv: list[str], out: str) -> None:
    if not shutil.which(argv[0], path="/usr/local/bin:/usr/bin:/bin"):
        pytest.skip(f"{argv[0]} is not installed; bootstrap installs it")
    result = nsbox.run(argv, memory="256M")
    assert result.ok, result.stderr
    assert getattr(result, out)
    assert touched(result) == {}


@pytest.mark.parametrize(
    "text, out",
    [
        ("printf 'int main(void) { return 0; }' > x.c && gcc -O2 x.c && ./a.out && echo ok", b"ok\n"),
        ("python3 -c '{}'", b"64\n"),
        ("seq 100000 | sort -rn | head -n 1", b"100000\n"),
    ],
    ids=["gcc", "threads", "pipe"],
)
def test_the_default_limits_are_wide_enough(text: str, out: bytes) -> None:
    threads = (
        "import threading, time\nts = [threading.Thread(target=time.sleep, args=(0.3,)) for _ in range(64)]\n"
        "[t.start() for t in ts]\n[t.join() for t in ts]\nprint(len(ts))"
    )
    result = shell(text.format(threads) if "{}" in text else text)
    assert (result.status, result.stdout) == (0, out), result.stderr
    assert touched(result) == {}


# Processes ----------------------------------------------------------------------------------------------------------

BOMB = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"


def host_fork() -> float:
    began = time.monotonic()
    subprocess.run(["/bin/true"], check=True)
    return time.monotonic() - began


def test_a_fork_bomb_leaves_the_host_its_own_forks(held: set[str]) -> None:
    with Sampler(host_fork) as forks:
        result = python(BOMB, pids=64, timeout=3)
    assert (result.reason, result.status) == ("timeout", 124)
    assert {"pids", "timeout"} <= touched(result).keys()
    assert strength(result, "pids") == ("kernel" if "pids" in held else "watched")
    if "pids" in held:
        assert result.usage["pids_peak"] in (64, None)
    assert len(forks.values) > 20
    # 64 runnable processes inside share one processor at most; a fork of the host's own waits for a few slices of it.
    assert sorted(forks.values)[len(forks.values) // 2] < 1
    assert result.timing["teardown_ms"] < 20_000


def test_processes_beyond_the_limit_are_refused(held: set[str]) -> None:
    code = (
        "import os, time\nn = 0\ntry:\n  while n < 60:\n    if os.fork() == 0: time.sleep(20)\n    n += 1\n"
        "except BlockingIOError: print(n)\ntime.sleep(0.3)"
    )
    result = python(code, pids=20)
    assert result.ok, result.stderr
    # RLIMIT_NPROC is one wider: it leaves room for a process of ours that is not always there.
    assert int(result.stdout) == (19 if "pids" in held else 20)
    assert "pids" in touched(result)


def test_threads_count_as_processes(held: set[str]) -> None:
    code = (
        "import threading, time\nn = 0\ntry:\n  while n < 60:\n    threading.Thread(target=time.sleep, args=(1,),"
        " daemon=True).start()\n    n += 1\nexcept RuntimeError: print(n)"
    )
    result = python(code, pids=20)
    assert int(result.stdout) == (19 if "pids" in held else 20)


def test_processes_of_the_caller_do_not_count() -> None:
    """RLIMIT_NPROC counts per user and user namespace: what the same user runs elsewhere must not matter."""
    others = [subprocess.Popen(["/bin/sleep", "60"]) for _ in range(200)]
    try:
        five = "for i in 1 2 3 4 5; do sleep 0.2 & done; wait; echo ok"
        full: list[nsbox.Result] = []
        filler = threading.Thread(target=lambda: full.append(python(BOMB, pids=32, timeout=2)))
        assert shell(five, pids=32).stdout == b"ok\n"
        filler.start()
        time.sleep(0.7)
        assert shell(five, pids=32).stdout == b"ok\n"
        filler.join()
        assert full[0].reason == "timeout"
    finally:
        for other in others:
            other.kill()
        for other in others:
            other.wait()


# Processor ----------------------------------------------------------------------------------------------------------

#: of processor time, for a limit of 1: on a busy host whoever watches is late; without a limit it would be the time-out
TOO_LATE_S = 5
SPIN = "python3 -c 'while True: pass'"


def test_two_processes_share_half_a_processor(held: set[str]) -> None:
    result = shell(f"{SPIN} & {SPIN} & wait", cpus=0.5, timeout=4)
    assert result.reason == "timeout"
    share = cpu_s(result) / (result.timing["run_ms"] / 1000)
    assert 0 < share < 0.5 * 1.2
    assert strength(result, "cpu") == ("kernel" if "cpu" in held else "watched")
    # A busy host may have given them less than their share.
    assert share < 0.4 or any(hit["limit"] == "cpu" and hit["count"] for hit in result.limits_hit)


def test_cpu_time_is_summed_over_processes() -> None:
    result = shell(f"{SPIN} & {SPIN} & wait", cpu_time=1, cpus="unlimited", timeout=20)
    assert (result.reason, result.status) == ("cpu_time", 124)
    assert touched(result) == {"cpu_time": 1}
    assert 0.65 < cpu_s(result) < TOO_LATE_S


def test_cpu_time_ends_a_single_busy_loop() -> None:
    result = python("while True: pass", cpu_time=1, timeout=20)
    assert (result.reason, touched(result)) == ("cpu_time", {"cpu_time": 1})
    assert 0.65 < cpu_s(result) < TOO_LATE_S


def test_cpu_time_of_short_lived_children_counts() -> None:
    result = shell("while :; do head -c 2000000 /dev/zero | sha1sum >/dev/null; done", cpu_time=1, timeout=30)
    assert (result.reason, touched(result)) == ("cpu_time", {"cpu_time": 1})
    assert 0.65 < cpu_s(result) < TOO_LATE_S


def test_sleeping_costs_no_cpu_time() -> None:
    result = nsbox.run(["sleep", "30"], cpu_time=1, timeout=1.5)
    assert (result.reason, result.status, touched(result)) == ("timeout", 124, {"timeout": 1})
    assert cpu_s(result) < 0.3


# Wall clock ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "echo begun; sleep infinity",
        "echo begun; sleep 60 & sleep 60 & kill -STOP $! $$; sleep 60",
        "trap '' TERM INT HUP; echo begun; sleep 60 & wait",
        "echo begun; setsid sh -c 'sleep 60 & sleep 60' & wait",
    ],
    ids=["sleeps", "stopped", "ignores", "session"],
)
def test_the_wall_clock_ends_whatever_it_is(text: str) -> None:
    began = time.monotonic()
    result = shell(text, timeout=0.7)
    assert time.monotonic() - began < 30
    assert (result.reason, result.status, touched(result)) == ("timeout", 124, {"timeout": 1})
    assert result.stdout == b"begun\n"


def test_the_deadline_holds_when_the_caller_was_stopped() -> None:
    code = (
        "import nsbox, time\nprint('up', flush=True)\nr = nsbox.run(['sleep', '60'], timeout=4)\n"
        "print(r.reason, flush=True)"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert caller.stdout
    try:
        caller.stdout.readline()
        time.sleep(0.4)
        caller.send_signal(signal.SIGSTOP)
        time.sleep(4)
        caller.send_signal(signal.SIGCONT)
        began = time.monotonic()
        assert caller.stdout.readline() == "timeout\n"
        assert time.monotonic() - began < 3, "it was waited for once more"
        assert caller.wait() == 0
    finally:
        caller.kill()
        caller.communicate()


# Files --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["/tmp/x", "/dev/shm/x", "x"])
def test_a_full_disk_is_felt_inside_and_told(place: str) -> None:
    result = shell(f"head -c 100M /dev/zero > {place}; echo $?; stat -c %s {place}", disk="8M")
    assert (result.reason, result.status) == ("exited", 0), result.stderr
    assert b"No space left on device" in result.stderr
    status, size = map(int, result.stdout.split())
    assert status == 1
    assert 7 * MIB < size <= 8 * MIB
    assert touched(result) == {"disk": 1}
    assert strength(result, "disk") == "kernel"
    assert result.usage["disk_used_bytes"] == pytest.approx(8 * MIB, rel=0.1)


def test_inodes_run_out_too() -> None:
    code = (
        "import os\nn = 0\ntry:\n  while n < 200000:\n    os.close(os.open(f'/tmp/{n}', os.O_CREAT)); n += 1\n"
        "except OSError as e: print(e.strerror)\n"
    )
    result = python(code, disk="8M")
    assert result.stdout == b"No space left on device\n"
    assert touched(result) == {"disk": 1}


def test_one_file_may_be_limited() -> None:
    result = shell("head -c 10M /dev/zero > x; echo $?; stat -c %s x", file_size="1M")
    assert result.stdout.split() == [str(128 + signal.SIGXFSZ).encode(), str(MIB).encode()]


def test_descriptors_run_out() -> None:
    code = (
        "import os\nfds = []\ntry:\n  while len(fds) < 10000: fds.append(os.open('/dev/null', os.O_RDONLY))\n"
        "except OSError as e: print(len(fds), e.errno)\n"
    )
    result = python(code)
    assert [*map(int, result.stdout.split())] == [1024 - 3, 24]
    assert shell("ulimit -n; ulimit -Hn", files=77).stdout.split() == [b"77"] * 2


def test_no_core_is_written() -> None:
    result = shell("ulimit -c; ulimit -Hc; cd /tmp; sh -c 'kill -SEGV $$'; ls -A", cwd="/tmp")
    assert result.stdout.split() == [b"0", b"0"]


# Output -------------------------------------------------------------------------------------------------------------


def test_a_flood_of_output_is_cut_and_costs_the_caller_nothing() -> None:
    nsbox.run(["true"])
    before = resident()
    with Sampler(resident) as sizes:
        result = shell("yes >&2 & yes", output="1M", memory="64M", timeout=2)
    assert (result.reason, result.status) == ("timeout", 124), result.limits_hit
    assert (len(result.stdout), len(result.stderr)) == (MIB, MIB)
    assert result.stdout_truncated
    assert result.stderr_truncated
    assert touched(result) == {"output": 2, "timeout": 1}
    assert max(sizes.values) - before < 8 * MIB


def test_output_without_end_of_line_is_cut_at_the_byte() -> None:
    result = shell("head -c 3000000 /dev/zero", output=1000)
    assert (result.status, len(result.stdout), result.stdout_truncated) == (0, 1000, True)
    assert touched(result) == {"output": 1}


# What is said of it -------------------------------------------------------------------------------------------------


def test_unlimited_is_a_word(held: set[str]) -> None:
    names = ("memory", "cpus", "pids", "disk", "files", "file_size", "timeout", "cpu_time", "output")
    result = nsbox.run(["sh", "-c", "head -c 20M /dev/zero; ulimit -c"], **dict.fromkeys(names, "unlimited"))
    assert result.ok
    assert len(result.stdout) == 20 * MIB + 2
    assert result.limits_hit == []
    for layer in ("memory", "cpu", "pids", "disk"):
        assert result.enforced[layer] == {"strength": "none", "how": "unlimited, as asked for"}


def test_what_holds_each_limit_is_told(held: set[str]) -> None:
    enforced = nsbox.run(["true"]).enforced
    for layer in ("memory", "pids", "cpu"):
        assert enforced[layer]["strength"] == ("kernel" if layer in held else "watched")
        assert ("cgroup" in enforced[layer]["how"]) == (layer in held)
    assert enforced["disk"]["strength"] == "kernel"


@pytest.mark.parametrize("layer", ["memory", "pids", "cpu"])
def test_the_kernel_can_be_insisted_on(held: set[str], layer: str) -> None:
    if layer in held:
        assert nsbox.run(["true"], require=[f"{layer}=kernel"]).ok
        return
    reason, remedy = look().refusals.get(layer, REFUSAL[1:])
    with pytest.raises(HostError, match=f"^{layer}: kernel is required") as caught:
        nsbox.run(["true"], require=[f"{layer}=kernel"])
    assert caught.value.remedy == remedy
    if layer in look().refusals:
        assert reason in str(caught.value)
        assert layer in reason or "/sys/fs/cgroup" in reason
    assert nsbox.run(["true"], require=[layer]).ok  # watched will do


def test_the_command_line_warns_once(held: set[str]) -> None:
    if held != HELD:
        pytest.skip("the command is another process, which sees the host as it is")
    weaker = sorted({"memory", "pids", "cpu"} - held)

    def said(*options: str) -> list[str]:
        command = [sys.executable, "-m", "nsbox", "run", *options, "--", "true"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tempfile.gettempdir())
        return done.stderr.splitlines()

    lines = said()
    assert len(lines) == (1 if weaker else 0), lines
    assert all(layer in lines[0] for layer in weaker)
    assert said(*(f"--degrade={layer}" for layer in weaker)) == []
