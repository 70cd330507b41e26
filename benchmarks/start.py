"""What a fresh sandbox costs: /bin/true through ``nsbox.run`` against posix_spawn(3), unshare(1) and bwrap(1).

    python benchmarks/start.py [--runs N] [--warmup N] [--touch-mib N] [--json FILE]

All subjects take turns in one process, so that what disturbs one disturbs all; the ratio to posix_spawn of the same run
is the figure to compare between machines. Run it as root and as an ordinary user: the paths differ.
"""

import argparse
import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import _common

TRUE = "/bin/true"
BASELINE = "posix_spawn"
FORKS = 20
NAMESPACES = ("--fork", "--pid", "--mount", "--net", "--ipc", "--uts", "--cgroup", "--user", "--map-root-user")

# The stages of native/nsbox.h in words: each row is the time since the row before.
STEPS = {
    "cgroup": "join the cgroups (v1), cgroup namespace",
    "hostname": "network thread started, private mounts, host name",
    "idmap": "wait for the id maps (and sources, for root)",
    "identity": "take on the new identity",
    "scratch": "scratch file system",
    "mount": "overlay root, /usr, /dev, /proc, masks",
    "pivot": "pivot_root, old root off",
    "landlock": "Landlock ruleset",
    "network": "wait for the network namespace, enter it",
    "limits": "close descriptors, resource limits",
    "capabilities": "capability sets, securebits, ids, no_new_privs",
    "seccomp": "load the filter",
    "exec": "vfork, exec of the command",
}


class Sandbox:
    """The subject: one fresh sandbox a call. Keeps what each Result says about its own time."""

    def __init__(self) -> None:
        import nsbox

        self._run, self._spec = nsbox.run, nsbox.Spec()
        self.results: list[dict[str, float]] = []
        self.enforced: dict[str, str] = {}

    def __call__(self) -> None:
        began = time.perf_counter_ns()
        result = self._run([TRUE], self._spec)
        whole = (time.perf_counter_ns() - began) / 1000
        if not result.ok:
            raise RuntimeError(f"{TRUE} in a sandbox: {result!r} {result.stderr_text}")
        self.results.append(account(result.timing, result.steps, whole))
        self.enforced = {layer: how["strength"] for layer, how in result.enforced.items()}


def account(timing: dict[str, float], steps: dict[str, float], whole_us: float) -> dict[str, float]:
    """Where the time of one run went, in microseconds: request, the steps of init, the run, the end, and what lies
    before and after what the Result covers."""
    before = timing["setup_ms"] * 1000 - sum(steps.values())
    around = whole_us - timing["total_ms"] * 1000
    after = {"run": timing["run_ms"] * 1000, "teardown": timing["teardown_ms"] * 1000, "around": max(0.0, around)}
    return {"request": max(0.0, before), **steps, **after}


def bwrap_argv(program: str) -> list[str]:
    """bubblewrap with the same namespaces and a root of about the same content."""
    argv = [program, "--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            argv += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            argv += ["--ro-bind", f"/{name}", f"/{name}"]
    return [*argv, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", TRUE]


def peers() -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """The programs to compare with that work here, and for the others why they do not."""
    found: dict[str, Callable[[], object]] = {}
    skipped = {}
    for name in ("unshare", "bwrap"):
        program = shutil.which(name)
        if program is None:
            skipped[name] = "not installed"
            continue
        argv = bwrap_argv(program) if name == "bwrap" else [program, *NAMESPACES, TRUE]
        try:
            _common.spawn(argv)
        except (OSError, RuntimeError) as error:
            skipped[name] = str(error)
        else:
            found[name] = functools.partial(_common.spawn, argv)
    return found, skipped


def fork_and_exec() -> None:
    """What a library pays that forks its caller."""
    pid = os.fork()
    if pid == 0:
        try:
            os.execv(TRUE, [TRUE])
        finally:
            os._exit(127)
    os.waitpid(pid, 0)


def first_run(subject: Callable[[], object]) -> float:
    """Milliseconds of the first sandbox of a process: the filter's cache, the plan, the helper process."""
    began = time.perf_counter()
    subject()
    return round((time.perf_counter() - began) * 1000, 2)


def steps_summary(results: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """p50 and p95 in microseconds of each part of the sandbox's time, in order."""
    out = {}
    order = ("request", *STEPS, "run", "teardown", "around")
    for name in [name for name in order if any(name in result for result in results)]:
        values = [result.get(name, 0.0) for result in results]
        p50, p95 = _common.median(values), _common.percentile(values, 0.95)
        out[name] = {"p50_us": round(p50, 1), "p95_us": round(p95, 1)}
    return out


def benchmark(runs: int, warmup: int, touch_mib: int, pause_ms: float) -> dict[str, Any]:
    """Everything that the JSON file holds."""
    memory = _common.touched(touch_mib)
    sandbox = Sandbox()
    first = first_run(sandbox)
    others, skipped = peers()
    quiet = _common.Quiet()
    subjects: dict[str, Callable[[], object]] = {BASELINE: lambda: _common.spawn([TRUE]), "nsbox": sandbox, **others}
    samples = _common.measure(subjects, runs, warmup, pause_s=pause_ms / 1000)
    quiet_facts = quiet.report(samples[BASELINE])
    results = {name: _common.summary(values, samples[BASELINE]) for name, values in samples.items()}
    if touch_mib:
        # By itself and last: a fork leaves every page of the caller to be copied at the next write.
        forks = _common.measure({"fork": fork_and_exec}, FORKS, 2)["fork"]
        results["fork"] = _common.summary(forks, samples[BASELINE][:FORKS])
    return {
        "benchmark": "start",
        "host": _common.host_facts(),
        "options": {"runs": runs, "warmup": warmup, "touch_mib": len(memory) >> 20, "pause_ms": pause_ms},
        "quiet": quiet_facts,
        "first_run_ms": first,
        "results": results,
        "skipped": skipped,
        "steps": steps_summary(sandbox.results[-runs:]),
        "enforced": sandbox.enforced,
    }


def results_table(report: dict[str, Any]) -> str:
    """The comparison."""
    rows = []
    for name, row in report["results"].items():
        interval = f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}" if name != BASELINE else ""
        rows.append([name, f"{row['p50_us']:.0f}", f"{row['p95_us']:.0f}", f"{row['ratio']:.2f}", interval])
    rows += [[name, "", "", "", why] for name, why in report["skipped"].items()]
    return _common.table(["/bin/true by", "p50 µs", "p95 µs", f"× {BASELINE}", "95 % interval"], rows)


def steps_table(report: dict[str, Any]) -> str:
    """Where the sandbox's time goes."""
    words = {
        "request": "plan, pipes, request, clone3",
        **STEPS,
        "run": "the command itself",
        "teardown": "end of everything inside",
        "around": "Spec from the cache, Result, closing (Python)",
    }
    rows = [[words[name], f"{row['p50_us']:.0f}", f"{row['p95_us']:.0f}"] for name, row in report["steps"].items()]
    return _common.table(["step of nsbox", "p50 µs", "p95 µs"], rows)


def show(report: dict[str, Any]) -> None:
    """The report for people."""
    host, options = report["host"], report["options"]
    machine = f"{host['cpu']}, {host['cores']} cores{', virtual machine' if host['virtual'] else ''}"
    print(f"{machine}, Linux {host['kernel']}, Python {host['python']}, as {host['user']}")
    print(f"{options['runs']} rounds after {options['warmup']} unmeasured ones, {options['touch_mib']} MiB of ballast")
    print(f"first sandbox of the process: {report['first_run_ms']:.1f} ms\n")
    print(results_table(report), steps_table(report), sep="\n\n")
    for warning in report["quiet"]["warnings"]:
        print(f"\nwarning: {warning}; the figures are of little use")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What a fresh sandbox costs, against posix_spawn, unshare and bwrap.")
    parser.add_argument("--runs", type=int, default=300, metavar="N", help="measured rounds (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=20, metavar="N", help="rounds before them (default: %(default)s)")
    parser.add_argument("--touch-mib", type=int, default=0, metavar="N", help="have N MiB of memory in use")
    parser.add_argument("--pause-ms", type=float, default=0.0, metavar="MS", help="idle time before each call")
    parser.add_argument("--json", metavar="FILE", help="write the report there as well")
    args = parser.parse_args(arguments)
    if args.runs < 2 or args.warmup < 0 or args.touch_mib < 0 or args.pause_ms < 0:
        parser.error("--runs must be at least 2, the others not negative")
    report = benchmark(args.runs, args.warmup, args.touch_mib, args.pause_ms)
    show(report)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1, ensure_ascii=False)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
