"""What a sandbox costs while it runs: the same program inside and outside, in turns.

Each figure is measured by the program itself around its work, so that neither its own start nor the sandbox's counts.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from nsbox.bench import svg
from nsbox.bench.frame import Benchmark, Found, Setting, table
from nsbox.bench.measure import Samples, median, percentile, ratio_interval

PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable

#: figure → in words
KINDS = {
    "cpu": "integer arithmetic (processor only)",
    "memory": "copies of 8 MiB (memory bandwidth)",
    "cheap_call": "getppid(2), the cheapest call",
    "calls": "stat, open, fstat, read, close of a file",
    "read": "64 KiB reads of a file in /usr",
    "write": "files of 4 KiB made, written, removed",
    "processes": "posix_spawn of /bin/true",
    "loopback_trip": "TCP round trip over loopback",
    "loopback_mib": "TCP over loopback, a MiB",
}

# Prints nanoseconds of one operation by kind, of the fastest of five passes: what disturbs one is not what is asked.
PROGRAM = """
import json, os, socket, sys, threading, time
scale, scratch = float(sys.argv[1]), sys.argv[2]
def timed(count, work):
    count, best = max(1, int(count * scale)), None
    for _ in range(5):
        began = time.perf_counter_ns(); work(count); took = (time.perf_counter_ns() - began) / count
        best = took if best is None else min(best, took)
    return best
def cpu(count):
    total = 0
    for number in range(count): total += number * number & 255
block = bytearray(8 << 20)
def memory(count):
    for _ in range(count): bytes(block)
def cheap_call(count):
    call = os.getppid
    for _ in range(count): call()
small, large = os.path.realpath('/usr/bin/env'), sys.argv[3]
def calls(count):
    for _ in range(count):
        os.stat(small); fd = os.open(small, os.O_RDONLY); os.fstat(fd); os.read(fd, 4096); os.close(fd)
def read(count):
    fd = os.open(large, os.O_RDONLY); at, size = 0, os.fstat(fd).st_size; buffer = bytearray(65536)
    for _ in range(count):
        at = 0 if at + 65536 > size else at; os.preadv(fd, [buffer], at); at += 65536
    os.close(fd)
data = bytes(4096)
def write(count):
    for number in range(count):
        path = f'{scratch}/{number}'; fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(fd, data); os.close(fd); os.unlink(path)
def processes(count):
    for _ in range(count):
        os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)
server = socket.create_server(('127.0.0.1', 0)); sizes = []
def serve():
    client, _ = server.accept(); client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray(1 << 20)
    while got := client.recv_into(buffer):
        if got == 1: client.send(b'x')
        elif buffer[got - 1] == 2: client.send(b'x')
threading.Thread(target=serve, daemon=True).start()
s = socket.create_connection(server.getsockname()); s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
def loopback_trip(count):
    for _ in range(count): s.send(b'x'); s.recv(1)
mib = bytes((1 << 20) - 1) + b'\\x02'
def loopback_mib(count):
    for _ in range(count): s.sendall(mib); s.recv(1)
print(json.dumps({
    'cpu': timed(400000, cpu), 'memory': timed(6, memory), 'cheap_call': timed(100000, cheap_call),
    'calls': timed(2500, calls), 'read': timed(1500, read), 'write': timed(800, write),
    'processes': timed(15, processes), 'loopback_trip': timed(500, loopback_trip),
    'loopback_mib': timed(8, loopback_mib),
}))
"""


def large_file() -> str:
    """The largest regular file in the places that are shown inside: it is read, not run."""
    sizes = []
    for directory in ("/usr/bin", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"):
        if os.path.isdir(directory):
            sizes += [(e.stat().st_size, e.path) for e in os.scandir(directory) if e.is_file(follow_symlinks=False)]
    return min((max(sizes), *(item for item in sizes if item[0] >= 4 << 20)))[1]


def _figures(output: bytes | str) -> dict[str, float]:
    found: dict[str, float] = json.loads(output)
    return found


def outside(words: list[str]) -> Callable[[], dict[str, float]]:
    """The program on the host, its files on a tmpfs as the sandbox's are."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

    def once() -> dict[str, float]:
        with tempfile.TemporaryDirectory(dir=place, prefix="nsbox-bench-") as scratch:
            argv = [PYTHON, "-I", "-c", PROGRAM, words[0], scratch, words[1]]
            return _figures(subprocess.run(argv, check=True, capture_output=True, env={"PATH": "/usr/bin:/bin"}).stdout)

    return once


def inside(words: list[str], **options: Any) -> Callable[[], dict[str, float]]:
    """The program in a fresh sandbox. Limits that would slow it down by intent are off, all layers are on."""
    import nsbox

    free: dict[str, Any] = dict.fromkeys(("cpus", "cpu_time", "timeout"), "unlimited")
    spec = nsbox.Spec(**{**free, **options})

    def once() -> dict[str, float]:
        result = nsbox.run([PYTHON, "-I", "-c", PROGRAM, words[0], "/tmp", words[1]], spec)
        if not result.ok:
            raise RuntimeError(f"the program in a sandbox: {result!r} {result.stderr_text}")
        return _figures(result.stdout)

    return once


def in_turns(subjects: dict[str, Callable[[], dict[str, float]]], rounds: int) -> dict[str, dict[str, Samples]]:
    """Subject → kind → nanoseconds of each round."""
    samples: dict[str, dict[str, Samples]] = {name: {kind: [] for kind in KINDS} for name in subjects}
    order, draw = list(subjects), random.Random(1)
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            for kind, value in subjects[name]().items():
                samples[name][kind].append(value)
    return samples


def compare(samples: Samples, baseline: Samples) -> dict[str, float]:
    low, high = ratio_interval(samples, baseline)
    return {
        "outside_ns": round(median(baseline), 1),
        "inside_ns": round(median(samples), 1),
        "inside_p95_ns": round(percentile(samples, 0.95), 1),
        "added_ns": round(median(samples) - median(baseline), 1),
        "ratio": round(median(samples) / median(baseline), 4),
        "ratio_low": round(low, 4),
        "ratio_high": round(high, 4),
    }


def run(settings: dict[str, Any]) -> Found:
    words = [str(settings["scale"]), large_file()]
    subjects = {"outside": outside(words), "inside": inside(words)}
    for call in subjects.values():
        call()
    samples = in_turns(subjects, int(settings["rounds"]))
    results = {kind: compare(samples["inside"][kind], samples["outside"][kind]) for kind in KINDS}
    return {"results": results}, samples["outside"]["cpu"]


def _time(nanoseconds: float) -> str:
    for size, unit in ((1e6, "ms"), (1e3, "µs")):
        if abs(nanoseconds) >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.3g} ns"


def text(report: dict[str, Any]) -> list[str]:
    rows = []
    for kind, row in report["results"].items():
        interval = f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}"
        times = [_time(row[key]) for key in ("outside_ns", "inside_ns", "added_ns")]
        rows.append([KINDS[kind], *times, f"{row['ratio']:.3f}", interval])
    return [table(["one operation", "outside", "inside", "added", "× outside", "95 % interval"], rows)]


def plots(report: dict[str, Any]) -> dict[str, str]:
    rows = [(KINDS[kind], row["ratio"], row["ratio_high"]) for kind, row in report["results"].items()]
    title = "The same work inside, as a multiple of outside"
    return {
        "runtime": svg.bars(
            title, "1 is the same; bar and number: ratio of medians, line: to the end of its 95 % interval", rows
        )
    }


BENCHMARK = Benchmark(
    "runtime",
    "The same program inside a sandbox and outside: processor, memory, system calls, files, processes, loopback.",
    (
        Setting("rounds", 12, 2, 3, "turns of each side"),
        Setting("scale", 1.0, 0.01, 0.2, "how much work, as a multiple"),
    ),
    run,
    text,
    plots,
)
