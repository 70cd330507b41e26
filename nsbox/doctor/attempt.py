"""Trying something in a process of its own, which ends whatever happens and leaves the caller as it was.

The child may unshare, mount and send netlink messages as it likes: all of that goes away with it.
"""

import contextlib
import ctypes
import errno
import functools
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

CLONE_NEWTIME = 0x80
CLONE_NEWNS = 0x20000
CLONE_NEWCGROUP = 0x2000000
CLONE_NEWUTS = 0x4000000
CLONE_NEWIPC = 0x8000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000

# Numbers from 424 on are the same on every architecture.
OPEN_TREE, MOVE_MOUNT, FSOPEN, CLONE3, CLOSE_RANGE, OPENAT2, MOUNT_SETATTR, LANDLOCK_CREATE_RULESET = (
    428, 429, 430, 435, 436, 437, 442, 444,
)  # fmt: skip

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
#: Seconds that one attempt may take.
PATIENCE = 1.0
_MAX_ANSWER = 1 << 16


class Outcome(NamedTuple):
    """What an attempt came to. ``errno`` is 0 where it succeeded, and then ``value`` is what the function returned."""

    value: Any
    errno: int = 0
    step: str = ""  #: the call that failed, or the file

    @property
    def ok(self) -> bool:
        return self.errno == 0

    @property
    def error(self) -> str:
        """Step and error in words."""
        return f"{self.step}: {os.strerror(self.errno)}" if self.step else os.strerror(self.errno)


@functools.cache
def libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return library


def checked(result: int, step: str) -> int:
    """The result of a C call, or its error as an OSError that names the step."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), step)
    return result


def syscall(step: str, number: int, *arguments: Any) -> int:
    """A system call by number; integers are passed as long, all else as ctypes does."""
    words = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return checked(libc().syscall(ctypes.c_long(number), *words), step)


def unshare(flags: int, step: str) -> None:
    checked(libc().unshare(ctypes.c_int(flags)), f"unshare({step})")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    words = [os.fsencode(word) if word is not None else None for word in (source, target, kind, data)]
    checked(libc().mount(*words[:3], ctypes.c_ulong(flags), words[3]), f"mount of {kind or source}")


def enter_user_namespace(flags: int = 0, step: str = "") -> None:
    """Become root of a new user namespace in which the caller's one id is mapped, then unshare ``flags``."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER, "CLONE_NEWUSER")
    # Without CAP_SETGID outside, a gid map is accepted only after setgroups(2) has been given up (user_namespaces(7)).
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        write(f"/proc/self/{name}", text)
    if flags:
        unshare(flags, step)
    if flags & CLONE_NEWNS:
        mount("none", "/", None, MS_REC | MS_PRIVATE)


def write(path: str, text: str) -> None:
    """One write(2) to a file of the kernel; the error names the file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held_namespace() -> Iterator[int]:
    """The pid of a child that sits in a new user namespace without id maps."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            unshare(CLONE_NEWUSER, "CLONE_NEWUSER")
            os.write(done, b"\0")
            signal.pause()
        finally:
            os._exit(ctypes.get_errno())
    os.close(done)
    status = 0
    try:
        with open(ready, "rb") as answer:
            held = answer.read(1)
        if held:
            yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    if not held:
        code = os.waitstatus_to_exitcode(status)
        raise OSError(code if code > 0 else errno.EPERM, "", "unshare(CLONE_NEWUSER)")


def _child(function: Callable[[], Any], answer: int) -> NoReturn:
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # After a change of uid a process may not write its own id maps before it is dumpable again (proc(5)).
        libc().prctl(_PR_SET_DUMPABLE, 1)
        try:
            message: dict[str, Any] = {"value": function()}
        except OSError as error:
            message = {"errno": error.errno or errno.EIO, "step": os.fsdecode(error.filename or "")}
        except Exception as error:
            message = {"errno": errno.EIO, "step": f"{type(error).__name__} {error}"}
        os.write(answer, json.dumps(message).encode() + b"\n")
    finally:
        os._exit(0)


def _receive(reader: int, deadline: float) -> bytes | None:
    """A line, or what came before end-of-file; None where neither came in time."""
    received = b""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    while not received.endswith(b"\n") and len(received) < _MAX_ANSWER:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return None
        chunk = os.read(reader, 4096)
        if not chunk:
            break
        received += chunk
    return received


def _end(pid: int) -> int:
    """Kill the child and whatever it started, and reap it; the wait status, 0 where another part reaped it."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:  # the embedder ignores SIGCHLD
        return 0


def attempt(function: Callable[[], Any], patience: float = PATIENCE) -> Outcome:
    """Run a function in a forked child; its JSON-able value, or its OSError. Ends within ``patience`` (s)."""
    libc()
    reader, writer = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        return Outcome(None, error.errno or errno.EAGAIN, "fork")
    if pid == 0:
        _child(function, writer)
    os.close(writer)
    status = 0
    try:
        received = _receive(reader, time.monotonic() + patience)
    finally:
        os.close(reader)
        status = _end(pid)
    if received is None:
        return Outcome(None, errno.ETIMEDOUT, f"no answer within {patience} s")
    if not received.endswith(b"\n"):
        end = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "no answer"
        return Outcome(None, errno.EPERM, f"the attempt ended by {end}")
    message = json.loads(received)
    return Outcome(message.get("value"), message.get("errno", 0), message.get("step", ""))
