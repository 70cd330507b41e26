"""README.md tells the truth: its examples are run, and what they print is what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nsbox
from nsbox import cli_options

README = Path(__file__).parents[2] / "README.md"
TEXT = README.read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
MARK = "--- end of a command ---"


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to type in, with ``nsbox`` in PATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nsbox").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nsbox "$@"\n')
    (tmp_path / "bin/nsbox").chmod(0o755)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")


def typed(block: str) -> list[tuple[str, str]]:
    """(command, what it should print) of a block that shows a terminal."""
    steps: list[tuple[str, str]] = []
    for line in block.splitlines(keepends=True):
        if line.startswith("$ "):
            steps.append((line[2:].strip(), ""))
        else:
            steps[-1] = (steps[-1][0], steps[-1][1] + line)
    return steps


def as_pattern(text: str) -> str:
    """``...`` in what a command prints stands for anything."""
    return re.escape(text).replace(re.escape("..."), r"[\s\S]*")


# One session, as a reader would type it: later blocks may use files of earlier ones.
def test_terminal() -> None:
    steps = [step for block in blocks("console") for step in typed(block)]
    assert len(steps) > 8
    # The subshell gives the next command the status that $? has to show.
    script = "umask 022\n" + "".join(f"{words}\ns=$?; echo '{MARK}'; (exit $s)\n" for words, _ in steps)
    done = subprocess.run(
        ["sh"], input=script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
    )
    for (words, expected), printed in zip(steps, done.stdout.split(MARK + "\n"), strict=False):
        # The warning is for hosts without cgroups for this caller; the README is not written on one.
        printed = re.sub(r"nsbox: watched, not held .*\n", "", printed)
        assert re.fullmatch(as_pattern(expected), printed), f"$ {words}\n{printed}"
    assert done.stdout.count(MARK) == len(steps)


@pytest.mark.parametrize("code", blocks("python"))
def test_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_profile(tmp_path: Path) -> None:
    (text,) = blocks("toml")
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
