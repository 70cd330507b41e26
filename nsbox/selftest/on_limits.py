"""Attempts to take more than a limit allows, or to live on. Every limit is set low, whatever the profile says."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from nsbox.selftest.stage import Noted, Stage, noted, staged

MIB = 1 << 20
_KEY = 0x6E736278
_IPC_CREAT, _IPC_RMID = 0o1000, 0


def _touched(result: Any) -> set[str]:
    return {hit["limit"] for hit in result.limits_hit}


def _taken(stage: Stage, word: str, **options: Any) -> tuple[str, Any]:
    """How far a hog came inside, and the result."""
    from nsbox.selftest.stage import parse

    result = stage.program(word, **options)
    return parse(result.stdout).get(word.partition(":")[0], result.reason), result


@staged("R01")
def fork_bomb(stage: Stage) -> Iterator[Noted]:
    """A hundred processes where twenty are allowed."""
    word = "hog_processes:100"
    control = stage.outside(word)["hog_processes"]
    inside, result = _taken(stage, word, pids=20)
    yield noted(
        "R01",
        "100 processes where 20 are allowed",
        works=control == "took 100",
        stopped=inside not in ("took 100", "") and "pids" in _touched(result),
        control=control,
        inside=inside,
    )


@staged("R02")
def memory(stage: Stage) -> Iterator[Noted]:
    """Twice the memory that is allowed."""
    word = "hog_memory:96"
    control = stage.outside(word)["hog_memory"]
    inside, result = _taken(stage, word, memory="48M")
    yield noted(
        "R02",
        "96 MiB where 48 are allowed",
        works=control == "took 96",
        stopped=inside != "took 96" and "memory" in _touched(result),
        control=control,
        inside=inside,
    )


@staged("R03")
def disk(stage: Stage) -> Iterator[Noted]:
    """Bytes and inodes."""
    for key, amount, what in (("hog_disk", 24, "24 MiB"), ("hog_inodes", 5000, "5000 files")):
        word = f"{key}:{amount}"
        control, _ = _taken(stage, word, disk="64M", memory="256M")
        inside, result = _taken(stage, word, disk="4M", memory="256M")
        yield noted(
            "R03",
            f"{what} where 4 MiB of disk are allowed",
            works=control == f"took {amount}",
            stopped=inside.startswith("took") and inside != f"took {amount}" and "disk" in _touched(result),
            control=f"where 64 are: {control}",
            inside=inside,
        )


@staged("R04")
def flood(stage: Stage) -> Iterator[Noted]:
    """Output beyond its limit, without an end of line."""
    control = len(stage.outside_bytes("hog_output:8"))
    result = stage.program("hog_output:8", output="1M")
    yield noted(
        "R04",
        "8 MiB of output where 1 is kept",
        works=control >= 8 * MIB,
        stopped=len(result.stdout) <= MIB and result.stdout_truncated,
        control=f"{control} bytes",
        inside=f"{len(result.stdout)} bytes",
    )


def _named(mark: str) -> list[int]:
    """Processes with a mark among their arguments."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
                if file.read().endswith(b"\0" + mark.encode() + b"\0"):
                    found.append(int(name))
    return found


@staged("R05")
def daemon(stage: Stage) -> Iterator[Noted]:
    """A process that wants to outlive its run."""
    mark = f"selftest-stays-{os.getpid()}-"
    stage.outside(f"stay:{mark}outside")
    left = _named(f"{mark}outside")
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    began = stage.inside(f"stay:{mark}inside").get("stay", "")
    deadline = time.monotonic() + 2
    while (stayed := _named(f"{mark}inside")) and time.monotonic() < deadline:
        time.sleep(0.01)
    yield noted(
        "R05",
        "a daemon: double fork, own session, deaf to signals",
        works=bool(left) and began == "done",
        stopped=not stayed,
        control="outside it lived on",
        inside=f"{len(stayed)} live on",
    )


@staged("R06")
def busy(stage: Stage) -> Iterator[Noted]:
    """A loop beyond its processor time."""
    control = stage.outside("hog_processor:0.5")["hog_processor"]
    inside, result = _taken(stage, "hog_processor:5", cpu_time=0.3, timeout=60)
    yield noted(
        "R06",
        "5 s of processor time where 0.3 are allowed",
        works=control == "took 0.5",
        stopped=result.reason == "cpu_time",
        control=control,
        inside=f"ended: {inside}",
    )


@staged("R07")
def for_ever(stage: Stage) -> Iterator[Noted]:
    """Sleep beyond the wall clock; what was said before that is kept."""
    control = stage.outside("hog_time:0.6")["hog_time"]
    result = stage.run(["sh", "-c", "echo began; exec sleep 30"], timeout=1)
    yield noted(
        "R07",
        "30 s of sleep where 1 is allowed",
        works=control == "took 0.6" and result.stdout == b"began\n",
        stopped=result.reason == "timeout",
        control=control,
        inside=f"ended: {result.reason}",
    )


@staged("R08")
def descriptors(stage: Stage) -> Iterator[Noted]:
    """Descriptors beyond their limit."""
    word = "hog_descriptors:200"
    control = stage.outside(word)["hog_descriptors"]
    inside, _ = _taken(stage, word, files=64)
    yield noted(
        "R08",
        "200 descriptors where 64 are allowed",
        works=control == "took 200",
        stopped=inside.startswith("took") and int(inside.split()[1]) <= 64,
        control=control,
        inside=inside,
    )


@contextlib.contextmanager
def shared_segment() -> Iterator[bool]:
    """System V shared memory that permissions let anybody have; False where the kernel has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = libc.shmget(_KEY, 4096, _IPC_CREAT | 0o666)
    try:
        yield number >= 0
    finally:
        if number >= 0:
            libc.shmctl(number, _IPC_RMID, None)


@staged("R09")
def shared_memory(stage: Stage) -> Iterator[Noted]:
    """A file in /dev/shm and a segment by key, made outside."""
    if os.access("/dev/shm", os.W_OK):
        name = f"selftest-{os.getpid()}"
        with open(f"/dev/shm/{name}", "x"):
            pass
        try:
            control = stage.outside(f"memory_file:{name}")["memory_file"]
            inside = stage.inside(f"memory_file:{name}").get("memory_file", "")
        finally:
            os.unlink(f"/dev/shm/{name}")
        yield noted(
            "R09",
            "a file in /dev/shm",
            works=control == "done",
            stopped=inside == "ENOENT",
            control=control,
            inside=inside,
        )
    with shared_segment() as made:
        if made:
            control = stage.outside("shared_memory_segment")["shared_memory_segment"]
            inside = stage.inside("shared_memory_segment").get("shared_memory_segment", "")
            yield noted(
                "R09",
                "a System V segment",
                works=control == "done",
                stopped=inside not in ("done", ""),
                control=control,
                inside=inside,
            )
