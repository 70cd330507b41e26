"""A sandbox that stays: many commands, their streams and their ends, and what a hostile command does to its watcher."""

import contextlib
import gc
import os
import signal
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from _examples import blocks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nsbox
from nsbox._native import ffi, lib
from nsbox.box import PIPE, Sandbox
from nsbox.errors import CommandError, SandboxUnavailable, SetupError, SpecError
from nsbox.handle import CommandHandle
from nsbox.process import Process
from nsbox.supervise import Run


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox(timeout=20) as made:
        yield made


def processes(box: Sandbox, name: str = "") -> list[str]:
    """The command lines inside, but that of the listing itself."""
    lines = box.run(["ps", "-eo", "args="]).stdout_text.splitlines()
    return [line for line in lines if not line.startswith(("ps ", "nsbox-")) and name in line]


def gone(box: Sandbox, name: str) -> bool:
    deadline = time.monotonic() + 2
    while processes(box, name) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not processes(box, name)


def test_what_one_command_leaves_the_next_one_finds(box: Sandbox) -> None:
    assert box.run("echo one > ~/file; exit 3").exit_code == 3
    result = box.run(["cat", "/home/user/file"])
    assert (result.stdout, result.stderr, result.exit_code, result.reason) == (b"one\n", b"", 0, "exited")
    assert result.id == box.id


def test_a_thousand_commands_leave_nothing(box: Sandbox) -> None:
    def state() -> tuple[int, int, int]:
        inside = box.run("ls /proc | grep -c '^[0-9]'").stdout
        return len(os.listdir("/proc/self/fd")), threading.active_count(), int(inside)

    # As many groups as are kept for others.
    for process in [box.popen(["sleep", "0.2"]) for _ in range(6)]:
        assert process.wait().ok
    before = state()
    times = []
    for number in range(1000):
        start = time.perf_counter()
        result = box.run(["echo", str(number)])
        times.append(time.perf_counter() - start)
        assert result.stdout == b"%d\n" % number
    # One more: a watcher or a thread that is just about to end.
    assert all(now <= then + 1 for now, then in zip(state(), before, strict=True)), (before, state())
    early, late = sorted(times[:200])[100], sorted(times[-200:])[100]
    assert late < early * 2 + 0.002


def test_list(box: Sandbox) -> None:
    box.write_file("a/b", "text")
    assert [entry.name for entry in box.list("a")] == ["b"]
    assert "a" in [entry.name for entry in box.list()]


def test_environment_directory_and_input_are_per_command(box: Sandbox) -> None:
    assert box.run('echo "$A$HOME"', env={"A": "a"}).stdout == b"a/home/user\n"
    assert box.run('echo "$A"').stdout == b"\n"
    assert box.run(["pwd"], cwd="/tmp").stdout == b"/tmp\n"
    assert box.run(["pwd"]).stdout == b"/home/user\n"
    assert box.run(["cat"], stdin="text").stdout == b"text"
    assert box.run(["cat"]).stdout == b""
    reader, writer = os.pipe()
    os.write(writer, b"through a pipe")
    os.close(writer)
    assert box.run(["cat"], stdin=reader).stdout == b"through a pipe"
    os.close(reader)


def test_bytes_that_are_no_text(box: Sandbox) -> None:
    data = bytes(range(256))
    result = box.run(["cat"], stdin=data)
    assert result.stdout == data
    assert "\ufffd" in result.stdout_text
    assert box.run(["printf", "%s", b"\xff\xfe"]).stdout == b"\xff\xfe"


def test_eight_mebibytes_through_input_to_both_outputs(box: Sandbox) -> None:
    data = os.urandom(8 << 20)
    result = box.run(["tee", "/dev/stderr"], stdin=data)
    assert result.stdout == data
    assert result.stderr == data


@pytest.mark.parametrize(
    ("argv", "kind", "words"),
    [
        (["nowhere"], CommandError, "'nowhere'"),
        (["/etc/passwd"], CommandError, "Permission denied"),
        (["/etc"], CommandError, "Permission denied"),
        ([], SpecError, "wants a list"),
        (["a\0b"], SpecError, "NUL"),
        (["x" * 200_000], SpecError, "longer than"),
    ],
)
def test_what_cannot_be_executed(box: Sandbox, argv: list[str], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        box.run(argv)
    assert box.run(["true"]).ok


def test_the_exit_code_of_a_command_that_cannot_be_executed(box: Sandbox) -> None:
    with pytest.raises(CommandError) as missing:
        box.run(["nowhere"])
    with pytest.raises(CommandError) as forbidden:
        box.run(["/etc/passwd"])
    assert (missing.value.exit_code, forbidden.value.exit_code) == (127, 126)


def test_a_directory_that_is_not_there_is_named(box: Sandbox) -> None:
    with pytest.raises(SetupError, match="/not/here"):
        box.run(["true"], cwd="/not/here")


SCRIPTS = {
    "background": "sleep 71 & echo hi",
    "setsid": "setsid sleep 71 & echo hi",
    "double fork": "( (sleep 71 &) & ); echo hi",
    "daemon": 'python3 -c "import os,time\nif os.fork() == 0:\n os.setsid()\n os.fork() or time.sleep(71)"; echo hi',
    "process substitution": "bash -c 'exec 3> >(sleep 71); cat <(echo hi)'",
    "ignores signals": "trap '' TERM HUP INT; (trap '' TERM; sleep 71) & echo hi",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_command_ends_with_its_own_process_and_takes_its_tree_along(box: Sandbox, script: str) -> None:
    start = time.monotonic()
    result = box.run(script)
    assert result.stdout.startswith(b"hi\n")
    assert time.monotonic() - start < 30
    assert gone(box, "71")


def test_background_stays_until_the_box_ends(box: Sandbox) -> None:
    result = box.run("sleep 71 >/dev/null 2>&1 & echo started", background=True)
    assert result.stdout == b"started\n"
    assert box.run(["true"]).ok
    assert processes(box, "sleep 71")


def test_background_that_floods_its_output_does_not_hold_its_caller(box: Sandbox) -> None:
    start = time.monotonic()
    result = box.run("yes & echo started", background=True)
    assert b"started" in result.stdout
    assert time.monotonic() - start < 30


def test_a_time_limit_ends_the_tree_and_not_the_box(box: Sandbox) -> None:
    start = time.monotonic()
    result = box.run("sleep 71 & sleep 72", timeout=0.2)
    assert (result.reason, result.status) == ("timeout", 124)
    assert time.monotonic() - start < 30
    assert gone(box, "sleep 7")
    assert box.run(["true"]).ok


def test_the_limit_on_output_is_per_command(box: Sandbox) -> None:
    result = box.run(["head", "-c", "100000", "/dev/zero"], max_output=10)
    assert (len(result.stdout), result.stdout_truncated) == (10, True)
    assert len(box.run(["head", "-c", "100000", "/dev/zero"]).stdout) == 100_000


def test_memory_ends_the_command_and_not_the_box() -> None:
    with Sandbox(memory="64M", timeout=300) as box:
        result = box.run(["python3", "-c", "x = bytearray(1 << 30)"])
        assert (result.reason, result.status) == ("memory", 137)
        assert box.run(["kill", "-9", "0"]).reason == "signaled"
        assert box.run(["true"]).ok


def test_processor_time_is_per_command() -> None:
    with Sandbox(cpu_time=1, timeout=20) as box:
        for _ in range(3):
            assert box.run(["timeout", "0.5", "sh", "-c", "while :; do :; done"]).exit_code == 124
        assert box.run("while :; do :; done").reason in ("cpu_time", "signaled")
        assert box.run(["true"]).ok


def test_kill_and_signals(box: Sandbox) -> None:
    process = box.popen(["sleep", "71"])
    process.kill()
    assert process.wait().reason == "cancelled"
    process.kill()
    process = box.popen(["bash", "-c", "trap 'echo got; exit 5' TERM; echo ready; while :; do sleep 0.01; done"])
    for name, data in process.output():
        assert name == "stdout"
        if b"ready" in data:
            process.send_signal(signal.SIGTERM)
    assert process.wait().exit_code == 5


def test_poll_and_wait_with_a_limit(box: Sandbox) -> None:
    process = box.popen("sleep 0.3; echo done")
    assert process.poll() is None
    with pytest.raises(TimeoutError):
        process.wait(0.05)
    assert process.wait(10).stdout == b"done\n"
    polled = process.poll()
    assert polled is not None
    assert polled.ok


def test_a_dialogue(box: Sandbox) -> None:
    process = box.popen(["bash", "-c", "while read x; do echo got $x; done; echo end"], stdin=PIPE)
    output = process.output()
    for word in ("one", "two"):
        process.write(word + "\n")
        assert next(output) == ("stdout", f"got {word}\n".encode())
    process.close_stdin()
    assert list(output) == [("stdout", b"end\n")]
    assert process.wait().ok
    with pytest.raises(BrokenPipeError):
        process.write(b"more")


def test_much_input_for_a_command_that_answers_meanwhile(box: Sandbox) -> None:
    process = box.popen(["cat"], stdin=PIPE)
    data = os.urandom(3 << 20)
    process.write(data)
    process.close_stdin()
    assert process.wait().stdout == data


def test_input_that_nobody_reads(box: Sandbox) -> None:
    process = box.popen(["sh", "-c", "exec <&-; sleep 0.2"], stdin=PIPE)
    with pytest.raises(BrokenPipeError):
        process.write(bytes(10_000_000))
    assert process.wait().ok
    assert box.run(["true"], stdin=bytes(1 << 20)).ok


def test_a_callback_that_raises_ends_the_command(box: Sandbox) -> None:
    class Odd(Exception):
        pass

    def refuse(data: bytes) -> None:
        raise Odd

    process = box.popen("echo x; sleep 71", on_stdout=refuse)
    with pytest.raises(Odd):
        process.wait()
    with pytest.raises(Odd):
        process.wait()
    assert gone(box, "sleep 71")
    assert box.run(["true"]).ok


def test_a_slow_reader_slows_the_writer_and_costs_no_memory(box: Sandbox) -> None:
    process = box.popen("head -c 3000000 /dev/zero; echo done >&2", max_output=None)
    time.sleep(0.3)
    assert process.watched.stdout.total == 0
    sizes = {"stdout": 0, "stderr": 0}
    for name, data in process.output():
        sizes[name] += len(data)
        if sizes["stdout"] < 500_000:
            time.sleep(0.002)
    assert sizes == {"stdout": 3_000_000, "stderr": 5}


def test_threads_do_not_meet(box: Sandbox) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        for turn in range(15):
            word = f"{number}-{turn}"
            result = box.run(["sh", "-c", f"echo {word}; exit {number}"], stdin=word)
            if (result.stdout_text, result.exit_code) != (word + "\n", number):
                wrong.append(result)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_close_while_others_wait() -> None:
    box = Sandbox(timeout=20)
    seen: list[BaseException] = []

    def work() -> None:
        try:
            box.run(["sleep", "71"])
        except SandboxUnavailable as error:
            seen.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    left = box.popen(["sleep", "71"])
    time.sleep(0.2)
    box.close()
    box.close()
    for thread in threads:
        thread.join(5)
    assert len(seen) == 4
    for call in (left.wait, lambda: box.run(["true"]), lambda: box.read_file("/etc/passwd")):
        with pytest.raises(SandboxUnavailable):
            call()
    assert not box.is_running


def test_a_box_that_ends_under_a_command() -> None:
    with Sandbox(timeout=20) as box:
        process = box.popen(["sleep", "71"])
        handle = box._handle
        assert handle is not None
        handle.kill()
        with pytest.raises(SandboxUnavailable, match="ended while"):
            process.wait()
        assert not box.is_running
        with pytest.raises(SandboxUnavailable):
            box.run(["true"])


ATTACKS = {
    "kill": "kill -9 $PPID; sleep 71",
    "kill, and write for ever": "yes & sleep 0.1; kill -9 $PPID; sleep 71",
    "stop": "kill -STOP $PPID; sleep 71",
    "stop for ever": "while :; do kill -STOP $PPID; done",
    "kill everything": "kill -9 -1; sleep 71",
    "stop everything": "kill -STOP -1; sleep 71",
    "kill init": "kill -9 1; sleep 71",
    "stop init": "kill -STOP 1; sleep 71",
    "descriptors of the watcher": "echo x > /proc/$PPID/fd/3; cat /proc/$PPID/mem | head -c1; sleep 71",
    "trace": 'python3 -c "import ctypes,os,time\nctypes.CDLL(None).ptrace(16,os.getppid(),0,0)\ntime.sleep(71)"',
    "fork without end": ":(){ :|:& };: ; sleep 71",
}


@pytest.mark.parametrize("script", ATTACKS.values(), ids=ATTACKS)
def test_an_attack_on_the_watcher_ends_in_bounded_time(script: str) -> None:
    with Sandbox(timeout=1) as box:
        start = time.monotonic()
        try:
            result = box.run(script)
        except SandboxUnavailable:
            assert not box.is_running
        else:
            assert result.reason in ("timeout", "pids", "signaled", "exited")
            if box.is_running:
                assert gone(box, "71")
        assert time.monotonic() - start < 30


def test_a_stopped_watcher_costs_the_command_only() -> None:
    with Sandbox(timeout=20) as box:
        assert box.run("kill -STOP $PPID; sleep 71", timeout=0.2).reason == "timeout"
        assert box.run(["true"]).ok


def let_go(boxes: list[Sandbox]) -> None:
    left, deadline = weakref.ref(boxes[0]), time.monotonic() + 20
    boxes.clear()
    while left() is not None and time.monotonic() < deadline:  # a thread that is looking at it has it yet
        time.sleep(0.01)


def test_nobody_closed_it() -> None:
    boxes = [Sandbox()]
    with pytest.warns(ResourceWarning, match="never closed"):
        let_go(boxes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        closed = Sandbox()
        closed.close()
        del closed
        gc.collect()


def test_a_box_that_cannot_be_made(tmp_path: object) -> None:
    with pytest.raises(SpecError):
        Sandbox(ro=[f"{tmp_path}/missing"])
    with pytest.raises(SpecError):
        Sandbox(no_such_option=1)


def test_two_boxes_share_nothing() -> None:
    with nsbox.Sandbox() as one, nsbox.Sandbox() as two:
        one.run("echo x > /tmp/file")
        assert not two.run(["test", "-e", "/tmp/file"]).ok
        assert one.id != two.id


def test_the_callers_spec_is_a_base() -> None:
    with Sandbox(nsbox.Spec(hostname="base", timeout=5), uid=0) as box:
        assert box.run("hostname; id -u").stdout == b"base\n0\n"


GUIDE = (Path(__file__).resolve().parents[2] / "docs/guides/sandboxes.md").read_text()
EXAMPLES = [code for _, code in blocks(GUIDE, "python")]


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_of_the_guide(code: str) -> None:
    exec(compile(code, "sandboxes.md", "exec"), {"__name__": "example"})
    gc.collect()


class Loose(CommandHandle):
    """A command whose watcher is played by the test."""

    def abandon(self) -> None:
        pass


KINDS = ["started", "failed", "exec_failed", "exited", "ended", "cloned", "kill", "run", "strange"]
NUMBERS = {name: getattr(lib, f"NSB_MSG_{name.upper()}", 0xFFFFFFFF) for name in KINDS}
integers = st.one_of(st.integers(-(1 << 31), (1 << 31) - 1), st.sampled_from([0, -1, -2, 1, -(1 << 31), 32512]))
messages = st.tuples(
    st.sampled_from(KINDS), integers, integers, integers, st.integers(0, 3), st.sampled_from([0, -1, 1])
)


@given(packets=st.lists(st.one_of(messages, st.binary(max_size=400)), max_size=8), tty=st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_a_watcher_says_the_host_side_survives(
    box: Sandbox, packets: list[tuple[str, int, int, int, int, int] | bytes], tty: bool
) -> None:
    assert box._handle is not None
    handle = Loose(box._handle)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handle.control = ours.detach()
    run = Run(handle, timeout=2, tty=tty)
    for packet in packets:
        if isinstance(packet, bytes):
            theirs.send(packet)
            continue
        kind, err, status, stage, count, extra = packet
        message = ffi.new("struct nsb_msg *")
        message.type, message.err, message.status = NUMBERS[kind], err, status
        message.stage = message.op = stage & 0xFFFFFFFF
        message.utime_us, message.stamps[3] = -(1 << 63), (1 << 64) - 1
        data = bytes(ffi.buffer(message)) + bytes(max(0, extra))
        socket.send_fds(theirs, [data[: len(data) + min(0, extra)]], [0] * count)
    theirs.close()
    process = Process(box, run, ["played"], "/", (-1, -1))
    with contextlib.suppress(nsbox.errors.NsboxError):
        result = process.wait()
        result.to_json()
        assert isinstance(result.status, int)
