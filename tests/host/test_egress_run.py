"""Filtered egress as programs meet it, through ``nsbox.run`` and boxes: what works, what is told, what is left."""

import base64
import functools
import hashlib
import http.server
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from _world import ECHO, HTTP, INSIDE, PATHS, ROOT, TLS, World, in_a_world

import nsbox
from nsbox import _native
from nsbox import launch as launching
from nsbox.box import PIPE
from nsbox.errors import NsboxError, SetupError, SpecError
from nsbox.resources import gateway as gateways
from nsbox.resources import netlink

pytest.importorskip("dnslib")

both = pytest.mark.parametrize("path", PATHS)
FILES = 8080  # where the world serves the files of a test
RUNS = 1000 if os.environ.get("NSBOX_TEST_SLOW") else 200
GET = "exec 3<>/dev/tcp/203.0.113.5/80; printf 'GET /%s HTTP/1.1\\r\\n\\r\\n' $0 >&3; cat <&3"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def serve_files(world: World, folder: Path) -> None:
    """A web server for a directory, at 203.0.113.5:8080."""
    handler = functools.partial(Quiet, directory=str(folder))
    server = world.outside(lambda: http.server.ThreadingHTTPServer(("203.0.113.5", FILES), handler))
    threading.Thread(target=server.serve_forever, daemon=True).start()


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [name for name in programs if not shutil.which(name, path="/usr/bin:/bin")]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


# ---- programs ---------------------------------------------------------------------------------------------------


@needs("curl", "openssl")
@both
@in_a_world
def test_curl(world: World, path: str) -> None:
    world.name("a.test", "203.0.113.5")
    script = """
        curl -sS --cacert /ca.pem https://a.test/secure http://a.test/plain && echo
        for where in https://b.test http://203.0.113.6 http://10.9.9.9 http://[2001:db8::5]; do
            curl -sS --max-time 5 --cacert /ca.pem $where 2>/dev/null; echo $?
        done
    """
    result = world.run(["sh", "-c", script], "a.test", net_path=path, ro=[(world.authority, "/ca.pem")])
    assert result.stdout_text == "GET /secure HTTP/1.1GET /plain HTTP/1.1\n6\n7\n7\n7\n", result.stderr_text
    reached = {(row["address"], row["port"]): row["connections"] for row in world.rows(verdict="allowed")}
    assert reached == {("203.0.113.5", TLS): 1, ("203.0.113.5", HTTP): 1}
    refused = {row.get("host") or row["address"] for row in world.rows(verdict="denied")}
    assert refused == {"b.test", "203.0.113.6", "10.9.9.9", "2001:db8::5"}


def wheel(folder: Path, name: str) -> None:
    """A package of one module, as an index serves it."""
    target = folder / "simple" / name
    target.mkdir(parents=True)
    files = {
        f"{name}.py": "answer = 42\n",
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    with zipfile.ZipFile(target / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{path},sha256={digest},{len(text)}\n"
        archive.writestr(f"{name}-1.0.dist-info/RECORD", record + f"{name}-1.0.dist-info/RECORD,,\n")
    (target / "index.html").write_text(f'<a href="{name}-1.0-py3-none-any.whl">{name}-1.0-py3-none-any.whl</a>')


@both
@in_a_world
def test_pip(world: World, path: str) -> None:
    """An index by name; another index, and one that a package would bring along, is not reached."""
    pip = subprocess.run(["/usr/bin/python3", "-m", "pip", "--version"], capture_output=True)
    if pip.returncode:
        return
    world.name("pypi.test", "203.0.113.5")
    wheel(world.folder / "index", "tiny")
    serve_files(world, world.folder / "index")
    install = "python3 -m pip install -q --no-cache-dir --disable-pip-version-check --target /tmp/t --retries 0"
    script = f"""
        {install} --index-url http://pypi.test:{FILES}/simple/ --trusted-host pypi.test tiny &&
        PYTHONPATH=/tmp/t python3 -c 'import tiny; print(tiny.answer)'
        {install} --index-url http://203.0.113.6:{HTTP}/simple/ --trusted-host 203.0.113.6 other 2>/dev/null || echo no
        {install} --index-url https://pypi.org/simple/ other 2>/dev/null || echo no
    """
    result = world.run(["sh", "-c", script], f"pypi.test:{FILES}", net_path=path, timeout="5m", cpu_time="5m")
    assert result.stdout_text == "42\nno\nno\n", result.stderr_text
    assert [row["address"] for row in world.rows(verdict="allowed")] == ["203.0.113.5"]
    assert {row.get("host") or row["address"] for row in world.rows(verdict="denied")} == {"203.0.113.6", "pypi.org"}


@needs("git")
@both
@in_a_world
def test_git_over_http(world: World, path: str) -> None:
    world.name("git.test", "203.0.113.5")
    work, bare = world.folder / "work", world.folder / "bare"
    who = ["-c", "user.name=t", "-c", "user.email=t@t.test", "-c", "init.defaultBranch=main"]
    for command in (["init", "-q", str(work)], ["-C", str(work), "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *who, *command], check=True, env={"PATH": os.environ["PATH"], "HOME": str(world.folder)})
    subprocess.run(["git", "clone", "-q", "--bare", str(work), str(bare)], check=True)
    subprocess.run(["git", "-C", str(bare), "update-server-info"], check=True)
    serve_files(world, world.folder)
    script = f"""
        git clone -q http://git.test:{FILES}/bare /tmp/c && git -C /tmp/c log --format=%s
        git clone -q http://203.0.113.5:{HTTP}/bare /tmp/d 2>&1 | grep -ci "failed to connect\\|couldn't connect"
    """
    result = world.run(["sh", "-c", script], f"git.test:{FILES}", net_path=path)
    assert result.stdout_text == "first\n1\n", result.stderr_text


CLIENTS = f"""
import asyncio, socket, urllib.error, urllib.request
def fetch(url):
    try: return urllib.request.urlopen(url, timeout=5).read().decode()
    except urllib.error.URLError as error: return type(error.reason).__name__
print(fetch('http://a.test/u'), fetch('http://b.test/'), fetch('http://203.0.113.6/'))
async def one(host, number):
    try: reader, writer = await asyncio.open_connection(host, 80)
    except OSError as error: return type(error).__name__
    writer.write(b'GET /%d HTTP/1.1\\r\\nHost: a.test\\r\\n\\r\\n' % number)
    body = await reader.read(); writer.close(); return body.split()[-2].decode()
async def all():
    good = await asyncio.gather(*(one('a.test', n) for n in range(20)))
    bad = await asyncio.gather(*(one(h, 0) for h in ('203.0.113.6', '10.9.9.9', 'b.test')))
    print(good == [f'/{{n}}' for n in range(20)], bad)
asyncio.run(all())
class Echo(asyncio.DatagramProtocol):
    def __init__(self): self.got = asyncio.get_running_loop().create_future()
    def connection_made(self, transport): transport.sendto(b'x')
    def datagram_received(self, data, peer): self.got.set_result(data)
    def error_received(self, error): self.got.done() or self.got.set_result(type(error).__name__)
async def datagrams():
    loop = asyncio.get_running_loop()
    for host in ('203.0.113.5', '203.0.113.6'):
        transport, protocol = await loop.create_datagram_endpoint(Echo, remote_addr=(host, {ECHO}))
        print(await asyncio.wait_for(protocol.got, 5)); transport.close()
asyncio.run(datagrams())
for kind in (socket.SOCK_RAW, 10):  # SOCK_PACKET
    try: socket.socket(socket.AF_INET, kind, socket.IPPROTO_ICMP); print('made')
    except OSError as error: print(type(error).__name__)
"""


@both
@in_a_world
def test_python_clients(world: World, path: str) -> None:
    """urllib, asyncio, datagrams and raw sockets: errors are the ones that programs know, and come at once."""
    world.name("a.test", "203.0.113.5")
    before = time.monotonic()
    result = world.run(["python3", "-c", CLIENTS], "a.test", f"203.0.113.5:{ECHO}/udp", net_path=path)
    assert result.ok, result.stderr_text
    assert result.stdout_text.splitlines()[:4] == [
        "GET /u HTTP/1.1 gaierror ConnectionRefusedError",
        "True ['ConnectionRefusedError', 'ConnectionRefusedError', 'gaierror']",
        "b're:x'",
        "PermissionError",
    ]
    assert "made" not in result.stdout_text
    assert time.monotonic() - before < 25


# ---- the report -----------------------------------------------------------------------------------------------------


@both
@in_a_world
def test_the_report_is_exact(world: World, path: str) -> None:
    """Every connection, datagram that was refused, and question is counted; bytes of streams to the byte (gateway)."""
    world.name("a.test", "203.0.113.5")
    code = f"""(
        [len(tcp('203.0.113.5', 80, b'GET / HTTP/1.1\\r\\n\\r\\n')) for _ in range(17)],
        [tcp('203.0.113.6', 80) for _ in range(13)], [tcp('203.0.113.6', 81) for _ in range(7)],
        [udp('203.0.113.5', {ECHO}) for _ in range(5)], [udp('203.0.113.6', {ECHO}) for _ in range(11)],
        [tcp('2001:db8::5', 80) for _ in range(3)],
        [dns('b.test') for _ in range(4)], [dns('a.test') for _ in range(6)])"""
    allow = ("203.0.113.5:80", f"203.0.113.5:{ECHO}/udp", "a.test:81")
    found = world.inside(code, *allow, net_path=path)
    assert len(set(found[0])) == 1
    got = {
        (row.get("host", ""), row["address"], row["port"], row["protocol"], row["verdict"]): row["connections"]
        for row in world.rows()
    }
    name = "a.test" if ("a.test", "203.0.113.5", 80, "tcp", "allowed") in got else ""
    wanted = {
        (name, "203.0.113.5", 80, "tcp", "allowed"): 17,
        ("", "203.0.113.6", 80, "tcp", "denied"): 13,
        ("", "203.0.113.6", 81, "tcp", "denied"): 7,
        ("", "203.0.113.6", ECHO, "udp", "denied"): 11,
        ("", "2001:db8::5", 80, "tcp", "denied"): 3,
        ("b.test", "", 53, "dns", "denied"): 4,
    }
    udp = [count for (_, _, _, protocol, verdict), count in got.items() if (protocol, verdict) == ("udp", "allowed")]
    # The kernel keeps no count of flows: with veth they are one row and one connection.
    assert udp == [5 if path == "gateway" else 1]
    assert {key: count for key, count in got.items() if key[3:] != ("udp", "allowed")} == wanted
    assert world.servers.came.count(("tcp", HTTP)) == 17
    assert world.servers.came.count(("udp", ECHO)) == 5
    assert world.result
    assert world.result.usage["net_tx_bytes"] == sum(row["tx_bytes"] for row in world.rows(verdict="allowed"))
    if path == "gateway":
        (row,) = world.rows(port=80, verdict="allowed")
        assert (row["tx_bytes"], row["rx_bytes"]) == (17 * 18, 17 * found[0][0])


@both
@in_a_world
def test_which_path(world: World, path: str) -> None:
    result = world.run(["true"], "203.0.113.5", net_path=path)
    assert path in result.enforced["egress"]["how"]
    assert result.enforced["egress"]["strength"] == "kernel"
    assert "gateway" in world.run(["true"], "a.test").enforced["egress"]["how"]
    assert PATHS[-1] in world.run(["true"], "203.0.113.5").enforced["egress"]["how"]
    if not ROOT:
        with pytest.raises(NsboxError, match="root"):
            world.run(["true"], "203.0.113.5", net_path="veth")


# ---- limits and changes ---------------------------------------------------------------------------------------------


@both
@in_a_world
def test_limits(world: World, path: str) -> None:
    def hits(result: nsbox.Result) -> dict[str, dict[str, Any]]:
        return {hit["limit"]: hit for hit in result.limits_hit}

    hold = f"""
import socket
held, refused = [], 0
for _ in range(9):
    s = socket.socket(); s.settimeout(3)
    try: s.connect(('203.0.113.5', {ECHO})); s.send(b'x'); s.recv(1); held.append(s)
    except OSError: refused += 1
print(len(held), refused)
"""
    result = world.run(["python3", "-c", hold], "203.0.113.5", net_path=path, net_connections=4)
    assert result.stdout_text == "4 5\n", result.stderr_text
    assert (hits(result)["net_connections"]["value"], hits(result)["net_connections"]["count"]) == (4, 5)
    pour = f"""
import socket
s = socket.create_connection(('203.0.113.5', {ECHO})); s.settimeout(3); sent = 0
try:
    while sent < 1 << 20: sent += s.send(bytes(1000)); s.recv(65536)
except OSError as error: print(type(error).__name__)
"""
    result = world.run(["python3", "-c", pour], "203.0.113.5", net_path=path, net_bytes="20K")
    assert result.stdout_text.split()[0] in ("ConnectionResetError", "BrokenPipeError", "TimeoutError"), result.stdout
    assert hits(result)["net_bytes"]["value"] == 20 << 10
    assert result.usage["net_tx_bytes"] <= 20 << 10  # type: ignore[operator]
    code = "[get('203.0.113.5') for _ in range(6)]"
    before = time.monotonic()
    assert world.inside(code, "203.0.113.5", net_path=path, net_rate=3) == ["200"] * 6
    assert time.monotonic() - before > 0.9
    assert world.result
    assert hits(world.result)["net_rate"]["value"] == 3
    result = world.run(["python3", "-c", hold], "203.0.113.5", net_path=path)
    assert (result.stdout_text, result.limits_hit) == ("9 0\n", []), "the control"
    with pytest.raises(SpecError, match="net_rate"):
        nsbox.Spec(net_rate=0)


@both
@in_a_world
def test_live_change(world: World, path: str) -> None:
    """A box that is allowed more and less while it runs; what is refused loses the connections that it has."""
    world.name("a.test", "203.0.113.6")
    talk = f"""
import socket, sys
s = socket.create_connection(('203.0.113.5', {ECHO})); s.settimeout(5)
for line in sys.stdin:
    try: s.send(line.encode()); print(s.recv(99).decode(), end='', flush=True)
    except OSError as error: print(type(error).__name__, flush=True); break
"""
    with nsbox.Sandbox(net="filtered", allow=["203.0.113.5"], net_path=path) as box:
        process = box.popen(["python3", "-c", talk], stdin=PIPE)
        output: Iterator[tuple[str, bytes]] = process.output()
        process.write("one\n")
        assert next(output)[1] == b"one\n"
        box.deny("203.0.113.5")
        process.write("two\n")
        assert next(output)[1] in (b"ConnectionResetError\n", b"BrokenPipeError\n", b"ConnectionRefusedError\n")

        def reached(host: str) -> str:
            return box.run(["python3", "-c", f"{INSIDE}\nprint(attempt(get, '{host}'))"]).stdout_text.strip()

        assert reached("203.0.113.5") == "ECONNREFUSED"
        assert reached("a.test") == "gaierror"
        box.allow("a.test", "203.0.113.5:80")
        assert (reached("a.test"), reached("203.0.113.5")) == ("200", "ECONNREFUSED"), "a refusal wins over any rule"
        box.allow("203.0.113.5")
        assert reached("203.0.113.5") == "200", "it is taken back by the rule that says the same"
        verdicts = {(row["address"], row["port"], row["verdict"]) for row in box.destinations()}
        assert verdicts >= {("203.0.113.6", 80, "allowed"), ("203.0.113.5", ECHO, "allowed")}
        box.deny("203.0.113.5")
        box.restore(box.snapshot())
        assert (reached("a.test"), reached("203.0.113.5")) == ("200", "ECONNREFUSED"), "it is the same box"
    with nsbox.Sandbox() as plain, pytest.raises(SpecError, match="filtered"):
        plain.allow("a.test")


@in_a_world
def test_a_late_failure_of_the_launch_is_told(world: World) -> None:
    """init gives up while the host side is about to answer it: the error must not be lost with the answer."""
    launching.fault = (_native.STAGES.index("network"), -12)
    for _ in range(40):
        with pytest.raises(SetupError, match="network"):
            world.run(["true"], "203.0.113.5")


# ---- many -----------------------------------------------------------------------------------------------------------


@both
@in_a_world
def test_64_at_once(world: World, path: str) -> None:
    """Nobody is answered before all are connected, so that all of them are there at the same time."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    many = 64
    world.servers.gate = threading.Barrier(many)
    spec = nsbox.Spec(net="filtered", allow=["203.0.113.5:80"], net_path=path, timeout=90)
    with ThreadPoolExecutor(many) as pool:
        results = list(pool.map(lambda n: nsbox.run(["bash", "-c", GET, str(n)], spec), range(many)))
    for number, result in enumerate(results):
        assert result.stdout_text.endswith(f"GET /{number} HTTP/1.1"), result.stderr_text
        (row,) = result.boundary["destinations"]
        assert (row["address"], row["verdict"], row["connections"]) == ("203.0.113.5", "allowed", 1)


def state() -> dict[str, Any]:
    """What runs could leave behind in this host."""
    from pyroute2 import IPRoute

    with IPRoute() as links:
        found: dict[str, Any] = {
            "links": sorted(link.get_attr("IFLA_IFNAME") for link in links.get_links()),
            "addresses": sorted(row.get_attr("IFA_ADDRESS") for row in links.get_addr()),
            "routes": len(list(links.get_routes())),
        }
    with netlink.open_socket(12) as sock:
        try:
            tables = netlink.dump(sock, 10 << 8 | 1, bytes(4))
        except PermissionError:
            tables = []
    found["tables"] = len(tables)
    found["threads"] = sorted(thread.name for thread in threading.enumerate())
    found["sessions"] = len(gateways.shared()._sessions)
    children = subprocess.run(["ps", "-o", "comm=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    found["children"] = sorted(set(children.split()) - {"ps"})
    found["descriptors"] = len(os.listdir("/proc/self/fd"))
    return found


def settle(wanted: dict[str, Any], seconds: float = 6.0) -> dict[str, Any]:
    """The state once it is as wanted; what it is otherwise after some seconds."""
    deadline = time.monotonic() + seconds
    while (now := state()) != wanted and time.monotonic() < deadline:
        time.sleep(0.1)
    if wanted:  # of the groups that are made ahead there may be fewer by now
        now["descriptors"] = max(now["descriptors"], wanted["descriptors"])
    return now


def broken(number: int, spec: nsbox.Spec) -> None:
    """One run that breaks half way, in one of many ways."""
    stages = [name for name in _native.STAGES if name not in ("request", "exec", "run")]
    way = number % 4
    if way == 0:  # a step of the launch fails
        stage = stages[number // 4 % len(stages)]
        if stage == "source" and not ROOT:
            stage = "mount"
        launching.fault = (_native.STAGES.index(stage), -12)
        try:
            with pytest.raises(NsboxError):
                nsbox.run(["true"], spec)
        finally:
            launching.fault = None
    elif way == 1:  # init is killed while a connection is open
        with nsbox.Sandbox(spec) as box:
            process = box.popen(["bash", "-c", f"exec 3<>/dev/tcp/203.0.113.5/{ECHO}; echo up; sleep 60"])
            next(process.output())
            os.kill(box.processes()[0], signal.SIGKILL)
    elif way == 2:  # the command is killed
        result = nsbox.run(["bash", "-c", f"exec 3<>/dev/tcp/203.0.113.5/{ECHO}; kill -9 $$"], spec)
        assert result.signal == signal.SIGKILL
    else:  # the time is over
        script = f"exec 3<>/dev/tcp/203.0.113.5/{ECHO}; while :; do echo x >&3; read -r _ <&3; done"
        assert nsbox.run(["bash", "-c", script], spec.replace(timeout=0.15)).reason == "timeout"


@pytest.mark.slow
@in_a_world
def test_many_runs_leave_nothing(world: World) -> None:
    """A fifth of them break half way. NSBOX_TEST_SLOW=1 makes it 1,000 runs."""
    specs = [nsbox.Spec(net="filtered", allow=["203.0.113.5"], net_path=path) for path in PATHS]
    for number, spec in enumerate(specs * 3):
        nsbox.run(["bash", "-c", GET, "0"], spec)
        broken(4 * number + 2, spec)
        broken(1, spec)  # a sandbox that stays has cgroups in more hierarchies
    time.sleep(2.5)  # the host's table goes a second after the last sandbox
    before = settle({})
    count = 0
    for number in range(RUNS):
        spec = specs[number % len(specs)]
        if number % 5 == 0:
            broken(number // 5, spec)
            count += 1
        else:
            result = nsbox.run(["bash", "-c", GET, str(number)], spec)
            assert result.stdout_text.endswith(f"GET /{number} HTTP/1.1"), (number, result, result.stderr_text)
    assert count == RUNS // 5
    assert settle(before) == before
