"""The fuzzers of the C, each for a moment: README.md here. Longer: python tests/fuzz/run.py --seconds 600."""

import functools
import re
from pathlib import Path

import pytest
import run as fuzzers

SECONDS = 4
WHY_NOT = functools.cache(fuzzers.missing)


@pytest.fixture(autouse=True)
def _there_is_a_fuzzer() -> None:
    if why := WHY_NOT():
        pytest.skip(why)
    if not fuzzers.NATIVE.exists():
        pytest.skip("the sources are not here")


def number(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    assert found, text[-4000:]
    return int(found[-1])


# What the first inputs reach alone; a seed that is refused at the door reaches a fraction of it.
@pytest.mark.parametrize("target, reached", [("launch", 300), ("control", 250), ("receive", 25)])
def test_fuzzer(tmp_path: Path, target: str, reached: int) -> None:
    done = fuzzers.fuzz(target, SECONDS, tmp_path)
    assert done.returncode == 0, done.stderr[-8000:]
    assert list(tmp_path.iterdir()) == [], "what it chokes on"
    assert number(r"INITED cov: (\d+)", done.stderr) >= reached
    assert number(r"stat::number_of_executed_units: +(\d+)", done.stderr) > 1000


# The fuzzers find what is put there. (file, what is there, what takes its place, target)
FAULTS = [
    ("util.c", "offset <= plan->size - count * each", "1", "launch"),
    ("command.c", "strings_valid(base, c->pointers, c->envp, c->envc)", "1", "control"),
    ("command.c", "    while (n)\n        nsb_close(fds[--n]);\n}\n\nlong", "}\n\nlong", "control"),
    ("seam.c", "            else\n                close(fd);", "", "receive"),
]


@pytest.mark.slow
@pytest.mark.parametrize("file, good, bad, target", FAULTS, ids=range(len(FAULTS)))
def test_a_fault_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, good: str, bad: str, target: str
) -> None:
    native, found = tmp_path / "native", tmp_path / "found"
    native.mkdir()
    found.mkdir()
    for source in fuzzers.NATIVE.glob("*.[ch]"):
        text = source.read_text()
        if source.name == file:
            assert text.count(good) == 1
            text = text.replace(good, bad)
        (native / source.name).write_text(text)
    monkeypatch.setattr(fuzzers, "NATIVE", native)
    done = fuzzers.fuzz(target, 60, found)
    assert done.returncode != 0
    assert list(found.iterdir()) != []
