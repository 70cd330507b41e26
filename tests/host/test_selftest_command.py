"""`nsbox selftest`, whole, as its users start it."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from nsbox.selftest import catalogue


def selftest(*words: str) -> "subprocess.CompletedProcess[str]":
    """The command; what it makes in the temporary directory must be gone when it ends."""
    argv = [sys.executable, "-m", "nsbox", "selftest", *words]
    with tempfile.TemporaryDirectory(prefix="command-") as folder:
        env = {**os.environ, "TMPDIR": folder}
        made = subprocess.run(argv, capture_output=True, text=True, timeout=300, cwd="/", env=env)
        assert os.listdir(folder) == []
    return made


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["default", "strict", "permissive"])
def test_everything_is_stopped_and_every_control_works(profile: str) -> None:
    made = selftest("--json", "--profile", profile)
    assert made.stderr == ""
    document: dict[str, Any] = json.loads(made.stdout)
    bad = [item for item in document["attempts"] if item["result"] not in ("stopped", "absent")]
    assert bad == []
    assert (made.returncode, document["verdict"]) == (0, "stopped")
    assert document["caller"] == ("root" if os.geteuid() == 0 else f"uid {os.geteuid()}")
    attempted = {item["id"] for item in document["attempts"]}
    left = {item["id"] for item in document["not_attempted"]}
    assert attempted | left == {threat.id for threat in catalogue.THREATS}
    assert attempted >= {threat.id for threat in catalogue.THREATS if not threat.left}


@pytest.mark.slow
def test_a_hole_is_found(tmp_path: Path) -> None:
    """The other way round: where a profile lets something through, the self-test says so."""
    profile = tmp_path / "open.toml"
    profile.write_text('extends = "default"\nnet = "host"\nallow_host_net = true\n')
    made = selftest("--profile", str(profile))
    assert made.returncode == 1
    assert "GOT THROUGH: " in made.stdout
    assert "through    N01" in made.stdout


def test_no_interpreter_is_an_error_not_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    from nsbox import python_env
    from nsbox.errors import HostError, SpecError
    from nsbox.selftest import stage

    def nothing() -> None:
        raise SpecError("there is none")

    monkeypatch.setattr(stage.os, "access", lambda *_: False)
    monkeypatch.setattr(python_env, "of", nothing)
    with pytest.raises(HostError, match=r"python3 is missing.*install python3"):
        stage.interpreter()
