"""Runs an attack outside, as the control, and inside."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nsbox

PROGRAM = Path(__file__).with_name("attacks.py")
Attempt = Callable[..., str]


def run_outside(*words: str, python: str = sys.executable) -> str:
    """What an attack comes to outside: ``done``, an errno's name, or the signal that ended it."""
    made = subprocess.run(
        [python, str(PROGRAM), *words], capture_output=True, text=True, timeout=30, start_new_session=True
    )
    if made.returncode < 0:
        return f"signal {-made.returncode}"
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


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
        mounts = [(str(PROGRAM), "/attacks.py"), *options.pop("ro", [])]
        result = nsbox.run(["python3", "/attacks.py", *words], ro=mounts, **options)
        if result.signal is not None:
            return f"signal {result.signal}"
        assert result.exit_code == 0, result.stderr_text
        return result.stdout_text.strip()

    return attempt


@pytest.fixture(scope="session")
def works_as_root_only() -> bool:
    """Whether the caller can show what only root can."""
    return os.geteuid() == 0
