"""The short form of tests/soak/soak.py."""

import importlib.util
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[1] / "soak" / "soak.py"


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 8])
def test_many_runs_of_every_outcome_leave_nothing(threads: int) -> None:
    spec = importlib.util.spec_from_file_location("soak", SOAK)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    said: list[str] = []
    wrong, figures = module.soak(80, threads, 30, said.append)
    assert wrong == [], "\n".join(said)
    assert sum(figures["outcomes"].values()) == 80
