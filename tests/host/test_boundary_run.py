"""The boundary of real runs: the log, the report, secrets, the guard, what comes out. Attacks carry their number."""

import base64
import contextlib
import hashlib
import importlib.util
import json
import os
import pty
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import start_helper

import nsbox
from nsbox import inputs, transfer
from nsbox.boundary import LogError
from nsbox.errors import MountRefused, SandboxUnavailable, SpecError

ROOT = Path(__file__).resolve().parents[2]
NSBOX = [sys.executable, "-m", "nsbox"]
VALUE = "correct-horse/battery+staple"
TOKEN = nsbox.Secret("TOKEN", value=VALUE.encode())


def _checker() -> Any:
    spec = importlib.util.spec_from_file_location("boundary_schema", ROOT / "tests/unit/test_boundary.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.check


CHECK = _checker()
SCHEMA = json.loads((ROOT / "docs/boundary-log.schema.json").read_text())


@pytest.fixture(scope="module", autouse=True)
def gateway_runs(helper_process: None) -> None:
    """The loop that all sandboxes with filtered egress share lives as long as the process: it is nobody's trace."""
    nsbox.run(["true"], allow=["127.0.0.1:9"])
    start_helper()


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NSBOX_LOG", raising=False)
    tmp_path.chmod(0o755)
    return tmp_path


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    made.mkdir()
    (made / "kept").write_text("kept\n")
    (made / "changed").write_text("before\n")
    (made / "removed").write_text("gone\n")
    return made


def events(path: str | Path = "log") -> list[dict[str, Any]]:
    """The events of a log, each of which must be one of the schema's."""
    found = [json.loads(line) for line in Path(path).read_text().splitlines()]
    for event in found:
        CHECK({name: value for name, value in event.items() if not name.endswith("_base64")}, SCHEMA)
    return found


def named(name: str, path: str | Path = "log") -> list[dict[str, Any]]:
    return [event for event in events(path) if event["event"] == name]


def cli(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*NSBOX, *map(str, words)], capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False, **options
    )


# ---- the log ------------------------------------------------------------------------------------------------------


def test_a_run_is_told_from_start_to_end(workspace: Path) -> None:
    result = nsbox.run(
        ["sh", "-c", "echo after > changed; rm removed; echo x > added"],
        workspace=workspace,
        secrets=[TOKEN],
        log="log",
    )
    found = events()
    assert [event["event"] for event in found] == [
        *("sandbox.start", "input", "secret.deliver", "secret.revoke", "output", "output", "output", "sandbox.end"),
    ]
    assert {event["sandbox"] for event in found} == {result.id}
    start, end = found[0], found[-1]
    assert (start["net"], start["open_egress"], start["max_lifetime_s"]) == ("none", False, 30.0)
    assert found[1]["path"] == str(workspace)
    assert found[1]["mode"] == "cow"
    assert [(e["path"], e["change"], e["action"]) for e in found[4:7]] == [
        *(("added", "added", "seen"), ("changed", "modified", "seen"), ("removed", "deleted", "seen")),
    ]
    assert (end["reason"], end["exit_code"]) == ("exited", 0)
    assert 0 < end["lifetime_seconds"] < 20
    assert result.boundary["outputs"][0]["sha256"] == found[4]["sha256"]
    assert os.stat("log").st_mode & 0o777 == 0o600


def test_many_processes_share_a_log(tmp_path: Path) -> None:
    code = "import nsbox\nfor _ in range(4): nsbox.run(['true'], log='log')"
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert len(named("sandbox.start")) == len(named("sandbox.end")) == 12


def test_a_limit_is_told() -> None:
    result = nsbox.run(["sleep", "30"], timeout=0.3, log="log")
    assert result.reason == "timeout"
    (hit,) = named("limit")
    assert (hit["limit"], hit["value"]) == ("timeout", 0.3)
    assert 0.2 < hit["first_at"] < 10
    assert named("sandbox.end")[0]["reason"] == "timeout"


def test_what_could_not_be_executed_has_an_end_as_well() -> None:
    with pytest.raises(nsbox.errors.NsboxError):
        nsbox.run(["/no/such/program"], log="log")
    assert [event["event"] for event in events()] == ["sandbox.start", "sandbox.end"]
    assert named("sandbox.end")[0]["reason"] == "error"


def test_S07_a_log_that_cannot_be_opened_lets_nothing_run(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    for target in ("/no/such/folder/log", "/dev/full", str(tmp_path)):
        with pytest.raises(LogError):
            nsbox.run(["touch", "/shown/ran"], rw=[(shown, "/shown")], log=target)
    done = cli("run", "--log", "/no/such/folder/log", "--rw", f"{shown}:/shown", "--", "touch", "/shown/ran")
    assert done.returncode == 125
    assert b"cannot be written" in done.stderr
    assert not (shown / "ran").exists()


def test_S07_a_log_that_fails_at_its_first_event_lets_nothing_run(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()

    def full(event: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(LogError, match="No space left"):
        nsbox.run(["touch", "/shown/ran"], rw=[(shown, "/shown")], log=full)
    assert not (shown / "ran").exists()


@pytest.mark.parametrize("name", ["secret.revoke", "limit"])
def test_S07_a_log_that_fails_midway_lets_nothing_out(workspace: Path, name: str) -> None:
    def failing(event: dict[str, Any]) -> None:
        if event["event"] == name:
            raise OSError(28, "No space left on device")

    began = time.monotonic()
    with pytest.raises(LogError):
        nsbox.run(
            ["sh", "-c", "echo after > changed; head -c 9000 /dev/zero; sleep 2"],
            workspace=workspace,
            apply=True,
            output=100,
            secrets=[TOKEN._replace(ttl=0.5)],
            log=failing,
        )
    assert time.monotonic() - began < 20
    assert (workspace / "changed").read_text() == "before\n"


def _full_at(name: str, action: str | None = None) -> Callable[[dict[str, Any]], None]:
    """A log that cannot be written any more from the first such event on."""
    full = False

    def failing(event: dict[str, Any]) -> None:
        nonlocal full
        full = full or (event["event"] == name and action in (None, event.get("action")))
        if full:
            raise OSError(28, "No space left on device")

    return failing


@pytest.mark.parametrize("name", ["output", "sandbox.end"])
def test_S07_a_log_that_fails_after_all_is_applied_says_so(workspace: Path, name: str) -> None:
    with pytest.raises(LogError, match="by then 3 changes were applied: 'added', 'changed', 'removed'") as caught:
        nsbox.run(
            ["sh", "-c", "echo after > changed; rm removed; echo x > added; echo y > .envrc"],
            workspace=workspace,
            apply=True,
            log=_full_at(name),
        )
    assert caught.value.crossed == {"applied": ("added", "changed", "removed")}
    assert (workspace / "changed").read_text() == "after\n", "it is true"
    with pytest.raises(LogError, match="by then 1 change was exported: 'added'"):
        nsbox.run(["sh", "-c", "echo z > added"], workspace=workspace, export="out", log=_full_at(name))
    assert Path("out/added").read_text() == "z\n"
    with pytest.raises(LogError) as caught:
        nsbox.run(["sh", "-c", "echo z > added"], workspace=workspace, log=_full_at(name))
    assert caught.value.crossed == {}
    assert "by then" not in str(caught.value)


def test_what_was_exported_before_apply_is_refused_is_told(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise SpecError("apply: not everything that changed is known")

    monkeypatch.setattr(transfer, "apply", refused)
    options: Any = {"workspace": workspace, "export": "out", "apply": True}
    with pytest.raises(SpecError, match="not everything"):
        nsbox.run(["sh", "-c", "echo x > added"], log="log", **options)
    assert [(event["path"], event["action"]) for event in named("output")] == [("added", "exported")]
    assert (events()[-1]["event"], events()[-1]["reason"]) == ("sandbox.end", "error")
    with pytest.raises(LogError, match="by then 1 change was exported: 'added'"):
        nsbox.run(["sh", "-c", "echo x > added"], log=_full_at("output"), **{**options, "export": "another"})


def test_S07_a_box_whose_log_fails_after_apply_says_so_and_is_ended(workspace: Path) -> None:
    box = nsbox.Sandbox(workspace=workspace, log=_full_at("output", "applied"))
    try:
        box.run("echo after > changed; echo x > added").check()
        assert set(box.export("out").copied) == {"added", "changed"}
        with pytest.raises(LogError, match="by then 1 change was applied: 'changed'") as caught:
            box.apply(paths=["changed"])
        assert caught.value.crossed == {"applied": ("changed",)}
        assert (workspace / "changed").read_text() == "after\n"
        # Nothing goes out any more that cannot be told.
        for take_out in (box.apply, lambda: box.export("another")):
            with pytest.raises(LogError):
                take_out()
        assert not (workspace / "added").exists()
        assert not Path("another").exists()
        with pytest.raises(SandboxUnavailable):
            box.run("sleep 1; true")
    finally:
        with pytest.raises(LogError, match="by then 1 change was applied"):
            box.close()


def test_a_log_that_fails_after_apply_on_the_command_line(workspace: Path) -> None:
    words = ["--workspace", "project", "--apply", "--report", "report", "--", "sh", "-c", "echo after > changed"]
    code = """if True:
        import sys, nsbox.boundary, nsbox.cli
        real = nsbox.boundary.FileSink.write
        def write(self, event, line):
            if event["event"] == "output":
                raise OSError(28, "No space left on device")
            real(self, event, line)
        nsbox.boundary.FileSink.write = write
        sys.exit(nsbox.cli.main())
    """
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "--log", "log", *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 125
    assert "by then 1 change was applied: 'changed'" in done.stderr
    assert "by then 1 change was applied" in json.loads(Path("report").read_text())["error"]
    assert (workspace / "changed").read_text() == "after\n"


def test_what_egress_is_changed_to_is_told() -> None:
    with nsbox.Sandbox(allow=["a.invalid:443"], log="log") as box:
        box.allow("b.invalid:80", "192.0.2.7")
        box.deny("192.0.2.7")
        for change in (box.allow, box.deny):
            with pytest.raises(SpecError):
                change("not a rule \x1b")
    told = named("policy")
    assert [(event["action"], event["rules"], event["open_egress"]) for event in told] == [
        *(("allow", ["b.invalid:80", "192.0.2.7"], False), ("deny", ["192.0.2.7"], False)),
    ]
    assert {event["sandbox"] for event in told} == {box.id}
    assert json.loads(cli("stats", "log", "--json").stdout)["open_egress"] == 0
    with nsbox.Sandbox(allow=["a.invalid:443"], log="log") as box:
        box.allow("*")
    assert json.loads(cli("stats", "log", "--json").stdout)["open_egress"] == 1
    assert "allow b.invalid:80, 192.0.2.7" in cli("log", "log").stdout.decode()
    with nsbox.Sandbox(log="log") as box, pytest.raises(SpecError, match="allow: this sandbox has no filtered egress"):
        box.allow("a.invalid")


def test_S07_egress_that_cannot_be_told_ends_the_box() -> None:
    box = nsbox.Sandbox(allow=["a.invalid:443"], log=_full_at("policy"))
    try:
        with pytest.raises(LogError):
            box.allow("b.invalid:80")
        with pytest.raises(SandboxUnavailable):
            box.run("sleep 1; true")
        with pytest.raises(LogError):
            box.deny("b.invalid:80")
    finally:
        with pytest.raises(LogError):
            box.close()


def test_S07_a_log_that_fails_while_it_runs_ends_the_run() -> None:
    def failing(event: dict[str, Any]) -> None:
        if event["event"] == "secret.revoke":
            raise OSError(28, "No space left on device")

    began = time.monotonic()
    with pytest.raises(LogError):
        nsbox.run(["sleep", "60"], timeout="2m", secrets=[TOKEN._replace(ttl=0.3)], log=failing)
    assert time.monotonic() - began < 20


def test_S07_a_query_that_cannot_be_recorded_ends_the_run() -> None:
    def failing(event: dict[str, Any]) -> None:
        if event["event"] in ("dns.query", "connect"):
            raise OSError(28, "No space left on device")

    began = time.monotonic()
    with pytest.raises(LogError):
        nsbox.run(
            ["sh", "-c", "getent hosts denied.invalid; sleep 60"],
            timeout="2m",
            allow=["allowed.invalid:443"],
            log=failing,
        )
    assert time.monotonic() - began < 30


def test_S07_the_payload_does_not_reach_the_log(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    for inside in (shown / "log", tmp_path / "shown/../shown/log"):
        with pytest.raises(SpecError, match="which the sandbox may write to"):
            nsbox.run(["true"], rw=[(shown, "/shown")], log=inside)
    (tmp_path / "link").symlink_to(shown)
    with pytest.raises(SpecError, match="which the sandbox may write to"):
        nsbox.run(["true"], rw=[(shown, "/shown")], log="link/log")
    log = tmp_path / "log"
    tries = f"for f in {log} /proc/*/fd/*; do echo forged >> $f; done 2>/dev/null; true"
    assert nsbox.run(["sh", "-c", tries], log=log).ok
    assert "forged" not in "".join(line for line in log.read_text().splitlines() if "sandbox.start" not in line)
    assert len(events()) == 2


def test_what_runs_past_the_sandboxes_is_in_the_log() -> None:
    code = (
        "import subprocess, nsbox\nfrom nsbox import coverage\ncoverage.install()\nsubprocess.run(['true'])\n"
        "for _ in range(2): nsbox.run(['true'], log='log')\n"
        "with nsbox.Sandbox(log='log') as box: box.run(['true'])\n"
        "print(coverage.snapshot()['sandboxed'], coverage.snapshot()['bare'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "3 1\n"
    last = named("coverage")[-1]
    assert (last["sandboxed"], last["bare"], last["sandbox"]) == (3, 1, "")


# ---- secrets ------------------------------------------------------------------------------------------------------


def test_S05_masked_however_it_is_cut(workspace: Path) -> None:
    script = """
        value=$(cat /run/secrets/TOKEN)
        printf %s "$value" | while IFS= read -r -n1 c; do printf %s "$c"; sleep 0.01; done; echo
        head -c 65530 /dev/zero | tr '\\0' .; printf '%s\\n' "$value"
        printf 'user:%s' "$value" | base64 -w0; echo; printf %s "$value" >&2
        printf %s "$value" | od -An -tx1 | tr -d ' \\n'
    """
    pieces: list[bytes] = []
    result = nsbox.run(["bash", "-c", script], secrets=[TOKEN], log="log", on_stdout=pieces.append)
    out = b"".join(pieces)
    for spelling in (VALUE, VALUE.encode().hex(), base64.b64encode(VALUE.encode()).decode()):
        assert spelling.encode() not in out + result.stderr
        assert spelling not in Path("log").read_text() + result.to_json()
    assert base64.b64encode(f"user:{VALUE}".encode())[8:-4] not in out
    assert out.count(b"***TOKEN***") >= 3
    assert result.stderr == b"***TOKEN***"


def test_in_the_log_a_value_is_masked_too() -> None:
    nsbox.run(["echo", VALUE], secrets=[TOKEN], log="log")
    assert VALUE not in Path("log").read_text()
    assert events()[0]["argv"] == ["echo", "***TOKEN***"]


def test_only_the_payload_reads_it() -> None:
    result = nsbox.run(
        ["sh", "-c", "stat -c '%a %u' /run/secrets/* /run/secrets; env; ls /run/secrets"], secrets=[TOKEN]
    )
    lines = result.stdout_text.splitlines()
    assert lines[:2] == ["400 1000", "700 1000"]
    assert lines[-1] == "TOKEN"
    assert not any(line.startswith("TOKEN=") for line in lines)
    as_variable = nsbox.run(
        ["sh", "-c", 'test "$TOKEN" = "$(cat /run/secrets/TOKEN)" && echo same'],
        secrets=[TOKEN._replace(deliver="env")],
    )
    assert as_variable.stdout == b"same\n"


def test_S01_nothing_of_the_caller_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_API_KEY", VALUE)
    result = nsbox.run(["sh", "-c", "env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'; ulimit -c; ulimit -Hc"])
    assert "HOST_API_KEY" not in result.stdout_text
    assert VALUE not in result.stdout_text
    assert result.stdout_text.splitlines()[-2:] == ["0", "0"]


def test_S01_S06_a_scan_of_all_that_is_readable(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_API_KEY", VALUE)
    (workspace / "planted").write_text(f"x {VALUE} x")  # the positive control
    scan = """
        find / -xdev \\( -path /proc -o -path /usr \\) -prune -o -type f -readable \\
            -exec grep -lsFf /run/secrets/TOKEN {} +
        for d in /run /tmp /dev/shm /work /home /var/tmp /etc; do grep -rlsFf /run/secrets/TOKEN $d; done
        find /proc -maxdepth 4 -type f -readable ! -name mem ! -name kcore ! -name kmsg ! -name pagemap \\
            -exec timeout 20 grep -lasFf /run/secrets/TOKEN {} +
        true
    """
    result = nsbox.run(
        ["sh", "-c", scan], workspace=workspace, secrets=[TOKEN], log="log", timeout="60s", cpu_time="60s"
    )
    assert result.ok
    assert set(result.stdout_text.split()) == {"/run/secrets/TOKEN", "/work/planted"}
    assert VALUE not in Path("log").read_text()
    assert VALUE not in result.to_json()
    # And nothing is left of it on the host: the ramfs is gone with the sandbox.
    assert "/run/secrets" not in Path("/proc/self/mountinfo").read_text()


def test_S06_gone_after_its_time_while_the_sandbox_runs_on() -> None:
    script = """
        exec 3< /run/secrets/TOKEN; cat /run/secrets/TOKEN > /tmp/first
        until [ ! -e /run/secrets/TOKEN ]; do sleep 0.05; done
        cat <&3; ls /run/secrets; cat /run/secrets/TOKEN; test -s /tmp/first && echo was there
    """
    began = time.time()
    result = nsbox.run(
        ["sh", "-c", script], secrets=[TOKEN._replace(ttl=0.7), nsbox.Secret("OTHER", value=b"1234567")], log="log"
    )
    assert result.stdout == b"OTHER\nwas there\n"
    told = {item["name"]: item["revoked_at"] for item in result.boundary["secrets"]}
    assert 0.5 < told["TOKEN"] - began < 10
    assert [(event["name"], event["why"]) for event in named("secret.revoke")] == [("TOKEN", "ttl"), ("OTHER", "end")]


def test_S06_gone_from_a_box_that_nobody_uses_meanwhile() -> None:
    with nsbox.Sandbox(
        secrets=[TOKEN._replace(ttl=0.5), nsbox.Secret("E", value=b"value-of-e", ttl=0.5, deliver="env")]
    ) as box:
        assert box.run("cat /run/secrets/TOKEN; echo $E").stdout == b"***TOKEN******E***\n"
        time.sleep(1)
        assert box.run("ls /run/secrets; echo $E").stdout == b"\n"


def test_a_change_that_holds_a_secret_is_named(workspace: Path) -> None:
    result = nsbox.run(
        ["sh", "-c", "cat /run/secrets/TOKEN > leak; echo x > clean"], workspace=workspace, secrets=[TOKEN], log="log"
    )
    assert {e["path"]: e.get("secrets") for e in result.boundary["outputs"]} == {"leak": ["TOKEN"], "clean": None}
    assert [event["path"] for event in named("output") if "secrets" in event] == ["leak"]


# ---- the guard ----------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    made = tmp_path / "home"
    for name in (
        ".ssh/id_rsa",
        ".aws/credentials",
        ".config/gcloud/x",
        ".kube/config",
        "project/.env",
        "project/main.py",
    ):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(f"content of {name}\n")
    monkeypatch.setenv("HOME", str(made))
    short = Path(os.path.relpath(made))
    with contextlib.ExitStack() as owned:
        for name in ("docker.sock", "agent.sock", "bus"):
            made_socket = owned.enter_context(socket.socket(socket.AF_UNIX))
            made_socket.bind(str(short / name))
        monkeypatch.setenv("SSH_AUTH_SOCK", str(made / "agent.sock"))
        monkeypatch.setenv("DBUS_SESSION_BUS_ADDRESS", f"unix:path={made}/bus")
        yield made


SENSITIVE = [
    "",
    ".ssh",
    ".ssh/id_rsa",
    ".aws",
    ".config/gcloud",
    ".config",
    ".kube/config",
    "docker.sock",
    "agent.sock",
    "bus",
]


@pytest.mark.parametrize("name", SENSITIVE)
def test_S09_refused_with_the_reason_and_the_word(home: Path, name: str) -> None:
    with pytest.raises(MountRefused) as caught:
        nsbox.run(["true"], ro=[(home / name, "/shown")], log="log")
    assert caught.value.why
    assert f"--allow-sensitive {caught.value.path}" in str(caught.value)
    (refused,) = events()
    assert (refused["event"], refused["kind"], refused["sandbox"]) == ("refusal", "guard", "")
    assert (refused["path"], refused["why"]) == (caught.value.path, caught.value.why)


def test_S09_also_by_a_link_and_from_the_command_line(home: Path) -> None:
    os.symlink(home / ".ssh", "innocent")
    done = cli("run", "-v", "--log", "log", "--ro", "innocent:/shown", "--", "true")
    assert done.returncode == 125
    assert b"SSH keys" in done.stderr
    assert f"--allow-sensitive {home}/.ssh".encode() in done.stderr
    assert [event["kind"] for event in named("refusal")] == ["guard"]


def test_S09_let_through_by_name_and_told(home: Path) -> None:
    result = nsbox.run(["ls", "/shown"], ro=[(home / ".ssh", "/shown")], allow_sensitive=[home / ".ssh"], log="log")
    assert result.stdout == b"id_rsa\n"
    assert [item["path"] for item in result.boundary["sensitive_mounts"]] == [str(home / ".ssh")]
    assert [item["path"] for item in named("sandbox.start")[0]["sensitive_mounts"]] == [str(home / ".ssh")]


def test_a_credential_in_a_project_is_covered(home: Path) -> None:
    result = nsbox.run(["sh", "-c", "wc -c < .env; cat main.py"], workspace=home / "project", log="log")
    assert result.stdout == b"0\ncontent of project/main.py\n"
    assert [item["path"] for item in named("sandbox.start")[0]["masked"]] == [str(home / "project/.env")]
    shown = nsbox.run(["cat", ".env"], workspace=home / "project", allow_sensitive=[home / "project/.env"])
    assert shown.stdout == b"content of project/.env\n"


def test_a_variable_that_looks_like_a_credential_is_counted() -> None:
    nsbox.run(["true"], env={"GITHUB_TOKEN": "x", "COLUMNS": "80"}, log="log")
    assert named("sandbox.start")[0]["found"] == ["GITHUB_TOKEN"]


# ---- what comes out -----------------------------------------------------------------------------------------------

PLANTED = {
    *(".git/hooks/post-checkout", ".git/config", ".envrc", ".bashrc", ".vscode/tasks.json", ".github/workflows/ci.yml"),
    *("conftest.py", "evil.pth", ".vimrc", ".pre-commit-config.yaml"),
}


def test_F12_what_the_host_would_act_upon_is_held_back(workspace: Path, tmp_path: Path) -> None:
    script = "; ".join(f"mkdir -p $(dirname {name}); echo x > {name}" for name in sorted(PLANTED)) + "; echo y > plain"
    result = nsbox.run(["sh", "-c", script], workspace=workspace, export="out", apply=True, log="log")
    held = {entry["path"] for entry in result.boundary["outputs"] if entry["action"] == "held_back"}
    assert held == PLANTED
    assert all(entry["trusted_by_host"] for entry in result.boundary["outputs"] if entry["path"] in PLANTED)
    assert {event["path"] for event in named("output") if event["action"] == "held_back"} == PLANTED
    for place in (workspace, tmp_path / "out"):
        assert (place / "plain").read_text() == "y\n"
        assert not [name for name in PLANTED if (place / name).exists()]
    allowed = nsbox.run(["sh", "-c", "echo x > .envrc"], workspace=workspace, apply=True, allow_trusted=[".envrc"])
    assert allowed.boundary["outputs"][0]["action"] == "applied"
    assert (workspace / ".envrc").exists()


def test_F05_F06_nothing_that_was_planted_is_followed(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text(VALUE)
    script = f"""
        ln -s {tmp_path}/outside abs; ln -s ../outside up; ln -s ../../../../../../../../etc/passwd passwd
        ln -s kept fine
        mkdir d; ln -s ../../outside/secret d/deep; rm -r changed; ln -s {tmp_path}/outside changed; mkfifo fifo
    """
    result = nsbox.run(["sh", "-c", script], workspace=workspace, export="out", apply=True)
    actions = {entry["path"]: entry["action"] for entry in result.boundary["outputs"]}
    assert actions["fine"] == "applied"
    for name in ("abs", "up", "passwd", "d/deep", "fifo", "changed"):
        assert actions[name] == "skipped", name
    for place in (tmp_path / "out", workspace):
        found = [Path(folder, name) for folder, _, names in os.walk(place) for name in names]
        assert not any(path.is_symlink() and not path.resolve().is_relative_to(place) for path in found)
        assert not any(VALUE in path.read_text() for path in found if path.exists())
    assert (workspace / "changed").read_text() == "before\n"
    assert os.listdir(tmp_path / "outside") == ["secret"]


def test_F06_an_export_goes_where_nothing_is(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    for target in ("full", "log-of-something/x/../../full"):
        os.makedirs("log-of-something/x", exist_ok=True)
        with pytest.raises(SpecError, match="not empty"):
            nsbox.run(["sh", "-c", "sleep 5"], workspace=workspace, export=target)


def test_F13_what_comes_out_is_only_bytes(workspace: Path) -> None:
    bomb = "cos\nsystem\n(S'touch exploded'\ntR."
    result = nsbox.run(
        ["sh", "-c", f"printf \"{bomb}\" | tee result.pkl; printf '\\200\\004.' > state.json"],
        workspace=workspace,
        export="out",
    )
    assert result.stdout_text == bomb
    assert json.loads(result.to_json())["stdout"] == bomb
    assert Path("out/result.pkl").read_text() == bomb
    assert not Path("exploded").exists()
    assert not (workspace / "exploded").exists()


def test_F14_names_of_any_bytes(workspace: Path, tmp_path: Path) -> None:
    names = [b"new\nline", b"esc\x1b[31m", b"\xff\xfe", b"a" * 255, b"-rf", b"tab\t", "\u202ertl".encode(), b" "]
    (workspace / "names").write_bytes(b"\0".join(names) + b"\0")
    result = nsbox.run(
        ["bash", "-c", 'while IFS= read -r -d "" n; do echo x > "./$n"; done < names'],
        workspace=workspace,
        export="out",
        log="log",
    )
    assert result.ok, result.stderr
    assert set(os.listdir(b"out")) == set(names)
    assert {os.fsencode(entry["path"]) for entry in result.boundary["outputs"]} == set(names)
    raw = Path("log").read_bytes()
    assert all(32 <= byte < 127 or byte == 10 for byte in raw)
    shown = {base64.b64decode(e["path_base64"]) if "path_base64" in e else e["path"].encode() for e in named("output")}
    assert shown == set(names)
    printed = cli("log", "log").stdout
    assert b"\x1b" not in printed
    assert "\u202e".encode() not in printed
    assert len(printed.splitlines()) == len(events())


def test_apply_leaves_alone_what_the_host_has_changed(workspace: Path) -> None:
    def meanwhile(_data: bytes) -> None:
        time.sleep(0.05)
        (workspace / "changed").write_text("by the host\n")

    result = nsbox.run(
        ["sh", "-c", "echo go; sleep 0.5; echo inside > changed; echo x > new"],
        workspace=workspace,
        apply=True,
        on_stdout=meanwhile,
    )
    assert {e["path"]: e["action"] for e in result.boundary["outputs"]} == {"changed": "conflict", "new": "applied"}
    assert (workspace / "changed").read_text() == "by the host\n"


def test_a_run_that_failed_is_not_applied(workspace: Path) -> None:
    result = nsbox.run(["sh", "-c", "echo x > new; exit 3"], workspace=workspace, apply=True)
    assert result.exit_code == 3
    assert not (workspace / "new").exists()


# ---- a sandbox that stays -----------------------------------------------------------------------------------------


def test_a_box_gives_its_changes(workspace: Path) -> None:
    with nsbox.Sandbox(workspace=workspace, log="log") as box:
        box.run("echo after > changed; rm removed; echo x > new; echo y > .envrc").check()
        assert [(entry.path, entry.change) for entry in box.changes().entries] == [
            *((".envrc", "added"), ("changed", "modified"), ("new", "added"), ("removed", "deleted")),
        ]
        assert "-before\n+after\n" in box.diff()
        assert set(box.export("out").copied) == {"changed", "new"}
        assert set(box.apply(paths=["new"]).applied) == {"new"}
        assert (workspace / "changed").read_text() == "before\n"
        assert set(box.apply().applied) == {"changed", "removed"}
        # What apply itself wrote is no conflict when the box goes on.
        box.run("echo later >> changed").check()
        assert box.apply().applied == ("changed",)
        box.run("echo last > unseen").check()
    assert (workspace / "changed").read_text() == "after\nlater\n"
    assert not (workspace / "removed").exists()
    told = [(event["path"], event["action"]) for event in named("output")]
    assert told[-1] == ("unseen", "seen")
    assert (".envrc", "held_back") in told
    assert events()[-1]["event"] == "sandbox.end"


def test_what_runs_in_a_box_is_told() -> None:
    with nsbox.Sandbox(log="log", secrets=[TOKEN]) as box:
        box.run(["echo", VALUE])
        assert box.run("exit 3").exit_code == 3
        assert box.run(["sleep", "9"], timeout=0.3).reason == "timeout"
    told = named("command")
    assert [(e["argv"], e["reason"], e.get("exit_code")) for e in told[:2]] == [
        (["echo", "***TOKEN***"], "exited", 0),
        (["/bin/sh", "-c", "exit 3"], "exited", 3),
    ]
    assert told[2]["reason"] == "timeout"
    assert 0.2 < told[2]["seconds"] < 9
    assert [event["limit"] for event in named("limit")] == ["timeout"]
    assert {event["sandbox"] for event in events()} == {box.id}


def test_a_box_ends_when_its_log_cannot_be_written() -> None:
    def failing(event: dict[str, Any]) -> None:
        if event["event"] == "command":
            raise OSError(28, "No space left on device")

    box = nsbox.Sandbox(log=failing)
    try:
        box.run("true")
        with pytest.raises(SandboxUnavailable):
            box.run("sleep 1; true")
    finally:
        with pytest.raises(LogError):
            box.close()


def test_a_box_without_a_workspace_has_no_changes() -> None:
    with nsbox.Sandbox() as box, pytest.raises(SpecError, match="no workspace"):
        box.changes()
    with pytest.raises(SandboxUnavailable):
        box.diff()


def test_a_box_ends_after_its_lifetime() -> None:
    with nsbox.Sandbox(lifetime=0.7, log="log") as box:
        with pytest.raises(SandboxUnavailable):
            box.run(["sleep", "30"])
        assert not box.is_running
    assert [event["limit"] for event in named("limit")] == ["lifetime"]
    (end,) = named("sandbox.end")
    assert end["reason"] == "timeout"
    assert 0.6 < end["lifetime_seconds"] < 10
    numbers = json.loads(cli("stats", "log", "--json").stdout)
    assert numbers["lifetime_seconds"]["overstayed"] == 0
    assert numbers["limit_hits"]["lifetime"]["runs"] == 1


# ---- the command line ---------------------------------------------------------------------------------------------


def on_a_terminal(words: list[str], answer: bytes, *, early: bytes = b"") -> tuple[int, str]:
    """``nsbox`` on a terminal of its own, which gets ``answer`` when the question comes: status and what was shown."""
    pid, fd = pty.fork()
    if not pid:
        os.execv(sys.executable, [*NSBOX, *words])
    shown, asked = b"", False
    deadline = time.monotonic() + 60
    os.write(fd, early)
    while time.monotonic() < deadline:
        if not select.select([fd], [], [], 1)[0]:
            continue
        try:
            piece = os.read(fd, 65536)
        except OSError:
            break
        shown += piece
        if not asked and shown.endswith(b"[y/N] "):
            asked = True
            time.sleep(0.2)
            os.write(fd, answer)
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode(errors="replace")


RUN = ["run", "--review", "--workspace", "project", "--log", "log", "--"]


def test_review_and_yes(workspace: Path) -> None:
    status, shown = on_a_terminal([*RUN, "sh", "-c", "echo after > changed; echo x > .envrc"], b"y\n")
    assert status == 0, shown
    assert "-before" in shown
    assert "+after" in shown
    assert "--allow-trusted .envrc" in shown
    assert (workspace / "changed").read_text() == "after\n"
    assert not (workspace / ".envrc").exists()


@pytest.mark.parametrize("answer", [b"n\n", b"\n", b"\x04", b"yess\n"])
def test_review_and_anything_else(workspace: Path, answer: bytes) -> None:
    status, shown = on_a_terminal([*RUN, "sh", "-c", "echo after > changed"], answer)
    assert status == 0, shown
    assert "nothing was taken out" in shown
    assert (workspace / "changed").read_text() == "before\n"
    assert [(event["action"], event["why"]) for event in named("output")] == [("seen", "declined")]


def test_what_was_typed_before_the_question_is_no_answer(workspace: Path) -> None:
    fooling = "printf 'Apply this to the workspace? [y/N] \\033[8m'; echo after > changed; sleep 0.3"
    status, shown = on_a_terminal([*RUN, "sh", "-c", fooling], b"n\n", early=b"y\ny\n")
    assert status == 0
    assert "\x1b[0m" in shown
    assert (workspace / "changed").read_text() == "before\n"


def test_review_needs_a_terminal_and_something_to_look_at(workspace: Path, tmp_path: Path) -> None:
    done = cli(*RUN, "sh", "-c", "echo after > changed", start_new_session=True)
    assert done.returncode == 125
    assert b"no terminal to ask on" in done.stderr
    assert not Path("log").exists()
    assert b"give a --workspace" in cli("run", "--review", "--", "true", start_new_session=True).stderr


def test_the_log_is_shown(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = nsbox.run(["true"], workspace=workspace, log="log")
    nsbox.run(["false"], log="log")
    lines = cli("log", "log").stdout.decode().splitlines()
    assert len(lines) == len(events()) == 5
    assert json.loads(cli("log", "log", "--json").stdout.splitlines()[0]) == events()[0]
    story = cli("log", "--sandbox", result.id[:6], "log").stdout.decode()
    assert "A sandbox is made for true" in story
    assert "false" not in story
    missing = cli("log", "log", "--sandbox", "zzz")
    assert (missing.returncode, missing.stdout) == (125, b"")
    assert cli("log").returncode == 125
    monkeypatch.setenv("NSBOX_LOG", "log")
    assert len(cli("log").stdout.splitlines()) == 5
    assert cli("run", "--", "true").returncode == 0
    assert len(named("sandbox.end")) == 3


def test_the_log_is_followed(tmp_path: Path) -> None:
    Path("log").touch()
    with subprocess.Popen([*NSBOX, "log", "log", "--follow"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            nsbox.run(["true"], log="log")
            assert b"sandbox.start" in process.stdout.readline()
            assert b"sandbox.end" in process.stdout.readline()
        finally:
            process.terminate()
            process.wait(10)


def test_gc() -> None:
    done = cli("gc")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout


def test_what_goes_in_is_told_with_size_and_hash(tmp_path: Path) -> None:
    file, folder, big = tmp_path / "in.csv", tmp_path / "folder", tmp_path / "big"
    file.write_bytes(b"a,b\n1,2\n")
    folder.mkdir()
    os.close(os.open(big, os.O_CREAT | os.O_WRONLY))
    os.truncate(big, inputs.HASH_MOST + 1)
    for path in (tmp_path, file, folder, big):
        os.chmod(path, 0o755)
    log = tmp_path / "log"
    mounts = [f"{file}:/in.csv", f"{folder}:/folder", f"{big}:/big"]
    result = nsbox.run(["cat", "/in.csv"], ro=mounts, log=str(log))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    told = {entry["path"]: (entry["bytes"], entry.get("sha256")) for entry in result.boundary["inputs"]}
    assert told == {str(file): (8, digest), str(folder): (None, None), str(big): (inputs.HASH_MOST + 1, None)}
    events = [json.loads(line) for line in log.read_text().splitlines()]
    told = {e["path"]: (e.get("bytes"), e.get("sha256")) for e in events if e["event"] == "input"}
    assert told == {str(file): (8, digest), str(folder): (None, None), str(big): (inputs.HASH_MOST + 1, None)}
    plain = nsbox.run(["cat", "/in.csv"], ro=[f"{file}:/in.csv"])
    assert plain.boundary["inputs"] == [{"path": str(file), "kind": "ro", "mode": "ro", "bytes": 8}]


def test_what_has_grown_since_the_sandbox_was_made_is_told_as_it_is(tmp_path: Path) -> None:
    file, events = tmp_path / "in.csv", list[dict[str, Any]]()
    file.write_bytes(b"a,b\n")
    for path in (tmp_path, file):
        os.chmod(path, 0o755)
    with nsbox.Pool(size=1, ro=[f"{file}:/in.csv"], log=events.append) as pool:
        assert pool.wait_full()
        file.write_bytes(b"a,b\n1,2\n" * 9)
        told = pool.run(["cat", "/in.csv"]).boundary["inputs"]
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert [(entry["bytes"], entry["sha256"]) for entry in told] == [(72, digest)]
    assert [(e["bytes"], e["sha256"]) for e in events if e["event"] == "input"] == [(72, digest)]


def test_the_report_tells_the_size_that_was_hashed(tmp_path: Path) -> None:
    """What the run itself writes to a file is no input."""
    file, events = tmp_path / "file", list[dict[str, Any]]()
    file.write_bytes(b"before\n")
    tmp_path.chmod(0o755)
    result = nsbox.run(["sh", "-c", "echo much more than before >/file"], rw=[f"{file}:/file"], log=events.append)
    assert result.ok, result.stderr_text
    digest = hashlib.sha256(b"before\n").hexdigest()
    assert [(entry["bytes"], entry["sha256"]) for entry in result.boundary["inputs"]] == [(7, digest)]
    assert [(e["bytes"], e["sha256"]) for e in events if e["event"] == "input"] == [(7, digest)]


def test_no_hash_is_told_of_what_a_link_leads_to(tmp_path: Path) -> None:
    """A folder above a source that was swapped for a link since it was looked at."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("another")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    paths = [str(tmp_path / "other/file"), str(tmp_path / "link/file")]
    found = inputs.with_hashes([{"path": path, "bytes": 7} for path in paths])
    assert ["sha256" in entry for entry in found] == [True, False]
