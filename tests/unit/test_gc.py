"""`nsbox gc` says what was removed."""

import os
import time
from pathlib import Path

import pytest

from nsbox import cli, gc
from nsbox.resources import cgroup, scratch, skeleton
from nsbox.resources import sweep as sweeping
from nsbox.resources.sweep import sweep


def test_each_thing_is_a_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gc, "sweep", lambda _: ["cgroup /a: removed", "scratch directory /b: removed"])
    assert cli.call(["gc"]) == 0
    assert capfd.readouterr().out == "cgroup /a: removed\nscratch directory /b: removed\n"


def test_nothing_is_said_too(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gc, "sweep", lambda _: [])
    assert cli.call(["gc"]) == 0
    assert capfd.readouterr().out == "nothing was left\n"


def test_it_takes_no_words(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["gc", "all"]) == 125
    assert "usage: nsbox gc" in capfd.readouterr().out


def test_all_kinds_are_swept_even_if_one_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cgroup, "sweep", lambda _: ["one"])
    monkeypatch.setattr(scratch, "sweep", lambda _: ["two"])
    monkeypatch.setattr(skeleton, "collect", refuse)
    assert sweep("/state") == ["one", "two", "skeletons in /state cannot be looked at: Permission denied"]


def test_processes_sweep_by_themselves_once_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[str] = []
    monkeypatch.setattr(sweeping, "sweep", swept.append)
    for _ in range(3):
        sweeping.sweep_in_turn(str(tmp_path))
    assert swept == [str(tmp_path)]
    stamp = tmp_path / "swept"
    for moved in (-sweeping.EVERY_S - 1, 3600):  # long ago; and a clock that was set back
        os.utime(stamp, (time.time() + moved,) * 2)
        sweeping.sweep_in_turn(str(tmp_path))
        sweeping.sweep_in_turn(str(tmp_path))
    assert len(swept) == 3


def test_a_stamp_that_cannot_be_left_keeps_nobody_from_sweeping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[str] = []
    monkeypatch.setattr(sweeping, "sweep", swept.append)
    (tmp_path / "swept").symlink_to("/nonexistent/elsewhere")
    os.utime(tmp_path / "swept", (0, 0), follow_symlinks=False)
    sweeping.sweep_in_turn(str(tmp_path))
    assert swept == [str(tmp_path)]
    assert not os.path.exists("/nonexistent/elsewhere")
