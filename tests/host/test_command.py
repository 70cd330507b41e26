"""The command as people and scripts use it: statuses, streams, signals, reports, Python."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nsbox

NSBOX = [sys.executable, "-m", "nsbox"]
# Said at each run where limits have no cgroup, as for most ordinary users.
WATCHED = re.compile(rb"nsbox: watched, not held by the kernel: .*\n")


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test starts in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cli(*words: str | Path | bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """``nsbox`` with these words, as a process of its own."""
    options.setdefault("stdin", None if "input" in options else subprocess.DEVNULL)
    done = subprocess.run([*NSBOX, *words], capture_output=True, timeout=60, check=False, **options)
    done.stderr = WATCHED.sub(b"", done.stderr)
    return done


def output(*words: str | Path | bytes, **options: Any) -> str:
    """What a run that must succeed in silence has printed."""
    done = cli(*words, **options)
    assert (done.returncode, done.stderr) == (0, b""), done
    return done.stdout.decode()


def one_line(done: subprocess.CompletedProcess[bytes], status: int) -> str:
    """The message of a run that came to nothing."""
    text = done.stderr.decode()
    assert done.returncode == status, done
    assert text.startswith("nsbox: ")
    assert text.count("\n") == 1
    assert "Traceback" not in text
    return text


@contextlib.contextmanager
def started(*words: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """``nsbox`` running in the background, with the signals of a shell's foreground job: whoever runs the tests from a
    job in the background ignores SIGINT, and so would all that it starts."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    foreground = ["env", "--default-signal=INT,HUP,TERM"]
    with subprocess.Popen([*foreground, *NSBOX, *words], **options) as process:
        try:
            yield process
        finally:
            process.kill()


def living(marker: str) -> list[str]:
    """Processes of the host, zombies excepted, that have ``marker`` as an argument."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if marker.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def gone(marker: str, seconds: float = 3.0) -> bool:
    """Whether nothing is left of what has ``marker`` as an argument, soon."""
    deadline = time.monotonic() + seconds
    while living(marker):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# ---- statuses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 1, 7, 124, 125, 126, 127, 255])
def test_the_commands_own_status(status: int) -> None:
    done = cli("run", "--", "sh", "-c", f"exit {status}")
    assert (done.returncode, done.stdout, done.stderr) == (status, b"", b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGPIPE])
def test_ended_by_a_signal(number: signal.Signals) -> None:
    assert cli("run", "--", "sh", "-c", f"kill -{int(number)} $$").returncode == 128 + number


def test_not_found() -> None:
    assert "No such file or directory" in one_line(cli("run", "--", "no-such-program"), 127)
    assert "'/no/such/program'" in one_line(cli("run", "--", "/no/such/program"), 127)


def test_cannot_be_executed(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch(mode=0o755)
    assert "Exec format error" in one_line(cli("run", "--ro", f"{empty}:/e", "--", "/e"), 126)
    assert "Permission denied" in one_line(cli("run", "--", "/usr"), 126)
    assert "Permission denied" in one_line(cli("run", "--", "/etc/passwd"), 126)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ro", "/no/such"], "--ro: '/no/such': No such file or directory; name a path"),
        (["--rw", "relative/nonsense"], "--rw: 'relative/nonsense'"),
        (["--workspace", "/no/such"], "--workspace: '/no/such'"),
        (["--root", "/no/such"], "--root: '/no/such'"),
        (["--ro", "/etc:relative"], "must be absolute"),
        (["--ro", "/etc:/a/../b"], "contains '..'"),
        (["--ro", "/etc:/x", "--ro", "/usr:/x"], "the place of more than one mount"),
        (["--profile", "nope"], "'nope' is not known; the shipped ones are strict, default, permissive"),
        (["--profile", "./nope.toml"], "No such file"),
        (["--seccomp", "nope"], "unknown seccomp policy 'nope'"),
        (["--memory", "-1"], "--memory: must be more than 0, not -1"),
        (["--pids", "0"], "--pids: must be more than 0"),
        (["--timeout", "-3s"], "--timeout: must be more than 0"),
        (["--timeout", "soon"], "--timeout: 'soon' is not understood; write a time such as 30s"),
        (["--cwd", "/no/such"], "/no/such"),
        (["--net", "host"], "allow_host_net"),
        (["--report", "/no/such/file"], "--report: '/no/such/file': No such file or directory"),
        (["--memroy", "1G"], "did you mean --memory?"),
    ],
)
def test_bad_input_is_one_line_and_125(words: list[str], said: str) -> None:
    assert said in one_line(cli("run", *words, "--", "true"), 125)


def test_arguments_that_no_program_can_be_given() -> None:
    for argv in (["echo", "a\0b"], ["a\0b"], [""], []):
        with pytest.raises(nsbox.errors.SpecError, match=r"^command: "):
            nsbox.run(argv)
    with pytest.raises(nsbox.errors.SpecError, match=r"^env: "):
        nsbox.run(["true"], env={"A=B": "1"})
    assert "empty" in one_line(cli("run", "--", ""), 125)


def test_an_unexpected_name_cannot_write_to_the_terminal() -> None:
    done = cli("run", "--", "\x1b[31m\nx\xff".encode("latin-1"))
    assert b"\x1b" not in done.stderr
    one_line(done, 127)


def test_profile_and_options() -> None:
    report = json.loads(output("run", "--json", "--profile", "strict", "--", "sh", "-c", "ulimit -n; ulimit -f"))
    assert report["stdout"].split() == ["256", str((32 << 20) // 512)]
    assert "strict" in report["enforced"]["seccomp"]["how"]
    assert output("run", "--profile", "strict", "--files", "77", "--", "sh", "-c", "ulimit -n") == "77\n"
    assert nsbox.run(["sh", "-c", "ulimit -n"], profile="strict").stdout == b"256\n"


# ---- streams ------------------------------------------------------------------------------------------------------


def test_streams_are_kept_apart_and_come_live() -> None:
    with started("run", "--", "sh", "-c", "echo one; echo two >&2; sleep 20", "live-marker") as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"one\n"
        assert process.stderr.readline() == b"two\n"
        assert process.poll() is None
    assert gone("live-marker")


def test_every_byte_in_and_out() -> None:
    data = bytes(range(256)) * 12000 + os.urandom(1000)
    assert cli("run", "--stdin", "--", "cat", input=data).stdout == data
    done = cli("run", "--stdin", "--", "sh", "-c", "tee /dev/stderr", input=data)
    assert done.stdout == done.stderr == data


def test_without_stdin_nothing_is_read() -> None:
    assert cli("run", "--", "cat", input=b"not for you").stdout == b""


def test_a_command_that_does_not_read_its_input() -> None:
    assert cli("run", "--stdin", "--", "true", input=bytes(5 << 20)).returncode == 0


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("option", ["", "--stdin", "--json", "-v"])
def test_closed_descriptors(closed: str, option: str) -> None:
    words = [
        "sh",
        "-c",
        f'exec "$@" {closed}',
        "sh",
        *NSBOX,
        "run",
        *option.split(),
        "--",
        "sh",
        "-c",
        "echo out; exit 5",
    ]
    done = subprocess.run(words, capture_output=True, timeout=60, check=False)
    assert done.returncode == 5, done
    assert b"Traceback" not in done.stderr


def test_nobody_reads_any_more() -> None:
    with started("run", "--", "sh", "-c", "while echo line; do :; done", "pipe-marker") as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.wait(10) == 128 + signal.SIGPIPE
        assert process.stderr.read() == b""
    assert gone("pipe-marker")


def test_a_reader_that_sleeps_does_not_hold_the_time_limit() -> None:
    begin = time.monotonic()
    with started("run", "--timeout", "500ms", "--", "yes", "slow-marker") as process:
        assert process.wait(60) == 124
        assert time.monotonic() - begin < 60
    assert gone("slow-marker")


def test_output_is_cut_with_a_word() -> None:
    done = cli("run", "--output", "10K", "--", "sh", "-c", "head -c 20000 /dev/zero; echo x >&2; exit 3")
    assert (done.returncode, done.stdout) == (3, bytes(10240))
    assert done.stderr == b"x\nnsbox: the output is not complete: it wrote more than 10 KiB, the --output\n"
    done = cli("run", "-q", "--output", "10K", "--", "head", "-c", "20000", "/dev/zero")
    assert (done.returncode, done.stdout, done.stderr) == (0, bytes(10240), b"")


def test_time_limit_keeps_what_was_said() -> None:
    done = cli("run", "--timeout", "300ms", "--", "sh", "-c", "echo begun; exec sleep 20")
    assert (done.returncode, done.stdout) == (124, b"begun\n")
    assert done.stderr == b"nsbox: sh was ended: it ran for 0.3 s, the --timeout\n"


def test_nothing_of_the_environment() -> None:
    environment = {**os.environ, "NSBOX_TEST_TOKEN": "x", "PYTHONPATH": "/elsewhere"}
    names = output("run", "--env", "A=1=2", "--env", "B=", "--", "env", env=environment).splitlines()
    assert {"A=1=2", "B="} < set(names)
    assert {line.partition("=")[0] for line in names} == {
        *("A", "B", "HOME", "USER", "LOGNAME", "PATH", "LANG", "TERM")
    }


# ---- signals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("option", ["-q", "--json"])
def test_a_signal_ends_everything_inside(number: signal.Signals, option: str) -> None:
    marker = f"signal-marker-{int(number)}-{os.getpid()}"
    script = "trap '' INT TERM HUP; setsid sh -c 'sleep 50' $0 & echo ready >&2; sleep 50"
    with started("run", option, "--timeout", "40s", "--", "sh", "-c", script, marker) as process:
        assert process.stderr
        if option == "-q":
            assert process.stderr.readline() == b"ready\n"
        deadline = time.monotonic() + 10
        while len(living(marker)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(10) == 128 + number
        assert process.stderr.read() == b""
    assert gone(marker)


def test_signals_that_the_caller_ignores_stay_ignored() -> None:
    script = 'trap "" INT; exec "$@"'
    words = ["sh", "-c", script, "sh", *NSBOX, "run", "--", "sh", "-c", "echo ready; sleep 0.5; echo done"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"done\n"
    assert process.returncode == 0


def test_killing_nsbox_ends_everything_inside() -> None:
    marker = f"kill-marker-{os.getpid()}"
    with started("run", "--", "sh", "-c", "echo ready; sleep 50", marker) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.kill()
    assert gone(marker)


# ---- reports ------------------------------------------------------------------------------------------------------


def test_json_is_all_there_is_on_stdout() -> None:
    done = cli("run", "--json", "--", "sh", "-c", "echo out; printf '\\377' >&2; exit 3")
    assert (done.returncode, done.stderr) == (3, b"")
    assert done.stdout.count(b"\n") == 1
    report = json.loads(done.stdout)
    assert (report["exit_code"], report["reason"], report["stdout"]) == (3, "exited", "out\n")
    assert report["stderr"] == {"base64": "/w=="}
    assert report["enforced"]["seccomp"]["strength"] == "kernel"


def test_the_warning_and_the_report_agree() -> None:
    done = subprocess.run([*NSBOX, "run", "--json", "--", "true"], capture_output=True, timeout=60, check=True)
    watched = [name for name, layer in json.loads(done.stdout)["enforced"].items() if layer["strength"] == "watched"]
    assert bool(WATCHED.fullmatch(done.stderr)) == bool(watched)
    assert all(name.encode() in done.stderr for name in watched)


def test_report_file_and_live_output(tmp_path: Path) -> None:
    done = cli("run", "--report", "report.json", "--output", "4", "--", "sh", "-c", "echo 12345; echo err >&2")
    assert (done.stdout, done.stderr.splitlines()[0]) == (b"1234", b"err")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["stdout"], report["stderr"], report["stdout_truncated"]) == ("1234", "err\n", True)


def test_a_report_of_what_came_to_nothing(tmp_path: Path) -> None:
    for words, status in ((["--ro", "/no/such", "--", "true"], 125), (["--", "no-such-program"], 127)):
        done = cli("run", "--json", "--report", "report.json", *words)
        said = one_line(done, status).removeprefix("nsbox: ").strip()
        for report in (json.loads(done.stdout), json.loads((tmp_path / "report.json").read_text())):
            assert (report["reason"], report["exit_code"], report["argv"]) == (
                "error",
                None,
                words[words.index("--") + 1 :],
            )
            assert report["error"] in said or said.removeprefix("--") == report["error"]


def test_verbose_tells_the_plan_and_the_steps() -> None:
    done = cli("run", "-v", "--", "echo", "hi")
    assert done.stdout == b"hi\n"
    said = done.stderr.decode()
    assert all(line.startswith("nsbox: ") for line in said.splitlines())
    assert "/usr on /usr, read-only" in said
    assert "µs" in said
    assert "exited, status 0" in said


# ---- python -------------------------------------------------------------------------------------------------------


def test_python_is_this_one() -> None:
    code = "import sys; print([sys.executable, sys.prefix, sys.base_prefix, list(sys.version_info)])"
    assert output("python", "-c", code) == subprocess.check_output([sys.executable, "-c", code], text=True)


def test_python_packages_of_the_caller_are_there() -> None:
    for package in ("pytest", "hypothesis", "cffi", "nsbox"):
        code = f"import {package}; print({package}.__file__)"
        assert output("python", "-c", code) == subprocess.check_output([sys.executable, "-c", code], text=True, cwd="/")


def test_python_runs_one_file(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/neighbour.py").write_text("")
    (tmp_path / "code/main.py").write_text("import os, sys; print(__file__, sys.argv[1:], os.listdir(sys.path[0]))")
    (tmp_path / "code/main.py").chmod(0o644)
    shown = output("python", "code/main.py", "-v", "--json", "x")
    assert shown == f"{tmp_path}/code/main.py ['-v', '--json', 'x'] ['main.py']\n"
    assert output("python", "--workspace", "code:/w", "code/main.py").startswith("/w/main.py [] [")


def test_python_from_standard_input() -> None:
    assert output("python", "-", "a", input=b"import sys; print(sys.argv)") == "['-', 'a']\n"
    assert output("python", "--stdin", "-c", "print(input())", input=b"hello\n") == "hello\n"


def test_python_sees_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("")
    code = f"import os; print(os.path.exists({str(tmp_path / 'secret')!r}), 'NSBOX_TEST_TOKEN' in os.environ)"
    assert output("python", "-c", code, env={**os.environ, "NSBOX_TEST_TOKEN": "x"}) == "False False\n"


def test_python_cannot_change_the_installation() -> None:
    code = (
        "import os, sys, errno\ntry: open(os.path.join(sys.prefix, 'x'), 'w')\nexcept OSError as e: print(e.strerror)"
    )
    assert output("python", "-c", code) in ("Read-only file system\n", "Permission denied\n")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment with a package, and one that a .pth file leads to."""
    at = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", at], check=True)
    (site,) = at.glob("lib/python3*/site-packages")
    (site / "inside_it.py").write_text("x = 1\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/outside_it.py").write_text("y = 2\n")
    (site / "more.pth").write_text(f"{tmp_path}/elsewhere\n")
    for path in (site / "inside_it.py", tmp_path / "elsewhere/outside_it.py", site / "more.pth"):
        path.chmod(0o644)
    return at


def test_python_of_another_environment(venv: Path) -> None:
    code = "import inside_it, outside_it, sys; print(inside_it.x + outside_it.y, sys.prefix)"
    assert output("python", "--python", venv / "bin/python", "-c", code) == f"3 {venv}\n"


def test_python_of_the_system() -> None:
    if not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("no /usr/bin/python3 on this host")
    assert output("python", "--python", "/usr/bin/python3", "-c", "import sys; print(sys.prefix)") == "/usr\n"


@pytest.mark.slow
def test_numpy_of_an_environment(venv: Path) -> None:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(venv / "bin/python"),
        "install",
        "-q",
        "--only-binary=:all:",
        "numpy",
    ]
    if subprocess.run(pip, capture_output=True, timeout=300, check=False).returncode != 0:
        pytest.skip("numpy cannot be installed here: no pip, or no package index in reach")
    code = "import numpy; a = numpy.random.rand(300, 300); print((a @ numpy.linalg.inv(a)).trace().round(3))"
    assert output("python", "--python", venv / "bin/python", "-c", code) == "300.0\n"


# ---- the rest -----------------------------------------------------------------------------------------------------


def test_demo() -> None:
    demo = Path(__file__).parents[2] / "examples/demo.sh"
    done = subprocess.run(
        ["sh", demo], capture_output=True, timeout=60, check=False, env={**os.environ, "NSBOX": " ".join(NSBOX)}
    )
    assert done.returncode == 0, textwrap.indent(done.stdout.decode(), "  ")
    assert b"!!" not in done.stdout
    assert done.stderr == b""


def test_doctor() -> None:
    facts = json.loads(output("doctor", "--json"))["facts"]
    assert {"name", "ok", "value", "reason", "remedy"} <= set(facts[0])
    assert "Sandboxes can run here" in output("doctor")
