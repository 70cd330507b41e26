"""The contract between Python and C, and what the helper does with a launch that is damaged."""

import contextlib
import errno
import os
import random
import re
import select
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import descriptor_count

import nsbox
from nsbox import _native, errors, launch
from nsbox._native import STAGES, ffi, lib
from nsbox.plan import ops

HEADER = ffi.sizeof("struct nsb_plan")
SOURCE = Path(__file__).parents[2] / "native" / "nsbox.h"


# Numbers


def test_the_layout_is_the_one_that_was_compiled() -> None:
    assert lib.nsb_layout() == lib.NSB_LAYOUT
    if SOURCE.exists() and Path(nsbox.__file__).parents[1] == SOURCE.parents[1]:
        found = re.search(r"NSB_LAYOUT = (\d+)", SOURCE.read_text())
        assert found
        assert int(found[1]) == lib.NSB_LAYOUT, "the module is older than its source: build it anew"


def test_kinds_of_operations_are_the_enum_s() -> None:
    numbers = {
        name.removeprefix("NSB_OP_").lower(): number for number, name in ffi.typeof("enum nsb_op_kind").elements.items()
    }
    assert set(numbers) == set(ops.KINDS)
    assert sorted(numbers.values()) == list(range(len(numbers)))


def test_flags_of_operations_are_the_enum_s() -> None:
    names = {"NSB_RO": "READ_ONLY", "NSB_NOEXEC": "NO_EXEC"}
    flags = {name: value for value, name in ffi.typeof("enum nsb_op_flags").elements.items()}
    for name, value in flags.items():
        assert value & (value - 1) == 0, f"{name} is one bit"
        python = names.get(name, name.removeprefix("NSB_"))
        assert getattr(ops, python, value) == value, name
    assert len(set(flags.values())) == len(flags)
    told = [name for name in flags if hasattr(ops, names.get(name, name.removeprefix("NSB_")))]
    assert {"NSB_RO", "NSB_RECURSIVE", "NSB_IDMAP_RANGE", "NSB_IDMAP_OWNER"} <= set(told)


def test_stages_have_names_in_their_order() -> None:
    assert STAGES[:2] == ("request", "clone")
    numbers = {
        name.removeprefix("NSB_STAGE_").lower(): number
        for number, name in ffi.typeof("enum nsb_stage").elements.items()
    }
    assert [numbers[name] for name in STAGES] == list(range(len(STAGES)))
    assert STAGES[lib.NSB_STAGE_EXEC] == "exec"
    assert len(STAGES) == lib.NSB_N_STAGES
    assert len(STAGES) <= len(ffi.new("struct nsb_msg *").stamps)


@pytest.mark.parametrize("name", ["nsb_op", "nsb_rlimit", "nsb_rule", "nsb_plan", "nsb_msg"])
def test_structures_have_no_hidden_padding(name: str) -> None:
    """Padding would carry bytes of one process's memory into another, and differ between compilers."""
    kind = ffi.typeof(f"struct {name}")
    at = 0
    for _, field in kind.fields:
        assert field.offset == at
        at += ffi.sizeof(field.type)
    assert ffi.sizeof(kind) == at
    assert ffi.sizeof(kind) % 8 == 0


# Damaged launches


class Sent(NamedTuple):
    """A launch as it went over the seam."""

    blob: bytes


@pytest.fixture
def good(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """The blob of a launch that works, for this kind of caller."""
    sent: list[Sent] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(lib, name)

        def nsb_launch(self, zygote: int, blob: bytes, *rest: Any) -> int:
            sent.append(Sent(bytes(blob)))
            return int(lib.nsb_launch(zygote, blob, *rest))

    with monkeypatch.context() as patch:
        patch.setattr(launch, "lib", Recorder())
        assert nsbox.run(["/bin/true"], memory="unlimited", cpus="unlimited", pids="unlimited").ok
    return sent[-1]


class Outcome(NamedTuple):
    """What came of a launch: the type of the last message (None: init went without a word), its stage and errno."""

    kind: int | None
    stage: int
    err: int


@contextlib.contextmanager
def pipes() -> Iterator[tuple[int, int]]:
    """Two writing ends that nobody reads."""
    ends = [*os.pipe(), *os.pipe()]
    try:
        yield ends[1], ends[3]
    finally:
        for fd in ends:
            os.close(fd)


def send(blob: bytes, fds: list[int] | None = None, patience: float = 5) -> Outcome:
    """Launch ``blob``, wait for its end, and make sure that it is one."""
    answer, made = ffi.new("struct nsb_msg *"), ffi.new("int[2]", (-1, -1))
    with pipes() as (out, err):
        given = [out, err] if fds is None else fds
        ret = lib.nsb_launch(_native.zygote().socket, blob, len(blob), given, len(given), answer, made)
    if ret < 0:
        return Outcome(None, 0, -ret)
    control, pidfd = made
    try:
        if answer.type == lib.NSB_MSG_FAILED:
            return Outcome(answer.type, answer.stage, -answer.err)
        assert answer.type == lib.NSB_MSG_CLONED
        return follow(control, pidfd, patience)
    finally:
        os.close(control)
        if pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            assert select.select([pidfd], [], [], 5)[0], "init does not end"
            os.close(pidfd)


def follow(control: int, pidfd: int, patience: float) -> Outcome:
    message = ffi.new("struct nsb_msg *")
    last = Outcome(None, 0, 0)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        ready = select.select([control, pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]
        if control not in ready:
            break
        ret = lib.nsb_receive(control, message, ffi.NULL, 0)
        if ret < 0:
            break
        last = Outcome(message.type, message.stage, -message.err)
        if message.type in (lib.NSB_MSG_FAILED, lib.NSB_MSG_EXEC_FAILED, lib.NSB_MSG_ENDED):
            break
    return last


def with_field(blob: bytes, name: str, value: int) -> bytes:
    """``blob`` with one number of its header changed."""
    kind = dict(ffi.typeof("struct nsb_plan").fields)[name]
    code = {4: "I", 8: "Q"}[ffi.sizeof(kind.type)]
    out = bytearray(blob)
    struct.pack_into(code, out, kind.offset, value & (1 << 8 * ffi.sizeof(kind.type)) - 1)
    return bytes(out)


@pytest.fixture(autouse=True)
def zygote_survives() -> Iterator[None]:
    """Whatever is sent, the helper lives, and the next launch works."""
    nsbox.run(["true"])
    before = _native.zygote().pid
    yield
    assert nsbox.run(["echo", "fine"]).stdout == b"fine\n"
    assert _native.zygote().pid == before
    with open(f"/proc/{before}/stat") as file:
        assert file.read().rpartition(")")[2].split()[0] in "SR"


def refused(outcome: Outcome) -> bool:
    """Refused before anything was made."""
    return outcome.kind == lib.NSB_MSG_FAILED and STAGES[outcome.stage] == "request" and outcome.err == errno.EPROTO


def test_the_recorded_launch_works(good: Sent) -> None:
    assert send(good.blob).kind == lib.NSB_MSG_ENDED, "the control"


def test_another_layout_is_refused(good: Sent) -> None:
    assert refused(send(with_field(good.blob, "layout", lib.NSB_LAYOUT + 1)))
    assert refused(send(with_field(good.blob, "layout", lib.NSB_LAYOUT - 1)))
    assert refused(send(with_field(good.blob, "magic", 0)))


@pytest.mark.parametrize("size", [1, 7, 8, 64, HEADER - 1, HEADER, HEADER + 7, HEADER + 8, 1500])
def test_truncated(good: Sent, size: int) -> None:
    if size >= len(good.blob):
        pytest.skip("a whole launch is shorter than that")
    assert refused(send(good.blob[:size]))
    assert refused(
        send(with_field(good.blob, "size", size)[:size].ljust(size, b"\0") if size >= HEADER else bytes(size))
    )


def test_the_empty_launch_is_refused() -> None:
    outcome = send(b"")
    assert outcome.kind in (None, lib.NSB_MSG_FAILED)
    assert outcome.err != 0


@pytest.mark.parametrize("size", [64, HEADER, 4096, 1 << 20])
@pytest.mark.parametrize("fill", [0x00, 0x41, 0xFF])
def test_garbage(size: int, fill: int) -> None:
    assert refused(send(bytes([fill]) * size))


def test_random_garbage() -> None:
    source = random.Random(20)
    for _ in range(50):
        assert refused(send(source.randbytes(source.randrange(8, 8192))))


def test_a_launch_that_does_not_end_in_nul_is_refused(good: Sent) -> None:
    assert refused(send(good.blob[:-1] + b"x"))


OFFSETS = ["ops", "rlimits", "rules", "filter"]
HOSTILE = [1, 4, 7, HEADER - 8, HEADER + 1, 0x7FFFFFF8, 0x80000000, 0xFFFFFFF8, 0xFFFFFFFF]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("field", OFFSETS)
def test_hostile_offsets_of_arrays(good: Sent, field: str, value: int) -> None:
    assert refused(send(with_field(good.blob, field, value)))


@pytest.mark.parametrize("value", [0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
@pytest.mark.parametrize("field", ["n_ops", "n_rlimits", "n_rules", "n_filter"])
def test_hostile_counts(good: Sent, field: str, value: int) -> None:
    assert refused(send(with_field(good.blob, field, value)))


@pytest.mark.parametrize("value", [*HOSTILE, HEADER])
@pytest.mark.parametrize("field", ["uid_map", "gid_map", "staging", "hostname", "scratch_dir"])
def test_hostile_offsets_of_strings(good: Sent, field: str, value: int) -> None:
    """A string may start anywhere in the launch: it is then another string. Beyond the end it is the empty one."""
    assert send(with_field(good.blob, field, value)).kind in (
        lib.NSB_MSG_FAILED,
        lib.NSB_MSG_ENDED,
        lib.NSB_MSG_EXEC_FAILED,
    )


def command_fields() -> list[tuple[str, int]]:
    """(name, place) of the numbers that describe the command."""
    kind = dict(ffi.typeof("struct nsb_plan").fields)["command"]
    return [(name, kind.offset + field.offset) for name, field in kind.type.fields if ffi.sizeof(field.type) == 4]


@pytest.mark.parametrize("value", [*HOSTILE, 0, HEADER])
@pytest.mark.parametrize(
    "name, place", command_fields() if "command" in dict(ffi.typeof("struct nsb_plan").fields) else []
)
def test_hostile_commands(good: Sent, name: str, place: int, value: int) -> None:
    blob = bytearray(good.blob)
    struct.pack_into("I", blob, place, value)
    outcome = send(bytes(blob), patience=0.3)
    assert outcome.kind in (
        lib.NSB_MSG_FAILED,
        lib.NSB_MSG_ENDED,
        lib.NSB_MSG_EXEC_FAILED,
        lib.NSB_MSG_STARTED,
        None,
    ), name


def test_pointers_on_top_of_what_they_lead_to_are_refused(good: Sent) -> None:
    """Once they are filled in, nothing there would end in NUL any more."""
    places = dict(command_fields())
    argv, envp, pointers = (
        struct.unpack_from("I", good.blob, places[name])[0] for name in ("argv", "envp", "pointers")
    )
    assert max(argv, envp) < pointers, "the control: they come after the strings"
    for offset in (*range(0, HEADER, 8), argv // 8 * 8, envp // 8 * 8, pointers + 8):
        blob = bytearray(good.blob)
        struct.pack_into("I", blob, places["pointers"], offset)
        assert refused(send(bytes(blob))), offset


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5])
def test_a_wrong_number_of_descriptors_is_refused(good: Sent, count: int) -> None:
    with pipes() as (out, err):
        outcome = send(good.blob, [out, err, out, err, out][:count])
    assert outcome.kind in (lib.NSB_MSG_FAILED, None)
    assert outcome.err != 0


def test_descriptors_of_the_wrong_kind(good: Sent, tmp_path: Path) -> None:
    fds = [os.open(tmp_path, os.O_RDONLY), os.open("/dev/null", os.O_RDONLY)]
    try:
        assert send(good.blob, fds).kind == lib.NSB_MSG_ENDED
    finally:
        for fd in fds:
            os.close(fd)


def untouchable() -> set[int]:
    """Bytes that a mutation leaves alone: those by which tests make a stage hang."""
    fields = dict(ffi.typeof("struct nsb_plan").fields)
    return {place for name in ("fault_stage", "fault") for place in range(fields[name].offset, fields[name].offset + 4)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_mutations(good: Sent, seed: int) -> None:
    """300 launches with a few bytes changed, half of them in the header: whatever comes of it, the helper lives."""
    source = random.Random(seed)
    kept = untouchable()
    safe = [place for place in range(len(good.blob)) if place not in kept]
    header = [place for place in safe if place < HEADER]
    before = descriptor_count(max)
    for _ in range(50):
        blob = bytearray(good.blob)
        for _ in range(source.choice([1, 1, 2, 8])):
            place = source.choice(header if source.random() < 0.5 else safe)
            blob[place] = source.choice(
                [0, 1, 0x7F, 0x80, 0xFF, blob[place] ^ 1 << source.randrange(8), source.randrange(256)]
            )
        send(bytes(blob), patience=0.3)
    assert descriptor_count() <= before


def test_packets_that_are_no_request() -> None:
    """Somebody in the embedding process writes to the wrong descriptor: the helper goes on, or is replaced."""
    import socket

    zygote = _native.zygote()
    with socket.socket(fileno=os.dup(zygote.socket)) as sock:
        sock.send(b"x")
        sock.send(bytes(16))
        sock.send(b"y" * 4000)
    assert nsbox.run(["echo", "fine"]).stdout == b"fine\n"


def test_messages_to_init_that_mean_nothing(good: Sent) -> None:
    handle = launch.launch(launch.prepare(nsbox.Spec()), ["sh", "-c", "sleep 0.3; exit 5"])
    with contextlib.closing(handle):
        for kind, value in (
            (0, 0),
            (1, 0),
            (2, 5),
            (63, -1),
            (99, 2**31 - 1),
            (lib.NSB_MSG_SIGNAL, 0),
            (lib.NSB_MSG_SIGNAL, 65),
            (lib.NSB_MSG_SIGNAL, -9),
        ):
            lib.nsb_tell(handle.control, kind, value, 0)
        import socket

        with socket.socket(fileno=os.dup(handle.control)) as sock:
            sock.send(b"short")
            sock.send(b"z" * 5000)
        from nsbox.supervise import Run, drive

        watch = Run(handle)
        drive(watch)
        assert watch.status == 5 << 8


def test_a_host_without_the_helper_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(lib, name)

        def nsb_zygote_start(self, pid: object) -> int:
            return -errno.ENOSYS

    with monkeypatch.context() as patch:
        patch.setattr(_native, "lib", Broken())
        with pytest.raises(errors.SandboxUnavailable, match="helper"):
            _native.Zygote()


def test_a_sandbox_that_was_closed_meanwhile_is_not_waited_for() -> None:
    began = time.monotonic()
    assert lib.nsb_run(-1, b"x", 1, [], 0) == lib.nsb_start(-1, b"x", 1, [], 0) == -errno.EBADF
    assert time.monotonic() - began < 4, "the time that an init has to take a message is 5 s"
