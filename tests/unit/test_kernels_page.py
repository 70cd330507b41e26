"""docs/kernels.md says what a run in virtual machines found, and nothing else."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_spec = importlib.util.spec_from_file_location("kernels", ROOT / "tests" / "vm" / "kernels.py")
assert _spec
assert _spec.loader
kernels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kernels)


def test_the_page_is_made_from_the_results() -> None:
    rows = json.loads((DOCS / "kernels.json").read_text())
    assert (DOCS / "kernels.md").read_text() == kernels.page(rows), "run: python tests/vm/kernels.py"


def test_the_results_are_of_a_run_without_failures() -> None:
    rows = json.loads((DOCS / "kernels.json").read_text())
    assert len({row["kernel"].split("-")[0] for row in rows}) >= 2, "two kernels at least"
    assert all("failed" not in row["tests"] and "passed" in row["tests"] for row in rows)


@pytest.mark.parametrize("caller", kernels.CALLERS)
def test_every_caller_has_words(caller: str) -> None:
    row = {"kernel": "6.1, cgroup v2", "caller": caller, "tests": "1 passed"}
    assert f"| 6.1 | v2 | {kernels.CALLERS[caller]} | 1 passed | – |" in kernels.page([row])
