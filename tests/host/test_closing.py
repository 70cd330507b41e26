"""A sandbox that one thread closes while another uses it: no descriptor is used whose number is another's by then."""

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nsbox import groups, handle, launch
from nsbox._native import lib
from nsbox.box import Sandbox
from nsbox.errors import NsboxError, SandboxUnavailable


class Slow:
    """The seam, with one function during which the sandbox is closed by another thread."""

    def __init__(self, name: str, close: Callable[[], None]) -> None:
        self._name, self._close = name, close
        self.seen: list[tuple[tuple[int, int], tuple[int, int]]] = []

    def __getattr__(self, name: str) -> Any:
        return self._slowly if name == self._name else getattr(lib, name)

    def _slowly(self, fd: int, *rest: Any) -> Any:
        before = what_is(fd)
        closing = threading.Thread(target=self._close)
        closing.start()
        time.sleep(0.2)
        with occupied():
            self.seen.append((before, what_is(fd)))
            result = getattr(lib, self._name)(fd, *rest)
        self.closing = closing
        return result


def what_is(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def occupied() -> Iterator[list[socket.socket]]:
    """Whatever number is free, somebody else has it."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(one) for _ in range(20) for one in socket.socketpair()]


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox(timeout=20) as made:
        made.run(["true"])
        yield made


def test_a_box_that_is_closed_while_it_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Sandbox()
    snapshot = box.snapshot()
    start, starting, closed = Sandbox._start, threading.Event(), threading.Event()

    def held(self: Sandbox, *args: Any) -> None:
        starting.set()
        assert closed.wait(60)
        start(self, *args)

    monkeypatch.setattr(Sandbox, "_start", held)
    with ThreadPoolExecutor(1) as pool:
        restored = pool.submit(box.restore, snapshot)
        assert starting.wait(60)
        box.close()
        closed.set()
        with pytest.raises(SandboxUnavailable, match="closed while"):
            restored.result()
    assert not box.is_running
    del snapshot, restored  # the latter has it in a traceback
    gc.collect()


def test_a_message_to_init(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow("nsb_tell", box.close)
    monkeypatch.setattr(handle, "lib", slow)
    held = box._handle
    assert held is not None
    held.tell(lib.NSB_MSG_SIGNAL, 18, 1)
    slow.closing.join()
    assert slow.seen
    assert all(before == after for before, after in slow.seen)
    assert not held.tell(lib.NSB_MSG_SIGNAL, 18, 1), "closed"
    assert not held.alive()


@pytest.mark.parametrize("ways", ["command", "connection"])
def test_a_request_to_init(box: Sandbox, monkeypatch: pytest.MonkeyPatch, ways: str) -> None:
    held = box._handle
    assert held is not None
    slow = Slow("nsb_run", held.close)
    monkeypatch.setattr(launch, "lib", slow)
    monkeypatch.setattr(groups, "lib", slow)
    with contextlib.suppress(NsboxError, OSError):
        if ways == "command":
            box.run(["true"])
        else:
            from nsbox import ports

            ports.connect(held, 80)
    slow.closing.join()
    assert slow.seen
    assert all(before == after for before, after in slow.seen)
    with pytest.raises(SandboxUnavailable):
        box.run(["true"])


def test_a_signal_by_pidfd(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    signal = handle.signal  # type: ignore[attr-defined]  # a stand-in, see nsbox.light
    held = box._handle
    assert held is not None
    real, seen = signal.pidfd_send_signal, []

    def slowly(fd: int, number: int) -> None:
        before = os.readlink(f"/proc/self/fd/{fd}")
        closing = threading.Thread(target=box.close)
        monkeypatch.setattr(signal, "pidfd_send_signal", real)
        closing.start()
        time.sleep(0.2)
        with occupied():
            seen.append((before, os.readlink(f"/proc/self/fd/{fd}")))
            real(fd, number)
        threads.append(closing)

    threads: list[threading.Thread] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", slowly)
    held.kill()
    threads[0].join()
    assert [before for before, _ in seen] == [after for _, after in seen] == ["anon_inode:[pidfd]"]
    held.kill()  # nothing is left to be hit


def test_a_copy_outlives_the_sandbox(box: Sandbox) -> None:
    held = box._handle
    assert held is not None
    with held.borrowed("scratch_fd") as fd:
        before = what_is(fd)
        box.close()
        with occupied():
            assert what_is(fd) == before
    with pytest.raises(SandboxUnavailable, match="closed"), held.borrowed("scratch_fd"):
        pass


def test_hammered_from_many_threads() -> None:
    """Strangers' sockets get the numbers of what was closed; nothing is ever sent to them."""
    for _ in range(3):
        box = Sandbox(timeout=20)
        stop, errors = threading.Event(), list[BaseException]()

        def use(what: Callable[[], Any], stop: threading.Event = stop, errors: list[BaseException] = errors) -> None:
            while not stop.is_set():
                try:
                    what()
                except (NsboxError, FileNotFoundError, TimeoutError):
                    pass
                except BaseException as error:
                    errors.append(error)
                    return

        held = box._handle
        assert held is not None
        uses: list[Callable[[], Any]] = [
            lambda box=box: box.run(["true"]),
            lambda box=box: box.popen(["sleep", "1"]).kill(),
            lambda box=box: box.files.write_file("/tmp/x", b"x"),
            lambda box=box: (box.is_running, box.processes()),
            lambda held=held: held.tell(lib.NSB_MSG_SIGNAL, 18, 1),
            lambda box=box: box.pause() or box.resume(),
        ]
        threads = [threading.Thread(target=use, args=(what,)) for what in uses]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        box.close()
        with occupied() as strangers:
            time.sleep(0.2)
            for one in strangers:
                one.setblocking(False)
                with pytest.raises(BlockingIOError):
                    one.recv(1)
            stop.set()
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
        assert not errors, errors
