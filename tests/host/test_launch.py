"""Launching: nothing is left, nothing is mixed up, and an end, however it comes, is the end of everything inside."""

import contextlib
import errno
import inspect
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import until

import nsbox
from nsbox import _native, errors
from nsbox import launch as launching
from nsbox.supervise import Run, drive

SOON_S = 20.0  #: what is looked for would stay for minutes
# What the library keeps for the next launches: not a leak, but its number varies.
MADE_AHEAD = re.compile(r"/nsbox/skeleton|/nsbox/[^/]+/\d+-ready")


def living(marker: str) -> list[int]:
    """Host pids of processes that are not zombies and have ``marker`` among their arguments."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if marker.encode() in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


def descriptors() -> int:
    """How many are open once the library has put away what it does behind a run; not counted: groups made ahead."""
    lowest = 1 << 30
    for _ in range(40):
        targets = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                targets.append(os.readlink(f"/proc/self/fd/{name}"))
        lowest = min(lowest, len([target for target in targets if not MADE_AHEAD.search(target)]))
        time.sleep(0.01)
    return lowest


def own_children() -> list[str]:
    """``pid state`` of every child of this process."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                after = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(after[1]) == os.getpid():
                    found.append(f"{name} {after[0]}")
    return sorted(found)


def threads() -> list[str]:
    """Threads but the library's own, which comes and goes with its work."""
    return [thread.name for thread in threading.enumerate() if not thread.name.startswith("nsbox-")]


def memory_now() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


PREAMBLE = f"""
import contextlib, os, re, signal, sys, threading, time, nsbox, nsbox.errors, nsbox.launch, nsbox._native
MADE_AHEAD = re.compile({MADE_AHEAD.pattern!r})
{inspect.getsource(descriptors).replace(chr(34) * 3, chr(39) * 3)}
"""


@pytest.fixture
def embedder(tmp_path: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Starts Python programs that embed nsbox; they are ended, and waited for, with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, **options: Any) -> "subprocess.Popen[str]":
        file = tmp_path / f"embedder{len(started)}.py"
        file.write_text(PREAMBLE + textwrap.dedent(code))
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        started.append(subprocess.Popen([sys.executable, str(file)], **options))  # type: ignore[call-overload]
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def answer(process: "subprocess.Popen[str]", seconds: float = 30) -> str:
    """What an embedder printed; it must have succeeded."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err
    return out


# Nothing is left


@pytest.mark.slow
def test_200_launches_leave_nothing() -> None:
    for _ in range(5):
        nsbox.run(["true"])
    before = (descriptors(), len(threads()), own_children(), memory_now())
    for number in range(200):
        assert nsbox.run(["sh", "-c", f"exit {number % 7}"]).exit_code == number % 7
    assert descriptors() <= before[0]
    assert len(threads()) == before[1]
    assert own_children() == before[2]
    assert memory_now() - before[3] < 4 << 20


def test_no_zombie_while_running_either() -> None:
    for _ in range(20):
        nsbox.run(["sh", "-c", "true & true | true & exit 0"])
        deadline = time.monotonic() + 10  # one that has just ended is one until its parent runs
        while zombies := [child for child in own_children() if child.endswith("Z")]:
            assert time.monotonic() < deadline, zombies
            time.sleep(0.01)


def test_failed_launches_leave_nothing() -> None:
    nsbox.run(["true"])
    before = descriptors()
    for _ in range(20):
        with pytest.raises(errors.CommandError):
            nsbox.run(["/no/such/program"])
        with pytest.raises(errors.SetupError):
            nsbox.run(["true"], cwd="/no/such/directory")
        with pytest.raises(errors.SpecError):
            nsbox.run(["true"], ro="/no/such/source")
        with pytest.raises(errors.SpecError):
            nsbox.run(["tr\0ue"])
    assert descriptors() <= before


# Nothing is mixed up


@pytest.mark.slow
def test_64_at_a_time_do_not_mix_their_output() -> None:
    together = threading.Barrier(64)

    def one(number: int) -> None:
        together.wait(30)
        mine = f"box {number} " * 2000
        result = nsbox.run(
            ["sh", "-c", 'cat; echo "$N" >&2; exit $((N % 100))'], stdin=mine, env={"N": str(number)}, timeout=120
        )
        assert result.stdout_text == mine
        assert result.stderr_text == f"{number}\n"
        assert result.exit_code == number % 100

    with ThreadPoolExecutor(64) as threads:
        list(threads.map(one, range(64)))


def test_two_sandboxes_listen_on_one_port() -> None:
    code = (
        "import socket, time; s = socket.socket(); "
        "s.bind(('127.0.0.1', 8000)); s.listen(); time.sleep(0.5); print('ok')"
    )
    with ThreadPoolExecutor(2) as threads:
        assert [r.stdout for r in threads.map(lambda _: nsbox.run(["python3", "-c", code]), range(2))] == [b"ok\n"] * 2


# The caller's own state


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_with_standard_descriptors_closed(
    embedder: Callable[..., "subprocess.Popen[str]"], tmp_path: Path, closed: tuple[int, ...]
) -> None:
    told = tmp_path / "told"
    process = embedder(
        f"""
        for fd in {closed}:
            os.close(fd)
        made = nsbox.run(["sh", "-c", "cat; echo err >&2; ls -l /proc/self/fd | wc -l"], stdin="in\\n")
        again = nsbox.run(["sh", "-c", "echo more; exit 3"])
        with open({str(told)!r}, "w") as file:
            print(made.stdout, made.stderr, again.stdout, again.exit_code, file=file)
        """
    )
    assert process.wait(30) == 0
    assert told.read_text() == r"b'in\n5\n' b'err\n' b'more\n' 3" + "\n"


def test_with_thousands_of_descriptors_open(embedder: Callable[..., "subprocess.Popen[str]"]) -> None:
    code = """
    import resource
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8000, hard), hard))
    many = [os.dup(0) for _ in range(min(8000, hard) - 100)]
    for fd in many[::2]:
        os.set_inheritable(fd, True)
    result = nsbox.run(["sh", "-c", "ls /proc/self/fd; cat <&9"])
    print(result.stdout.split(), len(many) > 900)
    """
    assert answer(embedder(code)) == "[b'0', b'1', b'2', b'3'] True\n"


FEW = "import resource; hard = resource.getrlimit(7)[1]; resource.setrlimit(7, (64, {hard}))\n"


def test_with_a_hard_limit_below_the_sandbox_s_own(embedder: Callable[..., "subprocess.Popen[str]"]) -> None:
    code = FEW.format(hard=64) + "print(nsbox.run(['sh', '-c', 'ulimit -n; ulimit -Hn'], files=1024).stdout)"
    assert answer(embedder(code)) == "b'64\\n64\\n'\n"


def test_out_of_descriptors_is_an_error_that_names_it(embedder: Callable[..., "subprocess.Popen[str]"]) -> None:
    code = """
    nsbox.run(["true"])
    before = descriptors()
    for spare in range(0, 14):
        many = []
        try:
            while True:
                many.append(os.dup(0))
        except OSError:
            pass
        for fd in many[:spare]:
            os.close(fd)
        try:
            nsbox.run(["true"])
            outcome = "ran"
        except OSError as error:
            outcome = f"{type(error).__name__} {error.errno}"
        for fd in many[spare:]:
            os.close(fd)
        print(spare, outcome)
        assert descriptors() <= before, spare
    print(nsbox.run(["true"]).ok)
    """
    lines = answer(embedder(FEW.format(hard="hard") + textwrap.dedent(code))).splitlines()
    assert lines[0].endswith(f" {errno.EMFILE}")
    assert lines[-2:] == ["13 ran", "True"]
    assert all(line.endswith((" ran", f" {errno.EMFILE}")) for line in lines[:-1]), lines


@pytest.mark.parametrize("how", ["ignored", "blocked", "handled"])
def test_signals_of_the_caller_do_not_go_in(embedder: Callable[..., "subprocess.Popen[str]"], how: str) -> None:
    prepare = {
        "ignored": "[signal.signal(s, signal.SIG_IGN) for s in signal.valid_signals() - {9, 19, 32, 33}]",
        "blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
        "handled": "[signal.signal(s, lambda *a: None) for s in signal.valid_signals() - {9, 19, 32, 33}]",
    }[how]
    code = """
    control = open("/proc/self/status").read().split()
    mine = {key[:6]: value for key, value in zip(control, control[1:]) if key in ("SigBlk:", "SigIgn:", "SigCgt:")}
    result = nsbox.run(["cat", "/proc/self/status"])
    inside = [line.split()[1] for line in result.stdout_text.splitlines() if line[:6] in mine]
    print(any(int(value, 16) for value in mine.values()), len(inside), set(inside))
    killed = nsbox.run(["sh", "-c", "kill -PIPE $$; echo no"])
    print(killed.signal, nsbox.run(["sh", "-c", "sleep 0.1 & wait $!; exit 7"]).exit_code)
    """
    assert answer(embedder(prepare + "\n" + textwrap.dedent(code))) == "True 3 {'0000000000000000'}\n13 7\n"


def test_A03_sigchld_ignored_keeps_the_status(embedder: Callable[..., "subprocess.Popen[str]"]) -> None:
    code = """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print(nsbox.run(["sh", "-c", "exit 7"]).exit_code, nsbox.run(["sh", "-c", "kill -9 $$"]).signal)
    """
    assert answer(embedder(code)) == "7 9\n"


def test_a_caller_that_reaps_every_child_does_not_steal(embedder: Callable[..., "subprocess.Popen[str]"]) -> None:
    code = """
    def reap():
        while True:
            try:
                print("stolen", os.waitpid(-1, 0))
            except ChildProcessError:
                time.sleep(0.001)
    threading.Thread(target=reap, daemon=True).start()
    print([nsbox.run(["sh", "-c", f"exit {n}"]).exit_code for n in range(5)], flush=True)
    os._exit(0)  # else the helper ends first, which is a child as well
    """
    assert answer(embedder(code)) == "[0, 1, 2, 3, 4]\n"


def test_sigpipe_when_the_payload_does_not_read(embedder: Callable[..., "subprocess.Popen[str]"]) -> None:
    code = """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(nsbox.run(["sh", "-c", "exec <&-; sleep 0.2; echo alive"], stdin=b"x" * (4 << 20)).stdout)
    print(nsbox.run(["true"], stdin=b"x" * (4 << 20)).ok, signal.SIGPIPE in signal.sigpending())
    """
    assert answer(embedder(code)) == "b'alive\\n'\nTrue False\n"


def test_after_a_change_of_the_working_directory_and_umask(tmp_path: Path) -> None:
    here, mask = os.getcwd(), os.umask(0o777)
    try:
        os.chdir(tmp_path)
        assert nsbox.run(["sh", "-c", "umask; touch x; stat -c %a x"]).stdout == b"0022\n644\n"
    finally:
        os.umask(mask)
        os.chdir(here)


# Threads and forks


def test_payload_outlives_the_thread_that_launched_it() -> None:
    prepared = launching.prepare(nsbox.Spec())
    handles = []

    def start() -> None:
        handles.append(launching.launch(prepared, ["sh", "-c", "sleep 0.7; echo survived"]))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with contextlib.closing(handles[0]) as handle:
        watch = Run(handle)
        drive(watch)
        assert (watch.status, watch.stdout.data) == (0, b"survived\n")


def test_the_first_launch_from_a_thread_that_ends(embedder: Callable[..., "subprocess.Popen[str]"]) -> None:
    # The zygote is then the child of a thread that is gone, which would be PR_SET_PDEATHSIG's idea of our death.
    code = """
    first = threading.Thread(target=lambda: print(nsbox.run(["echo", "one"]).stdout, flush=True))
    first.start(); first.join(); time.sleep(0.2)
    print(nsbox.run(["echo", "two"]).stdout)
    """
    assert answer(embedder(code)) == "b'one\\n'\nb'two\\n'\n"


def test_in_a_forked_child(embedder: Callable[..., "subprocess.Popen[str]"]) -> None:
    code = """
    print(nsbox.run(["echo", "parent"]).stdout, flush=True)
    child = os.fork()
    if child == 0:
        result = nsbox.run(["echo", "child"])
        print(result.stdout, flush=True)
        os._exit(0 if result.ok else 1)
    print(os.waitpid(child, 0)[1])
    print(nsbox.run(["echo", "parent"]).stdout)
    """
    assert answer(embedder(code)) == "b'parent\\n'\nb'child\\n'\n0\nb'parent\\n'\n"


def test_forks_of_other_threads_do_not_hold_a_run_up(embedder: Callable[..., "subprocess.Popen[str]"]) -> None:
    # A forked sibling holds a copy of every descriptor that was open at that moment, also the sandbox's ends of pipes.
    code = """
    sleepers, stop = [], threading.Event()
    def forks():
        while not stop.is_set():
            pid = os.fork()
            if pid == 0:
                time.sleep(60); os._exit(0)
            sleepers.append(pid); time.sleep(0.002)
    thread = threading.Thread(target=forks); thread.start()
    before = time.monotonic()
    print([nsbox.run(["echo", str(n)]).stdout for n in range(15)] == [b"%d\\n" % n for n in range(15)])
    print(time.monotonic() - before < 40)
    stop.set(); thread.join()
    for pid in sleepers:
        os.kill(pid, 9); os.waitpid(pid, 0)
    """
    assert answer(embedder(code), 60) == "True\nTrue\n"


# Ends


@pytest.mark.parametrize(
    "how", ["plain", "launching thread has ended", "a forked sibling has copies", "stopped inside", "nobody reads"]
)
def test_B08_killing_the_embedder_kills_everything_inside(
    embedder: Callable[..., "subprocess.Popen[str]"], how: str
) -> None:
    marker = f"397.{os.getpid() % 1000:03}{len(how):02}"
    payload = {
        "stopped inside": f"sleep {marker} & kill -STOP $!; (setsid sleep {marker} &); echo up; kill -STOP $$",
        "nobody reads": f"(setsid sleep {marker} &); echo up; cat /dev/zero",
    }.get(how, f"(trap '' TERM HUP; setsid sleep {marker} &) ; sleep {marker} | cat & echo up; sleep {marker}")
    code = f"""
    how = {how!r}
    def up(data):
        if data.startswith(b"up"):
            if how == "a forked sibling has copies":
                if os.fork() == 0:
                    time.sleep(30); os._exit(0)
            print("up", flush=True)
            while how == "nobody reads":
                time.sleep(1)
    def start():
        nsbox.run(["sh", "-c", {payload!r}], timeout=60, on_stdout=up)
    if how == "launching thread has ended":
        prepared = nsbox.launch.prepare(nsbox.Spec())
        kept = []
        thread = threading.Thread(target=lambda: kept.append(nsbox.launch.launch(prepared, ["sh", "-c", {payload!r}])))
        thread.start(); thread.join(); time.sleep(0.3); print("up", flush=True); time.sleep(60)
    start()
    """
    process = embedder(code)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    assert until(lambda: living(marker)), "control: the payload can be seen from outside"
    group = living("nsbox-zygote")
    process.kill()
    assert until(lambda: not living(marker), SOON_S), "something inside is still alive"
    assert group
    assert until(
        lambda: not [name for name in os.listdir("/proc") if name.isdigit() and _parent(name) == process.pid], SOON_S
    )
    if how == "a forked sibling has copies":
        for pid in _same_program(process.args[1]):  # type: ignore[index]
            os.kill(pid, signal.SIGKILL)


def _parent(pid: str) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return 0


def _same_program(argument: str) -> list[int]:
    return living(argument)


def test_an_embedder_that_ends_by_itself_takes_its_sandboxes_along(
    embedder: Callable[..., "subprocess.Popen[str]"],
) -> None:
    marker = f"398.{os.getpid()}"
    code = f"""
    kept = nsbox.launch.launch(nsbox.launch.prepare(nsbox.Spec()), ["sleep", "{marker}"])
    while not [p for p in os.listdir("/proc") if p.isdigit() and os.path.exists(f"/proc/{{p}}/cmdline")
               and b"{marker}" in open(f"/proc/{{p}}/cmdline", "rb").read()]:
        time.sleep(0.01)
    os._exit(0)
    """
    answer(embedder(code))
    assert until(lambda: not living(marker), SOON_S)


def test_zygote_killed_between_launches(embedder: Callable[..., "subprocess.Popen[str]"]) -> None:
    code = """
    print(nsbox.run(["echo", "one"]).stdout)
    before = descriptors()
    for _ in range(3):
        os.kill(nsbox._native.zygote().pid, signal.SIGKILL); time.sleep(0.1)
        print(nsbox.run(["echo", "again"]).stdout)
    print(max(0, descriptors() - before))
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    print(len(children), [open(f"/proc/{c}/stat").read().split()[2] for c in children])
    """
    assert answer(embedder(code)) == "b'one\\n'\n" + "b'again\\n'\n" * 3 + "0\n1 ['S']\n"


def test_zygote_killed_while_many_threads_launch(embedder: Callable[..., "subprocess.Popen[str]"]) -> None:
    code = """
    from concurrent.futures import ThreadPoolExecutor
    nsbox.run(["true"])
    before = descriptors()
    def one(number):
        try:
            return nsbox.run(["echo", str(number)]).stdout == b"%d\\n" % number
        except nsbox.errors.NsboxError as error:
            return type(error).__name__
    with ThreadPoolExecutor(8) as threads:
        for _ in range(4):
            runs = [threads.submit(one, n) for n in range(16)]
            time.sleep(0.03); os.kill(nsbox._native.zygote().pid, signal.SIGKILL)
            outcomes = {run.result() for run in runs}
    time.sleep(0.2)
    print(nsbox.run(["echo", "fine"]).stdout, max(0, descriptors() - before))
    print(len(open(f"/proc/self/task/{os.getpid()}/children").read().split()))
    """
    assert answer(embedder(code), 60) == "b'fine\\n' 0\n1\n"


def test_a_run_whose_zygote_is_killed_ends_and_says_so(embedder: Callable[..., "subprocess.Popen[str]"]) -> None:
    code = """
    def up(data):
        os.kill(nsbox._native.zygote().pid, signal.SIGKILL)
    result = nsbox.run(["sh", "-c", "echo up; sleep 60"], on_stdout=up)
    print(result.ok, result.signal)
    """
    assert answer(embedder(code), 20) == "False 9\n"


# Time


@pytest.mark.parametrize(
    "script",
    [
        "echo partial; sleep 60",
        "echo partial; (sleep 60 & sleep 60 & kill -STOP $!); kill -STOP $$",
        "trap '' TERM INT HUP QUIT; echo partial; while :; do :; done",
        "echo partial; exec >&- 2>&-; sleep 60",
        "echo partial; setsid sh -c 'setsid sleep 60 & sleep 60' & sleep 60",
        "echo partial; cat </dev/ptmx",
        "sleep 60 & echo partial; kill -STOP -1; sleep 60",
    ],
)
def test_R07_the_wall_clock_always_fires_and_partial_output_stays(script: str) -> None:
    before = time.monotonic()
    result = nsbox.run(["sh", "-c", script], timeout=0.4)
    assert time.monotonic() - before < 30
    assert (result.reason, result.stdout, result.status) == ("timeout", b"partial\n", 124)
    assert "timeout" in [hit["limit"] for hit in result.limits_hit]  # who spins may meet --cpus as well


def test_R07_reading_a_terminal_or_a_pipe_for_ever() -> None:
    assert nsbox.run(["sh", "-c", "mkfifo f; echo x; cat f"], timeout=0.3).reason == "timeout"


def test_timeout_holds_while_the_output_is_a_flood() -> None:
    before = time.monotonic()
    result = nsbox.run(["sh", "-c", "yes & yes >&2"], timeout=0.5, output=1 << 20)
    assert time.monotonic() - before < 30
    assert result.reason in ("timeout", "output")


def test_a_short_run_is_not_held_up_by_a_long_timeout() -> None:
    before = time.monotonic()
    assert nsbox.run(["true"], timeout=3600).ok
    assert time.monotonic() - before < 5


def test_keyboard_interrupt_ends_the_sandbox(embedder: Callable[..., "subprocess.Popen[str]"]) -> None:
    marker = f"399.{os.getpid()}"
    code = f"""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    def up(data):
        os.kill(os.getpid(), signal.SIGINT)
    try:
        nsbox.run(["sh", "-c", "echo up; exec sleep {marker}"], on_stdout=up, timeout=60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    time.sleep(60)
    """
    process = embedder(code)
    assert process.stdout is not None
    assert process.stdout.readline() == "interrupted\n"
    assert until(lambda: not living(marker), SOON_S)


def test_an_exception_in_a_callback_ends_the_sandbox() -> None:
    marker = f"396.{os.getpid()}"

    def fail(data: bytes) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        nsbox.run(["sh", "-c", f"echo up; exec sleep {marker}"], on_stdout=fail)
    assert until(lambda: not living(marker), SOON_S)


# Streams


def test_stdin_of_8_mebibytes_comes_back() -> None:
    data = os.urandom(8 << 20)
    result = nsbox.run(["cat"], stdin=data)
    assert result.ok
    assert result.stdout == data


def test_input_and_both_outputs_at_once() -> None:
    data = os.urandom(1 << 20)
    result = nsbox.run(["sh", "-c", "tee /dev/stderr"], stdin=data)
    assert result.stdout == data
    assert result.stderr == data


def test_empty_stdin_and_none() -> None:
    assert nsbox.run(["sh", "-c", "cat; echo eof"], stdin=b"").stdout == b"eof\n"
    assert nsbox.run(["sh", "-c", "cat; echo eof"]).stdout == b"eof\n"


@pytest.mark.parametrize(
    "script", ["sleep 60 & echo hi", "(setsid sleep 60 &) ; echo hi", "nohup sleep 60 >&2 & echo hi"]
)
def test_a_descendant_that_holds_stdout_does_not_hold_the_call(script: str) -> None:
    before = time.monotonic()
    result = nsbox.run(["sh", "-c", script])
    assert result.stdout == b"hi\n"
    assert time.monotonic() - before < 30


def test_output_that_is_closed_early_is_whole_and_its_end_is_the_program_s() -> None:
    result = nsbox.run(["sh", "-c", "echo out; echo err >&2; exec >&- 2>&-; sleep 0.2; exit 3"])
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")


def test_rules_name_places_inside_wherever_a_link_of_the_workspace_leads(tmp_path: Path) -> None:
    """While the root is changed, what lies above / is for a moment the host's."""
    workspace, out = tmp_path / "workspace", tmp_path / "out"
    for path in (workspace, out):
        path.mkdir()
        path.chmod(0o777)
    tmp_path.chmod(0o755)
    (workspace / "link").symlink_to("../../../srv")
    result = nsbox.run(["sh", "-c", "echo x > /srv/o/file"], workspace=str(workspace), rw=[(str(out), "/work/link/o")])
    assert result.ok, result.stderr_text
    assert (out / "file").read_text() == "x\n"


def test_pid_1_has_one_thread_by_the_time_the_payload_runs() -> None:
    """The thread that builds the root has more rights than anything that may run inside."""
    for _ in range(20):
        assert nsbox.run(["ls", "/proc/1/task"]).stdout == b"1\n"


def test_output_of_descendants_before_the_end_is_kept() -> None:
    assert (
        nsbox.run(["sh", "-c", "(echo first; sleep 0.1; echo second) & wait; echo third"]).stdout
        == b"first\nsecond\nthird\n"
    )


def test_R05_nothing_survives_the_end_of_the_command() -> None:
    marker = f"395.{os.getpid()}"
    script = (
        f"for i in 1 2 3; do (trap '' TERM HUP INT; setsid setsid sleep {marker} >/dev/null 2>&1 &) ; done; sleep 0.1"
    )
    assert nsbox.run(["sh", "-c", script]).ok
    assert until(lambda: not living(marker), 0.2)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_R04_a_flood_is_cut_and_the_host_memory_bounded(stream: str) -> None:
    redirect = "" if stream == "stdout" else " >&2"
    nsbox.run(["true"])
    before = memory_now()
    result = nsbox.run(["sh", "-c", f"head -c 300M /dev/zero{redirect}; true"], output="1M", timeout=60)
    assert memory_now() - before < 8 << 20
    assert len(getattr(result, stream)) == 1 << 20
    assert getattr(result, f"{stream}_truncated")
    # A slow machine may also have to wait for its share of the processors.
    hits = [(hit["limit"], hit["value"]) for hit in result.limits_hit if hit["limit"] != "cpu"]
    assert hits == [("output", 1 << 20)]
    assert result.reason in ("exited", "output")


def test_R04_small_writes_do_not_cost_more_than_they_hold() -> None:
    code = "import os\nfor _ in range(200000): os.write(1, b'x')"
    nsbox.run(["true"])
    before = memory_now()
    result = nsbox.run(["python3", "-c", code], output="100K")
    assert memory_now() - before < 8 << 20
    assert result.stdout == b"x" * 102400


def test_output_exactly_at_the_cap_is_not_truncated() -> None:
    result = nsbox.run(["head", "-c", "1000", "/dev/zero"], output=1000)
    assert (len(result.stdout), result.stdout_truncated, result.limits_hit) == (1000, False, [])


def test_callbacks_get_the_stream_in_order_and_the_cap_holds() -> None:
    pieces: list[bytes] = []
    result = nsbox.run(["seq", "1", "100000"], on_stdout=pieces.append, output=100000)
    assert result.stdout == b""
    assert b"".join(pieces) == "".join(f"{n}\n" for n in range(1, 100001)).encode()[:100000]


def test_closed_output_gives_the_payload_what_a_closed_pipe_gives() -> None:
    assert nsbox.run(["sh", "-c", "exec >&-; echo lost; echo $? >&2"]).stderr.strip().endswith(b"1")


# What is told


def test_the_zygote_has_one_thread_and_few_descriptors() -> None:
    nsbox.run(["true"])
    pid = _native.zygote().pid
    assert os.listdir(f"/proc/{pid}/task") == [str(pid)]
    assert until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= 8)


def test_timing_and_usage_are_of_this_run() -> None:
    result = nsbox.run(["python3", "-c", "import time; x = bytearray(50 << 20); time.sleep(0.3)"])
    assert 250 < result.timing["run_ms"] < 30_000
    assert result.timing["total_ms"] >= result.timing["run_ms"]
    assert result.timing["setup_ms"] > 0
    peak = result.usage["memory_peak_bytes"]
    assert peak is not None
    assert peak > 50 << 20
    busy = nsbox.run(["python3", "-c", "import time\nwhile time.process_time() < 0.3: pass"])
    user, system = busy.usage["cpu_user_s"], busy.usage["cpu_system_s"]
    assert user is not None
    assert system is not None
    assert 0.25 < user + system < 3
