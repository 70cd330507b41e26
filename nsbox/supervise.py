"""Watches a sandbox until it ends: streams, deadlines, messages of init, and the kill. One poll loop, no threads.

A run is over when init has said that nothing is left inside, and what the streams hold then has been read, or when init
itself is gone. A descendant that holds a stream cannot delay that: init kills everything once the payload has ended.
"""

from __future__ import annotations

import errno
import os
import select
import time

from nsbox import received
from nsbox._native import STAGES, ffi, lib, steps
from nsbox.enforce import Enforcer
from nsbox.errors import CommandError, HostError, NsboxError, SandboxUnavailable
from nsbox.failures import failure
from nsbox.handle import Handle
from nsbox.light import TYPE_CHECKING, contextlib, signal
from nsbox.streams import Stream

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CHUNK = 65536
GRACE = 2.0  #: seconds that init, or a watcher, gets to kill and report before it is killed itself; a busy host is slow
MAX_ERRNO = 4095
END_OF_INPUT = b"\x04"  #: what a terminal takes as such at the start of a line (termios(3), VEOF)
PIPE_MAX = 1 << 20  #: bytes that a pipe can hold at most, where nobody has raised fs.pipe-max-size
_READ = select.POLLIN | select.POLLHUP | select.POLLERR


class Run:
    """One sandbox under watch, and what has been learnt of it."""

    def __init__(self, handle: Handle, **options: Any) -> None:
        """``options`` are those of ``expect``."""
        self.handle = handle
        self.enforcer = Enforcer(handle.limits, handle.watch_for, handle, handle.cgroup)
        self._message, self._fds = ffi.new("struct nsb_msg *"), ffi.new("int[]", 5)
        self._poll = select.poll()
        self._waited: dict[int, tuple[str, int]] = {}  #: what it was told to wait for
        self.expect(**options)

    def expect(
        self,
        *,
        stdin: bytes | int | None = None,
        timeout: float | None = None,
        output: int | None = None,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        streams: bool = True,
        tty: bool | Callable[[int], object] = False,
    ) -> None:
        """A program is to start, with these streams and limits: nothing is known of it yet."""
        handle = self.handle
        self.started = False
        self.joinable = False  #: see NSB_JOIN
        self.pid = 0  #: of the payload, inside
        self.stdout = Stream(output, on_stdout, handle.masker())
        self.stderr = Stream(output, on_stderr, handle.masker())
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.timeout, self.cap = timeout, output
        self.reason: str | None = None
        self.error: NsboxError | None = None
        self.status: int | None = None
        self.usage: dict[str, float] = {}
        self.stamps: dict[str, int] = {}
        self.steps: dict[str, float] = {}  #: microseconds from one stage's end to the next
        self.ended_at = 0.0
        self.streams = streams  #: whether output is read; while it is not, the payload waits once its pipe is full
        # An int is a descriptor that is read as far as the payload takes it: nothing piles up here.
        self._source = stdin if isinstance(stdin, int) else -1
        self._input = memoryview(b"" if isinstance(stdin, int) or stdin is None else stdin)
        self._tty, self._hung = tty, False  #: a terminal is expected; a callable is told its master
        self._kill_at: float | None = None
        self._term_until: float | None = None  #: 0 once the grace is over
        self._ended = self._gone = False

    @property
    def over(self) -> bool:
        """Whether there is nothing more to wait for."""
        drained = self.handle.stdout < 0 and self.handle.stderr < 0
        return self._gone or (self._ended and drained)

    @property
    def settled(self) -> bool:
        """Whether all of it has ended, though perhaps nobody has taken the news yet."""
        return self._gone or (self.handle.is_part and _hung_up(self.handle.control))

    @property
    def complete(self) -> bool:
        """Whether the sandbox's side has told of the end of everything."""
        return self._ended

    def interests(self) -> dict[int, tuple[str, int]]:
        """Descriptor → its name, and what to wait for on it (poll(2))."""
        h = self.handle
        wanted = [(h.pidfd, "pidfd", select.POLLIN)]
        if self.streams:
            wanted += [(-1 if self._hung else h.stdout, "stdout", _READ), (h.stderr, "stderr", _READ)]
        # Without anything to write the pipe is watched for its reader's end only (POLLERR needs no asking).
        idle = self._source >= 0 and not self._input
        wanted += [(h.control, "control", _READ), (h.stdin, "stdin", 0 if idle else select.POLLOUT)]
        if idle and h.stdin >= 0:
            wanted.append((self._source, "source", select.POLLIN))
        wanted += [(fd, "cgroup", events) for fd, events in self.enforcer.interests().items()]
        return {fd: (name, events) for fd, name, events in wanted if fd >= 0}

    def next_time(self) -> float | None:
        """When ``on_time`` must be called at the latest (time.monotonic())."""
        times = [
            self.deadline,
            self._kill_at,
            self._term_until or None,
            self.enforcer.next_time(),
            self.handle.next_revocation(),
            self.handle.shared.next_time() if self.handle.shared else None,
        ]
        return min((t for t in times if t is not None), default=None)

    def stop(self, reason: str) -> None:
        """Have everything inside killed; init reports what was used, or is itself killed after a grace time.

        Where the Spec has a grace, the payload gets SIGTERM first, and that time to end by itself.
        """
        if self.reason is None:
            self.reason = reason
        grace = self.handle.prepared.spec.grace
        if grace and self._term_until is None and reason in ("timeout", "cpu_time", "cancelled"):
            self._term_until = time.monotonic() + grace
            self.handle.tell(lib.NSB_MSG_SIGNAL, signal.SIGTERM)
            return
        self._term_until = 0.0
        if self._kill_at is None:
            self._kill_at = time.monotonic() + GRACE
            if not self.handle.tell(lib.NSB_MSG_KILL):
                self.handle.kill()

    def take_start(self) -> None:
        """Take the news that the command has started, if they are there: they say which processes are its own."""
        poll = select.poll()
        if not self.started and self.error is None and self.handle.control >= 0:
            poll.register(self.handle.control, select.POLLIN)
            if poll.poll(0):
                self._receive()

    def on_time(self, now: float) -> None:
        """Act on deadlines that have passed."""
        if self.deadline is not None and now >= self.deadline:
            self.deadline = None
            if self.status is None and not self.settled:  # else it has ended in time, and is looked at late
                self.enforcer.hit("timeout", self.timeout)
                self.stop("timeout")
        self.handle.revoke_secrets(now)
        if self._term_until and now >= self._term_until:
            self.stop(self.reason or "timeout")
        exceeded = self.enforcer.on_time(now)
        if exceeded:
            self.stop(exceeded)
        if self.handle.shared is not None:
            self.handle.shared.look(now)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None if self.settled else now + GRACE
            if not self.settled:
                self.handle.kill()

    def on_event(self, name: str, fd: int) -> None:
        """Act on a descriptor that is ready."""
        if name in ("stdout", "stderr"):
            self._read(name)
        elif name == "stdin":
            self._write()
        elif name == "source":
            self._fetch()
        elif name == "control":
            self._receive()
        elif name == "cgroup":
            exceeded = self.enforcer.on_event(fd)
            if exceeded:
                self.stop(exceeded)
        elif name == "pidfd":
            self._init_gone()

    def prepare(self) -> None:
        """Tell poll(2) what to wait for, as far as that has changed."""
        wanted, before = self.interests(), self._waited
        if wanted == before:
            return
        for fd in before.keys() - wanted.keys():
            self._poll.unregister(fd)
        for fd, (name, events) in wanted.items():
            if before.get(fd) != (name, events):
                self._poll.register(fd, events)
        self._waited = wanted

    def turn(self, limit: float | None = None) -> None:
        """Wait until something happens, or until ``limit`` (time.monotonic()), and act on it."""
        self.prepare()
        at = self.next_time()
        if limit is not None:
            at = limit if at is None else min(at, limit)
        pause = None if at is None else max(0.0, at - time.monotonic()) * 1000 + 0.5
        waited = self._waited
        with contextlib.suppress(InterruptedError):
            ready = self._poll.poll(pause)
            # pidfd last: what init has said and written comes before the news of its end.
            ready.sort(key=lambda item: waited[item[0]][0] == "pidfd")
            for fd, _ in ready:
                self.on_event(waited[fd][0], fd)
        self.on_time(time.monotonic())

    def conclude(self) -> list[dict[str, Any]]:
        """After the end: settle the reason and the usage; the limits that were touched, in order."""
        self.stdout.finish()
        self.stderr.finish()
        for stream in (self.stdout, self.stderr):
            if stream.cut_at is not None:
                self.enforcer.hit("output", self.cap, self.enforcer.hits.get("output", {}).get("count", 0) + 1)
        ended_by = self.enforcer.conclude(self.usage)
        if self.handle.egress is not None and self.handle.is_last:
            self.usage["net_tx_bytes"], self.usage["net_rx_bytes"] = self.handle.egress.end()
            for hit in self.handle.egress.limits_hit():
                self.enforcer.hits.setdefault(hit["limit"], hit)
        self.reason = self.reason or ended_by
        return sorted(self.enforcer.hits.values(), key=lambda hit: float(hit["first_at"]))

    def _read(self, name: str) -> bool:
        """Read once; False when there is nothing to read now or any more."""
        fd = getattr(self.handle, name)
        if fd < 0:
            return False
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            # EIO: nobody inside has the terminal open. To close the master now would hang up a payload that is about to
            # exit, as programs do that close their streams first.
            self._hung = bool(self._tty) and self.status is None
            if self._hung:
                return False
            data = b""
        if data:
            getattr(self, name).add(data)
        else:
            self.handle.close_stream(name)
        return bool(data)

    def _fetch(self) -> None:
        """Take what the source has; at its end, or when it cannot be read, the payload sees end-of-file."""
        try:
            data = os.read(self._source, CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self._input = memoryview(data)
        if not data:
            self._source = -1
            if self._tty:
                self._input = memoryview(END_OF_INPUT)
            else:
                self.handle.close_stream("stdin")

    def _write(self) -> None:
        if not self._input:  # POLLERR: nobody reads any more
            self._source = -1
        if self._input:
            ret = lib.nsb_write(self.handle.stdin, ffi.from_buffer(self._input[:CHUNK]), min(CHUNK, len(self._input)))
            if ret >= 0:
                self._input = self._input[ret:]
            elif ret not in (-errno.EAGAIN, -errno.EINTR):
                self._input, self._source = memoryview(b""), -1
        if not self._input and self._source < 0:
            self.handle.close_stream("stdin")

    def _receive(self) -> None:
        message = self._message
        ret = lib.nsb_receive(self.handle.control, message, self._fds, len(self._fds))
        if ret == -errno.EPIPE:
            self.handle.close_stream("control")
            if self.handle.is_command:
                self._init_gone()
            return
        if ret < 0:
            if not self.started:
                # Without its descriptors nothing of the sandbox could be taken out or counted: rather an error.
                why = "the message that a sandbox has started was lost, mostly for want of descriptors"
                self.error = HostError(why, remedy="raise the limit on open files: ulimit -n", errno=-ret)
                self.handle.kill()
            return
        kind = message.type
        first = kind == lib.NSB_MSG_STARTED and not self.started
        self._take(first, ret)
        if first or kind != lib.NSB_MSG_STARTED:
            self.stamps.update((name, at) for name, at in zip(STAGES, message.stamps, strict=False) if at)
        if first:
            self.started, self.pid, self.steps = True, message.pid, steps(self.stamps)
            self.handle.payload = message.pid
        if not -MAX_ERRNO <= message.err <= 0:  # from somebody hostile: anything can be in it
            message.err = -errno.EPROTO
        if kind == lib.NSB_MSG_FAILED and self.error is None:  # two threads of init may fail
            self.error = failure(self.handle.prepared, message)
        elif kind == lib.NSB_MSG_EXEC_FAILED:
            self.error = CommandError("", -message.err, 127 if message.status == 127 else 126)
        elif kind == lib.NSB_MSG_JOIN:
            self.joinable = True
        elif kind in (lib.NSB_MSG_EXITED, lib.NSB_MSG_ENDED):
            self._learn_end(message)

    def _learn_end(self, message: Any) -> None:
        if self.status is None:
            self.status, self.ended_at, self._hung = message.status, time.monotonic(), False
            self.handle.close_stream("stdin")
        if message.type == lib.NSB_MSG_ENDED:
            self._ended = self.handle.settled = True
            # What is in the pipes is all: nobody writes any more, or he was left running and is not waited for.
            for name in ("stdout", "stderr") if self.streams else ():
                self._drain(name)
                self.handle.close_stream(name)
        self.usage = {
            "cpu_user_s": message.utime_us / 1e6,
            "cpu_system_s": message.stime_us / 1e6,
            "memory_peak_bytes": message.maxrss_kb * 1024,
            "io_read_bytes": message.inblock * 512,
            "io_write_bytes": message.oublock * 512,
        }

    def _drain(self, name: str) -> None:
        """Read what is in a pipe; not to the end of file, for somebody who lives on may write for ever."""
        most = getattr(self, name).total + PIPE_MAX
        while getattr(self, name).total < most and self._read(name):
            pass

    def _take(self, first: bool, got: int) -> None:
        """Keep the descriptors of the first NSB_MSG_STARTED, if they are as many as were asked for: the root and the
        scratch file system, the master of a terminal. Whatever else came along is closed."""
        names = []
        if not self.handle.is_command and self.handle.root_fd < 0:  # else it was made ahead, and has told of them then
            names = ["root_fd", "scratch_fd", *(["secrets_fd"] if self.handle.secrets.files else [])]
        if self._tty:
            names.append("stdout")
        fds = [self._fds[number] for number in range(got)]
        wanted = first and len(fds) == len(names)
        if wanted:
            try:
                received.at_start(dict(zip(names, fds, strict=True)), self.handle.scratch, bool(self._tty))
            except (OSError, SandboxUnavailable) as error:
                self.error = error if isinstance(error, SandboxUnavailable) else received.wrong("a descriptor")
                self.handle.abandon()
                wanted = False
        if not wanted:
            for fd in fds:
                os.close(fd)
            return
        for name, fd in zip(names, fds, strict=True):
            self.handle.close_stream(name)
            setattr(self.handle, name, fd)
        if self._tty:
            os.set_blocking(fds[-1], False)
            self.handle.close_stream("stdin")
            self.handle.stdin = os.dup(fds[-1])
            if callable(self._tty):
                self._tty(fds[-1])

    def _init_gone(self) -> None:
        """Whoever watches inside is gone: take what it has said and what the pipes still hold, without waiting."""
        while self.handle.control >= 0:
            ready = select.poll()
            ready.register(self.handle.control, select.POLLIN)
            if not ready.poll(0):
                break
            self._receive()
        if self.handle.is_command and not self._ended and self.error is None:
            # A watcher ends only after its tree, unless it was killed from inside. What it left is known to nobody.
            self.handle.abandon()
        for name in ("stdout", "stderr"):
            self._drain(name)
        self._gone = True
        self.ended_at = self.ended_at or time.monotonic()


def _hung_up(control: int) -> bool:
    """Whether the other end of a socket is closed, whatever it still holds."""
    poll = select.poll()
    if control >= 0:
        poll.register(control, 0)
    return control < 0 or bool(poll.poll(0))


def drive(run: Run, until: Callable[[], bool] | None = None) -> None:
    """Watch until it is over, or ``until`` says so. Whatever is raised meanwhile (KeyboardInterrupt) leaves it running;
    the caller closes the handle."""
    while not run.over and not (until and until()):
        run.turn()
