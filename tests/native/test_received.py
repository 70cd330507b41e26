"""A sandbox's init or watcher that was taken over and hands over descriptors of another kind; played by the test."""

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import descriptor_count, until

import nsbox
from nsbox import ports, received
from nsbox._native import ffi, lib
from nsbox.box import Sandbox
from nsbox.errors import NsboxError, SandboxUnavailable
from nsbox.handle import CommandHandle, Handle
from nsbox.plan.net import SocketSpec
from nsbox.process import Process
from nsbox.supervise import Run

ROOT = os.geteuid() == 0


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox(timeout=20) as made:
        assert made._handle is not None
        while made._handle.groups is not None and made._handle.groups.ahead_at is not None:
            time.sleep(0.01)
        yield made


def tcp() -> int:
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM).detach()


def unix() -> int:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).detach()


def pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def slave() -> int:
    master, other = os.openpty()
    os.close(master)
    return other


def memory() -> int:
    return os.memfd_create("x")


def path(name: str, flags: int = os.O_RDONLY) -> Callable[[], int]:
    return lambda: os.open(name, flags)


KINDS: dict[str, Callable[[], int]] = {
    "directory": path("/", os.O_RDONLY),
    "path only": path("/proc", os.O_PATH),
    "file": path("/etc/passwd"),
    "null": path("/dev/null", os.O_RDWR),
    "pipe": pipe,
    "slave": slave,
    "socket": unix,
    "tcp": tcp,
    "memory": memory,
    "terminal, path only": path("/dev/ptmx", os.O_PATH),
    "terminal, read only": path("/dev/ptmx", os.O_RDONLY | os.O_NOCTTY),
}


@contextlib.contextmanager
def opened(make: Callable[[], int]) -> Iterator[int]:
    fd = make()
    try:
        yield fd
    finally:
        os.close(fd)


def started(sock: socket.socket, fds: list[int]) -> None:
    message = ffi.new("struct nsb_msg *")
    message.type, message.pid = lib.NSB_MSG_STARTED, 7
    socket.send_fds(sock, [bytes(ffi.buffer(message))], fds)


class Played(CommandHandle):
    """A command whose watcher is the test."""

    def abandon(self) -> None:
        pass


def played(box: Sandbox, *, tty: bool) -> tuple[Process, socket.socket]:
    assert box._handle is not None
    handle = Played(box._handle)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handle.control = ours.detach()
    return Process(box, Run(handle, timeout=5, tty=tty), ["played"], "/", (-1, -1)), theirs


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_what_is_no_terminal_is_refused(box: Sandbox, make: Callable[[], int]) -> None:
    process, theirs = played(box, tty=True)
    with opened(make) as fd, theirs:
        started(theirs, [fd])
        with pytest.raises(SandboxUnavailable, match="in place of the terminal"):
            process.wait()
    assert process.watched.handle.stdout == -1


def test_a_terminal_is_taken(box: Sandbox) -> None:
    """The control of the test above."""
    process, theirs = played(box, tty=True)
    with opened(path("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)) as fd, theirs:
        started(theirs, [fd])
        with pytest.raises(TimeoutError):
            process.wait(0.2)
        assert os.path.samestat(os.fstat(process.watched.handle.stdout), os.fstat(fd))
        process.close()


class Lone(Handle):
    """A sandbox that stays whose init is the test."""

    def kill(self) -> None:
        pass

    abandon = kill


def begun(box: Sandbox, fds: list[int]) -> Run:
    """What the host side makes of a first message with these descriptors."""
    assert box._handle is not None
    handle = Lone(box._handle.prepared, 0.0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handle.control = ours.detach()
    with theirs:
        started(theirs, fds)
        run = Run(handle)
        run.on_event("control", handle.control)
    for name in ("control", "root_fd", "scratch_fd"):
        handle.close_stream(name)
    return run


def test_a_root_and_a_scratch_file_system(box: Sandbox) -> None:
    assert box._handle is not None
    root, scratch = box._handle.root_fd, box._handle.scratch_fd
    assert begun(box, [root, scratch]).error is None, "the control"
    for make in KINDS.values():
        before = descriptor_count(max)
        with opened(make) as fd:
            assert isinstance(begun(box, [root, fd]).error, SandboxUnavailable), "no tmpfs"
            if not os.path.isdir(f"/proc/self/fd/{fd}"):
                assert isinstance(begun(box, [fd, scratch]).error, SandboxUnavailable), "no directory"
        assert descriptor_count() <= before  # what is put away behind a run may go meanwhile


def test_a_scratch_directory_is_the_one_that_was_made() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        try:
            box = Sandbox(timeout=20, scratch=folder)
        except NsboxError as error:
            pytest.skip(f"no scratch directory here: {error}")
        with box, opened(path(folder)) as other:
            assert box.run("echo x > /tmp/file").ok
            assert box._handle is not None
            assert box._handle.scratch is not None
            received.directory(box._handle.scratch_fd, "x", same=box._handle.scratch.fd)
            with pytest.raises(SandboxUnavailable):
                received.directory(other, "x", same=box._handle.scratch.fd)


def test_secrets_lie_in_a_ramfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD", "hush")
    with Sandbox(timeout=20, secrets=["WORD=env:WORD"]) as box:
        assert box._handle is not None
        received.directory(box._handle.secrets_fd, "x", filesystem=received.RAMFS)
        with pytest.raises(SandboxUnavailable):
            received.directory(box._handle.scratch_fd, "x", filesystem=received.RAMFS)


# ---- the network --------------------------------------------------------------------------------------------------

PLAN = [
    SocketSpec("tcp", socket.AF_INET, socket.SOCK_STREAM, backlog=8),
    SocketSpec("udp", socket.AF_INET, socket.SOCK_DGRAM),
]


def sockets(stack: contextlib.ExitStack) -> list[int]:
    made = [
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12),
        socket.socket(socket.AF_INET, socket.SOCK_STREAM),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    ]
    made[2].listen()
    return [stack.enter_context(sock).fileno() for sock in made]


def test_sockets_of_another_kind_or_of_our_own_network_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        ours = sockets(stack)
        with pytest.raises(SandboxUnavailable):
            received.network(ours, PLAN)  # of the host's own network
        monkeypatch.setattr(received, "own_namespace", lambda: 0)
        received.network(ours, PLAN)  # the control: as if they were of another
        for place in range(4):
            for make in KINDS.values():
                with opened(make) as fd, pytest.raises(SandboxUnavailable):
                    received.network([*ours[:place], fd, *ours[place + 1 :]], PLAN)
        with pytest.raises(SandboxUnavailable):
            received.network(ours[:3], PLAN)


class Silent:
    """A watcher for ``nsbox.ports`` that has said something already."""

    def __init__(self, fd: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        started(theirs, [fd])
        theirs.close()
        self.control = ours.detach()


@pytest.mark.parametrize("make", [make for name, make in KINDS.items() if name != "tcp"])
def test_what_is_no_connection_is_refused(make: Callable[[], int]) -> None:
    before = descriptor_count(max)
    with opened(make) as fd:
        watcher = Silent(fd)
        with pytest.raises(SandboxUnavailable, match="in place of a connection"):
            ports._receive(watcher, own=True)  # type: ignore[arg-type]
        os.close(watcher.control)
    assert descriptor_count() <= before  # what is put away behind a run may go meanwhile


def test_a_connection_in_our_own_network_is_refused() -> None:
    with opened(tcp) as fd:
        watcher = Silent(fd)
        with pytest.raises(SandboxUnavailable, match="in place of a connection"):
            ports._receive(watcher, own=False)  # type: ignore[arg-type]
        os.close(watcher.control)
        watcher = Silent(fd)
        ports._receive(watcher, own=True).close()  # type: ignore[arg-type]
        os.close(watcher.control)


def test_a_real_one_is_taken() -> None:
    serve = "import socket\ns = socket.create_server(('127.0.0.1', 80))\nc, _ = s.accept()\nc.send(b'hello')"
    with nsbox.Sandbox(timeout=60, uid=0) as box:
        server = box.popen(["python3", "-c", serve.replace("80", "8080")])
        with box.forward(8080) as forward:

            def answers() -> bool:
                with socket.create_connection(("127.0.0.1", forward.port)) as sock:
                    return sock.recv(10) == b"hello"

            assert until(answers, 30)
        server.kill()
