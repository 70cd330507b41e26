"""What the command costs as a whole process, against an interpreter that does nothing: `import nsbox`, `nsbox run`."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from nsbox.bench.frame import Benchmark, Found, Setting, ratio_table
from nsbox.bench.measure import Samples, measure, spawn, summary

BASELINE = "python3 -c pass"
COMMAND = "from nsbox.cli import main; main()"
PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def environment() -> dict[str, str]:
    """With this very nsbox, wherever it lies, and the caller's home, where compiled filters are kept."""
    kept = {name: os.environ[name] for name in ("HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR") if name in os.environ}
    path = {"PYTHONPATH": PACKAGE_PARENT} if os.path.exists(f"{PACKAGE_PARENT}/nsbox/cli.py") else {}
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **kept, **path}


def interpreters() -> list[str]:
    """This one; that of the system; those that NSBOX_BENCH_PYTHON names, with colons between. Where nsbox works."""
    named = os.environ.get("NSBOX_BENCH_PYTHON", "").split(":")
    out: list[str] = []
    for path in (sys.executable, "/usr/bin/python3", *named):
        if path and path not in out and os.access(path, os.X_OK):
            probe = [path, "-c", COMMAND, "run", "--", "true"]
            if subprocess.run(probe, capture_output=True, env=environment()).returncode == 0:
                out.append(path)
    return out


def subjects(python: str) -> dict[str, Callable[[], object]]:
    lines = {
        BASELINE: ["-c", "pass"],
        "import nsbox": ["-c", "import nsbox"],
        "import nsbox, use nsbox.run": ["-c", "import nsbox; nsbox.run"],
        "nsbox --version": ["-c", COMMAND, "--version"],
        "nsbox run -- true": ["-c", COMMAND, "run", "--", "true"],
    }
    return {
        name: functools.partial(spawn, [python, *words], environment(), silent=True) for name, words in lines.items()
    }


def run(settings: dict[str, Any]) -> Found:
    results: dict[str, Any] = {}
    baseline: Samples = []
    for python in interpreters():
        samples = measure(subjects(python), int(settings["runs"]), 3)
        baseline = baseline or samples[BASELINE]
        results[python] = {name: summary(values, samples[BASELINE]) for name, values in samples.items()}
    return {"results": {_name(python): found for python, found in results.items()}}, baseline


def _name(python: str) -> str:
    """An interpreter by version and place, without naming anybody's directories."""
    asked = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
    version = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    where = "system" if os.path.realpath(python).startswith("/usr/bin/") else "own"
    return f"Python {version} ({where}{', venv' if os.path.islink(python) and where == 'system' else ''})"


def text(report: dict[str, Any]) -> list[str]:
    return [ratio_table(name, BASELINE, results) for name, results in report["results"].items()]


BENCHMARK = Benchmark(
    "program",
    "What the nsbox command costs as a process of its own, against an interpreter that does nothing.",
    (Setting("runs", 60, 2, 8, "measured rounds"),),
    run,
    text,
)
