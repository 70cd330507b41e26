"""Writes results/README.md from the results that lie there: every table, every plot.

python benchmarks/tables.py [DIR]
"""

import json
import sys
from pathlib import Path

import neighbours
import network

from nsbox.bench import NAMES, frame, named

HEAD = """# Results

Written by `benchmarks/tables.py` from the JSON files beside it; what the figures mean is in [the README](../README.md).
"""


def benchmarks() -> dict[str, frame.Benchmark]:
    """All of them by name, in the order of a report."""
    return {**{name: named(name) for name in NAMES}, "network": network.BENCHMARK, "neighbours": neighbours.BENCHMARK}


def page(directory: Path) -> str:
    """The whole text."""
    parts = [HEAD]
    for name, benchmark in benchmarks().items():
        reports = [(path, json.loads(path.read_text())) for path in sorted(directory.glob("*.json"))]
        for path, report in reports:
            if report["benchmark"] != name:
                continue
            title = f"{name}, as {report['host']['user']}"
            touched = report["options"].get("touch_mib")
            parts.append(f"## {title}{f', the caller with {touched} MiB in use' if touched else ''}\n")
            parts.append(f"[{path.name}]({path.name})\n\n```\n{frame.words(benchmark, report)}```\n")
            for plot in benchmark.plots(report):
                drawn = f"{plot}{frame.result_name(report)}.svg"
                if (directory / drawn).exists():
                    parts.append(f"![{plot}]({drawn})\n")
    return "\n".join(parts)


if __name__ == "__main__":
    where = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "results")
    (where / "README.md").write_text(page(where), encoding="utf-8")
