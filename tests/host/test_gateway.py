"""Egress through the gateway, from a network namespace of its own: what is reached, what is refused and how fast."""

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _netbox import NetBox
from _servers import Datagrams, Server, Zone, echo, gateway, http

from nsbox.errors import HostError, SpecError
from nsbox.plan.net import EgressLimits, NetPolicy
from nsbox.resources.gateway import Gateway, GatewaySession
from nsbox.resources.netplan import plan_net

pytest.importorskip("dnslib")

# What runs inside: small functions that print one word or a repr.
INSIDE = r"""
import errno, os, socket, struct, sys, time

def tcp(host, port, data=b"", timeout=5):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(timeout)
        try:
            s.connect((host, port))
            s.sendall(data)
            got = b""
            while (more := s.recv(65536)):
                got += more
                if len(got) > 1 << 20: break
            return got
        except OSError as error:
            return errno.errorcode.get(error.errno, type(error).__name__)

def udp(host, port, data=b"x", timeout=2):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.settimeout(timeout)
        try:
            s.sendto(data, (host, port))
            return s.recvfrom(65536)[0]
        except OSError as error:
            return errno.errorcode.get(error.errno, type(error).__name__)

def dns(name, kind=1, server="192.0.0.1", stream=False, raw=None):
    query = struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0)
    query += b"".join(bytes((len(x),)) + x.encode() for x in name.split(".")) + b"\0" + struct.pack("!HH", kind, 1)
    query = raw or query
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM if stream else socket.SOCK_DGRAM) as s:
        s.settimeout(5)
        try:
            s.connect((server, 53))
            s.sendall(struct.pack("!H", len(query)) + query if stream else query)
            reply = s.recv(4096)[2 if stream else 0:]
        except OSError as error:
            return errno.errorcode.get(error.errno, type(error).__name__)
    rows = [i for i in range(len(reply) - 13) if (reply[i:i + 4], reply[i + 8:i + 10]) == (b"\0\1\0\1", b"\0\4")]
    return reply[3] & 15, [socket.inet_ntoa(reply[i + 10:i + 14]) for i in rows]
"""


class World:
    """A gateway with one sandbox, and servers outside. ``inside(expression)`` evaluates in the sandbox."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.web = self._kept(Server(http))
        self.echo = self._kept(Server(echo))
        self.datagrams = self._kept(Datagrams(lambda data: b"re:" + data))
        self.zone = self._kept(Zone({}))
        self.gateway: Gateway = self._kept(gateway(self.zone))
        self.box: NetBox
        self.session: GatewaySession

    def _kept(self, thing: Any) -> Any:
        self._stack.callback(thing.close)
        return thing

    def start(self, *allow: str, limits: EgressLimits | None = None) -> "World":
        policy = NetPolicy.parse(allow, limits)
        self.box = self._kept(NetBox(plan_net(policy, self.gateway.own())))
        self.session = self._kept(self.gateway.attach("test", policy, self.box.fds, self._log))
        return self

    def _log(self, event: str, fields: dict[str, Any]) -> None:
        self.events.append((event, fields))

    def inside(self, code: str, timeout: float = 30) -> Any:
        text = self.box.python(f"{INSIDE}\nprint(repr({code}))", timeout=timeout)
        return eval(text.splitlines()[-1])

    def row(self, **wanted: Any) -> dict[str, Any]:
        """The one row of the record that has these fields."""
        found = [row for row in self.session.record() if all(row.get(key) == value for key, value in wanted.items())]
        assert len(found) == 1, self.session.record()
        return found[0]


@pytest.fixture
def world() -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        yield World(stack)


def test_address_is_reached_and_everything_else_refused_at_once(world: World) -> None:
    web = world.web.port
    world.start(f"203.0.113.5:{web}", f"[2001:db8::5]:{web}")
    assert world.inside(f"tcp('203.0.113.5', {web}, b'GET /a HTTP/1.1\\r\\n\\r\\n')").endswith(b"GET /a HTTP/1.1")
    assert world.inside(f"tcp('2001:db8::5', {web}, b'GET /b HTTP/1.1\\r\\n\\r\\n')").endswith(b"GET /b HTTP/1.1")
    refused = world.inside(
        f"[tcp(h, p) for h, p in [('203.0.113.5', 1), ('203.0.113.6', {web}), ('2001:db8::6', {web})]]"
    )
    assert refused == ["ECONNREFUSED"] * 3
    assert world.inside(f"[udp('203.0.113.5', {web}), udp('2001:db8::5', 53)]") == ["EPERM"] * 2
    row = world.row(address="203.0.113.5", verdict="allowed")
    assert (row["port"], row["protocol"], row["connections"], row["tx_bytes"]) == (web, "tcp", 1, 19)
    assert row["rx_bytes"] > 50
    assert world.row(address="203.0.113.5", port=1)["verdict"] == "denied"
    assert world.row(address="203.0.113.5", protocol="udp")["connections"] == 1
    assert world.row(address="2001:db8::5", protocol="udp", port=53)["connections"] == 1


def test_an_empty_policy_reaches_nothing(world: World) -> None:
    world.start()
    assert world.inside("[tcp('203.0.113.5', 80), dns('example.org'), udp('192.0.0.1', 99)]") == [
        "ECONNREFUSED",
        (3, []),
        "TimeoutError",
    ]
    assert not world.zone.asked


def test_names(world: World) -> None:
    web = world.web.port
    world.zone.records |= {
        "web.test.": ["web.test. 60 A 203.0.113.5"],
        "www.test.": ["www.test. 60 CNAME web.test.", "web.test. 60 A 203.0.113.5"],
        "evil.test.": ["evil.test. 60 A 203.0.113.6"],
        "sub.wild.test.": ["sub.wild.test. 60 A 203.0.113.7"],
    }
    world.start(f"web.test:{web}", "www.test", "*.wild.test")
    assert world.inside(f"tcp('203.0.113.5', {web})") == "ECONNREFUSED", "not before it was looked up"
    for stream in (False, True):
        assert world.inside(f"dns('web.test', stream={stream})") == (0, ["203.0.113.5"])
        assert world.inside(f"dns('WWW.Test', stream={stream})") == (0, ["203.0.113.5"])
        assert world.inside(f"dns('sub.wild.test', stream={stream})") == (0, ["203.0.113.7"])
        assert world.inside(f"dns('evil.test', stream={stream})") == (3, [])
        assert world.inside(f"dns('secret-data.evil.test', stream={stream})") == (3, [])
        assert world.inside(f"dns('wild.test', stream={stream})") == (3, [])
    assert not [name for name, _ in world.zone.asked if "evil" in name or name == "wild.test."]
    request = b"GET / HTTP/1.1\r\nHost: web.test\r\n\r\n"
    assert b"200 OK" in world.inside(f"tcp('203.0.113.5', {web}, {request!r})")
    assert world.inside(f"tcp('203.0.113.6', {web})") == "ECONNREFUSED"
    assert world.row(host="web.test", verdict="allowed")["connections"] == 1
    assert world.row(host="evil.test", protocol="dns")["verdict"] == "denied"
    assert ("dns.query", {"name": "evil.test", "type": "A", "verdict": "denied"}) in world.events


def test_a_resolver_elsewhere_is_a_destination_like_any_other(world: World) -> None:
    world.zone.records["web.test."] = ["web.test. 60 A 203.0.113.5"]
    world.start("web.test", f"198.51.100.1:{world.datagrams.port}/udp")
    assert world.inside("dns('web.test', server='8.8.8.8')") == "EPERM"
    assert world.inside("dns('web.test', server='8.8.8.8', stream=True)") == "ECONNREFUSED"
    assert world.inside("tcp('1.1.1.1', 853)") == "ECONNREFUSED"
    assert world.inside(f"udp('198.51.100.1', {world.datagrams.port}, b'hi')") == b"re:hi", "the control"


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"])
def test_a_name_that_resolves_to_a_special_address(world: World, address: str) -> None:
    world.zone.records["bad.test."] = [f"bad.test. 60 A {address}", "bad.test. 60 A 203.0.113.5"]
    world.start("bad.test")
    assert world.inside("dns('bad.test')") == (0, ["203.0.113.5"])
    assert world.row(host="bad.test", address=address)["verdict"] == "denied"


def test_rebinding(world: World) -> None:
    web = world.web.port
    world.zone.records["turn.test."] = ["turn.test. 0 A 203.0.113.5"]
    world.start(f"turn.test:{web}")
    request = b"GET / HTTP/1.1\r\nHost: turn.test\r\n\r\n"
    assert world.inside("dns('turn.test')") == (0, ["203.0.113.5"])
    world.zone.records["turn.test."] = ["turn.test. 0 A 127.0.0.1"]
    assert world.inside("dns('turn.test')") == (0, [])
    assert b"200 OK" in world.inside(f"tcp('203.0.113.5', {web}, {request!r})"), (
        "the address that was checked is dialled"
    )
    assert world.inside(f"tcp('127.0.0.1', {web}, {request!r})") == "ECONNREFUSED"


def test_host_loopback_and_listeners(world: World) -> None:
    web = world.web.port
    world.start("0.0.0.0/0", "::/0")
    for host in ("127.0.0.1", "::1", "192.0.0.2"):
        assert world.inside(f"tcp('{host}', {web})") == "ECONNREFUSED"
    assert world.inside("tcp('127.0.0.1', 65533)") in ("ECONNRESET", b""), "the gateway does not loop"
    for network in world.gateway.own():
        host = str(network).partition("/")[0]
        if network.family == socket.AF_INET and host not in ("127.0.0.1",):
            assert world.inside(f"tcp('{host}', {web})") == "ECONNREFUSED"


def test_host_loopback_that_a_rule_names(world: World) -> None:
    web = world.web.port
    world.start(f"127.0.0.1:{web}")
    assert b"200 OK" in world.inside(f"tcp('127.0.0.1', {web}, b'GET / HTTP/1.1\\r\\n\\r\\n')")
    assert world.inside("tcp('127.0.0.1', 1)") == "ECONNREFUSED"


def test_own_loopback_works(world: World) -> None:
    world.start()
    code = "(lambda s: tcp(*s.getsockname(), timeout=0.2))(socket.create_server(('127.0.0.1', 8000)))"
    assert world.inside(code) == "TimeoutError", "connected, and nobody answers"


def test_host_header(world: World) -> None:
    web = world.web.port
    world.zone.records |= {"a.test.": ["a.test. 60 A 203.0.113.5"], "b.test.": ["b.test. 60 A 203.0.113.6"]}
    world.start("a.test", "b.test")
    assert world.inside("(dns('a.test'), dns('b.test'))") == ((0, ["203.0.113.5"]), (0, ["203.0.113.6"]))
    good = b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"
    assert b"200 OK" in world.inside(f"tcp('203.0.113.5', {web}, {good!r})")
    for bad in (
        b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        good.replace(b"a.test", b"b.test"),
    ):
        assert world.inside(f"tcp('203.0.113.5', {web}, {bad!r})") == "ECONNRESET"
    assert world.row(host="evil.test")["verdict"] == "denied"


def test_server_name_of_tls(world: World, tmp_path: Path) -> None:
    if subprocess.run(["openssl", "version"], capture_output=True).returncode:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
    ]
    subprocess.run(
        [*command, "-keyout", key, "-out", certificate, "-subj", "/CN=a.test"], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            secure.sendall(b"secure " + secure.recv(100))

    server = world._kept(Server(serve))
    world.zone.records["a.test."] = ["a.test. 60 A 203.0.113.5"]
    world.start(f"a.test:{server.port}")
    code = f"""
import ssl, socket, sys
{INSIDE}
dns('a.test')
context = ssl.create_default_context(); context.check_hostname = False; context.verify_mode = ssl.CERT_NONE
for name in ('a.test', 'front.test', None):
    try:
        with context.wrap_socket(socket.create_connection(('203.0.113.5', {server.port})), server_hostname=name) as s:
            s.sendall(b'hi'); print(s.recv(100))
    except OSError as error:
        print(type(error).__name__)
"""
    assert world.box.python(code).splitlines() == ["b'secure hi'", "ConnectionResetError", "ConnectionResetError"]
    assert world.row(host="front.test")["verdict"] == "denied"


def test_a_server_that_speaks_first(world: World) -> None:
    server = world._kept(Server(lambda connection: connection.sendall(b"SSH-2.0-x\r\n" + connection.recv(100))))
    early = world._kept(Server(lambda connection: (connection.sendall(b"220 hello\r\n"), echo(connection))[0]))
    world.zone.records["a.test."] = ["a.test. 60 A 203.0.113.5"]
    world.start("a.test")
    code = f"""(dns('a.test'), tcp('203.0.113.5', {server.port}, b'SSH-2.0-y\\r\\n'),
        (lambda s: (s.recv(100), s.sendall(b'EHLO me\\r\\n'), s.shutdown(1), s.recv(100)))(
            socket.create_connection(('203.0.113.5', {early.port}))))"""
    assert world.inside(code)[1:] == (b"SSH-2.0-x\r\nSSH-2.0-y\r\n", (b"220 hello\r\n", None, None, b"EHLO me\r\n"))


def test_udp(world: World) -> None:
    port = world.datagrams.port
    world.start(f"203.0.113.5:{port}/udp", f"[2001:db8::5]:{port}/udp")
    assert (
        world.inside(f"[udp(h, {port}, b'x' * 40000) for h in ('203.0.113.5', '2001:db8::5')]")
        == [b"re:" + b"x" * 40000] * 2
    )
    connected = f"(lambda s: (s.connect(('203.0.113.5', {port})), s.send(b'c'), s.recv(9)))(socket.socket(2, 2))[2]"
    assert world.inside(connected) == b"re:c"
    assert world.inside(f"udp('203.0.113.5', {port + 1})") == "EPERM"
    assert world.row(address="203.0.113.5", verdict="allowed")["connections"] == 2


def test_protocols_that_no_rule_can_name(world: World) -> None:
    world.start("203.0.113.5", "203.0.113.5/udp")
    # A kernel with SCTP would send in its own time; in a sandbox there is none, by the filter: tests/escape.
    code = r"""
import socket
for family, kind, protocol in ((2, 3, 1), (2, 3, 255), (2, 3, 17), (17, 3, 3), (2, 2, 1)):
    try:
        s = socket.socket(family, kind, protocol)
        s.sendto(b'\x08\0\0\0\0\0\0\0', ('203.0.113.5', 0))
        print('sent')
    except OSError as error:
        print('refused')
"""
    assert world.box.python(code).splitlines() == ["refused"] * 5


def test_rules_and_links_cannot_be_changed_from_inside(world: World) -> None:
    world.start()
    code = r"""
import socket, struct
def ask(protocol, message):
    s = socket.socket(16, 3, protocol); s.settimeout(2)
    s.send(message)
    reply = s.recv(4096)
    return struct.unpack_from('=i', reply, 16)[0] if reply[4:6] == b'\2\0' else 'listed'
def m(kind, flags, body): return struct.pack('=IHHII', 16 + len(body), kind, flags, 1, 0) + body
edge = struct.pack('!BBH', 0, 0, 10)
flush = m(16, 1, edge) + m(10 << 8 | 2, 5, struct.pack('!BBH', 1, 0, 0)) + m(17, 1, edge)
print(ask(12, flush), ask(12, m(10 << 8 | 7, 0x301, struct.pack('!BBH', 1, 0, 0))))
route = struct.pack('=8BI', 2, 0, 0, 0, 254, 0, 0, 0, 0)
print(ask(0, m(17, 5, struct.pack('=BxHiII', 0, 0, 1, 0, 0))), ask(0, m(25, 5, route)))
"""
    assert world.box.python(code).split() == ["-1", "-1", "-1", "-1"]


def test_half_close_and_much_data(world: World) -> None:
    world.start(f"203.0.113.5:{world.echo.port}")
    code = f"""
import socket, threading, hashlib
s = socket.create_connection(('203.0.113.5', {world.echo.port}))
sent, got = hashlib.sha256(), hashlib.sha256()
def send():
    for i in range(400):
        block = bytes([i % 256]) * 65536; sent.update(block); s.sendall(block)
    s.shutdown(socket.SHUT_WR)
t = threading.Thread(target=send); t.start()
n = 0
while (data := s.recv(100000)): got.update(data); n += len(data)
t.join(); print(n, sent.hexdigest() == got.hexdigest())
"""
    assert world.box.python(code) == f"{400 * 65536} True"
    row = world.row(address="203.0.113.5")
    assert (row["tx_bytes"], row["rx_bytes"]) == (400 * 65536, 400 * 65536)


def test_back_pressure_bounds_what_is_held(world: World) -> None:
    release = threading.Event()
    server = world._kept(Server(lambda connection: (release.wait(20), echo(connection))[1]))
    world._stack.callback(release.set)
    world.start("203.0.113.5")
    code = f"""
import socket
s = socket.create_connection(('203.0.113.5', {server.port})); s.settimeout(1); n = 0
try:
    while n < 1 << 28: n += s.send(bytes(65536))
except TimeoutError: pass
print(n)
"""
    assert int(world.box.python(code)) < 64 << 20
    assert world.session.bytes[0] < 64 << 20


def test_resets_travel_on(world: World) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    server = world._kept(Server(serve))
    world.start("203.0.113.5", "203.0.113.6:9")
    assert world.inside(f"tcp('203.0.113.5', {server.port}, b'x')") == "ECONNRESET"
    assert world.inside("tcp('203.0.113.6', 9, b'x')") in ("ECONNRESET", "EPIPE"), "nobody listens there"


def test_limits(world: World) -> None:
    world.start("203.0.113.5", limits=EgressLimits(connections=4, rate=None, bytes_out=10_000))
    hold = f"""
import socket
held = [socket.create_connection(('203.0.113.5', {world.echo.port})) for _ in range(8)]
out = []
for s in held:
    try: s.send(b'x'); out.append(s.recv(9))
    except OSError as e: out.append('reset')
print(out.count('reset'), out.count(b'x'))
"""
    assert world.box.python(hold) == "4 4"
    assert world.inside(f"tcp('203.0.113.5', {world.echo.port}, bytes(20000))") in ("ECONNRESET", "EPIPE")
    hit = {entry["limit"]: entry for entry in world.session.limits_hit()}
    assert hit["net_connections"]["count"] == 4
    assert hit["net_connections"]["value"] == 4
    assert hit["net_bytes"]["value"] == 10_000
    assert world.session.bytes[0] <= 10_000


def test_rate_delays_and_does_not_refuse(world: World) -> None:
    world.start("203.0.113.5", limits=EgressLimits(rate=20))
    started = time.monotonic()
    code = f"[tcp('203.0.113.5', {world.web.port}, b'GET / HTTP/1.1\\r\\n\\r\\n')[:15] for _ in range(30)]"
    assert world.inside(code) == [b"HTTP/1.1 200 OK"] * 30
    assert time.monotonic() - started > 0.4
    assert world.session.limits_hit()[0]["limit"] == "net_rate"


def test_policy_changes_while_it_runs(world: World) -> None:
    web = world.web.port
    world.zone.records["a.test."] = ["a.test. 60 A 203.0.113.9"]
    world.start("203.0.113.5", "203.0.113.8")
    get = b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"
    assert world.inside(f"tcp('203.0.113.6', {web}, {get!r})") == "ECONNREFUSED"
    world.session.allow(["203.0.113.6", "a.test"])
    assert b"200 OK" in world.inside(f"tcp('203.0.113.6', {web}, {get!r})")
    assert b"200 OK" in world.inside(f"(dns('a.test'), tcp('203.0.113.9', {web}, {get!r}))[1]")
    world.session.deny(["203.0.113.5", "a.test"])
    assert world.inside(f"[tcp(h, {web}, {get!r}) for h in ('203.0.113.5', '203.0.113.9')]") == ["ECONNREFUSED"] * 2
    assert world.inside("dns('a.test')") == (3, [])
    assert b"200 OK" in world.inside(f"tcp('203.0.113.8', {web}, {get!r})")
    with pytest.raises(SpecError):
        world.session.allow(["not a host"])
    assert world.inside(f"tcp('203.0.113.7', {web})") == "ECONNREFUSED"


def test_deny_ends_open_connections(world: World) -> None:
    world.start("203.0.113.5")
    code = f"""
import socket
s = socket.create_connection(('203.0.113.5', {world.echo.port})); s.send(b'x'); print(s.recv(1), flush=True)
try: print(s.recv(1))
except OSError as e: print(type(e).__name__)
"""
    process = world.box.popen(["python3", "-c", code])
    assert process.stdout
    assert process.stdout.readline() == "b'x'\n"
    world.session.deny(["203.0.113.5"])
    assert process.communicate(timeout=5)[0] == "ConnectionResetError\n"


def test_a_change_that_fails_leaves_the_old_policy(world: World) -> None:
    web = world.web.port
    world.start("203.0.113.5")
    assert world.inside("1") == 1
    nft = world.session._sockets["nft"]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.close()
        world.session._sockets["nft"] = ours
        with pytest.raises(HostError, match="not changed"):
            world.session.allow(["203.0.113.6"])
        world.session._sockets["nft"] = nft
    assert world.session.policy == NetPolicy.parse(["203.0.113.5"])
    assert b"200" in world.inside(f"tcp('203.0.113.5', {web}, b'GET / HTTP/1.1\\r\\n\\r\\n')")
    assert world.inside(f"tcp('203.0.113.6', {web})") == "ECONNREFUSED"


def test_dns_survives_any_bytes(world: World) -> None:
    world.zone.records["a.test."] = ["a.test. 60 A 203.0.113.9"]
    world.start("a.test")
    code = """[socket.socket(2, 2).sendto(os.urandom(n), ('192.0.0.1', 53)) for n in [*range(0, 600, 7), 65000]]
        and dns('a.test')""".replace("\n", "")
    assert world.inside(code) == (0, ["203.0.113.9"])
    stream = r"""[(lambda s: (s.connect(('192.0.0.1', 53)), s.sendall(os.urandom(3000)), s.close()))(socket.socket())
        for _ in range(50)] and dns('a.test', stream=True)"""
    assert world.inside(stream) == (0, ["203.0.113.9"])


def test_many_connections_and_many_sandboxes(world: World) -> None:
    policy = NetPolicy.parse([f"203.0.113.5:{world.echo.port}"])
    plan = plan_net(policy, world.gateway.own())
    boxes = [world._kept(NetBox(plan)) for _ in range(16)]
    sessions = [world._kept(world.gateway.attach(str(n), policy, box.fds)) for n, box in enumerate(boxes)]
    code = f"""
import socket
for _ in range(40):
    with socket.create_connection(('203.0.113.5', {world.echo.port})) as s:
        s.sendall(b'ping'); assert s.recv(9) == b'ping'
print('done')
"""
    running = [box.popen(["python3", "-c", code]) for box in boxes]
    assert [process.communicate(timeout=60)[0] for process in running] == ["done\n"] * 16
    for session in sessions:
        assert [row["connections"] for row in session.record()] == [40]


def test_nothing_is_left(world: World) -> None:
    policy = NetPolicy.parse([f"203.0.113.5:{world.echo.port}", "a.test"])
    plan = plan_net(policy, world.gateway.own())
    world.zone.records["a.test."] = ["a.test. 60 A 203.0.113.9"]
    before = None
    for turn in range(12):
        box = NetBox(plan)
        session = world.gateway.attach(str(turn), policy, box.fds)
        process = box.popen(
            ["python3", "-c", f"{INSIDE}\ndns('a.test'); tcp('203.0.113.5', {world.echo.port}, b'x', timeout=1)"]
        )
        if turn % 3 == 0:
            process.kill()
        elif turn % 3 == 1:
            time.sleep(0.1)
            session.close()
        process.communicate(timeout=10)
        session.close()
        session.close()
        assert session.record() == session.record()
        box.close()
        world.gateway.loop.ask(lambda: None)
        now = set(os.listdir("/proc/self/fd")), threading.active_count()
        if turn == 0:
            before = now
    deadline = time.monotonic() + 5
    while before and len(os.listdir("/proc/self/fd")) > len(before[0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert before
    assert len(os.listdir("/proc/self/fd")) <= len(before[0])


def index_server(connection: socket.socket) -> None:
    """A package index with one package, pkg 1.0, as a wheel."""
    import io
    import zipfile

    head = connection.recv(8192)
    path = head.split()[1].decode()
    if path == "/simple/pkg/":
        kind, body = "text/html", b'<a href="/pkg-1.0-py3-none-any.whl">pkg-1.0-py3-none-any.whl</a>'
    else:
        kind, wheel = "application/zip", io.BytesIO()
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("pkg.py", "print('installed')")
            archive.writestr("pkg-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pkg\nVersion: 1.0\n")
            archive.writestr(
                "pkg-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr("pkg-1.0.dist-info/RECORD", "")
        body = wheel.getvalue()
    answer = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(answer.encode() + body)


def test_programs(world: World, tmp_path: Path) -> None:
    """curl, pip, git and asyncio, by name, with the C library's resolver."""
    index = world._kept(Server(index_server))
    world.zone.records |= {"web.test.": ["web.test. 60 A 203.0.113.5"], "index.test.": ["index.test. 60 A 203.0.113.6"]}
    world.start(f"web.test:{world.web.port}", f"index.test:{index.port}")
    code, text = world.box.run(["curl", "-sS", f"http://web.test:{world.web.port}/x"])
    assert (code, text) == (0, "GET /x HTTP/1.1")
    started = time.monotonic()
    code, text = world.box.run(["curl", "-sS", "http://evil.test/"])
    assert code == 6, text
    assert time.monotonic() - started < 5, "refused at once, not after a time-out (resolv.conf(5): 5 s)"
    code, text = world.box.run(["curl", "-sS", f"http://203.0.113.9:{world.web.port}/"])
    assert code == 7, text
    pip = [
        "-m",
        "pip",
        "--isolated",
        "--disable-pip-version-check",
        "install",
        "--no-cache-dir",
        "--target",
        str(tmp_path),
    ]
    where = ["--index-url", f"http://index.test:{index.port}/simple/", "--trusted-host", "index.test"]
    code, text = world.box.run([sys.executable, *pip, *where, "pkg"], timeout=60)
    assert code == 0, text
    assert (tmp_path / "pkg.py").exists()
    code, text = world.box.run(["git", "ls-remote", "http://evil.test/x.git"])
    assert code == 128
    assert "evil.test" in text
    fetch = f"""
import asyncio
async def main():
    reader, writer = await asyncio.open_connection('web.test', {world.web.port})
    writer.write(b'GET /y HTTP/1.1\\r\\nHost: web.test\\r\\n\\r\\n')
    print((await reader.read()).split()[-2:])
    try: await asyncio.open_connection('evil.test', 80)
    except OSError as error: print(type(error).__name__)
asyncio.run(main())
"""
    assert world.box.python(fetch).splitlines() == ["[b'/y', b'HTTP/1.1']", "gaierror"]
    assert world.row(host="web.test", verdict="allowed")["connections"] == 2
    assert world.row(host="index.test", verdict="allowed")["connections"] == 2


def test_git_over_http(world: World, tmp_path: Path) -> None:
    source = tmp_path / "source"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    subprocess.run([*git, "init", "-q", str(source)], check=True)
    (source / "file").write_text("content")
    subprocess.run([*git, "-C", str(source), "add", "."], check=True)
    subprocess.run([*git, "-C", str(source), "commit", "-qm", "one"], check=True)
    subprocess.run([*git, "-C", str(source), "update-server-info"], check=True)

    def serve(connection: socket.socket) -> None:
        path = source / ".git" / connection.recv(8192).split()[1].decode().partition("?")[0].removeprefix("/x.git/")
        body = path.read_bytes() if path.is_file() else None
        state = "404 Not Found" if body is None else "200 OK"
        length = len(body or b"")
        connection.sendall(
            f"HTTP/1.1 {state}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n".encode() + (body or b"")
        )

    server = world._kept(Server(serve))
    world.zone.records["git.test."] = ["git.test. 60 A 203.0.113.5"]
    world.start(f"git.test:{server.port}")
    target = tmp_path / "target"
    code, text = world.box.run(["git", "clone", "-q", f"http://git.test:{server.port}/x.git", str(target)])
    assert code == 0, text
    assert (target / "file").read_text() == "content"


def test_thousands_of_connections(world: World) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    world._stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    count = min(2000, (min(8192, hard) - 200) // 4)
    world.start("203.0.113.5", limits=EgressLimits(connections=count, rate=None))
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    held = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(listener.accept()[0])
                held[-1].sendall(b"!")

    thread = threading.Thread(target=accept)
    thread.start()
    code = f"""
import resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, ({hard}, {hard}))
held = [socket.create_connection(('203.0.113.5', {listener.getsockname()[1]})) for _ in range({count})]
print(sum(s.recv(1) == b'!' for s in held))
"""
    assert world.box.python(code, timeout=60) == str(count)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for sock in held:
        sock.close()
    assert world.row(address="203.0.113.5")["connections"] == count


def test_no_descriptor_left_makes_it_wait_not_spin(world: World) -> None:
    import resource

    world.start(f"203.0.113.5:{world.web.port}")
    assert world.inside("1") == 1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    process = world.box.popen(
        [
            "python3",
            "-c",
            f"{INSIDE}\ninput()\nprint(tcp('203.0.113.5', {world.web.port}, b'GET / HTTP/1.1\\r\\n\\r\\n')[:15])",
        ],
        stdin=subprocess.PIPE,
    )
    assert process.stdin
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        before = os.times()
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(2)
        used = os.times().user - before.user + os.times().system - before.system
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert process.communicate(timeout=120)[0].strip() == "b'HTTP/1.1 200 OK'"
    assert used < 1
    assert {entry["limit"] for entry in world.session.limits_hit()} == {"descriptors"}
