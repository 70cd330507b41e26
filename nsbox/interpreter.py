"""An interpreter that waits in a sandbox of its own, and the watch over one request to it.

It was forked from a template (``nsbox.template``) into a sandbox that was launched without a command. Its control
socket leads to the template, which tells its end as a watcher inside would; what it is asked, and answers, goes over a
socket of its own. All that comes from there is hostile: a length that is bounded, then JSON.
"""

import contextlib
import errno
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nsbox import inputs, janitor, pausing, watch
from nsbox._native import ffi, lib
from nsbox.ahead import identity, namespaces_of, proof
from nsbox.errors import SandboxUnavailable
from nsbox.handle import Handle
from nsbox.launch import launch, pipe
from nsbox.prepared import Prepared
from nsbox.streams import Stream
from nsbox.supervise import CHUNK, Run
from nsbox.template import MOST_ANSWER, Template

if TYPE_CHECKING:
    from nsbox.masking import Masker

START_TIMEOUT_S = 30.0
_HEAD = struct.Struct("=Q")


class Interpreter(Handle):
    """Owns a sandbox and the interpreter in it; ``close`` ends both."""

    is_command = True
    is_last = True

    def __init__(self, box: Handle) -> None:
        super().__init__(box.prepared, box.started_at)
        self.id, self.box = box.id, box
        self.answer = -1
        self.pidfd, self.scratch_fd, self.root_fd, self.secrets_fd = (
            *(box.pidfd, box.scratch_fd, box.root_fd, box.secrets_fd),
        )
        self.pid, self.cloned_at, self.host_ids = box.pid, box.cloned_at, box.host_ids
        self.cgroup, self.egress, self.scratch = box.cgroup, box.egress, box.scratch
        self.secrets, self.revoked_at = box.secrets, box.revoked_at
        self.inside = 0  #: its host pid

    @property
    def roots(self) -> tuple[int, ...]:
        return (self.box.pid, self.inside)

    def tell(self, kind: int, value: int = 0, op: int = 0) -> bool:
        """Signals are sent from here: init, whose Landlock domain is another, could send it none."""
        if kind == lib.NSB_MSG_SIGNAL:
            pausing.send(self._processes()[1:], value, self._processes)
        else:
            self.kill()
        return True

    def _processes(self) -> list[int]:
        return watch.processes(*self.roots)

    def kill(self) -> None:
        self.box.kill()

    def close(self) -> None:
        """SIGKILL everything inside; the rest is given back later, off the caller's path. Idempotent."""
        if self.pidfd < 0:
            return
        self.kill()
        self.pidfd = self.scratch_fd = self.root_fd = self.secrets_fd = -1
        self.cgroup = self.egress = self.scratch = None
        if os.getpid() == self.owner:
            janitor.later(self._give_back)
        else:
            self._give_back()

    def _give_back(self) -> None:
        for name in ("stdout", "stderr", "control", "answer"):
            self.close_stream(name)
        self.box.close()


class Lease(Run):
    """The interpreter under watch. ``reply`` is what it answered to the last request, as it came from there."""

    def __init__(self, handle: Interpreter) -> None:
        super().__init__(handle)
        self.interpreter = handle
        self.made_at = time.time()
        self.reply: dict[str, Any] | None = None
        self.trouble = ""  #: why there is no reply, where it was not one
        self.template: Template | None = None
        self.identity: dict[str, Any] = {}  #: see nsbox.ahead
        self._used = 0.0
        self._request = memoryview(b"")
        self._received = bytearray()

    @property
    def over(self) -> bool:
        return self.reply is not None or bool(self.trouble) or super().over

    @property
    def healthy(self) -> bool:
        """Whether it can be given out: it waits, and says nothing."""
        fds = self.interpreter.answer, self.handle.control, self.handle.pidfd
        if min(fds) < 0:
            return False
        waiter = select.poll()
        for fd in fds:
            waiter.register(fd, select.POLLIN)
        return not waiter.poll(0)

    def proof(self) -> dict[str, Any]:
        """For the report: what shows that nobody used it before."""
        return proof(self.identity, self.made_at)

    def ask(self, request: Mapping[str, Any], timeout: float | None, output: int | None) -> None:
        """Send a request, with time and output limited anew; the answer comes while somebody watches."""
        data = json.dumps(request).encode()
        self._request = memoryview(_HEAD.pack(len(data)) + data)
        self.reply, self.trouble, self.reason, self.status = None, "", None, None
        self.stdout, self.stderr = (Stream(output, None, self.handle.masker()) for _ in range(2))
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.timeout, self.cap = timeout, output
        self.enforcer.hits.clear()
        self.enforcer.begin(self._used)
        self.stamps = {"exec": time.monotonic_ns()}
        self._send()

    def settle(self) -> None:
        """It waits from now on: what was used until now is not the next request's."""
        self.reply = None
        if "cpu_time" in self.handle.prepared.plan.limits.watch:
            self._used = self.enforcer.used()
        if self.handle.cgroup is not None:
            self.handle.cgroup.counters()  # opens what will be read at the end
        self.prepare()

    def interests(self) -> dict[int, tuple[str, int]]:
        wanted = super().interests()
        if self.interpreter.answer >= 0:
            wanted[self.interpreter.answer] = ("answer", select.POLLIN | (select.POLLOUT if self._request else 0))
        return wanted

    def on_event(self, name: str, fd: int) -> None:
        if name != "answer":
            super().on_event(name, fd)
            return
        if self._request:
            self._send()
        self._take_answer()

    def _send(self) -> None:
        ret = lib.nsb_write(self.interpreter.answer, ffi.from_buffer(self._request), len(self._request))
        if ret >= 0:
            self._request = self._request[ret:]
        elif ret not in (-errno.EAGAIN, -errno.EINTR):
            self._request = memoryview(b"")

    def _take_answer(self) -> None:
        while self.interpreter.answer >= 0 and self.reply is None and not self.trouble:
            try:
                data = os.read(self.interpreter.answer, CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.interpreter.close_stream("answer")
                return
            self._received += data
            self._parse()

    def _parse(self) -> None:
        if len(self._received) < _HEAD.size:
            return
        size = _HEAD.unpack_from(self._received)[0]
        if size > MOST_ANSWER:
            self.trouble = f"it answered with {size} bytes; {MOST_ANSWER} may come back"
        elif len(self._received) == _HEAD.size + size:
            self.reply = _parsed(self._received[_HEAD.size :], self.handle.masker())
        if self.reply is None and len(self._received) >= _HEAD.size + size:
            self.trouble = "it answered with something that is not a reply"
        if self.reply is not None or self.trouble:
            self.stamps["run"] = time.monotonic_ns()
            self._received.clear()
            for name in ("stdout", "stderr"):
                self._drain(name)
        if self.trouble:
            self.reason = "error"

    def _receive(self) -> None:
        super()._receive()
        if self.status is not None and self.reply is None:
            # It has ended without an answer, or right behind it. What it left in its sandbox goes now.
            self._take_answer()
            if self.reply is None:
                self.handle.kill()

    def conclude(self) -> list[dict[str, Any]]:
        if self.reply is not None:
            code = self.reply.get("exit", int("exception" in self.reply))
            self.status = (code if isinstance(code, int) else 1) % 256 << 8
        if self.handle.cgroup is None:
            used = watch.cpu_time(self.interpreter.inside)
            self.usage.setdefault("cpu_user_s", used[0])
            self.usage.setdefault("cpu_system_s", used[1])
        return super().conclude()


def _parsed(data: bytes | bytearray, masker: "Masker | None") -> dict[str, Any] | None:
    """What came as an object of JSON, without values of secrets; None where it is none."""
    try:
        reply = json.loads(data)
        if not isinstance(reply, dict):
            return None
        return _masked(reply, masker) if masker else reply
    except (ValueError, RecursionError):
        return None


def _masked(value: Any, masker: "Masker") -> Any:
    if isinstance(value, str):
        return masker.mask(value.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
    if isinstance(value, list):
        return [_masked(item, masker) for item in value]
    if isinstance(value, dict):
        return {_masked(key, masker): _masked(item, masker) for key, item in value.items()}
    return value


def _wait(run: Run, until: Callable[[], bool]) -> None:
    # Not drive(): the answer that ends a request may come before the template's word that it has started.
    while not until():
        if run.error is not None:
            raise run.error
        if run.reason is not None or run.status is not None or run.handle.control < 0:
            raise SandboxUnavailable("a sandbox for a pool did not start", remedy="run: nsbox doctor")
        run.turn()


def make(
    prepared: Prepared,
    template: Template,
    zygote: Any,
    on_network: Callable[[str, dict[str, Any]], None] | None = None,
) -> Lease:
    """A fresh sandbox with a fresh interpreter in it that waits. Raises what a launch raises; then nothing is left."""
    box = launch(prepared, None, on_network=on_network, flags=lib.NSB_JOIN, zygote=zygote)
    with contextlib.ExitStack() as undo:
        undo.callback(box.close)
        run = Run(box, timeout=START_TIMEOUT_S, streams=False)
        _wait(run, lambda: run.joinable)
        namespaces = namespaces_of(box.pid)  # while init can be looked at, also by an ordinary user
        handle = Interpreter(box)
        undo.callback(handle.close)
        for name in ("stdout", "stderr"):
            box.close_stream(name)
        _enter(handle, template)
        lease = Lease(handle)
        lease.deadline = time.monotonic() + START_TIMEOUT_S
        _wait(lease, lambda: lease.started)
        handle.inside = lease.pid
        _wait(lease, lambda: lease.reply is not None or bool(lease.trouble))
        _check(lease)
        box.tell(lib.NSB_MSG_GO)
        _wait(run, lambda: run.started)
        handle.scratch_fd, handle.root_fd, handle.secrets_fd = box.scratch_fd, box.root_fd, box.secrets_fd
        lease.deadline, lease.template = None, template
        lease.identity = identity(handle) | {"namespaces": namespaces}
        handle.inputs = inputs.describe(prepared)
        lease.settle()
        undo.pop_all()
    return lease


def _enter(handle: Interpreter, template: Template) -> None:
    box = handle.box
    with contextlib.ExitStack() as owned:
        handle.stdout, out = pipe(owned, to_inside=False, host_ids=box.host_ids)
        handle.stderr, err = pipe(owned, to_inside=False, host_ids=box.host_ids)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        handle.control = ours.detach()
        owned.callback(theirs.close)
        asked, asks = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        asks.setblocking(False)
        handle.answer = asks.detach()
        owned.callback(asked.close)
        into, groups = (box.cgroup.into, box.cgroup.doors()) if box.cgroup else (-1, ())
        try:
            template.fork_into(box.pidfd, theirs.fileno(), [asked.fileno(), out, err], into, groups)
        finally:
            if box.cgroup:
                box.cgroup.joined()


def _check(lease: Lease) -> None:
    reply = lease.reply or {}
    if "ready" not in reply:
        raise SandboxUnavailable(
            f"an interpreter could not enter its sandbox: {reply.get('failed', lease.trouble)}",
            remedy="run: nsbox doctor",
        )
