"""What every benchmark has around it: options, the look at the machine, the report in words, as JSON and as plots."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nsbox.bench.host import Quiet, host_facts
from nsbox.bench.measure import Samples

#: what a run comes to: facts for the report, and the samples that tell whether the machine was quiet
Found = tuple[dict[str, Any], Samples]


class Setting(NamedTuple):
    """A number that a benchmark can be told."""

    name: str
    default: float
    least: float
    quick: float  #: in its place where a few seconds must do
    help: str


class Benchmark(NamedTuple):
    """One benchmark. ``run`` is given the settings by name; ``text`` and ``plots`` are given the report."""

    name: str
    summary: str
    settings: tuple[Setting, ...]
    run: Callable[[dict[str, Any]], Found]
    text: Callable[[dict[str, Any]], list[str]]
    plots: Callable[[dict[str, Any]], dict[str, str]] = lambda report: {}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned text; the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *map(line, rows)])


def ratio_table(what: str, baseline: str, results: Mapping[str, Mapping[str, float]]) -> str:
    """Rows of ``measure.summary``; the baseline has no interval."""
    rows = []
    for name, row in results.items():
        interval = f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}" if name != baseline else ""
        rows.append([name, f"{row['p50_us']:.0f}", f"{row['p95_us']:.0f}", f"{row['ratio']:.2f}", interval])
    return table([what, "p50 µs", "p95 µs", f"× {baseline}", "95 % interval"], rows)


def values(benchmark: Benchmark, quick: bool = False) -> dict[str, Any]:
    """The settings as they are where nobody says otherwise."""
    return {setting.name: setting.quick if quick else setting.default for setting in benchmark.settings}


def perform(benchmark: Benchmark, settings: dict[str, Any]) -> dict[str, Any]:
    """Run it; everything that the JSON file holds."""
    quiet = Quiet()
    facts, baseline = benchmark.run(settings)
    return {
        "benchmark": benchmark.name,
        "host": host_facts(),
        "options": settings,
        "quiet": quiet.report(baseline),
        **facts,
    }


def machine(report: Mapping[str, Any]) -> str:
    """One line about where the figures come from."""
    host = report["host"]
    where = f"{host['cpu']}, {host['cores']} cores{', virtual machine' if host['virtual'] else ''}"
    return f"{where}, Linux {host['kernel']}, Python {host['python']}, as {host['user']}"


def words(benchmark: Benchmark, report: dict[str, Any], head: bool = True) -> str:
    """The report for people."""
    options = ", ".join(f"{value:g} {name.replace('_', ' ')}" for name, value in report["options"].items())
    parts = [f"{machine(report)}\n{options}"] if head else [options]
    parts += benchmark.text(report)
    parts.append("\n".join(f"warning: {warning}" for warning in report["quiet"]["warnings"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def write(path: str, text: str) -> None:
    """A file, whole. Raises OSError."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def as_json(report: object) -> str:
    return json.dumps(report, indent=1, ensure_ascii=False) + "\n"


def write_plots(benchmark: Benchmark, report: dict[str, Any], directory: str, suffix: str = "") -> list[str]:
    """Every plot of a report as DIRECTORY/NAME.svg; their paths."""
    os.makedirs(directory, exist_ok=True)
    paths = []
    for name, svg in benchmark.plots(report).items():
        paths.append(os.path.join(directory, f"{name}{suffix}.svg"))
        write(paths[-1], svg)
    return paths


def variant(report: Mapping[str, Any]) -> str:
    """What tells two kinds of the same benchmark apart in the names of result files: the caller's ballast."""
    touched = int(report["options"].get("touch_mib", 0))
    return f"-{touched}mib" if touched else ""


def result_name(report: Mapping[str, Any]) -> str:
    """The end of the names of result files: variant, kernel, processors, caller."""
    host = report["host"]
    return f"{variant(report)}-{host['kernel'].split('-')[0]}-{host['cores']}c-{host['user']}"


def _parser(benchmark: Benchmark) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=benchmark.summary)
    for name, default, _, _, text in benchmark.settings:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--quick", action="store_true", help="fewer of everything: a look, no figures to keep")
    parser.add_argument("--json", metavar="FILE", help="write the report there as well")
    parser.add_argument("--svg", metavar="DIR", help="draw the plots there")
    parser.add_argument("--results", metavar="DIR", help="write both there, named after kernel, processors and caller")
    return parser


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> int:
    """One benchmark as a program of its own."""
    parser = _parser(benchmark)
    args = vars(parser.parse_args(arguments))
    settings = values(benchmark, args["quick"])
    settings |= {name: args[name] for name in settings if args[name] is not None}
    for setting in benchmark.settings:
        if settings[setting.name] < setting.least:
            parser.error(f"--{setting.name.replace('_', '-')} must be at least {setting.least}")
    try:
        report = perform(benchmark, settings)
    except RuntimeError as error:
        print(f"{benchmark.name}: {error}", file=sys.stderr)
        return 1
    print(words(benchmark, report), end="")
    if args["json"]:
        write(args["json"], as_json(report))
    if args["svg"]:
        write_plots(benchmark, report, args["svg"])
    if args["results"]:
        os.makedirs(args["results"], exist_ok=True)
        name = result_name(report)
        write(os.path.join(args["results"], f"{benchmark.name}{name}.json"), as_json(report))
        write_plots(benchmark, report, args["results"], name)
    return 0
