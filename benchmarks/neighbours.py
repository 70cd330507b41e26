"""What a well-behaved sandbox feels of a hog next to it: the time of a small job alone, and beside each kind of hog.

    python benchmarks/neighbours.py [--rounds N] [--jobs N] [--json FILE]

A hog is a sandbox with the default limits that takes all it can get of one thing. In each round every hog has its turn,
in a random order, and "alone" is one of the turns: the machine's own moods fall on all alike. The ratio to "alone" is
the figure to compare. With as many processors as hogs and jobs it should be near 1 for all but what is shared in spite
of every limit: caches, memory bandwidth, the disk's queue, locks of the kernel.
"""

import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from nsbox.bench.frame import Benchmark, Found, Setting, main, ratio_table
from nsbox.bench.measure import Samples, summary

ALONE = "alone"
#: some work on the processor, in memory and on files: about 20 ms of it beside the start
JOB = ["python3", "-c", "import json\nopen('x', 'w').write(json.dumps(list(range(20000))))\njson.load(open('x'))"]
HOGS: dict[str, list[str]] = {
    "cpu": ["sh", "-c", "for i in 1 2 3 4; do while :; do :; done & done; wait"],
    "memory": [
        *("python3", "-c"),
        "x = bytearray(400 << 20)\nwhile True:\n  for i in range(0, len(x), 4096): x[i] ^= 1",
    ],
    "fork bomb": ["python3", "-c", "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"],
    "disk": ["sh", "-c", "while :; do head -c 200M /dev/zero > x; sync; rm x; done"],
    "output": ["sh", "-c", "yes >&2 & yes"],
}
SETTLE_S = 0.5  #: from the start of a hog until it is at full speed
PAUSE_S = 0.2  #: after its end, for the kernel's own cleaning up


@contextlib.contextmanager
def beside(argv: list[str] | None) -> Iterator[None]:
    """A sandbox that runs ``argv`` meanwhile, in a process of its own: this one's interpreter lock is no neighbour."""
    if argv is None:
        yield
        return
    code = "import json, sys, nsbox; nsbox.run(json.loads(sys.argv[1]), timeout='5m', cpu_time='unlimited')"
    hog = subprocess.Popen([sys.executable, "-c", code, json.dumps(argv)])
    try:
        time.sleep(SETTLE_S)
        yield
        if hog.poll() is not None:
            raise RuntimeError(f"the hog {argv[-1]!r} has ended by itself; it would have to last")
    finally:
        hog.kill()
        hog.wait()
        time.sleep(PAUSE_S)


def job() -> float:
    """Microseconds of the small job in a fresh sandbox of this process."""
    import nsbox

    began = time.perf_counter_ns()
    result = nsbox.run(JOB)
    took = (time.perf_counter_ns() - began) / 1000
    if not result.ok:
        raise RuntimeError(f"the job came to {result!r}: {result.stderr_text}")
    return took


def in_turns(hogs: dict[str, list[str]], rounds: int, jobs: int, seed: int = 1) -> dict[str, Samples]:
    """Samples of the job by what ran next to it."""
    turns: dict[str, list[str] | None] = {ALONE: None, **hogs}
    draw = random.Random(seed)
    samples: dict[str, Samples] = {name: [] for name in turns}
    job()
    for _ in range(rounds):
        order = list(turns)
        draw.shuffle(order)
        for name in order:
            with beside(turns[name]):
                samples[name] += [job() for _ in range(jobs)]
    return samples


def run(settings: dict[str, Any]) -> Found:
    import nsbox

    enforced = {layer: how["strength"] for layer, how in nsbox.run(["true"]).enforced.items()}
    samples = in_turns(HOGS, int(settings["rounds"]), int(settings["jobs"]))
    results = {name: summary(values, samples[ALONE]) for name, values in samples.items()}
    facts = {"results": results, "enforced": {layer: enforced[layer] for layer in ("memory", "pids", "cpu", "disk")}}
    return facts, samples[ALONE]


def text(report: dict[str, Any]) -> list[str]:
    return [f"limits: {report['enforced']}", ratio_table("job next to", ALONE, report["results"])]


BENCHMARK = Benchmark(
    "neighbours",
    "A small job in a sandbox, alone and next to hogs.",
    (Setting("rounds", 6, 1, 1, "turns of each hog"), Setting("jobs", 20, 2, 3, "jobs in a turn")),
    run,
    text,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
