"""A bash that lives on between commands: working directory, variables, functions and jobs survive.

Nothing is guessed from a prompt. bash reads its script from a pipe; each command is one ``eval``, after which bash
itself writes a mark to both streams: a random word that the command cannot know, and on standard output the exit status
and the working directory. The command's own standard input is /dev/null, so that it cannot eat the script.
"""

import os
import secrets
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

from nsbox import pausing, watch
from nsbox.errors import SandboxUnavailable
from nsbox.process import PIPE

if TYPE_CHECKING:
    from nsbox.commands import Commands

# Copies of the streams, for the marks: the command may redirect its own for good, and does not inherit these.
_START = "exec 253>&1 254>&2\n"
_SCRIPT = (
    "{restore}{{ eval {text}\n}} </dev/null 253>&- 254>&-; "
    "printf '\\0%s %d %s\\0' {mark} \"$?\" \"$PWD\" >&253; printf '\\0%s\\0' {mark} >&254\n"
)
#: seconds that bash gets to come back after what it waits for was killed
GRACE_S = 1.0
MAX_FACTS = 8192  #: bytes behind a mark: a status and a path


class ShellResult(NamedTuple):
    """What a command came to. ``reason`` is ``exited``; ``timeout`` when its deadline ended it; ``ended`` when it ended
    the shell itself (``exit``, ``exec``). ``exit_code`` is None where bash did not get to tell."""

    stdout: bytes
    stderr: bytes
    exit_code: int | None
    cwd: str
    reason: str
    truncated: bool

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with status 0."""
        return self.reason == "exited" and self.exit_code == 0

    @property
    def stdout_text(self) -> str:
        """``stdout`` as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """``stderr`` as text; bytes that are not UTF-8 are replaced."""
        return self.stderr.decode("utf-8", "replace")


class _Stream:
    """One stream of the shell: what a command writes, up to its mark."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self.begin(b"")

    def begin(self, mark: bytes) -> None:
        """Start anew. What background jobs wrote since the last command belongs to nobody."""
        self._mark = mark
        self._data, self._tail = bytearray(), b""
        self.facts: bytes | None = None  #: what stands behind the mark; None: it has not come
        self.truncated = False

    def add(self, data: bytes) -> None:
        """Take what was read."""
        if self.facts is not None or not self._mark:
            return
        text = self._tail + data
        at = text.find(self._mark)
        end = -1 if at < 0 else text.find(b"\0", at + 1)
        if at >= 0 and end < 0 and len(text) - at > MAX_FACTS:  # not what bash writes
            end = at + len(self._mark)
        if end >= 0:
            self._keep(text[:at])
            self.facts, self._tail = text[at + len(self._mark) : end], b""
            return
        # A mark may have come in part: keep back as much as one can be long.
        safe = at if at >= 0 else max(0, len(text) - len(self._mark) + 1)
        self._keep(text[:safe])
        self._tail = text[safe:]

    def _keep(self, data: bytes) -> None:
        room = max(0, self._cap - len(self._data))
        self._data += data[:room]
        self.truncated |= len(data) > room

    @property
    def data(self) -> bytes:
        """What the command has written."""
        return bytes(self._data) + (self._tail if self.facts is None else b"")


class Shell:
    """A session in a box; ``close`` it, or close the box. For one thread at a time."""

    def __init__(self, box: "Commands", *, cwd: str | None = None, env: dict[str, str] | None = None) -> None:
        self._box = box
        limits = box.spec.limits
        self._timeout = limits.timeout
        cap = limits.output if limits.output is not None else 1 << 40
        self._out, self._err = _Stream(cap), _Stream(cap)
        self._status = 0
        self._process = box.popen(
            ["bash", "--noprofile", "--norc"],
            stdin=PIPE,
            cwd=cwd,
            env=env,
            timeout="unlimited",
            max_output="unlimited",
            on_stdout=self._out.add,
            on_stderr=self._err.add,
        )
        try:
            self._process.write(_START)
            self.cwd = self.run("true").cwd
        except BaseException:
            self.close()
            raise

    @property
    def is_over(self) -> bool:
        """Whether the shell has ended."""
        return self._process.is_over

    def run(self, text: str, timeout: float | None = None) -> ShellResult:
        """Run shell text; it sees the state that the commands before have left.

        ``timeout`` (seconds) defaults to the box's. At the deadline what the command has started is killed; if bash
        does not come back then, it is itself what hangs, and is ended: ``is_over``. Raises SandboxUnavailable when it
        has ended before, ValueError for text with a NUL character."""
        if "\0" in text:
            raise ValueError("the text contains a NUL character, which no shell can be given")
        if self.is_over:
            raise SandboxUnavailable("the shell has ended", remedy="open another with box.shell()")
        mark = secrets.token_hex(16)
        self._out.begin(b"\0" + mark.encode() + b" ")
        self._err.begin(b"\0" + mark.encode())
        restore = f"(exit {self._status}); " if self._status else ""
        earlier = set(self._descendants())
        limit = self._timeout if timeout is None else timeout
        deadline = None if limit is None else time.monotonic() + limit
        self._process.write(_SCRIPT.format(restore=restore, text=_quoted(text), mark=mark))
        reason = "exited"
        if not self._await_mark(deadline):
            reason = "timeout"
            pausing.send(set(self._descendants()) - earlier, signal.SIGKILL, self._descendants)
            if not self._await_mark(time.monotonic() + GRACE_S):
                self._process.kill()
                self._await_mark(None)
        return self._conclude(reason)

    def _await_mark(self, deadline: float | None) -> bool:
        """Whether the marks have come, or the shell has ended; False at the deadline."""
        while not self.is_over and (self._out.facts is None or self._err.facts is None):
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self._process.advance(deadline)
        return True

    def _conclude(self, reason: str) -> ShellResult:
        code: int | None = None
        if self._out.facts is not None:
            status, _, cwd = self._out.facts.partition(b" ")
            code = self._status = int(status) if len(status) <= 3 and status.isdigit() else 255
            self.cwd = os.fsdecode(cwd) or self.cwd
        elif self.is_over:
            reason = reason if reason == "timeout" else "ended"
            result = self._process.wait()
            code = result.status if reason == "ended" else None
        truncated = self._out.truncated or self._err.truncated
        return ShellResult(self._out.data, self._err.data, code, self.cwd, reason, truncated)

    def _descendants(self) -> list[int]:
        """Host pids of what runs below the shell."""
        for pid in self._box.processes():
            if watch.inside_pid(pid) == self._process.pid:
                return watch.processes(pid)[1:]
        return []

    def close(self) -> None:
        """End the shell and all that it started. Idempotent."""
        self._process.close()

    def __enter__(self) -> "Shell":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _quoted(text: str) -> str:
    """One word of the shell."""
    return "'" + text.replace("'", "'\\''") + "'"
