"""A port of the host that leads to one inside: bytes both ways, ends of connections, and nothing the other way."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import nsbox
from nsbox.box import Sandbox
from nsbox.errors import SpecError
from nsbox.ports import Forward, parse

SERVER = """
import socket, threading
listener = socket.create_server(("127.0.0.1", 8080))
print("ready", flush=True)
def serve(conn):
    while data := conn.recv(65536):
        conn.sendall(data)
    conn.sendall(b"end")
    conn.close()
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],)).start()
"""


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox(timeout=60) as made:
        made.write_file("server.py", SERVER)
        process = made.popen(["python3", "server.py"])
        for _, data in process.output():
            if b"ready" in data:
                break
        yield made


def everything(conn: socket.socket) -> bytes:
    data = b""
    conn.settimeout(20)
    while chunk := conn.recv(65536):
        data += chunk
    return data


def talk(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as conn:
        threading.Thread(target=lambda: (conn.sendall(data), conn.shutdown(socket.SHUT_WR))).start()
        return everything(conn)


def test_bytes_both_ways(box: Sandbox) -> None:
    with box.forward(8080) as forward:
        assert forward.address == ("127.0.0.1", forward.port)
        assert talk(forward.port, b"hello") == b"helloend"
        data = os.urandom(4 << 20)
        assert talk(forward.port, data) == data + b"end"


def test_many_connections_at_once(box: Sandbox) -> None:
    found: dict[int, bytes] = {}
    with box.forward(8080) as forward:
        threads = [
            threading.Thread(target=lambda n=n: found.update({n: talk(forward.port, b"%d" % n * 1000)}))
            for n in range(30)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {n: b"%d" % n * 1000 + b"end" for n in range(30)}


def test_a_unix_socket(box: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with box.forward(8080, path) as forward:
        assert forward.port == 0
        assert path.stat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as conn:
            conn.connect(str(path))
            conn.sendall(b"x")
            conn.shutdown(socket.SHUT_WR)
            assert everything(conn) == b"xend"
    assert not path.exists()


def test_nobody_listens_inside(box: Sandbox) -> None:
    with box.forward(9) as forward:
        for _ in range(3):
            with (
                socket.create_connection(("127.0.0.1", forward.port), timeout=20) as conn,
                contextlib.suppress(OSError),
            ):
                assert everything(conn) == b""
        box.run(["true"]).check()


def test_it_ends_with_the_box(box: Sandbox) -> None:
    forward = box.forward(8080)
    with socket.create_connection(("127.0.0.1", forward.port), timeout=20) as conn:
        conn.sendall(b"x")
        assert conn.recv(1) == b"x"
        box.close()
        with contextlib.suppress(ConnectionError):
            assert conn.recv(1) == b""
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", forward.port), timeout=5)


def test_it_ends_when_the_box_is_ended_from_inside(box: Sandbox) -> None:
    forward = box.forward(8080)
    handle = box._handle
    assert handle is not None
    handle.kill()
    time.sleep(0.2)
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", forward.port), timeout=5) as conn:
        assert everything(conn) == b""


def test_ports_that_cannot_be(box: Sandbox) -> None:
    for port, listen in ((0, 0), (70000, 0), (80, -1), (80, 70000)):
        with pytest.raises(SpecError):
            box.forward(port, listen)
    with box.forward(8080) as forward, pytest.raises(OSError):
        box.forward(8080, forward.port)


def test_the_host_cannot_be_reached_from_inside(box: Sandbox) -> None:
    with box.forward(8080) as forward:
        assert isinstance(forward, Forward)
        code = f"import socket; socket.create_connection(('127.0.0.1', {forward.port}), timeout=3)"
        assert b"ConnectionRefused" in box.run(["python3", "-c", code]).stderr


@pytest.mark.parametrize(
    ("text", "where"),
    [(8080, (8080, 8080)), ("9000:80", (9000, 80)), ("/run/a:b:80", ("/run/a:b", 80)), ("0:80", (0, 80))],
)
def test_how_ports_are_written(text: int | str, where: tuple[int | str, int]) -> None:
    assert parse(text) == where


@pytest.mark.parametrize("text", ["", "x", "80:", "0.0.0.0:1:80", "host:80", "80:http", "-1"])
def test_how_ports_are_not_written(text: str) -> None:
    with pytest.raises(SpecError, match="publish"):
        parse(text)


def test_a_run_with_a_port() -> None:
    port = 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers: list[bytes] = []

    def call(data: bytes) -> None:
        if b"ready" in data:
            answers.append(talk(port, b"hello"))

    code = SERVER.replace("while True:", "for _ in range(1):")
    result = nsbox.run(["python3", "-c", code], publish=[f"{port}:8080"], on_stdout=call, timeout=30)
    assert result.ok
    assert answers == [b"helloend"]
    with pytest.raises(SpecError, match="publish"), socket.create_server(("127.0.0.1", port)):
        nsbox.run(["true"], publish=[f"{port}:80"])
