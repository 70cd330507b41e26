"""What a payload says that it did to its workspace, against what nsbox reports and exports."""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

import nsbox

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/unit"))

import overlay_driver  # noqa: E402
from test_changes import crosses, expected, plain  # noqa: E402

RUNS = int(os.environ.get("NSBOX_TEST_ROUND_TRIPS", "20"))


@pytest.mark.parametrize("seed", range(RUNS))
def test_round_trip_through_a_sandbox(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    workspace.chmod(0o755)
    for op in overlay_driver.random_ops(chance, 15):
        if op[0] != "socket":  # the guard covers those, and they would look different inside
            overlay_driver.play(str(workspace), op)
    for path, (kind, mode, *_) in overlay_driver.picture(str(workspace)).items():
        if kind == "dir":  # who is not root inside could not look into it otherwise
            (workspace / path).chmod(mode | 0o700)
    before = overlay_driver.picture(str(workspace))
    result = nsbox.run(
        ["python3", "/src/tests/unit/overlay_driver.py", "inside"],
        workspace=str(workspace),
        export=str(tmp_path / "out"),
        allow_trusted=[".git"],
        ro=[(str(ROOT), "/src")],
        env={"PYTHONPATH": "/src"},
        stdin=json.dumps(overlay_driver.random_ops(chance, 20)),
    )
    assert result.ok, result.stderr_text
    after: dict[str, Any] = json.loads(result.stdout)
    assert overlay_driver.picture(str(workspace)) == before
    wanted = expected(before, after)
    outputs = {entry["path"]: entry for entry in result.boundary["outputs"]}
    assert {path: (entry["change"], entry["kind"]) for path, entry in outputs.items()} == wanted
    for path, (change, kind) in wanted.items():
        if change != "deleted" and kind == "file":
            assert outputs[path]["sha256"] == after[path][2]
    exported = overlay_driver.picture(str(tmp_path / "out"))
    held = {path for path, entry in outputs.items() if entry["action"] == "held_back"}
    there = {p for p, (change, _) in wanted.items() if change != "deleted" and crosses(p, after[p])} - held
    assert {path: item[:3] for path, item in exported.items() if path in there} == {p: plain(after[p]) for p in there}
