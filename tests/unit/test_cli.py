"""The command line without a sandbox: what is parsed, what --help says, which status comes of what."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nsbox import cli, cli_options, cli_output, cli_python, cli_run, python_env
from nsbox.cli_options import NOT_YET, OFF, ON, PYTHON, RUN, by_flag, help_text, parse
from nsbox.errors import CommandError, HostError, SandboxUnavailable, SetupError, SpecError
from nsbox.spec import FIELDS, Spec

# Fields of Spec that the command line does not offer.
PYTHON_ONLY = {"subids", "lifetime"}


def parsed(*words: str) -> tuple[dict[str, Any], list[str]]:
    return parse(words, RUN)


# ---- the table ----------------------------------------------------------------------------------------------------


def test_every_field_of_spec_has_an_option() -> None:
    assert {option.key for option in RUN if not option.own} == FIELDS - PYTHON_ONLY


def test_no_flag_twice() -> None:
    flags = [flag for option in PYTHON for flag in (option.flag, option.short) if flag]
    assert len(flags) == len(set(flags))
    assert not NOT_YET & set(flags)


def test_help_lists_every_option_and_fits() -> None:
    for width in (60, 80, 120):
        text = help_text(PYTHON, width)
        for option in PYTHON:
            assert re.search(rf"^  (-\w, )?{option.flag}( {re.escape(option.metavar)})?(\s|$)", text, re.MULTILINE), (
                option
            )
        assert max(map(len, text.splitlines())) <= width


def test_help_tells_the_defaults_of_the_limits() -> None:
    shown = {"memory": "512M", "cpus": "1.0", "pids": "128", "disk": "256M", "files": "1024", "file_size": "unlimited"}
    shown |= {"timeout": "30s", "cpu_time": "30s", "output": "10M"}
    shown |= {"net_connections": "512", "net_bytes": "1G", "net_rate": "1000"}
    assert Spec(**shown) == Spec()
    for key, value in shown.items():
        option = next(option for option in RUN if option.key == key)
        assert f"({value}" in option.help


# ---- parsing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("--memory", "1G"), ("--memory=1G",), ("--memory", "2G", "--memory=1G")])
def test_value(words: tuple[str, ...]) -> None:
    assert parsed(*words, "true") == ({"memory": "1G"}, ["true"])


def test_repeated_options_add_up() -> None:
    values, rest = parsed("--ro", "a", "--ro=b:/c", "--env", "A=1", "--env", "B=x=y", "--env", "A=2", "--", "--ro", "d")
    assert values == {"ro": ["a", "b:/c"], "env": {"A": "2", "B": "x=y"}}
    assert rest == ["--ro", "d"]


def test_first_other_word_is_the_command() -> None:
    assert parsed("-q", "env", "-i", "--memory", "1G", "--") == ({"quiet": True}, ["env", "-i", "--memory", "1G", "--"])


def test_only_the_first_double_dash_is_taken() -> None:
    assert parsed("--", "--", "-x") == ({}, ["--", "-x"])


def test_a_lone_dash_is_no_option() -> None:
    assert parse(["-v", "-", "-q"], PYTHON, ends="-c") == ({"verbose": True}, ["-", "-q"])


@pytest.mark.parametrize("words", [["-c", "print()", "-q"], ["-cprint()", "--json"]])
def test_code_belongs_to_what_follows(words: list[str]) -> None:
    assert parse(["-q", *words], PYTHON, ends="-c") == ({"quiet": True}, words)


def test_letters_in_one_word() -> None:
    assert parsed("-qv", "true") == ({"quiet": True, "verbose": True}, ["true"])


def test_switches() -> None:
    assert parsed("--no-landlock", "--stdin", "--allow-host-net", "x")[0] == {
        "landlock": False,
        "stdin": True,
        "allow_host_net": True,
    }


def test_numbers() -> None:
    assert parsed("--uid", "0", "x")[0] == {"uid": 0}
    with pytest.raises(SpecError, match=r"--uid: must be a number.*'-1'"):
        cli_run.spec_of(parsed("--uid", "-1", "x")[0], RUN)


def test_empty_and_odd_values_survive() -> None:
    odd = "a\udcff b\n=c"
    assert parsed("--env", f"K={odd}", "--env", "E=", f"--ro={odd}", "x")[0] == {
        "env": {"K": odd, "E": ""},
        "ro": [odd],
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memroy", "1G"], r"unknown option --memroy; did you mean --memory\?"),
        (["--mem=1G"], "unknown option --mem"),
        (["-x"], "unknown option -x"),
        (["-qx"], "unknown option -x"),
        (["--memory"], "--memory wants a value: --memory SIZE"),
        (["--memory", "--", "true"], "--memory wants a value"),
        (["--stdin=yes"], "--stdin takes no value"),
        (["--env", "HOME"], 'to pass your own on: --env HOME="\\$HOME"'),
    ],
)
def test_refused(words: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse(words, RUN)


def test_every_value_option_takes_a_value_in_both_ways() -> None:
    for flag, option in by_flag(PYTHON).items():
        if option.kind not in (ON, OFF):
            value = "A=1" if option.kind == cli_options.PAIR else "1"
            assert parse([flag, value], PYTHON) == parse([f"{flag}={value}"], PYTHON)


# ---- profile and options ------------------------------------------------------------------------------------------


def test_options_win_over_the_profile() -> None:
    spec = cli_run.spec_of(parsed("--profile", "strict", "--memory", "1G")[0], RUN)
    assert spec == Spec.from_profile("strict", memory="1G")
    assert spec.memory == 1 << 30
    assert spec.seccomp == "strict"


def test_errors_name_the_flag() -> None:
    for words, flag in (
        (["--cpu-time", "x"], "--cpu-time:"),
        (["--profile", "nope"], "--profile:"),
        (["--ro", ""], "--ro:"),
    ):
        with pytest.raises(SpecError, match=f"^{flag}"):
            cli_run.spec_of(parsed(*words)[0], RUN)


# ---- statuses -----------------------------------------------------------------------------------------------------


def result(status: int, reason: str = "exited", **more: Any) -> SimpleNamespace:
    values: dict[str, Any] = {"limits_hit": [], "argv": ["x"], "steps": {}, "enforced": {}, "to_json": lambda: "{}"}
    values |= {"timing": {}, "boundary": {"outputs": []}}
    return SimpleNamespace(status=status, reason=reason, **{**values, **more})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[Any]]:
    def install(outcome: Any) -> list[Any]:
        calls: list[Any] = []

        def run(*args: Any, **options: Any) -> Any:
            calls.append((args, options))
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr("nsbox.api.run", run)
        return calls

    return install


@pytest.mark.parametrize("status", [0, 1, 124, 137, 143, 255])
def test_status_of_the_command(fake: Any, status: int) -> None:
    calls = fake(result(status))
    assert cli.call(["run", "--", "x", "y"]) == status
    assert calls[0][0][:2] == (["x", "y"], Spec())


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (SpecError("ro: 'x': gone; say another"), 125, "nsbox: --ro: 'x': gone; say another\n"),
        (HostError("no landlock", remedy="boot a newer kernel"), 125, "nsbox: no landlock; boot a newer kernel\n"),
        (SandboxUnavailable("no namespaces", remedy="run this"), 125, "nsbox: no namespaces; run this\n"),
        (
            SetupError("mount", 13, target="/a on /b"),
            125,
            "nsbox: set-up stopped at mount of /a on /b: Permission denied\n",
        ),
        (CommandError("x", 13, 126), 126, "nsbox: cannot execute 'x' inside the sandbox: Permission denied\n"),
        (CommandError("x", 2, 127), 127, "nsbox: cannot execute 'x' inside the sandbox: No such file or directory\n"),
        (cli.Interrupted(2), 130, ""),
        (cli.Interrupted(15), 143, ""),
        (cli_output.DownstreamClosed(), 141, ""),
    ],
)
def test_status_of_errors(fake: Any, capfd: pytest.CaptureFixture[str], error: Any, status: int, words: str) -> None:
    fake(error)
    assert cli.call(["run", "x"]) == status
    assert capfd.readouterr() == ("", words)


def test_a_bug_is_one_line(fake: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NSBOX_DEBUG", raising=False)
    fake(ZeroDivisionError("oh\nno"))
    assert cli.call(["run", "x"]) == 125
    assert (
        capfd.readouterr().err
        == "nsbox: ZeroDivisionError: oh\\nno; this is a bug in nsbox: NSBOX_DEBUG=1 shows where\n"
    )
    monkeypatch.setenv("NSBOX_DEBUG", "1")
    assert cli.call(["run", "x"]) == 125
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "no command"),
        (["run", "--"], "no command"),
        (["python"], "no code"),
        (["python", "-c"], "-c wants CODE"),
        (["python", "/no/such.py"], "No such file"),
        (["python", "/dev/null"], "neither a file nor a folder"),
        (["python", "--python", "/no/such", "-c", ""], "not a program"),
        (["python", "--python", "/bin/true", "-c", ""], "does not answer as a Python 3"),
        (["rnu", "true"], "did you mean run"),
        (["ls", "-l"], "to run a program: nsbox run -- ls"),
        (["bench", "strat"], "did you mean start"),
        (["profiles", "nope"], "is not known"),
    ],
)
def test_one_line_and_125(capfd: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert cli.call(words) == 125
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("nsbox: ")


def test_messages_of_limits(fake: Any, capfd: pytest.CaptureFixture[str]) -> None:
    hits = [{"limit": "output", "value": 10 << 20}, {"limit": "timeout", "value": 1.5}, {"limit": "pids", "value": 9}]
    fake(result(124, "timeout", limits_hit=hits))
    assert cli.call(["run", "x"]) == 124
    said = capfd.readouterr().err.splitlines()
    assert said == [
        "nsbox: the output is not complete: it wrote more than 10 MiB, the --output",
        "nsbox: x was ended: it ran for 1.5 s, the --timeout",
        "nsbox: x touched a limit: it made more than 9 processes and threads, the --pids",
    ]
    assert cli.call(["run", "-q", "x"]) == 124
    assert capfd.readouterr().err == ""


def test_a_limit_that_is_only_watched_is_told(fake: Any, capfd: pytest.CaptureFixture[str]) -> None:
    enforced = {name: {"strength": "watched", "how": "…"} for name in ("memory", "cpu")}
    fake(result(0, enforced={**enforced, "pids": {"strength": "kernel", "how": "…"}}))
    for options, said in ([], "memory, cpu"), (["--degrade", "cpu"], "memory"):
        assert cli.call(["run", *options, "x"]) == 0
        assert capfd.readouterr().err.startswith(f"nsbox: watched, not held by the kernel: {said}; nsbox doctor")
    for options in ["-q"], ["--degrade", "cpu", "--degrade=memory"]:
        assert cli.call(["run", *options, "x"]) == 0
        assert capfd.readouterr().err == ""


def test_usage(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.call([]) == 125
    assert capfd.readouterr().err.startswith("usage: nsbox run")
    for words in (
        ["--help"],
        ["-h"],
        ["help"],
        ["run", "--help"],
        ["python", "-h"],
        ["doctor", "--help"],
        ["profiles", "-h"],
    ):
        assert cli.call(words) == 0
        assert "usage: nsbox" in capfd.readouterr().out


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["--version"]) == 0
    assert re.fullmatch(r"nsbox \d+\.\d+\.\d+\n", capfd.readouterr().out)


def test_profiles(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["profiles"]) == 0
    shown = [line.split()[0] for line in capfd.readouterr().out.splitlines()]
    assert shown == ["strict", "default", "permissive", "coding-agent", "data-analysis", "documents"]
    assert cli.call(["profiles", "strict"]) == 0
    assert 'extends = "default"' in capfd.readouterr().out


# ---- streams ------------------------------------------------------------------------------------------------------


def test_output_gives_up_on_a_reader_that_sleeps_past_the_deadline() -> None:
    reader, writer = os.pipe()
    try:
        import time

        output = cli_output.Output(writer, time.monotonic() + 0.1, keep=True)
        output.write(bytes(1 << 20))
        assert output.kept == [bytes(1 << 20)]
        assert 4096 <= len(os.read(reader, 1 << 20)) < 1 << 20
    finally:
        os.close(reader)
        os.close(writer)


def test_output_to_nobody() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        with pytest.raises(cli_output.DownstreamClosed):
            cli_output.Output(writer, None, keep=False).write(b"x")
    finally:
        os.close(writer)


def test_output_is_whole_where_the_descriptor_does_not_block() -> None:
    code = "import os; from nsbox.cli_output import Output; os.set_blocking(1, False); "
    code += "Output(1, None, False).write(bytes(300000))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert len(process.stdout.read()) == 300000
    assert process.returncode == 0


# ---- nsbox python -------------------------------------------------------------------------------------------------


def about(**more: Any) -> dict[str, Any]:
    base = {
        "executable": "/usr/bin/python3",
        "base": "/usr/bin/python3",
        "prefixes": ["/usr"],
        "paths": [],
        "stdlib": [],
    }
    return {**base, "library": "", "userbase": None, "version": [3, 11], **more}


def environment(monkeypatch: pytest.MonkeyPatch, home: str, **more: Any) -> python_env.PythonEnvironment:
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(python_env, "_own", lambda: about(**more))
    return python_env.of()


def test_the_systems_interpreter_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment(monkeypatch, "/home/somebody", paths=["/usr/lib/python3.11", "/usr/lib/python3/dist-packages"])
    assert found.mounts == ()
    assert "PATH" not in found.env


def test_an_installation_of_its_own_is_mounted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    prefix, packages, extra = tmp_path / "py", tmp_path / "py/lib/site-packages", tmp_path / "checkout"
    for folder in (prefix / "bin", packages, extra):
        folder.mkdir(parents=True)
    (prefix / "bin/python").write_text("")
    found = environment(
        monkeypatch,
        "/home/somebody",
        executable=f"{prefix}/bin/python",
        prefixes=[f"{prefix}"],
        paths=[f"{packages}", f"{extra}", f"{tmp_path}/missing"],
    )
    assert sorted(found.mounts) == sorted([f"{prefix}", f"{extra}"])
    assert found.env["PATH"].startswith(f"{prefix}/bin:")


def test_never_a_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Python installed with --prefix ~/.local, and a .pth file that names the home directory."""
    prefix = tmp_path / ".local"
    for folder in (prefix / "bin", prefix / "lib/python3.11/site-packages", prefix / "share/keyrings"):
        folder.mkdir(parents=True)
    (prefix / "bin/python").write_text("")
    found = environment(
        monkeypatch,
        f"{tmp_path}",
        executable=f"{prefix}/bin/python",
        base=f"{prefix}/bin/python",
        prefixes=[f"{prefix}"],
        stdlib=[f"{prefix}/lib/python3.11"],
        paths=[f"{prefix}/lib/python3.11", f"{prefix}/lib/python3.11/site-packages", f"{tmp_path}", "/"],
        userbase=f"{prefix}",
    )
    assert sorted(found.mounts) == [f"{prefix}/bin/python", f"{prefix}/lib/python3.11"]
    assert found.env["PYTHONUSERBASE"] == f"{prefix}"


def test_links_to_the_interpreter_are_all_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "real/bin").mkdir(parents=True)
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "links").mkdir()
    (tmp_path / "real/bin/python3.11").write_text("")
    (tmp_path / "links/python3").symlink_to("../real/bin/python3.11")
    (tmp_path / "venv/bin/python").symlink_to(tmp_path / "links/python3")
    found = environment(
        monkeypatch,
        "/home/somebody",
        executable=f"{tmp_path}/venv/bin/python",
        prefixes=[f"{tmp_path}/venv", f"{tmp_path}/real"],
    )
    assert sorted(found.mounts) == [f"{tmp_path}/{name}" for name in ("links/python3", "real", "venv")]


def test_the_interpreter_of_this_process() -> None:
    found = python_env.of()
    assert found.executable == sys.executable
    home = os.path.realpath(os.path.expanduser("~"))
    assert not any(home == os.path.realpath(path) for path in found.mounts)
    assert python_env.of(sys.executable).executable == sys.executable


def test_a_file_in_the_workspace_is_run_there(tmp_path: Any, fake: Any) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/main.py").write_text("")
    calls = fake(result(0))
    assert cli.call(["python", "--workspace", f"{tmp_path}:/w", f"{tmp_path}/pkg/main.py", "-x"]) == 0
    (argv, spec), _ = calls[0]
    assert argv[1:] == ["/w/pkg/main.py", "-x"]
    assert not any("main.py" in bind.source for bind in spec.ro)


def test_own_variables_win(fake: Any) -> None:
    calls = fake(result(0))
    assert cli.call(["python", "--env", "PYTHONUNBUFFERED=", "-c", "1"]) == 0
    assert calls[0][0][1].env["PYTHONUNBUFFERED"] == ""
    assert calls[0][0][0][1:] == ["-c", "1"]
    assert cli_python.PYTHON is PYTHON
