"""N01, N08, N09: without a policy there is no network but the sandbox's own loopback."""

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nsbox
from nsbox import errors


def python(code: str, **options: Any) -> str:
    result = nsbox.run(["python3", "-c", textwrap.dedent(code)], **options)
    assert result.ok, result.stderr_text
    return result.stdout_text


def here(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    ).stdout


CONNECT = """
import socket
def attempt(family, kind, address):
    s = socket.socket(family, kind); s.settimeout(2)
    try:
        s.connect(address)
        if kind == socket.SOCK_DGRAM: s.send(b"x")
        return "connected"
    except OSError as error:
        return f"{type(error).__name__} {error.errno}"
"""


@pytest.fixture
def services() -> Iterator[dict[str, int]]:
    """What the host serves: TCP and UDP on every address, IPv4 and IPv6 where it has it; counts who came."""
    came = {"tcp": 0, "udp": 0}
    tcp = socket.socket(socket.AF_INET6 if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6") else socket.AF_INET)
    tcp.bind(("", 0))
    tcp.listen(64)
    port = tcp.getsockname()[1]
    udp = socket.socket(tcp.family, socket.SOCK_DGRAM)
    udp.bind(("", port))
    stop = threading.Event()

    def serve() -> None:
        tcp.settimeout(0.05)
        udp.settimeout(0.05)
        while not stop.is_set():
            for name, take in (("tcp", tcp.accept), ("udp", lambda: udp.recvfrom(10))):
                try:
                    got = take()
                    came[name] += 1
                    if name == "tcp":
                        got[0].close()
                except TimeoutError:
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    yield {"port": port, **came} | {"came": came}  # type: ignore[dict-item]
    stop.set()
    thread.join()
    tcp.close()
    udp.close()


def host_addresses() -> list[str]:
    """Addresses of the host that are not loopback."""
    found = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.1", 9))
            found.add(s.getsockname()[0])
        except OSError:
            pass
    return sorted(found)


def gateways() -> list[str]:
    """Addresses of the host's default routers."""
    lines = Path("/proc/net/route").read_text().splitlines()[1:]
    return [
        socket.inet_ntoa(int(line.split()[2], 16).to_bytes(4, "little"))
        for line in lines
        if line.split()[1] == "00000000"
    ]


def test_N08_services_of_the_host(services: dict[str, int]) -> None:
    port, came = services["port"], services["came"]
    addresses = ["127.0.0.1", "127.0.0.53", "0.0.0.0", *host_addresses(), *gateways()]
    code = (
        CONNECT
        + f"""
for address in {addresses}:
    print(attempt(socket.AF_INET, socket.SOCK_STREAM, (address, {port})))
"""
    )
    assert here(code).startswith("connected"), "the control"
    time.sleep(0.2)
    before = dict(came)  # type: ignore[call-overload]
    assert before["tcp"] >= 1, "the control: the service notices"
    outcomes = python(code).splitlines()
    assert len(outcomes) == len(addresses)
    assert "connected" not in outcomes
    for kind in ("SOCK_DGRAM",):
        python(
            CONNECT + f"for address in {addresses}: print(attempt(socket.AF_INET, socket.{kind}, (address, {port})))"
        )
    time.sleep(0.2)
    assert came == before, "something came through"


def test_N01_nothing_but_loopback() -> None:
    code = (
        CONNECT
        + """
for address in ("1.1.1.1", "169.254.169.254", "10.0.0.1", "192.168.0.1", "224.0.0.1", "255.255.255.255"):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        print(attempt(socket.AF_INET, kind, (address, 53)))
if socket.has_ipv6:
    for address in ("2606:4700:4700::1111", "fe80::1", "fd00::1", "::ffff:1.1.1.1"):
        print(attempt(socket.AF_INET6, socket.SOCK_STREAM, (address, 53)))
"""
    )
    lines = python(code).splitlines()
    assert len(lines) >= 12
    assert not [line for line in lines if "Timeout" in line], "it must fail at once"
    assert "connected" not in lines


def test_N01_dns_fails_fast() -> None:
    code = """
    import socket, time
    before = time.monotonic()
    for name in ("example.com", "metadata.google.internal", "localhost.localdomain.example"):
        try: socket.getaddrinfo(name, 80); print("resolved")
        except socket.gaierror as error: print("refused")
    print(time.monotonic() - before < 5)  # resolv.conf(5): the first time-out
    print(socket.gethostbyname("localhost"), socket.gethostbyname(socket.gethostname()))
    """
    assert python(code).split() == ["refused"] * 3 + ["True", "127.0.0.1", "127.0.0.1"]


def test_N08_the_other_sandboxes() -> None:
    found: list[str] = []

    def look(_: bytes) -> None:
        found.append(python(CONNECT + "print(attempt(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', 8123)))"))

    server = (
        "import socket, time; s = socket.socket(); s.bind(('0.0.0.0', 8123)); "
        "s.listen(); print('up', flush=True); time.sleep(0.5)"
    )
    assert nsbox.run(["python3", "-c", server], on_stdout=look).ok
    assert found == ["ConnectionRefusedError 111\n"]
    own = server.replace("time.sleep(0.5)", "socket.create_connection(('127.0.0.1', 8123)); print('own')")
    assert nsbox.run(["python3", "-c", own]).stdout == b"up\nown\n", "the control"


def test_N09_abstract_sockets_of_the_host() -> None:
    name = f"\0nsbox-test-{os.getpid()}"
    attempt = CONNECT + f"print(attempt(socket.AF_UNIX, socket.SOCK_STREAM, {name!r}))"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        assert here(attempt) == "connected\n", "the control"
        assert python(attempt) == "ConnectionRefusedError 111\n"


@pytest.mark.skipif(
    not nsbox.run(["true"]).enforced["landlock"]["how"].startswith("ABI"), reason="this kernel has no Landlock"
)
def test_N09_abstract_sockets_even_with_the_host_s_network() -> None:
    """net=host shares the namespace of abstract sockets: Landlock's scope keeps them apart, from ABI 6 on."""
    how = nsbox.run(["true"]).enforced["landlock"]["how"]
    if int("".join(c for c in how if c.isdigit()) or 0) < 6:
        pytest.skip(f"Landlock's scopes are not in this kernel ({how})")
    name = f"\0nsbox-host-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        attempt = CONNECT + f"print(attempt(socket.AF_UNIX, socket.SOCK_STREAM, {name!r}))"
        assert python(attempt, net="host", allow_host_net=True) == "PermissionError 1\n"


def test_N09_path_sockets_only_where_mounted() -> None:
    with tempfile.TemporaryDirectory(prefix="sock-") as folder, socket.socket(socket.AF_UNIX) as server:
        path = f"{folder}/s"
        server.bind(path)
        server.listen()
        os.chmod(path, 0o777)
        os.chmod(folder, 0o755)
        attempt = CONNECT + f"print(attempt(socket.AF_UNIX, socket.SOCK_STREAM, {path!r}))"
        assert here(attempt) == "connected\n", "the control"
        assert python(attempt) == "FileNotFoundError 2\n"
        # Mounting the socket itself needs a word of its own.
        for option in ("ro", "rw"):
            with pytest.raises(errors.NsboxError):
                nsbox.run(["true"], **{option: path})
        # Mounted along with its directory it would be a door as well: connecting asks for no writable mount.
        assert "connected" not in python(attempt, ro=folder)


def test_host_network_needs_two_words() -> None:
    with pytest.raises(errors.SpecError, match="allow_host_net"):
        nsbox.run(["true"], net="host")
    result = nsbox.run(["cat", "/proc/net/dev"], net="host", allow_host_net=True)
    assert result.enforced["net_ns"]["strength"] == result.enforced["egress"]["strength"] == "none"


@pytest.mark.parametrize("uid", [0, 1000])
def test_privileged_ports_inside(uid: int) -> None:
    """The network namespace is the sandbox's own, but CAP_NET_BIND_SERVICE is gone: what decides is the sysctl."""
    code = (
        "import socket; s = socket.socket(); s.bind(('127.0.0.1', 80)); s.listen(); "
        "socket.create_connection(('127.0.0.1', 80)); print('ok')"
    )
    result = nsbox.run(["python3", "-c", code], uid=uid)
    assert result.stdout == b"ok\n", result.stderr_text
