"""Thousands of sandboxes of every outcome in one process: what that process holds must not grow.

    python tests/soak/soak.py [--runs 10000] [--threads 1] [--every 1000] [--json FILE]

Prints, at intervals, the resident memory, descriptors, threads, children, cgroups, mounts and network links that belong
to this process, and ends with status 1 if any of them grew. Most runs are short commands that succeed; one in 25 fails,
runs out of time, memory, processes, disk or output, breaks half way through its set-up, or loses its init.
"""

import argparse
import collections
import contextlib
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import nsbox
from nsbox import _native, errors, janitor, launch

MEMORY_SLACK = 3 << 20  #: bytes that the allocator may wander by
BOMB = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"


def _reason(argv: list[str], **options: Any) -> str:
    return nsbox.run(argv, **options).reason


def _failed(argv: list[str], **options: Any) -> str:
    try:
        nsbox.run(argv, **options)
    except errors.NsboxError as error:
        return type(error).__name__
    return "no error"


def _killed() -> str:
    """init is killed by somebody while the payload runs."""
    return nsbox.run(["sh", "-c", "echo; sleep 5"], on_stdout=lambda _: os.kill(_newest_init(), signal.SIGKILL)).reason


def _newest_init() -> int:
    helper = _native.zygote().pid
    return int(Path(f"/proc/{helper}/task/{helper}/children").read_text().split()[-1])


#: what is run, and how it must end
RARE: dict[str, tuple[Callable[[], str], set[str]]] = {
    "fails": (lambda: _reason(["sh", "-c", "exit 3"]), {"exited"}),
    "signal": (lambda: _reason(["sh", "-c", "kill -9 $$"]), {"signaled"}),
    "timeout": (lambda: _reason(["sleep", "9"], timeout=0.05), {"timeout"}),
    "memory": (
        lambda: _reason(["python3", "-c", "x = bytearray(99 << 20); __import__('time').sleep(9)"], memory="24M"),
        {"memory"},
    ),
    "fork bomb": (lambda: _reason(["python3", "-c", BOMB], pids=16, timeout=0.2), {"timeout"}),
    "disk": (lambda: _reason(["sh", "-c", "head -c 9M /dev/zero > x"], disk="1M"), {"exited"}),
    "output": (lambda: _reason(["head", "-c", "300000", "/dev/zero"], output="64K"), {"exited"}),
    "left running": (lambda: _reason(["sh", "-c", "sleep 9 & setsid sleep 9 &"]), {"exited"}),
    "no command": (lambda: _failed(["/no/such/program"]), {"CommandError"}),
    "no directory": (lambda: _failed(["true"], cwd="/no/such/directory"), {"SetupError"}),
    "init killed": (_killed, {"signaled", "exited"}),
}


def _broken(number: int) -> str:
    """Set-up breaks at one stage after the other. One thread only: the switch is the module's."""
    stages = [name for name in _native.STAGES if name not in ("request", "source", "exec", "run")]
    launch.fault = (_native.STAGES.index(stages[number % len(stages)]), -5)
    try:
        return "" if _failed(["true"]) in ("SetupError", "SandboxUnavailable") else "no error"
    finally:
        launch.fault = None


class Soak:
    """Counts the outcomes; every thread takes the next number until there is none."""

    def __init__(self, runs: int, threads: int) -> None:
        self.runs, self.threads = runs, threads
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self._next = 0
        self.others = [thread for thread in threading.enumerate() if thread.name != "nsbox-janitor"]
        self._lock = threading.Lock()

    def one(self, number: int) -> None:
        """Run number ``number``."""
        if number % 25 or number == 0:
            result = nsbox.run(["true"])
            kind, good = "ok", result.ok
            ended = result.reason
        elif number % 250 == 0 and self.threads == 1:
            kind, ended = "broken set-up", _broken(number // 250)
            good = not ended
        else:
            kind = list(RARE)[number // 25 % len(RARE)]
            if kind == "init killed" and self.threads > 1:
                kind = "fails"  # whose init it would be is not known
            call, expected = RARE[kind]
            ended = call()
            good = ended in expected
        with self._lock:
            self.outcomes[kind] += 1
            if not good:
                self.wrong.append(f"run {number}, {kind}: {ended}")

    def until(self, end: int) -> None:
        """Run all up to number ``end``, in all threads; back when the janitor is done as well."""

        def work() -> None:
            while True:
                with self._lock:
                    number = self._next
                    if number >= end:
                        return
                    self._next += 1
                self.one(number)

        threads = [threading.Thread(target=work) for _ in range(self.threads - 1)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        settle(self.others)


def settle(others: Collection[threading.Thread] = ()) -> None:
    """Wait until what is given back off the caller's path has been; ``others`` are threads that were there before."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        janitor.flush()
        helper = _native.zygote().pid
        ours = set(threading.enumerate()).difference(others, [threading.main_thread()])
        if not ours and not Path(f"/proc/{helper}/task/{helper}/children").read_text():
            return
        time.sleep(0.05)


def held() -> dict[str, int]:
    """What this process holds, and what it has outside of itself."""
    gc.collect()
    own = os.getpid()
    groups = 0
    for directory, names, _ in os.walk("/sys/fs/cgroup"):
        groups += sum(f"/nsbox/{own}-" in f"{directory}/{name}/" for name in names)
    children = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit():
                children += (
                    int(Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()[1]) == own
                )
    return {
        "rss_kib": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 10,
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": children,
        "cgroups": groups,
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "links": len(Path("/proc/net/dev").read_text().splitlines()) - 2,
    }


def grown(rows: list[dict[str, int]]) -> list[str]:
    """What is more at the end than after the first interval, which is still part of warming up."""
    first, last = rows[1], rows[-1]
    out = [
        f"{name}: {first[name]}, then {last[name]}" for name in first if name != "rss_kib" and last[name] > first[name]
    ]
    if last["rss_kib"] - first["rss_kib"] > MEMORY_SLACK >> 10:
        out.append(f"rss_kib: {first['rss_kib']}, then {last['rss_kib']}")
    return out


def soak(runs: int, threads: int, every: int, say: Callable[[str], object] = print) -> tuple[list[str], dict[str, Any]]:
    """(what went wrong, figures)."""
    work = Soak(runs, threads)
    nsbox.run(["true"])
    settle(work.others)
    rows: list[dict[str, int]] = []
    began = time.monotonic()
    for end in [0, *range(every, runs, every), runs]:
        work.until(end)
        rows.append(held())
        if not end:
            say("    runs  seconds  " + "  ".join(f"{name:>8}" for name in rows[0]))
        values = "  ".join(f"{value:8}" for value in rows[-1].values())
        say(f"{end:8}  {time.monotonic() - began:7.1f}  {values}")
    seconds = round(time.monotonic() - began, 1)
    figures = {"runs": runs, "threads": threads, "seconds": seconds, "outcomes": dict(work.outcomes), "rows": rows}
    return work.wrong + grown(rows), figures


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Thousands of sandboxes in one process, which must not grow.")
    parser.add_argument("--runs", type=int, default=10000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--every", type=int, default=1000)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    wrong, figures = soak(options.runs, options.threads, options.every)
    print(", ".join(f"{kind}: {count}" for kind, count in sorted(figures["outcomes"].items())))
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")
    for line in wrong:
        print(line)
    print("grew or went wrong" if wrong else "flat")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
