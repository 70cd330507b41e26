"""Boots a virtual machine for each kernel and lets suite.sh run in it. Slow: only when asked for by its path."""

import json
import os
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from . import vm
from .conftest import rows

HERE = Path(__file__).parent
#: see suite.sh
PASSES = {"brief": {"v2": 3}, "usual": {"v2": 5, "hybrid": 3, "v1": 3}, "full": {"v2": 5, "hybrid": 3, "v1": 3}}
SECONDS = {"brief": 800, "usual": 1800, "full": 6 * 3600}  #: for one machine

#: An emulated processor on a busy host now and then panics or stands still before anything of ours has run.
BOOTS = 2

pytestmark = [pytest.mark.vm, pytest.mark.slow]

BRIEF = [("6.1", "v2"), ("6.12", "v2")]
#: On the hybrid host with 6.12 memory is on v2, for which alone that kernel has a controller, and the others on v1.
MACHINES = [*BRIEF, ("6.12", "hybrid"), ("6.1", "hybrid"), ("6.1", "v1")]


@pytest.fixture(scope="session")
def extent(pytestconfig: pytest.Config) -> str:
    """``brief``, ``usual`` or ``full``; skips where machines were not asked for."""
    named = [Path(str(word).partition("::")[0]).resolve() for word in pytestconfig.option.file_or_dir]
    if not any(path == HERE or HERE in path.parents for path in named):
        pytest.skip("boots virtual machines for some minutes: ./bootstrap test-vm")
    options = {word: pytestconfig.getoption(f"--{word}", False) for word in ("brief", "full")}
    return next((word for word, given in options.items() if given), "usual")


def _counts(report: Path) -> tuple[dict[str, int], list[str]]:
    """(passed, failed, skipped; what failed) of a pass, from pytest's JUnit file."""
    counts, failed = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[kind] += 1
        if kind == "failed":
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return counts, failed


def _row(kernel: str, folder: Path) -> tuple[dict[str, str], list[str]]:
    """A line of the table for one pass, and what went wrong in it."""
    row = {"kernel": kernel, "caller": folder.name}
    wrong: list[str] = []
    try:
        counts, wrong = _counts(folder / "junit.xml")
        row["tests"] = " ".join(f"{number} {kind}" for kind, number in counts.items() if number or kind == "passed")
    except OSError:
        wrong.append("the tests did not come to an end")
    try:
        facts = json.loads((folder / "facts.json").read_text())
    except (OSError, ValueError):
        return row, [*wrong, "nothing could be learnt of what is enforced"]
    if "refused" in facts:
        row["memory"] = "refused: " + facts["refused"].partition("; ")[2].partition(";")[0]
    for layer, value in facts.get("enforced", {}).items():
        detail = value["how"].partition(";")[0] if layer in ("landlock", "overlay") else ""
        row[layer] = f"{value['strength']} {detail}".strip()
    row["root layer"] = facts.get("skeleton", "")
    left = (folder / "left.txt").read_text().split()
    return row, wrong + [f"control group left: {path}" for path in left]


@pytest.mark.parametrize(("series", "cgroup"), MACHINES)
def test_in_a_machine(series: str, cgroup: str, extent: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if extent == "brief" and (series, cgroup) not in BRIEF:
        pytest.skip("not with --brief")
    try:
        kernel = vm.kernel(series)
    except vm.Unavailable as error:
        pytest.skip(str(error))
    command = [str(HERE / "suite.sh"), os.environ.get("NSBOX_VM_PYTHON", sys.executable), extent]
    log, results = tmp_path / "log", tmp_path / "results"
    results.mkdir()
    problems: list[str] = []
    for _ in range(BOOTS):
        problems.clear()
        with open(log, "ab") as output:
            try:
                limit = SECONDS[extent]
                vm.boot(kernel, command, cgroup=cgroup, timeout=limit, results=results, output=output.fileno())
            except (vm.Unavailable, TimeoutError) as error:
                problems.append(str(error))
        if any(results.iterdir()):
            break
    folders = sorted(results.iterdir())
    if len(folders) != PASSES[extent][cgroup]:
        problems.append(f"{len(folders)} passes have run, not {PASSES[extent][cgroup]}")
    for folder in folders:
        row, wrong = _row(f"{kernel.release}, cgroup {cgroup}", folder)
        pytestconfig.stash[rows].append(row)
        problems += [f"{folder.name}: {problem}" for problem in wrong]
    if problems:
        text = log.read_text(errors="replace")[-20000:]
        pytest.fail("\n".join([text, *problems]), pytrace=False)
