"""Attacks on the boundary: what comes out, what must not go in, and the record of both."""

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import nsbox
from nsbox.boundary import LogError
from nsbox.errors import SpecError
from nsbox.selftest.on_files import beneath

SECRET = "host secret, not for the sandbox"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    place = tmp_path / "workspace"
    place.mkdir()
    place.chmod(0o755)
    (place / "code.py").write_text("print(1)\n")
    return place


def outputs(result: nsbox.Result) -> dict[str, dict[str, Any]]:
    return {entry["path"]: entry for entry in result.boundary["outputs"]}


# ---- what comes out --------------------------------------------------------------------------------------------------


def test_F06_a_planted_link_leads_the_host_nowhere(workspace: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "key").write_text(SECRET)
    plant = f"ln -s {target}/key file; ln -s {target} dir; ln -s ../target/key up; mkdir d; ln -s ../../target d/climb"
    # The control: whoever copies such a tree by ordinary means takes the secret along.
    control = tmp_path / "control"
    control.mkdir()
    subprocess.run(["sh", "-c", plant], cwd=control, check=True)
    shutil.copytree(control, tmp_path / "copy")
    assert (tmp_path / "copy/file").read_text() == SECRET
    result = nsbox.run(["sh", "-c", plant], workspace=str(workspace), export=str(tmp_path / "out"), apply=True)
    assert result.ok
    assert SECRET not in str(beneath(tmp_path / "out"))
    for name in ("file", "dir", "up", "d/climb"):
        assert not os.path.lexists(tmp_path / "out" / name)
        assert not os.path.lexists(workspace / name)
        assert outputs(result)[name]["action"] == "skipped"


def test_F06_apply_writes_through_no_link(workspace: Path, tmp_path: Path) -> None:
    """The payload makes a file in a directory that the host has, meanwhile, replaced by a link."""
    (workspace / "sub").mkdir()
    target = tmp_path / "target"
    target.mkdir()

    def swap(data: bytes) -> None:
        if not (workspace / "sub").is_symlink():
            (workspace / "sub").rmdir()
            (workspace / "sub").symlink_to(target)

    # Time stamps of files are no finer than 10 ms: what the host does sooner after the launch cannot be told apart.
    command = ["sh", "-c", "sleep 0.2; echo evil > sub/file; echo done"]
    result = nsbox.run(command, workspace=str(workspace), apply=True, on_stdout=swap)
    assert os.listdir(target) == []
    assert outputs(result)["sub/file"]["action"] in ("conflict", "skipped")


HOOKS = (".git/hooks/post-checkout", ".envrc", ".vscode/tasks.json", ".github/workflows/ci.yml", "conftest.py", "x.pth")


def test_F12_what_the_host_would_trust_is_held_back(workspace: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(workspace)], check=True)
    plant = "".join(f"mkdir -p $(dirname {name}); echo evil > {name}; chmod +x {name}; " for name in HOOKS)
    log = tmp_path / "log"
    result = nsbox.run(
        ["sh", "-c", f"{plant} echo fine > readme"],
        workspace=str(workspace),
        export=str(tmp_path / "out"),
        apply=True,
        log=str(log),
    )
    assert result.ok, result.stderr_text
    for name in HOOKS:
        entry = outputs(result)[name]
        assert (entry["trusted_by_host"], entry["action"]) == (True, "held_back"), name
        assert not (tmp_path / "out" / name).exists()
        assert not (workspace / name).exists()
    assert (workspace / "readme").exists()
    events = [json.loads(line) for line in log.read_bytes().splitlines()]
    assert {event["path"] for event in events if event.get("trusted_by_host")} == set(HOOKS)


def test_F12_control_a_hook_that_is_let_through_runs(workspace: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(workspace)], check=True)
    hook = ".git/hooks/post-checkout"
    command = f"printf '#!/bin/sh\\ntouch {tmp_path}/ran\\n' > {hook}; chmod +x {hook}"
    result = nsbox.run(["sh", "-c", command], workspace=str(workspace), apply=True, allow_trusted=[hook])
    assert outputs(result)[hook]["action"] == "applied"
    commit = "git -c user.name=a -c user.email=a@b add code.py && git -c user.name=a -c user.email=a@b commit -qm a"
    subprocess.run(["sh", "-c", f"{commit} && git checkout -q -b other"], cwd=workspace, check=True)
    assert (tmp_path / "ran").exists()


def test_F14_names_of_any_bytes_come_out_intact(workspace: Path, tmp_path: Path) -> None:
    names = [b"\xff\xfe", b"line\nfeed", b"\x1b[2J\x1b]0;title\x07", b"n" * 255, b"\xe2\x80\xaetxt.exe", b"-rf", b" "]
    program = f"import os\nfor name in {names!r}:\n    open(name, 'wb').write(name)\n"
    log = tmp_path / "log"
    result = nsbox.run(["python3", "-c", program], workspace=str(workspace), export=str(tmp_path / "out"), log=str(log))
    assert result.ok, result.stderr_text
    assert beneath(tmp_path / "out") == {name: name for name in names}
    assert {os.fsencode(path) for path in outputs(result)} == set(names)
    raw = log.read_bytes()
    assert all(0x20 <= byte < 0x7F or byte == 0x0A for byte in raw)
    assert all(json.loads(line) for line in raw.splitlines())


# ---- the record ------------------------------------------------------------------------------------------------------


def test_S07_no_way_from_inside_to_the_log(workspace: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    attack = f"""
import os
for path in [{str(log)!r}, *(f"/proc/{{pid}}/fd/{{fd}}" for pid in range(1, 20) for fd in range(64))]:
    for flags in (os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND):
        try:
            fd = os.open(path, flags | os.O_NONBLOCK)
            if os.readlink(f"/proc/self/fd/{{fd}}").endswith("log"):
                os.write(fd, b"for" + b"ged")
        except OSError:
            pass
"""
    result = nsbox.run(["python3", "-c", attack], workspace=str(workspace), log=str(log))
    assert result.ok, result.stderr_text
    events = [json.loads(line)["event"] for line in log.read_bytes().splitlines()]
    assert events[0] == "sandbox.start"
    assert events[-1] == "sandbox.end"
    assert b"forged" not in log.read_bytes()
    subprocess.run(["python3", "-c", attack], check=True)  # the control
    assert b"forged" in log.read_bytes()


@pytest.mark.parametrize("where", ["missing/log", "directory", "link"])
def test_S07_nothing_runs_when_the_log_cannot_be_opened(where: str, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "real").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    shared = tmp_path / "shared"
    shared.mkdir()
    with pytest.raises(LogError):
        nsbox.run(["touch", "/shared/ran"], rw=[(str(shared), "/shared")], log=str(tmp_path / where))
    assert os.listdir(shared) == []


def test_S07_a_log_that_fails_ends_the_run(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()

    def full(event: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    began = time.monotonic()
    with pytest.raises(LogError, match="No space"):
        nsbox.run(["sh", "-c", "sleep 60; touch /shared/ran"], rw=[(str(shared), "/shared")], log=full)
    assert time.monotonic() - began < 30
    assert os.listdir(shared) == []


# ---- what must not go in ---------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "home"
    for name in (".ssh/id_ed25519", ".aws/credentials", ".config/gcloud/token", ".kube/config", ".docker/config.json"):
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SECRET)
        path.chmod(0o644)
    monkeypatch.setenv("HOME", str(place))
    return place


NAMES = ("", ".ssh", ".ssh/id_ed25519", ".aws", ".config/gcloud", ".config", ".kube/config", ".docker")


@pytest.mark.parametrize("option", ["ro", "rw", "workspace"])
@pytest.mark.parametrize("name", NAMES)
def test_S09_credentials_are_refused(option: str, name: str, home: Path) -> None:
    path = str(home / name)
    if option == "workspace" and os.path.isfile(path):
        pytest.skip("a workspace is a directory")
    given: dict[str, Any] = {option: path if option == "workspace" else [(path, "/in")]}
    with pytest.raises(SpecError, match="--allow-sensitive"):
        nsbox.run(["true"], **given)


def test_S09_control_what_is_let_through_can_be_read_and_shows(home: Path, tmp_path: Path) -> None:
    path, log = str(home / ".ssh"), tmp_path / "log"
    result = nsbox.run(["cat", "/in/id_ed25519"], ro=[(path, "/in")], allow_sensitive=[path], log=str(log))
    assert result.stdout_text == SECRET
    assert result.boundary["sensitive_mounts"]
    started = json.loads(log.read_bytes().splitlines()[0])
    assert [item["path"] for item in started["sensitive_mounts"]] == [path]


@pytest.mark.parametrize("how", ["link", "above"])
def test_S09_by_another_way(how: str, home: Path, tmp_path: Path) -> None:
    (tmp_path / "innocent").symlink_to(home / ".aws")
    with pytest.raises(SpecError, match="refused"):
        nsbox.run(["true"], ro=[(str(tmp_path / "innocent" if how == "link" else home / ".config"), "/in")])


def test_S09_sockets_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "agent"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))
        with pytest.raises(SpecError, match="socket"):
            nsbox.run(["true"], ro=[(str(place), "/in")])
    for known in ("/run/docker.sock", "/var/run/docker.sock", "/run/dbus/system_bus_socket", "/tmp/.X11-unix"):
        with pytest.raises(SpecError):
            nsbox.run(["true"], ro=[(known, "/in")])


@pytest.mark.parametrize("option", ["ro", "rw", "workspace"])
def test_S09_credentials_in_a_project_are_covered(option: str, workspace: Path, tmp_path: Path) -> None:
    (workspace / ".env").write_text(SECRET)
    (workspace / "deploy").mkdir()
    (workspace / "deploy/id_rsa").write_text(SECRET)
    given: dict[str, Any] = {option: str(workspace) if option == "workspace" else [(str(workspace), "/work")]}
    command = [
        "sh",
        "-c",
        "cat /work/code.py /work/.env /work/deploy/id_rsa; echo x > /work/.env; rm -f /work/.env; true",
    ]
    result = nsbox.run(command, **given)
    assert result.stdout_text == "print(1)\n"
    assert (workspace / ".env").read_text() == SECRET
    shown = nsbox.run(["cat", "/work/.env"], **given, allow_sensitive=[str(workspace / ".env")])
    assert shown.stdout_text == SECRET
