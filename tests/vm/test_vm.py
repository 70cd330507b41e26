"""Boots a virtual machine for each kernel and lets suite.sh run in it. Slow: only when asked for by its path."""

import json
import os
import shutil
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from . import vm
from .conftest import rows

HERE = Path(__file__).parent
#: what ``--full`` runs, a machine for each: ``usual``, the attacks, and what else is in these folders of tests
PARTS = ("usual", "unit", "native", "escape", "host", "environments", "faults", "cases")
#: how many passes there are (see suite.sh) and how many seconds they may take; of a folder: 2, and hours
PASSES = {"brief": {"v2": 3}, "usual": {"v2": 5, "hybrid": 3, "v1": 3}}
SECONDS = {"brief": 800, "usual": 1800}

#: An emulated processor on a busy host now and then panics or stands still before anything of ours has run.
BOOTS = 2

pytestmark = [pytest.mark.vm, pytest.mark.slow]

BRIEF = [("6.1", "v2"), ("6.12", "v2")]
#: On the hybrid host with 6.12 memory is on v2, for which alone that kernel has a controller, and the others on v1.
MACHINES = [*BRIEF, ("6.12", "hybrid"), ("6.1", "hybrid"), ("6.1", "v1")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each machine; with ``--full`` for each machine and part."""
    brief, full = (metafunc.config.getoption(f"--{word}", False) for word in ("brief", "full"))
    parts = PARTS if full else ("brief",) if brief else ("usual",)
    cases = [(*machine, part) for machine in (BRIEF if brief else MACHINES) for part in parts]
    names = ["-".join(case if full else case[:2]) for case in cases]
    metafunc.parametrize(("series", "cgroup", "part"), cases, ids=names)


@pytest.fixture(autouse=True)
def asked_for(pytestconfig: pytest.Config) -> None:
    """Skips where machines were not asked for."""
    named = [Path(str(word).partition("::")[0]).resolve() for word in pytestconfig.option.file_or_dir]
    if not any(path == HERE or HERE in path.parents for path in named):
        pytest.skip("boots virtual machines for some minutes: ./bootstrap test-vm")


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


def _row(kernel: str, part: str, folder: Path) -> tuple[dict[str, str], list[str]]:
    """A line of the table for one pass, and what went wrong in it."""
    row = {"kernel": kernel, "caller": folder.name if part in PASSES else f"{folder.name}: {part}"}
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


def test_in_a_machine(series: str, cgroup: str, part: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    try:
        kernel = vm.kernel(series)
    except vm.Unavailable as error:
        pytest.skip(str(error))
    command = [str(HERE / "suite.sh"), os.environ.get("NSBOX_VM_PYTHON", sys.executable), part]
    log, results = tmp_path / "log", vm.cache() / "results" / f"{series}-{cgroup}-{part}"
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    problems: list[str] = []
    for _ in range(BOOTS):
        problems.clear()
        with open(log, "ab") as output:
            try:
                limit = SECONDS.get(part, 6 * 3600)
                vm.boot(kernel, command, cgroup=cgroup, timeout=limit, results=results, output=output.fileno())
            except (vm.Unavailable, TimeoutError) as error:
                problems.append(str(error))
        if any(results.iterdir()):
            break
    folders = sorted(results.iterdir())
    expected = PASSES[part][cgroup] if part in PASSES else 2
    if len(folders) != expected:
        problems.append(f"{len(folders)} passes have run, not {expected}")
    for folder in folders:
        row, wrong = _row(f"{kernel.release}, cgroup {cgroup}", part, folder)
        pytestconfig.stash[rows].append(row)
        problems += [f"{folder.name}: {problem}" for problem in wrong]
    if problems:
        text = log.read_text(errors="replace")[-20000:]
        pytest.fail("\n".join([text, *problems]), pytrace=False)
