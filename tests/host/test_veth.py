"""Egress by a veth pair, on a host that the test makes: a network namespace that forwards, and a world behind it."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator

import pytest
from _netbox import CLONE_NEWNET, NetBox, setns, unshare
from _servers import Datagrams, Server, Zone, echo, http
from test_gateway import INSIDE

from nsbox.errors import HostError
from nsbox.plan.address import parse_address
from nsbox.plan.net import NetPolicy
from nsbox.resources import netlink, nft, veth
from nsbox.resources.gateway import Gateway, shared

pytestmark = [pytest.mark.root, pytest.mark.skipif(not shutil.which("ip"), reason="the ip command is not installed")]


def ip(*words: str) -> None:
    subprocess.run(["ip", *" ".join(words).split()], check=True)


def links() -> set[str]:
    return {line.split(":")[0].strip() for line in open("/proc/net/dev", encoding="ascii").readlines()[2:]}


def tables() -> set[str]:
    with netlink.open_socket(12) as sock:
        rows = netlink.dump(sock, 10 << 8 | 1, bytes(4))
    return {netlink.attributes(row[4:])[1].rstrip(b"\0").decode() for row in rows}


class Host:
    """A network namespace that stands for the host, and another for the world, joined by a veth pair."""

    def __init__(self) -> None:
        unshare(CLONE_NEWNET)
        self.here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        ip("link set lo up")
        with open("/proc/sys/net/ipv4/ip_forward", "w", encoding="ascii") as setting:
            setting.write("1")
        unshare(CLONE_NEWNET)
        self.world = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        ip("link set lo up")
        for address in ("203.0.113.5", "203.0.113.6", "10.9.9.9", "169.254.169.254"):
            ip("address add", address + "/32 dev lo")
        ip(f"link add up0 type veth peer name wan0 netns /proc/{os.getpid()}/fd/{self.here}")
        ip("address add 198.51.100.2/24 dev up0")
        ip("link set up0 up")
        setns(self.here, CLONE_NEWNET)
        ip("address add 198.51.100.1/24 dev wan0")
        ip("link set wan0 up")
        ip("route add default via 198.51.100.2")

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Sockets made in here belong to the world."""
        setns(self.world, CLONE_NEWNET)
        try:
            yield
        finally:
            setns(self.here, CLONE_NEWNET)


def on_a_host(case: Callable[[Host, contextlib.ExitStack], None]) -> Callable[[], None]:
    """Run a test in a child process that has a host of its own."""

    def test() -> None:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with contextlib.ExitStack() as stack:
                    case(Host(), stack)
            except BaseException:
                os.write(writer, traceback.format_exc().encode()[-60000:])
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader, encoding="utf-8") as report:
            problem = report.read()
        os.waitpid(child, 0)
        if problem:
            pytest.fail(problem, pytrace=False)

    test.__name__ = case.__name__
    return test


class Box:
    """A sandbox's namespace on slot ``slot`` with a policy, and its session."""

    def __init__(self, stack: contextlib.ExitStack, gateway: Gateway, slot: int, *allow: str) -> None:
        policy = NetPolicy.parse(allow)
        self.net = NetBox(veth.plan_veth(policy, gateway.own()))
        stack.callback(self.net.close)
        self.veth = veth.shared().attach(slot, self.net.fds["rtnl"])
        stack.callback(self.veth.close)
        self.session = gateway.attach(str(slot), policy, self.net.fds, path="veth")
        stack.callback(self.session.close)

    def inside(self, code: str) -> object:
        return eval(self.net.python(f"{INSIDE}\nprint(repr({code}))").splitlines()[-1])


def serve(host: Host, stack: contextlib.ExitStack, where: str, what: Callable[[socket.socket], None]) -> Server:
    with host.outside():
        server = Server(what, where)
    stack.callback(server.close)
    return server


GET = b"GET / HTTP/1.1\r\n\r\n"


@on_a_host
def test_addresses(host: Host, stack: contextlib.ExitStack) -> None:
    web = serve(host, stack, "0.0.0.0", http).port
    local = Server(http, "0.0.0.0")
    stack.callback(local.close)
    with host.outside():
        datagrams = Datagrams(lambda data: b"re:" + data, "203.0.113.5")
    stack.callback(datagrams.close)
    gateway = Gateway()
    stack.callback(gateway.close)
    one = Box(stack, gateway, 1, f"203.0.113.5:{web}", f"203.0.113.5:{datagrams.port}/udp")
    two = Box(stack, gateway, 2, "0.0.0.0/0", "0.0.0.0/0/udp")
    assert b"200 OK" in one.inside(f"tcp('203.0.113.5', {web}, {GET!r})")
    assert one.inside(f"udp('203.0.113.5', {datagrams.port}, b'hi')") == b"re:hi"
    assert one.inside(f"[tcp(h, {web}) for h in ('203.0.113.6', '10.9.9.9', '2001:db8::1')]") == ["ECONNREFUSED"] * 3
    assert one.inside(f"udp('203.0.113.6', {datagrams.port})") == "EPERM"
    # The control reaches the world, and neither the host, nor another sandbox, nor what is special.
    assert b"200 OK" in two.inside(f"tcp('203.0.113.6', {web}, {GET!r})")
    here, there = veth.addresses(1)
    for address in (here, there, "198.51.100.1", "10.9.9.9", "169.254.169.254", veth.addresses(2)[0]):
        assert two.inside(f"tcp('{address}', {local.port}, timeout=1)") == "ECONNREFUSED", address
    rows = {(row["address"], row["port"], row["verdict"]): row for row in one.session.record()}
    assert rows["203.0.113.5", web, "allowed"]["connections"] == 1
    assert rows["203.0.113.5", web, "allowed"]["rx_bytes"] > 80
    assert rows["203.0.113.5", datagrams.port, "allowed"]["tx_bytes"] == 30
    assert rows["203.0.113.6", web, "denied"]["connections"] == 1
    assert rows["2001:db8::1", web, "denied"]["connections"] == 1
    assert len(rows) == 6, list(rows)


@on_a_host
def test_the_host_drops_what_the_rules_inside_would_let_out(host: Host, stack: contextlib.ExitStack) -> None:
    local = Server(http, "0.0.0.0")
    stack.callback(local.close)
    web = serve(host, stack, "0.0.0.0", http).port
    gateway = Gateway(own=())
    stack.callback(gateway.close)
    one, two = (Box(stack, gateway, slot, "0.0.0.0/0", "198.19.0.0/16", "198.51.100.1") for slot in (1, 2))
    assert b"200 OK" in one.inside(f"tcp('203.0.113.5', {web}, {GET!r})"), "the control"
    for address in ("198.51.100.1", veth.addresses(1)[0]):
        assert one.inside(f"tcp('{address}', {local.port}, timeout=1)") == "TimeoutError", "the host itself"
    server = two.net.popen(
        ["python3", "-c", "import socket; s = socket.create_server(('0.0.0.0', 99)); print(1, flush=1); s.accept()"]
    )
    stack.callback(server.kill)
    assert one.inside(f"tcp('{veth.addresses(2)[1]}', 99, timeout=1)") == "TimeoutError", "another sandbox"
    with host.outside():
        ip("route add 198.19.0.0/16 via 198.51.100.1")
        with pytest.raises(OSError, match="timed out"):
            socket.create_connection((veth.addresses(2)[1], 99), timeout=1)


@on_a_host
def test_names_and_change(host: Host, stack: contextlib.ExitStack) -> None:
    web = serve(host, stack, "0.0.0.0", echo).port
    zone = Zone({"a.test.": ["a.test. 60 A 203.0.113.5"], "b.test.": ["b.test. 60 A 10.9.9.9"]})
    stack.callback(zone.close)
    gateway = Gateway(resolvers=[zone.address])
    stack.callback(gateway.close)
    box = Box(stack, gateway, 7, "a.test", "b.test")
    assert box.inside(f"tcp('203.0.113.5', {web})") == "ECONNREFUSED"
    assert box.inside("(dns('a.test'), dns('b.test'), dns('evil.test'))") == ((0, ["203.0.113.5"]), (0, []), (3, []))
    code = f"""
import socket
s = socket.create_connection(('203.0.113.5', {web})); s.send(b'x'); print(s.recv(1), flush=True)
s.settimeout(3)
input()
try: s.send(b'y'); print(s.recv(1))
except OSError as e: print(type(e).__name__)
"""
    process = box.net.popen(["python3", "-c", code], stdin=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == "b'x'\n"
    box.session.deny(["a.test"])
    assert process.communicate("\n", timeout=9)[0] in ("ConnectionResetError\n", "ConnectionRefusedError\n")
    assert box.inside(f"tcp('203.0.113.5', {web})") == "ECONNREFUSED"
    box.session.allow(["203.0.113.6"])
    assert box.inside(f"tcp('203.0.113.6', {web}, b'x', timeout=1)") == "TimeoutError", "connected"


@on_a_host
def test_nothing_is_left(host: Host, stack: contextlib.ExitStack) -> None:
    gateway = Gateway()
    stack.callback(gateway.close)
    fds = len(os.listdir("/proc/self/fd"))
    before = links()
    for slot in range(8):
        with contextlib.ExitStack() as inner:
            Box(inner, gateway, slot, "203.0.113.5")
            assert f"nsbx{slot:x}" in links()
            assert tables() == {f"nsbox-{os.getpid()}"}
    deadline = time.monotonic() + 5
    while (links() != before or tables()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert links() == before
    assert not tables()
    shared().close()
    gateway.loop.ask(lambda: None)
    assert len(os.listdir("/proc/self/fd")) == fds


@on_a_host
def test_hosts_that_cannot(host: Host, stack: contextlib.ExitStack) -> None:
    assert veth.obstacle() is None
    table = nft.Table("other")
    with netlink.open_socket(12) as sock:
        parts = [table.create(owned=True), table.chain("fwd", nft.FORWARD)]
        netlink.exchange(sock, nft.batch(parts))
        problem = veth.obstacle()
        assert problem
        assert "'other' drops" in str(problem)
    with open("/proc/sys/net/ipv4/ip_forward", "w", encoding="ascii") as setting:
        setting.write("0")
    with pytest.raises(HostError, match="forwards no packets"):
        veth.shared().attach(1, 0)


def test_addresses_of_slots_differ() -> None:
    found = {address for slot in range(4095) for address in veth.addresses(slot)}
    assert len(found) == 2 * 4095
    assert all((address := parse_address(text)) and veth.BLOCK.holds(address) for text in found)
