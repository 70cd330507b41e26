"""What a well-behaved sandbox feels of a hog next to it: the time of a small job alone, and beside each kind of hog.

    python benchmarks/neighbours.py [--rounds N] [--jobs N] [--hogs NAME,NAME] [--json FILE]

A hog is a sandbox with the default limits that takes all it can get of one thing. In each round every hog has its turn,
in a random order, and "alone" is one of the turns: the machine's own moods fall on all alike. The ratio to "alone" is
the figure to compare. With as many processors as hogs and jobs it should be near 1 for all but what is shared in spite
of every limit: caches, memory bandwidth, the disk's queue, locks of the kernel.
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import _common

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


def measure(hogs: dict[str, list[str]], rounds: int, jobs: int, seed: int = 1) -> dict[str, _common.Samples]:
    """Samples of the job by what ran next to it."""
    turns: dict[str, list[str] | None] = {ALONE: None, **hogs}
    draw = random.Random(seed)
    samples: dict[str, _common.Samples] = {name: [] for name in turns}
    job()
    for _ in range(rounds):
        order = list(turns)
        draw.shuffle(order)
        for name in order:
            with beside(turns[name]):
                samples[name] += [job() for _ in range(jobs)]
    return samples


def benchmark(hogs: dict[str, list[str]], rounds: int, jobs: int) -> dict[str, Any]:
    """Everything that the JSON file holds."""
    import nsbox

    enforced = {layer: how["strength"] for layer, how in nsbox.run(["true"]).enforced.items()}
    quiet = _common.Quiet()
    samples = measure(hogs, rounds, jobs)
    return {
        "benchmark": "neighbours",
        "host": _common.host_facts(),
        "options": {"rounds": rounds, "jobs": jobs},
        "quiet": quiet.report(samples[ALONE]),
        "results": {name: _common.summary(values, samples[ALONE]) for name, values in samples.items()},
        "enforced": {layer: enforced[layer] for layer in ("memory", "pids", "cpu", "disk")},
    }


def show(report: dict[str, Any]) -> None:
    """The report for people."""
    host, options = report["host"], report["options"]
    machine = f"{host['cpu']}, {host['cores']} cores{', virtual machine' if host['virtual'] else ''}"
    print(f"{machine}, Linux {host['kernel']}, Python {host['python']}, as {host['user']}")
    print(f"{options['rounds']} rounds of {options['jobs']} jobs beside each hog; limits: {report['enforced']}\n")
    rows = []
    for name, row in report["results"].items():
        interval = f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}" if name != ALONE else ""
        cells = [f"{row['p50_us'] / 1000:.1f}", f"{row['p95_us'] / 1000:.1f}", f"{row['ratio']:.2f}", interval]
        rows.append([name, *cells])
    print(_common.table(["job next to", "p50 ms", "p95 ms", f"× {ALONE}", "95 % interval"], rows))
    for warning in report["quiet"]["warnings"]:
        print(f"\nwarning: {warning}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A small job in a sandbox, alone and next to hogs.")
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="turns of each hog (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=20, metavar="N", help="jobs in a turn (default: %(default)s)")
    parser.add_argument("--hogs", default=",".join(HOGS), metavar="NAME,...", help="which of: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write the report there as well")
    args = parser.parse_args(arguments)
    chosen = [name.strip() for name in args.hogs.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in HOGS]
    if args.rounds < 1 or args.jobs < 2 or unknown:
        parser.error(f"no such hog: {unknown[0]}" if unknown else "--rounds must be at least 1, --jobs at least 2")
    report = benchmark({name: HOGS[name] for name in chosen}, args.rounds, args.jobs)
    show(report)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1, ensure_ascii=False)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
