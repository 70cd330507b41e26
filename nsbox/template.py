"""The template of a pool of interpreters, seen from outside: started once, asked to fork itself into sandboxes.

What it is and does is in ``nsbox.python_template`` and native/template.c. It is started without any of the caller's
variables and descriptors, so that its memory, of which every fork has a copy, holds nothing of the caller's.
"""

import json
import os
import select
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from nsbox import _native
from nsbox._native import ffi, lib
from nsbox.encode import Ids, command, command_blob, launch_blob, waiting
from nsbox.errors import HostError, SandboxUnavailable, SpecError
from nsbox.failures import failure
from nsbox.prepared import Prepared
from nsbox.python_env import PythonEnvironment

#: bytes of an answer that are taken from inside
MOST_ANSWER = 16 << 20
_BOOT = "g={'__name__':'nsbox-template','__file__':'<nsbox>'};exec(compile(open(4).read(),'<nsbox>','exec'),g)"
_NAMESPACES = {"user": 0x10000000, "mnt": 0x20000, "pid": 0x20000000, "ipc": 0x8000000, "uts": 0x4000000}
_CGROUP, _NETWORK = 0x2000000, 0x40000000
_NUMPY = "import numpy\n(numpy.arange(16.0).reshape(4, 4) @ numpy.ones((4, 4))).sum().tolist()\n"


def _memory(name: str, data: bytes) -> int:
    """A descriptor that reads as ``data``."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def zygote_for(prepared: Prepared) -> "_native.Zygote | None":
    """Who launches sandboxes that a template can enter: None is the zygote of the process. The caller closes it."""
    if prepared.plan.privileged:
        return None
    made = _native.Zygote()
    try:
        made.nest()
    except BaseException:
        made.close()
        raise
    return made


class Template:
    """A template that serves. Any thread may ask; it forks one after the other. ``close`` is idempotent."""

    def __init__(
        self,
        prepared: Prepared,
        python: PythonEnvironment,
        zygote: "_native.Zygote | None",
        preload: Sequence[str] = (),
        warm_up: str = "",
        timeout: float = 60.0,
    ) -> None:
        """Raises SpecError when it cannot import what it should, SandboxUnavailable when it cannot be started."""
        self.python = python
        self._lock = threading.Lock()
        self._errors = os.memfd_create("nsbox-template-errors", os.MFD_CLOEXEC)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        passed = [theirs.detach(), *self._files(prepared, preload, warm_up)]
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            try:
                self._start(prepared, zygote or _native.zygote(), [null, self._errors, *passed])
            finally:
                for fd in (null, *passed):
                    os.close(fd)
            self.version = self._ready(timeout)
        except BaseException:
            self.close()
            raise

    def _files(self, prepared: Prepared, preload: Sequence[str], warm_up: str) -> list[int]:
        """What it finds at 4 and up: its text, the library, what it is told, the plan, the text for inside."""
        library = lib.nsb_join_library()
        if library < 0:
            raise SandboxUnavailable(f"no memory for a template: {os.strerror(-library)}", errno=-library)
        plan, fixed = prepared.plan, dict(_NAMESPACES)
        warm = f"1 + 1\n{_NUMPY if 'numpy' in preload else ''}{warm_up}"
        config = {
            "preload": list(preload),
            "env": dict(plan.env),
            "cwd": plan.cwd,
            "warm": [{"code": "pass"}, {"code": warm, "inputs": {"x": 1}}],
            "most": MOST_ANSWER,
            "namespaces": sum(fixed.values()) | _CGROUP | (_NETWORK if plan.network else 0),
            "clone": lib.NSB_STAGE_CLONE,
            "messages": {
                "failed": lib.NSB_MSG_FAILED,
                "started": lib.NSB_MSG_STARTED,
                "exited": lib.NSB_MSG_EXITED,
                "ended": lib.NSB_MSG_ENDED,
            },
        }
        # Of a plan, what a process gives up; the ids on the host, which differ between sandboxes, are not in it.
        ids = Ids("", "", plan.uid, plan.gid, plan.uid, plan.gid, 0, 0, not plan.privileged)
        blob = launch_blob(prepared.compiled, waiting(), ids, lib.NSB_JOIN)
        texts = [Path(__file__).with_name(name).read_bytes() for name in ("python_template.py", "python_inside.py")]
        return [
            _memory("nsbox-template", texts[0]),
            library,
            _memory("nsbox-config", json.dumps(config).encode()),
            _memory("nsbox-plan", blob),
            _memory("nsbox-inside", texts[1]),
        ]

    def _start(self, prepared: Prepared, zygote: "_native.Zygote", fds: Sequence[int]) -> None:
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/nonexistent"}
        base = self.python.env.get("PYTHONUSERBASE")
        flags = ["-P", "-B"] if base else ["-I", "-B"]
        if base:
            env["PYTHONUSERBASE"] = base
        blob = command_blob(command([self.python.executable, *flags, "-c", _BOOT], env, "/", 0, len(fds) - 2))
        answer, made = ffi.new("struct nsb_msg *"), ffi.new("int[2]", (-1, -1))
        try:
            ret = lib.nsb_ask(zygote.socket, lib.NSB_TEMPLATE, blob, len(blob), list(fds), len(fds), answer, made)
            if ret == 0 and answer.type == lib.NSB_MSG_CLONED:
                self.pid = answer.pid
                ret = lib.nsb_receive(made[0], answer, ffi.NULL, 0)
                if ret == -32:  # the socket went with its execve(2)
                    return
        finally:
            for fd in made:
                if fd >= 0:
                    os.close(fd)
        if ret >= 0 and answer.type == lib.NSB_MSG_FAILED:
            raise failure(prepared, answer)
        raise SandboxUnavailable(
            f"the template interpreter cannot be started: {os.strerror(-ret)}", remedy="run: nsbox doctor", errno=-ret
        )

    def _ready(self, timeout: float) -> str:
        self._socket.settimeout(timeout)
        try:
            answer = json.loads(self._socket.recv(1 << 16) or b"{}")
        except (OSError, ValueError):
            answer = {}
        self._socket.settimeout(None)
        if "failed" in answer:
            last = str(answer["failed"]).strip().rpartition("\n")[2]
            raise SpecError(f"python: the template cannot be made: {last}")
        if "ready" not in answer:
            raise SpecError(
                f"python: {self.python.executable!r} did not become a template: {self.errors() or 'no word'}"
            )
        self.pid = int(answer["pid"])
        return str(answer["ready"])

    def errors(self) -> str:
        """The end of what it wrote to standard error."""
        size = os.fstat(self._errors).st_size
        return os.pread(self._errors, 2000, max(0, size - 2000)).decode("utf-8", "replace").strip()

    def fork_into(
        self, pidfd: int, control: int, streams: Sequence[int], into: int = -1, groups: Sequence[int] = ()
    ) -> None:
        """Have a fork enter the sandbox that ``pidfd`` is the init of. ``control`` gets NSB_MSG_STARTED, or FAILED;
        ``streams``: the socket where it is asked, standard output, standard error; ``into`` and ``groups``: cgroups, as
        a ``Cgroup`` has them."""
        fds = [pidfd, control, *streams, *((into,) if into >= 0 else ()), *groups]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"={len(fds)}i", *fds))]
        try:
            with self._lock:
                self._socket.sendmsg([bytes([into >= 0])], rights)
        except OSError as error:
            raise HostError(
                f"the template interpreter is gone: {error.strerror}", remedy="make another pool", errno=error.errno
            ) from None

    @property
    def is_alive(self) -> bool:
        """Whether it still serves."""
        if self._socket.fileno() < 0:
            return False
        waiter = select.poll()
        waiter.register(self._socket, select.POLLIN)
        return not waiter.poll(0)

    def close(self) -> None:
        """Let it end. What it forked is ended by the sandboxes' own ends, or by its parent-death signal."""
        with self._lock:
            self._socket.close()
            if self._errors >= 0:
                os.close(self._errors)
            self._errors = -1

    def forget(self) -> None:
        """``close`` in a forked child, where a thread of the parent may hold the lock for ever."""
        self._lock = threading.Lock()
        self.close()


def stamp(python: PythonEnvironment) -> tuple[tuple[str, int, int], ...]:
    """What tells that an interpreter or its packages have changed: times and numbers of its files and folders."""
    found = []
    for path in (python.executable, *python.folders):
        try:
            status = os.stat(path)
        except OSError:
            continue
        found.append((path, status.st_mtime_ns, status.st_ino))
    return tuple(found)
