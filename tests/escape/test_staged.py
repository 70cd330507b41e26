"""Attempts that need something on the host's side as well: those of ``nsbox selftest``, and what it leaves out.

What is done, and its control, is in nsbox/selftest/on_*.py; here it is done under every shipped profile.
"""

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import until

import nsbox
from nsbox import janitor, prepared
from nsbox.errors import HostError
from nsbox.resources import cgroup
from nsbox.selftest.stage import STAGED, Noted, Stage

for _name in ("on_files", "on_limits", "on_network", "on_secrets"):
    importlib.import_module(f"nsbox.selftest.{_name}")
PROFILES = ("default", "strict", "permissive")
under_every_profile = pytest.mark.parametrize("profile", PROFILES)


@pytest.fixture
def stage(profile: str) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="stage-") as folder:
        os.chmod(folder, 0o755)
        yield Stage(profile, folder)
    janitor.flush()


def attempt(threat: str, stage: Stage) -> list[Noted]:
    """Every attempt of a threat has a control that works, and is stopped."""
    found = list(STAGED[threat](stage))
    assert found
    assert [item for item in found if item.result != "stopped"] == []
    return found


@under_every_profile
def test_F01_the_runtime_is_the_same_afterwards(stage: Stage) -> None:
    attempt("F01", stage)


@under_every_profile
def test_F03_descriptors_of_the_caller(stage: Stage) -> None:
    attempt("F03", stage)


@under_every_profile
def test_F05_paths_that_the_host_uses(stage: Stage) -> None:
    attempt("F05", stage)


@under_every_profile
def test_F06_planted_links(stage: Stage) -> None:
    attempt("F06", stage)


@under_every_profile
def test_F12_what_the_host_acts_upon(stage: Stage) -> None:
    attempt("F12", stage)


@under_every_profile
def test_F13_what_is_evaluated(stage: Stage) -> None:
    attempt("F13", stage)


@under_every_profile
def test_F14_names_of_any_bytes(stage: Stage) -> None:
    attempt("F14", stage)


@under_every_profile
def test_N01_no_network(stage: Stage) -> None:
    attempt("N01", stage)


@under_every_profile
def test_N09_unix_sockets(stage: Stage) -> None:
    attempt("N09", stage)


@under_every_profile
def test_R01_fork_bomb(stage: Stage) -> None:
    attempt("R01", stage)


@under_every_profile
def test_R02_memory(stage: Stage) -> None:
    attempt("R02", stage)


@under_every_profile
def test_R03_disk_and_inodes(stage: Stage) -> None:
    attempt("R03", stage)


@under_every_profile
def test_R04_output(stage: Stage) -> None:
    attempt("R04", stage)


@under_every_profile
def test_R05_a_daemon(stage: Stage) -> None:
    attempt("R05", stage)


@under_every_profile
def test_R06_processor_time(stage: Stage) -> None:
    attempt("R06", stage)


@under_every_profile
def test_R07_wall_clock(stage: Stage) -> None:
    attempt("R07", stage)


@under_every_profile
def test_R08_descriptors(stage: Stage) -> None:
    attempt("R08", stage)


@under_every_profile
def test_R09_shared_memory(stage: Stage) -> None:
    attempt("R09", stage)


@under_every_profile
def test_S01_credentials_of_the_caller(stage: Stage) -> None:
    attempt("S01", stage)


@under_every_profile
def test_S02_leases_of_a_pool(stage: Stage) -> None:
    attempt("S02", stage)


@under_every_profile
def test_S05_a_printed_secret(stage: Stage) -> None:
    attempt("S05", stage)


@under_every_profile
def test_S06_a_secret_after_its_time(stage: Stage) -> None:
    attempt("S06", stage)


@under_every_profile
def test_S07_the_log(stage: Stage) -> None:
    attempt("S07", stage)


@under_every_profile
def test_S08_no_isolation_to_be_had(stage: Stage) -> None:
    attempt("S08", stage)


@under_every_profile
def test_S09_credentials_as_mounts(stage: Stage) -> None:
    attempt("S09", stage)


# ---- what the self-test leaves out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["thread", "process"])
def test_R08_threads_and_processes_share_one_limit(place: str) -> None:
    start = {"thread": "threading.Thread(target=time.sleep, args=(2,), daemon=True).start()", "process": "fork()"}[
        place
    ]
    code = f"""
import os, threading, time
def fork():
    if os.fork() == 0: time.sleep(2); os._exit(0)
made = 0
try:
    while made < 100: {start}; made += 1
except (OSError, RuntimeError): pass
print(made, flush=True)
os._exit(0)
"""
    control = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert control.stdout == "100\n"
    assert int(nsbox.run(["python3", "-c", code], pids=20).stdout) <= 20


EMBEDDER = """
import nsbox, sys, time
def up(data): print("up", flush=True)
nsbox.run(["sh", "-c", "setsid sleep 3971 & sleep 3971 & echo; exec sleep 3971"], workspace=sys.argv[1], on_stdout=up)
"""


def named(*words: str) -> list[int]:
    """Processes with exactly these arguments."""
    wanted = "\0".join(words).encode() + b"\0"
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes() == wanted:
                    found.append(int(entry.name))
            except OSError:
                pass
    return found


@pytest.mark.leaves_traces
@pytest.mark.slow
def test_R10_a_killed_embedder_leaves_nothing(tmp_path: Path) -> None:
    """Killed again and again, each time a moment later: before, while and after the sandbox is made."""
    mounts = Path("/proc/self/mountinfo").read_text()
    seen = 0
    for delay in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4):
        process = subprocess.Popen([sys.executable, "-c", EMBEDDER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout
        if delay == 0.4:
            assert process.stdout.readline() == b"up\n", "the control: it was there"
            until(lambda: len(named("sleep", "3971")) >= 2)
            seen = len(named("sleep", "3971"))
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert until(lambda: named("sleep", "3971") == [])
    assert seen >= 2, "the control"
    subprocess.run([sys.executable, "-m", "nsbox", "gc"], check=True, capture_output=True)
    groups = [str(path) for path in Path("/sys/fs/cgroup").rglob(f"nsbox/{process.pid}-*")]
    assert groups == []
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert list(tmp_path.iterdir()) == []


REFUSAL = (False, "no controller, as far as this test goes", "run it elsewhere")


@pytest.mark.parametrize("limit", ["memory", "pids", "cpu"])
def test_R11_a_limit_that_the_host_lacks(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nsbox.run(["true"]).enforced[limit]["strength"] in ("kernel", "watched"), "the control"
    prepared._prepare.cache_clear()
    monkeypatch.setattr(cgroup.Hierarchy, "strength", lambda *_: REFUSAL)
    try:
        assert nsbox.run(["true"]).enforced[limit]["strength"] == "watched", "it is held in another way, and said"
        with pytest.raises(HostError, match=f"{limit}: kernel is required"):
            nsbox.run(["true"], require=[f"{limit}=kernel"])
        with pytest.raises(HostError, match=f"{limit}: kernel is required"):
            nsbox.run(["true"], require=[f"{limit}=kernel"], profile="strict")
    finally:
        monkeypatch.undo()
        prepared._prepare.cache_clear()


DRAW = "import os, random, uuid; print(os.urandom(8).hex(), random.random(), uuid.uuid4(), random.Random().random())"
SHARED = """
import os, random
one = random.Random()
for _ in range(2):
    if os.fork() == 0:
        print(one.random())
        os._exit(0)
    os.wait()
"""


def test_S03_members_of_a_pool_share_no_randomness() -> None:
    control = subprocess.run([sys.executable, "-u", "-c", SHARED], capture_output=True, text=True, check=True)
    assert len(set(control.stdout.split())) == 1, "the control: forks of one process draw the same"
    with nsbox.Pool(size=3) as pool:
        rows = [pool.run(["python3", "-c", DRAW]).stdout_text.split() for _ in range(6)]
    for column in zip(*rows, strict=True):
        assert len(set(column)) == 6
    janitor.flush()


def test_S03_interpreters_of_one_template_draw_other_numbers() -> None:
    """They are forks of one process, as in the control above, and start from states of their own."""
    draw = "import os, random, uuid\n[random.random(), str(uuid.uuid4()), os.urandom(8).hex(), os.getpid() > 0]"
    with nsbox.PythonPool(preload=["random", "uuid"], size=3) as pool:
        rows = [pool.run(draw).value for _ in range(6)]
    for column in list(zip(*rows, strict=True))[:3]:
        assert len(set(column)) == 6
    janitor.flush()


PLANT = "import builtins, json, sys\njson.planted = builtins.planted = 1\nsys.modules['planted'] = sys"
FIND = "import builtins, json, sys\n[hasattr(json, 'planted'), hasattr(builtins, 'planted'), 'planted' in sys.modules]"


def test_S04_code_never_runs_in_the_template() -> None:
    """What code changes in its interpreter no later one has: the control is a session, which is one interpreter."""
    with nsbox.PythonPool(preload=["json"], size=2) as pool:
        with pool.session() as session:
            session.run(PLANT)
            assert session.run(FIND).value == [True] * 3, "the control"
        for _ in range(4):
            assert pool.run(PLANT).exit_code == 0
        assert [pool.run(FIND).value for _ in range(4)] == [[False] * 3] * 4
    janitor.flush()
