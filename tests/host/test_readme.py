"""README.md tells the truth: its examples are run, and what they print is what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _examples import blocks, put_nsbox_into, type_all, typed

import nsbox
from nsbox import cli_options

README = Path(__file__).parents[2] / "README.md"
TEXT = README.read_text()


def python_blocks() -> list[str]:
    return [code for _, code in blocks(TEXT, "python")]


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to type in, with ``nsbox`` in PATH."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", f"{put_nsbox_into(tmp_path / 'bin')}:{os.environ['PATH']}")


# One session, as a reader would type it: later blocks may use files of earlier ones.
def test_terminal() -> None:
    steps = [step for _, block in blocks(TEXT, "console") for step in typed(block)]
    assert len(steps) > 8
    type_all(steps)


@pytest.mark.parametrize("code", python_blocks())
def test_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_profile(tmp_path: Path) -> None:
    ((_, text),) = blocks(TEXT, "toml")
    path = tmp_path / "mine.toml"
    path.write_text(text)
    spec = nsbox.Spec.from_profile(path)
    assert (spec.timeout, spec.memory, spec.env) == (300.0, 2 << 30, {"CI": "1"})


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (README.parent / target).exists(), target


def test_options_exist() -> None:
    known = {option.flag for option in cli_options.RUN} | cli_options.NOT_YET
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT):
        assert flag in known, flag
