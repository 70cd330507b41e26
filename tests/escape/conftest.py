"""Runs an attack outside, as the control, and inside."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nsbox
from nsbox.selftest import attempted

FOLDER = Path(attempted.__file__).parent
Attempt = Callable[..., str]


def run_outside(*words: str, python: str = sys.executable) -> str:
    """What an attack comes to outside: ``done``, an errno's name, or the signal that ended it."""
    made = subprocess.run(
        [python, "-m", "attempts", *words],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    assert made.returncode == 0, made.stderr
    return made.stdout.strip().partition(" ")[2]


def program(*words: str, **options: Any) -> nsbox.Result:
    """The program in a sandbox of its own; the options are those of ``nsbox.run``."""
    mounts = [(str(FOLDER / "attempts"), "/selftest/attempts"), *options.pop("ro", [])]
    return nsbox.run(["python3", "-m", "attempts", *words], ro=mounts, cwd="/selftest", **options)


@pytest.fixture(scope="session")
def control() -> Attempt:
    """Attempts an attack outside, as root over namespaces of its own."""
    return lambda name: run_outside("--control", name)


@pytest.fixture(scope="session")
def outside() -> Attempt:
    """Attempts an attack outside, as the caller."""
    return run_outside


@pytest.fixture(scope="session")
def inside() -> Attempt:
    """Attempts an attack in a sandbox of its own; the options are those of ``nsbox.run``."""

    def attempt(*words: str, **options: Any) -> str:
        result = program(*words, **options)
        if result.signal is not None:
            return f"signal {result.signal}"
        assert result.exit_code == 0, result.stderr_text
        return result.stdout_text.strip().partition(" ")[2]

    return attempt


@pytest.fixture(scope="session")
def works_as_root_only() -> bool:
    """Whether the caller can show what only root can."""
    return os.geteuid() == 0
