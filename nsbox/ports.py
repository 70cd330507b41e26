"""A port of the host's loopback, or a unix socket, that leads to a port inside: off unless asked for, one at a time.

Each connection is a socket that a watcher inside makes in the sandbox's network namespace and passes out; from there on
the host side copies bytes. Nothing of the host can be reached that way: only the host side opens connections.
"""

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nsbox import received
from nsbox._native import ffi, lib
from nsbox.encode import command
from nsbox.errors import SandboxUnavailable, SpecError
from nsbox.handle import Handle
from nsbox.launch import start_command

if TYPE_CHECKING:
    from nsbox.supervise import Run

CHUNK = 65536
MAX_CONNECTIONS = 128
START_TIMEOUT_S = 5.0


def connect(handle: Handle, port: int) -> socket.socket:
    """A TCP socket that connects, or already is, to a loopback port inside; it does not block.

    Raises SandboxUnavailable, ConnectionError or another OSError."""
    what = command(["connect"], {}, "/", lib.NSB_CONNECT)._replace(detail=port)
    watcher = start_command(handle, what)
    try:
        return _receive(watcher, own=handle.prepared.spec.net == "host")
    finally:
        watcher.close()


def _receive(watcher: Handle, *, own: bool) -> socket.socket:
    message, fds = ffi.new("struct nsb_msg *"), ffi.new("int[]", 1)
    poll = select.poll()
    poll.register(watcher.control, select.POLLIN)
    got = lib.nsb_receive(watcher.control, message, fds, 1) if poll.poll(START_TIMEOUT_S * 1000) else -errno.EPIPE
    if got < 0:
        raise SandboxUnavailable("the sandbox does not answer", remedy="start another", errno=-got)
    if message.type != lib.NSB_MSG_STARTED or got != 1:
        if got == 1:
            os.close(fds[0])
        number = -message.err if 0 < -message.err < 4096 else errno.EPROTO
        raise OSError(number, os.strerror(number), "a connection inside")
    try:
        received.connection(fds[0], own=own)
        found = socket.socket(fileno=fds[0])
    except BaseException:
        os.close(fds[0])
        raise
    found.setblocking(False)
    return found


class _Way:
    """One direction of a connection: what was read from one socket and not yet written to the other."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source, self.target = source, target
        self.data = b""
        self.ended = self.told = False

    def move(self) -> None:
        """Copy what can be without blocking. Raises OSError when the connection is broken."""
        # MSG_DONTWAIT: somebody inside may have the socket too, and make it block again.
        with contextlib.suppress(BlockingIOError):
            if not self.data and not self.ended:
                self.data = self.source.recv(CHUNK, socket.MSG_DONTWAIT)
                self.ended = not self.data
        with contextlib.suppress(BlockingIOError):
            if self.data:
                sent = self.target.send(self.data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self.data = self.data[sent:]
        if self.ended and not self.data and not self.told:
            self.told = True
            with contextlib.suppress(OSError):
                self.target.shutdown(socket.SHUT_WR)


class _Pair:
    def __init__(self, outer: socket.socket, inner: socket.socket) -> None:
        self.outer, self.inner = outer, inner
        self.connected = False
        self.ways = (_Way(outer, inner), _Way(inner, outer))

    def wanted(self) -> dict[int, int]:
        """Descriptor → poll events."""
        events = {self.outer.fileno(): 0, self.inner.fileno(): 0}
        if not self.connected:
            events[self.inner.fileno()] = select.POLLOUT
            return events
        for way in self.ways:
            if way.data:
                events[way.target.fileno()] |= select.POLLOUT
            elif not way.ended:
                events[way.source.fileno()] |= select.POLLIN
        return {fd: mask for fd, mask in events.items() if mask}

    def advance(self) -> bool:
        """False when the connection is over."""
        if not self.connected:
            if self.inner.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return False
            self.connected = True
        try:
            for way in self.ways:
                way.move()
        except OSError:
            return False
        return not all(way.told for way in self.ways)

    def close(self) -> None:
        self.outer.close()
        self.inner.close()


class Forward:
    """A listening socket of the host and its connections, served by a thread of its own. ``close`` ends all of it."""

    def __init__(self, handle: Callable[[], Handle], port: int, listen: int | str | os.PathLike[str]) -> None:
        """``listen``: a port of 127.0.0.1 (0: any that is free), or the path of a unix socket that is made with mode
        0600. Raises SpecError for a port that is none, OSError where it cannot be listened on."""
        if not 0 < port < 65536:
            raise SpecError(f"forward: {port} is no port inside; ports are 1 to 65535")
        if isinstance(listen, int) and not 0 <= listen < 65536:
            raise SpecError(f"forward: {listen} is no port to listen on; ports are 0 (any) to 65535")
        self._handle, self._port = handle, port
        self._listener = _listen(listen)
        self.address: tuple[str, int] | str = (
            self._listener.getsockname()[:2] if isinstance(listen, int) else os.fspath(listen)
        )
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._pairs: list[_Pair] = []
        self._thread = threading.Thread(target=self._serve, name=f"nsbox-forward-{port}", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port of the host; 0 for a unix socket."""
        return self.address[1] if isinstance(self.address, tuple) else 0

    def _serve(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            for pair in self._pairs:
                pair.close()
            self._listener.close()
            os.close(self._stop_read)

    def _turn(self) -> bool:
        poll, owners = select.poll(), dict[int, _Pair]()
        poll.register(self._stop_read, select.POLLIN)
        if len(self._pairs) < MAX_CONNECTIONS:
            poll.register(self._listener, select.POLLIN)
        for pair in self._pairs:
            for fd, events in pair.wanted().items():
                poll.register(fd, events)
                owners[fd] = pair
        ready = [fd for fd, _ in poll.poll()]
        if self._stop_read in ready:
            return False
        for pair in {owners[fd] for fd in ready if fd in owners}:
            if not pair.advance():
                pair.close()
                self._pairs.remove(pair)
        return self._listener.fileno() not in ready or self._accept()

    def _accept(self) -> bool:
        try:
            outer, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.1)  # it stays ready
            return True
        outer.setblocking(False)
        try:
            self._pairs.append(_Pair(outer, connect(self._handle(), self._port)))
        except SandboxUnavailable:
            outer.close()
            return False  # the sandbox has ended, and nobody will answer any more
        except OSError:
            outer.close()
        return True

    def close(self) -> None:
        """End the connections and listen no longer. Idempotent."""
        fd, self._stop_write = self._stop_write, -1
        if fd < 0:
            return
        os.close(fd)  # POLLHUP on the other end
        if self._thread is not threading.current_thread():
            self._thread.join(START_TIMEOUT_S + 1)
        if isinstance(self.address, str):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address)

    def __enter__(self) -> "Forward":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def parse(text: int | str) -> tuple[int | str, int]:
    """(where to listen, port inside) of PORT, HOST_PORT:PORT or PATH:PORT. Raises SpecError."""
    where, _, inside = str(text).rpartition(":")
    if not inside.isascii() or not inside.isdigit():
        raise SpecError(f"publish: {text!r} names no port inside; write PORT, HOST_PORT:PORT or PATH:PORT")
    if where and not where.isdigit() and "/" not in where:
        raise SpecError(
            f"publish: {text!r}: {where!r} is neither a port nor a path; ports of 127.0.0.1 alone lead inside"
        )
    return int(where or inside) if not where or where.isdigit() else where, int(inside)


def publish_all(wanted: Sequence[int | str], handle: Handle, run: "Run") -> list["Forward"]:
    """Forward ports to the sandbox of one run. Raises SpecError where one cannot be listened on."""

    def started() -> Handle:
        if not run.started:  # init takes nothing else before
            raise ConnectionRefusedError("the sandbox is not ready yet")
        return handle

    made: list[Forward] = []
    try:
        for text in wanted:
            where, port = parse(text)
            try:
                made.append(Forward(started, port, where))
            except SpecError as error:
                raise SpecError(str(error).replace("forward:", "publish:", 1)) from None
            except OSError as error:
                raise SpecError(f"publish: {text!r}: {error.strerror}; choose another port or path") from None
    except BaseException:
        for forward in made:
            forward.close()
        raise
    return made


def _listen(where: int | str | os.PathLike[str]) -> socket.socket:
    if isinstance(where, int):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address: Any = ("127.0.0.1", where)
    else:
        listener, address = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), os.fspath(where)
    try:
        if not isinstance(where, int):
            # Before it has a name, so that it never is anybody else's to use (unix(7)).
            os.fchmod(listener.fileno(), 0o600)
        listener.bind(address)
        listener.listen(64)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
