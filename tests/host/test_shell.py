"""A shell that lives on between commands, and terminals: of a box, and of ``nsbox shell`` joined to a real one."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nsbox
from nsbox.box import Sandbox
from nsbox.errors import SandboxUnavailable
from nsbox.process import Process
from nsbox.shell import Shell

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 15.0


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox(timeout=20) as made:
        yield made


@pytest.fixture
def shell(box: Sandbox) -> Iterator[Shell]:
    with box.shell() as made:
        yield made


def test_state_survives(shell: Shell) -> None:
    result = shell.run("cd /tmp && x='a b' && f() { echo \"<$x>\"; } && declare -a list=(1 2)")
    assert (result.ok, result.cwd) == (True, "/tmp")
    assert shell.run("f; echo ${list[1]}; pwd").stdout == b"<a b>\n2\n/tmp\n"
    assert shell.run("mkdir 'odd\nname' && cd 'odd\nname'").cwd == "/tmp/odd\nname"
    assert shell.cwd == "/tmp/odd\nname"


def test_status_and_streams(shell: Shell) -> None:
    result = shell.run("echo out; echo err >&2; (exit 7)")
    assert (result.stdout, result.stderr, result.exit_code, result.reason) == (b"out\n", b"err\n", 7, "exited")
    assert shell.run("echo $?").stdout == b"7\n"
    assert shell.run("kill -9 $BASHPID &\nwait $!").exit_code == 137
    assert shell.run("printf 'no end of line'").stdout == b"no end of line"
    assert shell.run("printf 'a\\0b'; printf '\\xff'").stdout == b"a\0b\xff"


@pytest.mark.parametrize(
    "text",
    [
        "if",
        "'",
        "$(",
        "cat <<E\nno end",
        "}",
        "{ echo x; ",
        "break",
        "continue 3",
        "return 4",
        "((",
        "#",
        "",
        "\\",
        "\n\n",
    ],
)
def test_no_text_breaks_the_protocol(shell: Shell, text: str) -> None:
    shell.run(text)
    assert shell.run("echo alive").stdout == b"alive\n"


def test_quotes_and_lines_arrive_as_they_are(shell: Shell) -> None:
    assert shell.run("""x='it'"'"'s'\necho "$x" $(echo '\\$y')""").stdout == b"it's \\$y\n"
    assert shell.run("cat <<'E'\n$a 'b'\nE").stdout == b"$a 'b'\n"
    with pytest.raises(ValueError, match="NUL"):
        shell.run("a\0b")


def test_a_command_cannot_eat_the_script(shell: Shell) -> None:
    assert shell.run("cat; read line; echo got:$line").stdout == b"got:\n"
    assert shell.run("exec < /etc/hostname; echo next").stdout == b"next\n"
    assert shell.run("echo alive").stdout == b"alive\n"


def test_streams_redirected_for_good(shell: Shell) -> None:
    shell.run("exec > /tmp/log 2>&1")
    assert shell.run("echo hidden").stdout == b""
    assert shell.run("cat /tmp/log; exec > /dev/null").exit_code == 0


def test_much_output_on_both_streams(shell: Shell) -> None:
    result = shell.run("head -c 3000000 /dev/zero >&2; head -c 3000000 /dev/zero")
    assert (len(result.stdout), len(result.stderr)) == (3_000_000, 3_000_000)


def test_output_is_capped() -> None:
    with Sandbox(output=1000, timeout=20) as box, box.shell() as shell:
        result = shell.run("head -c 3000000 /dev/zero")
        assert (len(result.stdout), result.truncated) == (1000, True)
        assert shell.run("echo next").stdout == b"next\n"


def test_what_waits_meets_its_deadline_and_the_state_survives(shell: Shell) -> None:
    shell.run("x=kept; sleep 71 & mkfifo /tmp/fifo")
    start = time.monotonic()
    result = shell.run("cat /tmp/fifo & cat /tmp/fifo; echo after", timeout=0.3)
    assert (result.reason, result.ok) == ("timeout", False)
    assert time.monotonic() - start < 30
    assert shell.run("echo $x; jobs").stdout.startswith(b"kept\n[1]")


def test_an_interactive_program_meets_its_deadline(shell: Shell) -> None:
    start = time.monotonic()
    assert shell.run("python3 -c 'import time; print(1, flush=True); time.sleep(71)'", timeout=0.5).reason == "timeout"
    assert time.monotonic() - start < 30
    assert not shell.is_over


def test_bash_itself_hangs(shell: Shell) -> None:
    result = shell.run("while :; do :; done", timeout=0.2)
    assert (result.reason, result.exit_code) == ("timeout", None)
    assert shell.is_over
    with pytest.raises(SandboxUnavailable, match="ended"):
        shell.run("true")


@pytest.mark.parametrize(("text", "code"), [("exit 5", 5), ("exec sh -c 'exit 6'", 6), ("kill -9 $$", 137)])
def test_the_shell_ends_itself(box: Sandbox, text: str, code: int) -> None:
    with box.shell() as shell:
        result = shell.run(f"echo last; {text}")
        assert (result.stdout, result.exit_code, result.reason) == (b"last\n", code, "ended")
        assert shell.is_over


def test_shells_side_by_side(box: Sandbox) -> None:
    with box.shell(cwd="/tmp", env={"V": "1"}) as one, box.shell() as two:
        one.run("x=1")
        assert one.run("echo $x$V; pwd").stdout == b"11\n/tmp\n"
        assert two.run("echo $x$V; pwd").stdout == b"\n/home/user\n"


# ---- terminals ----


def await_text(process: Process, wanted: str, *, seen: list[bytes]) -> str:
    """What came, up to and with ``wanted``; the rest stays in ``seen``."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        process.poll()
        text = b"".join(seen).decode(errors="replace")
        if found := re.search(wanted, text):
            seen[:] = [text[found.end() :].encode()]
            return text[: found.end()]
        process.advance(time.monotonic() + 0.1)
    raise AssertionError(f"{wanted!r} did not come: {b''.join(seen)!r}")


def test_a_terminal_of_a_box(box: Sandbox) -> None:
    seen: list[bytes] = []
    process = box.terminal(rows=30, columns=90, on_stdout=seen.append)
    process.write("PS1='> '; stty size; tty\n")
    await_text(process, r"30 90\r\n/dev/pts/0\r\n[^\n]*> ", seen=seen)
    process.write("trap 'echo changed' WINCH\n")
    process.resize(40, 100)
    process.write("stty size\n")
    await_text(process, "40 100", seen=seen)
    process.write("sleep 71\n")
    await_text(process, "sleep 71\r\n", seen=seen)
    time.sleep(0.3)  # until bash has given it the terminal
    process.write(b"\x03")
    process.write("echo status $?\n")
    await_text(process, "status 130", seen=seen)
    process.write("sleep 71\n")
    await_text(process, "sleep 71\r\n", seen=seen)
    time.sleep(0.3)  # until bash has given it the terminal
    process.write(b"\x1a")
    await_text(process, "Stopped", seen=seen)
    # The first one may say that there are stopped jobs; then the next one ends the shell.
    process.write("kill -9 %1; exit 3\nexit 3\n")
    assert process.wait(PATIENCE_S).exit_code == 3


def test_a_python_prompt_on_a_terminal(box: Sandbox) -> None:
    seen: list[bytes] = []
    process = box.terminal(["python3", "-q"], on_stdout=seen.append)
    await_text(process, ">>> ", seen=seen)
    process.write("6 * 7\n")
    await_text(process, "42\r\n", seen=seen)
    await_text(process, ">>> ", seen=seen)  # until then the end of input is the line discipline's, and may get lost
    process.write(b"\x04")
    assert process.wait(PATIENCE_S).exit_code == 0


def test_a_run_on_a_terminal() -> None:
    sizes: list[int] = []
    result = nsbox.run(
        ["sh", "-c", "stty size; cat; exit 4"], tty=(11, 22), on_tty=sizes.append, stdin=b"typed\n\x04", timeout=20
    )
    assert sorted(result.stdout.split(b"\r\n")) == [b"", b"11 22", b"typed", b"typed"]
    assert result.exit_code == 4
    assert len(sizes) == 1


class Terminal:
    """A real terminal with ``nsbox ARGUMENTS`` on it."""

    def __init__(self, *arguments: str) -> None:
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.master, (33, 77))
        self.before = termios.tcgetattr(self.slave)
        self.program = subprocess.Popen(
            [sys.executable, "-m", "nsbox", *arguments],
            **dict.fromkeys(("stdin", "stdout", "stderr"), self.slave),  # type: ignore[arg-type]
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # it becomes the controlling terminal
            env={**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)},
        )
        self.text = ""

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def expect(self, wanted: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(wanted, self.text)):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.master], [], [], left)[0]:
                raise AssertionError(f"{wanted!r} did not come: {self.text!r}")
            self.text += os.read(self.master, 65536).decode(errors="replace")
        self.text = self.text[found.end() :]

    def end(self) -> int:
        return self.program.wait(PATIENCE_S)

    def is_as_before(self) -> bool:
        return bool(termios.tcgetattr(self.slave) == self.before)

    def close(self) -> None:
        if self.program.poll() is None:
            self.program.kill()
        self.program.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    with contextlib.ExitStack() as stack:

        def make(*arguments: str) -> Terminal:
            made = Terminal(*arguments)
            stack.callback(made.close)
            return made

        yield make


def test_nsbox_shell(terminal: Callable[..., Terminal]) -> None:
    screen = terminal("shell")
    screen.expect(r"\$ ")
    screen.type("echo $TERM $((6*7)); stty size\r")
    screen.expect(r"xterm 42\r\n33 77\r\n")
    assert not screen.is_as_before()
    termios.tcsetwinsize(screen.master, (20, 60))
    screen.program.send_signal(signal.SIGWINCH)
    screen.type("sleep 0.2; stty size\r")
    screen.expect(r"20 60\r\n")
    screen.type("sleep 71\r")
    screen.expect("sleep 71\r\n")
    time.sleep(0.3)
    screen.type("\x03")
    screen.expect(r"\^C")
    screen.type("echo status $?\r")
    screen.expect(r"status 130\r\n")
    screen.type("sleep 71\r")
    screen.expect("sleep 71\r\n")
    time.sleep(0.3)
    screen.type("\x1a")
    screen.expect("Stopped")
    screen.type("kill -9 %1; exit 9\rexit 9\r")
    assert screen.end() == 9
    assert screen.is_as_before()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_terminal_is_put_back_when_a_signal_ends_it(
    terminal: Callable[..., Terminal], number: int, status: int
) -> None:
    screen = terminal("shell")
    screen.expect(r"\$ ")
    screen.program.send_signal(number)
    assert screen.end() == status
    assert screen.is_as_before()


def test_the_terminal_is_put_back_after_a_time_limit(terminal: Callable[..., Terminal]) -> None:
    screen = terminal("shell", "--timeout", "1s")
    screen.expect(r"\$ ")
    screen.type("sleep 71\r")
    screen.expect("--timeout")
    assert screen.end() == 124
    assert screen.is_as_before()


def test_stopped_and_continued(terminal: Callable[..., Terminal]) -> None:
    screen = terminal("shell")
    screen.expect(r"\$ ")
    screen.program.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    termios.tcsetattr(screen.slave, termios.TCSANOW, screen.before)
    screen.program.send_signal(signal.SIGCONT)
    time.sleep(0.2)
    assert not screen.is_as_before()
    screen.type("exit 2\r")
    assert screen.end() == 2


def test_a_program_for_the_whole_screen(terminal: Callable[..., Terminal]) -> None:
    screen = terminal("run", "--tty", "--", "sh", "-c", "seq 200 | less; echo over")
    screen.expect(r"(?s)31\r\n32\r\n")
    screen.type("G")
    screen.expect(r"200")
    screen.type("q")
    screen.expect("over")
    assert screen.end() == 0


def test_the_callers_terminal_cannot_be_fed(terminal: Callable[..., Terminal]) -> None:
    code = "import fcntl,termios\nfor fd in 0, 1, 2: fcntl.ioctl(fd, termios.TIOCSTI, b'x')"
    screen = terminal("run", "--tty", "--", "sh", "-c", f'python3 -c "{code}" 2>/dev/null; echo over')
    screen.expect("over")
    assert screen.end() == 0
    assert not select.select([screen.slave], [], [], 0.1)[0]


def test_a_script_instead_of_a_keyboard() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nsbox", "shell"],
        input=b"echo $((6*7))\n",
        capture_output=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == b"42\n"
    assert done.returncode == 0
