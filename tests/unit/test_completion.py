"""Completion in the shells themselves: what is typed on a terminal, Tab, and what the command then gets."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nsbox import bench, cli, cli_completion, cli_words, profiles
from nsbox.cli_options import RUN, by_flag
from nsbox.cli_words import WORDS
from nsbox.errors import SpecError
from nsbox.spec import LAYERS

# What each shell is started with: no files of the user's, and a stand-in for nsbox that prints its arguments.
START = {
    "bash": ["bash", "--noprofile", "--norc", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
SAY = "nsbox() { printf '<%s>' \"$@\"; echo '<END>'; }\n"
READY = {
    "bash": SAY + "source SCRIPT; PS1='ready> '\n",
    "zsh": SAY + "autoload -Uz compinit; compinit -D -u; source SCRIPT; PS1='ready> '\n",
}
PATIENCE_S = 20.0


def need(shell: str) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(shell: str) -> Path:
        path = tmp_path / f"script.{shell}"
        path.write_text(cli_completion.script([shell]))
        return path

    return write


@pytest.mark.parametrize("shell", sorted(cli_completion.SHELLS))
def test_the_shell_takes_the_script(shell: str, script: Callable[[str], Path]) -> None:
    need(shell)
    done = subprocess.run([shell, "-n", script(shell)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("shell", sorted(cli_completion.SHELLS))
def test_every_word_and_option_is_in_the_script(shell: str) -> None:
    text = cli_completion.script([shell])
    for word in WORDS:
        assert re.search(rf"\b{word.name}\b", text)
        for option in word.options:
            # fish names them without the dashes.
            assert (f"-l {option.flag[2:]} " if shell == "fish" else option.flag) in text


def test_the_table_has_every_command() -> None:
    assert [word.name for word in WORDS] == list(cli._COMMANDS)


def test_named_words_are_those_that_there_are() -> None:
    assert [name for name, _ in cli_words.by_name("completion").names] == list(cli_completion.SHELLS)
    assert tuple(name for name, _ in cli_words.by_name("bench").names) == bench.NAMES


def test_refused() -> None:
    for words in ([], ["csh"], ["bash", "zsh"]):
        with pytest.raises(SpecError, match="bash, zsh, fish"):
            cli_completion.script(words)


def test_values_come_from_where_they_are_defined() -> None:
    known = by_flag(RUN)
    assert cli_completion.values_of(known["--net"]).words == ("none", "filtered", "host")
    assert cli_completion.values_of(known["--profile"]) == (tuple(profiles.names()), "file")
    assert cli_completion.values_of(known["--require"]).words == LAYERS
    assert "strict" in cli_completion.values_of(known["--seccomp"]).words
    assert cli_completion.values_of(known["--workspace"]) == ((), "dir")
    assert cli_completion.values_of(known["--ro"]) == ((), "file")
    for flag in ("--secret", "--env", "--memory", "--publish"):
        assert cli_completion.values_of(known[flag]) == ((), "")


# ---- a shell on a terminal ----------------------------------------------------------------------------------------


class Terminal:
    """An interactive shell with the script loaded; ``type`` gives what nsbox gets for a line with Tabs in it."""

    def __init__(self, shell: str, script: Path, folder: Path) -> None:
        self._fd, theirs = pty.openpty()
        env = {"PATH": os.environ["PATH"], "HOME": f"{folder}", "TERM": "dumb", "INPUTRC": "/dev/null", "LC_ALL": "C"}
        self._process = subprocess.Popen(
            START[shell], stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=folder, start_new_session=True
        )
        os.close(theirs)
        os.write(self._fd, READY[shell].replace("SCRIPT", f"{script}").encode())
        self._until(r"(?<!')ready> ")

    def _until(self, pattern: str) -> "re.Match[str]":
        text, deadline = "", time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, text, re.DOTALL)):
            if not select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                pytest.fail(f"no {pattern!r} in {text!r}")
            text += os.read(self._fd, 65536).decode("utf-8", "replace")
        return found

    def type(self, line: str) -> list[str]:
        os.write(self._fd, f"{line}\n".encode())
        found = self._until(r"\n((?:<[^<>]*>)+)<END>.*ready> ")
        return re.findall(r"<([^<>]*)>", found[1])

    def close(self) -> None:
        os.close(self._fd)  # the hang-up ends the shell
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture(params=["bash", "zsh"])
def terminal(request: pytest.FixtureRequest, script: Callable[[str], Path], tmp_path: Path) -> Iterator[Terminal]:
    need(request.param)
    folder = tmp_path / "here"
    (folder / "project").mkdir(parents=True)
    (folder / "data.csv").write_text("")
    made = Terminal(request.param, script(request.param), folder)
    yield made
    made.close()


def parts(words: list[str]) -> list[str]:
    """zsh completes an option that takes a value to ``--option=``, and takes the slash of a directory away again."""
    return [part.rstrip("/") for word in words for part in word.split("=")]


def test_typed_on_a_terminal(terminal: Terminal) -> None:
    for line, expected in (
        ("nsbox prof\t", ["profiles"]),
        ("nsbox profiles perm\t", ["profiles", "permissive"]),
        ("nsbox run --mem\t1G", ["run", "--memory", "1G"]),
        ("nsbox run --net fil\t", ["run", "--net", "filtered"]),
        ("nsbox run --net=fil\t", ["run", "--net=filtered"]),
        ("nsbox run --profile coding\t", ["run", "--profile", "coding-agent"]),
        ("nsbox run --ro da\t", ["run", "--ro", "data.csv"]),
        ("nsbox run --workspace pro\t", ["run", "--workspace", "project/"]),
        ("nsbox run --ro data.csv:/data.csv --hostn\tx", ["run", "--ro", "data.csv:/data.csv", "--hostname", "x"]),
        ("nsbox run --require landl\t true", ["run", "--require", "landlock", "true"]),
        ("nsbox run -- mkfif\t", ["run", "--", "mkfifo"]),
        ("nsbox run -q mkfif\t", ["run", "-q", "mkfifo"]),
        ("nsbox run cat dat\t", ["run", "cat", "data.csv"]),
        ("nsbox python dat\t --mem\t", ["python", "data.csv", "--mem"]),
        ("nsbox log data.csv --fol\t", ["log", "data.csv", "--follow"]),
        ("nsbox completion fi\t", ["completion", "fish"]),
        ("nsbox bench start --quick lay\t", ["bench", "start", "--quick", "layers"]),
    ):
        assert parts(terminal.type(line)) == parts(expected), line


def test_names_of_files_are_put_into_the_line_quoted(terminal: Terminal, tmp_path: Path) -> None:
    name = "odd;touch $(echo hit) `echo hit` &"
    (tmp_path / "here" / name).write_text("")
    (tmp_path / "here" / name).chmod(0o755)
    for line, expected in (
        ("nsbox run ./od\t", ["run", f"./{name}"]),
        ("nsbox run cat od\t", ["run", "cat", name]),
        ("nsbox run --ro od\t", ["run", "--ro", name]),
        ("nsbox log od\t", ["log", name]),
    ):
        assert parts(terminal.type(line)) == expected, line
    assert not (tmp_path / "here/hit").exists()


def test_what_fish_offers(script: Callable[[str], Path], tmp_path: Path) -> None:
    need("fish")
    (tmp_path / "data.csv").write_text("")
    for line, expected in (
        ("nsbox prof", ["profiles"]),
        ("nsbox profiles perm", ["permissive"]),
        ("nsbox run --mem", ["--memory"]),
        ("nsbox run --net ", ["filtered", "host", "none"]),
        ("nsbox run --net=fil", ["--net=filtered"]),
        ("nsbox run --ro dat", ["data.csv"]),
        ("nsbox run --net none --hostna", ["--hostname"]),
        ("nsbox run -- mkfif", ["mkfifo"]),
        ("nsbox run -q mkfif", ["mkfifo"]),
        ("nsbox run cat dat", ["data.csv"]),
        ("nsbox run cat --mem", []),
        ("nsbox log data.csv --fol", ["--follow"]),
        ("nsbox completion fi", ["fish"]),
        ("nsbox bench start --quick lay", ["layers"]),
    ):
        command = f'source {script("fish")}; complete -C "{line}"'
        done = subprocess.run(
            [*START["fish"][:2], "-c", command],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": f"{tmp_path}"},
        )
        assert done.stderr == ""
        assert sorted(found.split("\t")[0] for found in done.stdout.splitlines()) == expected, line


def test_the_command_line_prints_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nsbox", "completion", "bash"], capture_output=True, text=True, check=True
    )
    assert done.stdout == cli_completion.script(["bash"])


def test_a_run_does_not_pay_for_it() -> None:
    code = "import sys; from nsbox import cli, cli_run; print(*(name for name in sys.modules if 'nsbox.cli_' in name))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "nsbox.cli_run" in done.stdout
    assert "cli_words" not in done.stdout
    assert "cli_completion" not in done.stdout


def test_help_names_every_word() -> None:
    usage = cli_words.usage()
    for word in WORDS:
        assert f"nsbox {word.name}" in usage
        assert word.summary in usage
        assert max(map(len, cli_words.help_of(word.name, 80).splitlines())) <= 120
