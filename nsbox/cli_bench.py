"""``nsbox bench``: what isolation costs on this host."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nsbox.bench import NAMES, USUAL, named
from nsbox.cli_options import suggestion
from nsbox.errors import NsboxError, SpecError

if TYPE_CHECKING:
    from nsbox.bench.frame import Benchmark


class BenchError(NsboxError):
    """A measurement that could not be made."""


def chosen(words: Sequence[str]) -> "list[Benchmark]":
    """The benchmarks of these names. Raises SpecError for a name that is none."""
    for word in words:
        if word not in NAMES:
            raise SpecError(f"bench: {word!r} is no benchmark{suggestion(word, NAMES)}; there are {', '.join(NAMES)}")
    return [named(name) for name in NAMES if name in (words or USUAL)]


def show(values: Mapping[str, Any], words: Sequence[str], write: Any) -> int:
    """Measure and tell, one benchmark after the other; ``write`` prints text. The exit status."""
    from nsbox.bench import frame, outline, svg

    reports: list[dict[str, Any]] = []
    drawn: list[str] = []
    plots: list[str] = []
    try:
        for benchmark in chosen(words):
            report = frame.perform(benchmark, frame.values(benchmark, bool(values.get("quick"))))
            head = "" if reports else frame.machine(report) + "\n"
            write(f"{head}\n{benchmark.name}: {benchmark.summary}\n{frame.words(benchmark, report, head=False)}")
            reports.append(report)
            plots += benchmark.plots(report).values() if "plot" in values else ()
            if "svg" in values:
                drawn += frame.write_plots(benchmark, report, values["svg"])
        if "json" in values:
            frame.write(values["json"], frame.as_json({**outline.outline(reports), "benchmarks": reports}))
        if "plot" in values:
            frame.write(values["plot"], svg.stack(plots))
            drawn.append(values["plot"])
    except RuntimeError as error:
        raise BenchError(f"bench: {error}") from None
    except OSError as error:
        raise BenchError(f"bench: {error.filename}: {error.strerror}; name another place") from None
    if drawn:
        write("drawn: " + ", ".join(drawn) + "\n")
    return 0
