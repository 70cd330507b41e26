"""What idle sandboxes hold: memory of their processes, of the kernel, of the caller; what a start costs among many."""

import resource
import time
from typing import Any

from nsbox.bench.frame import Benchmark, Found, Setting, table
from nsbox.bench.measure import TRUE, Samples, median, percentile, spawn

#: lines of /proc/meminfo that sandboxes make grow
KERNEL = ("SUnreclaim", "SReclaimable", "KernelStack", "PageTables", "Percpu", "Shmem")
SETTLE_S = 2.0  #: for the kernel to take down what has ended
STARTS = 60


def meminfo() -> dict[str, int]:
    """KiB by name: proc_meminfo(5)."""
    with open("/proc/meminfo", encoding="ascii") as file:
        rows = [line.split() for line in file]
    return {row[0].rstrip(":"): int(row[1]) for row in rows}


def rollup(pid: int | str) -> dict[str, int] | None:
    """KiB by name of one process (proc_pid_smaps(5)); None where it may not be looked at."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            rows = [line.split() for line in file.readlines()[1:]]
    except OSError:
        return None
    return {row[0].rstrip(":"): int(row[1]) for row in rows}


def _private(found: dict[str, int] | None) -> int | None:
    return found["Private_Clean"] + found["Private_Dirty"] if found else None


def starts(count: int) -> tuple[Samples, Samples]:
    """Microseconds of posix_spawn and of a fresh sandbox, in turns."""
    import nsbox

    spec, bare, boxed = nsbox.Spec(), [], []
    for _ in range(count):
        began = time.perf_counter()
        spawn([TRUE])
        between = time.perf_counter()
        nsbox.run([TRUE], spec)
        bare.append((between - began) * 1e6)
        boxed.append((time.perf_counter() - between) * 1e6)
    return bare, boxed


def room_for(count: int) -> None:
    """Descriptors for so many sandboxes. Raises RuntimeError where the hard limit is lower."""
    wanted = 64 + 12 * count
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise RuntimeError(f"{count} sandboxes want {wanted} descriptors and the hard limit is {hard}: ulimit -Hn")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _held(before: dict[str, int], own_before: int, pids: list[int]) -> dict[str, Any]:
    """What so many sandboxes hold, a sandbox, in KiB."""
    after, count = meminfo(), len(pids)
    found = [one for one in map(rollup, pids) if one]
    own = (_private(rollup("self")) or 0) - own_before
    out: dict[str, Any] = {
        "init_pss": round(sum(one["Pss"] for one in found) / len(found), 1) if found else None,
        "init_private": round(sum(_private(one) or 0 for one in found) / len(found), 1) if found else None,
        "caller_private": round(own / count, 1),
    }
    return out | {f"kernel_{name}": round((after[name] - before[name]) / count, 1) for name in KERNEL}


def run(settings: dict[str, Any]) -> Found:
    import nsbox

    count = int(settings["alive"])
    room_for(count)
    spec = nsbox.Spec(timeout="unlimited", lifetime="unlimited")
    bare, empty = starts(STARTS)
    time.sleep(SETTLE_S)
    before, own = meminfo(), _private(rollup("self")) or 0
    boxes: list[Any] = []
    made: Samples = []
    try:
        for _ in range(count):
            began = time.perf_counter()
            boxes.append(nsbox.Sandbox(spec))
            made.append((time.perf_counter() - began) * 1e6)
        time.sleep(SETTLE_S)
        held = _held(before, own, [box._handle.pid for box in boxes])
        _, crowded = starts(STARTS)
    finally:
        began = time.perf_counter()
        for box in boxes:
            box.close()
        closed = time.perf_counter() - began
    third = max(1, count // 3)
    facts = {
        "held_kib": held,
        "made": {
            "first_p95_us": round(percentile(made[:third], 0.95)),
            "last_p95_us": round(percentile(made[-third:], 0.95)),
        },
        "start": {
            "empty_p50_us": round(median(empty)),
            "empty_p95_us": round(percentile(empty, 0.95)),
            "crowded_p50_us": round(median(crowded)),
            "crowded_p95_us": round(percentile(crowded, 0.95)),
            "p95_ratio": round(percentile(crowded, 0.95) / percentile(empty, 0.95), 2),
        },
        "close_ms": round(closed * 1000 / count, 2),
    }
    return facts, bare


def text(report: dict[str, Any]) -> list[str]:
    names = {
        "init_pss": "pid 1 inside, PSS",
        "init_private": "pid 1 inside, private",
        "caller_private": "this process, private",
        "kernel_SUnreclaim": "kernel slab that stays",
        "kernel_SReclaimable": "kernel slab that can be given back",
        "kernel_KernelStack": "kernel stacks",
        "kernel_PageTables": "page tables",
        "kernel_Percpu": "per-processor memory",
        "kernel_Shmem": "tmpfs and shared memory",
    }
    held = report["held_kib"]
    rows = [[words, "unreadable" if held[key] is None else f"{held[key]:.1f}"] for key, words in names.items()]
    start, made = report["start"], report["made"]
    lines = [
        f"start of one more: p95 {start['crowded_p95_us']} µs with {report['options']['alive']:g} alive, "
        f"{start['empty_p95_us']} µs with none: {start['p95_ratio']:.2f} times",
        f"made in a row: p95 {made['first_p95_us']} µs in the first third, {made['last_p95_us']} in the last",
        f"closed: {report['close_ms']:.2f} ms each",
    ]
    return [table(["an idle sandbox holds", "KiB"], rows), "\n".join(lines)]


BENCHMARK = Benchmark(
    "memory",
    "What idle sandboxes hold, and what a start costs when many are alive.",
    (Setting("alive", 200, 1, 40, "sandboxes alive at once"),),
    run,
    text,
)
