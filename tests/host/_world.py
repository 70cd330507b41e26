"""A host and the world behind it, both network namespaces of the test's own, made with pyroute2; for root and users.

A case runs in a child process whose network namespace stands for the host: it has an uplink (198.51.100.1/24 and
2001:db8:1::1) to the world, where servers of the test answer on every port of ``PORTS`` at every address of ``WORLD``.
The child of an ordinary user is that user still, without any capability; only the thread that lives in the world has.
"""

import contextlib
import ctypes
import functools
import inspect
import os
import queue
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from _netbox import CLONE_NEWNET, CLONE_NEWUSER, map_ids, unshare
from _servers import Zone

import nsbox
from nsbox.resources import gateway as gateways

T = TypeVar("T")
WORLD = ("203.0.113.5", "203.0.113.6", "10.9.9.9", "100.64.0.9", "169.254.169.254", "100.100.100.200", "168.63.129.16")
WORLD6 = ("2001:db8::5", "2001:db8::6", "fd00:ec2::254")
HTTP, TLS, ECHO, DNS, DOT = 80, 443, 9000, 53, 853
HOST, ROUTER = "198.51.100.1", "198.51.100.2"
PATHS = ("gateway", "veth") if os.geteuid() == 0 else ("gateway",)
ROOT = os.geteuid() == 0


class Servers:
    """What the world answers; ``came`` tells of everything that arrived, as (protocol, port of the server)."""

    def __init__(self, certificate: Path | None) -> None:
        self.came: list[tuple[str, int]] = []
        self.peers: list[str] = []
        self.gate: threading.Barrier | None = None  # holds HTTP answers until so many have come
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if certificate:
            self._tls.load_cert_chain(certificate)
        for port, serve in ((HTTP, self._http), (TLS, self._secure), (ECHO, self._echo), (DNS, self._echo)):
            self._listen(port, serve)
        self._listen(DOT, self._echo)
        for port in (DNS, TLS, ECHO):
            self._datagrams(port)

    def _listen(self, port: int, serve: Callable[[socket.socket], None]) -> None:
        sock = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
        threading.Thread(target=self._accept, args=(sock, port, serve), daemon=True).start()

    def _accept(self, sock: socket.socket, port: int, serve: Callable[[socket.socket], None]) -> None:
        while True:
            client, peer = sock.accept()
            self.came.append(("tcp", port))
            self.peers.append(peer[0])
            threading.Thread(target=self._one, args=(client, serve), daemon=True).start()

    @staticmethod
    def _one(client: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        with client, contextlib.suppress(OSError):
            client.settimeout(10)
            serve(client)

    def _http(self, client: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head and (data := client.recv(4096)):
            head += data
        if self.gate and head:
            self.gate.wait(60)
        if head:
            body = head.split(b"\r\n")[0]
            client.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    def _secure(self, client: socket.socket) -> None:
        with self._tls.wrap_socket(client, server_side=True) as secure:
            self._http(secure)

    @staticmethod
    def _echo(client: socket.socket) -> None:
        while data := client.recv(1 << 16):
            client.sendall(data)

    def _datagrams(self, port: int) -> None:
        for family, host in ((socket.AF_INET, "203.0.113.5"), (socket.AF_INET, "203.0.113.6"), (socket.AF_INET6, "::")):
            sock = socket.socket(family, socket.SOCK_DGRAM)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((host, port))
            threading.Thread(target=self._answer, args=(sock, port), daemon=True).start()

    def _answer(self, sock: socket.socket, port: int) -> None:
        while True:
            data, peer = sock.recvfrom(65536)
            self.came.append(("udp", port))
            sock.sendto(b"re:" + data, peer)


class World:
    """The child's host. ``zone`` is the resolver that the host uses, ``servers`` what is out there."""

    def __init__(self) -> None:
        if not ROOT:
            uid, gid = os.geteuid(), os.getegid()
            unshare(CLONE_NEWUSER)
            map_ids("self", uid, gid, inside=uid)
        self.folder = Path(tempfile.mkdtemp(prefix="world-"))
        self.folder.chmod(0o755)
        unshare(CLONE_NEWNET)
        self._host = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._tasks: queue.Queue[Callable[[], None]] = queue.Queue()
        threading.Thread(target=self._live_outside, daemon=True).start()
        self.outside(self._build_world)
        self._build_host()
        self.certificate = self._certify()
        self.servers = self.outside(lambda: Servers(self.certificate))
        self.zone = self.outside(lambda: Zone({}, ROUTER))
        if not ROOT:
            drop_capabilities()
        resolvers = [(ROUTER, self.zone.address[1])]
        gateways._shared = (os.getpid(), gateways.Gateway(resolvers=resolvers))
        self.result: nsbox.Result | None = None

    def outside(self, task: Callable[[], T]) -> T:
        """Do something in the world."""
        done: queue.Queue[tuple[bool, Any]] = queue.Queue()

        def work() -> None:
            try:
                done.put((True, task()))
            except BaseException as error:
                done.put((False, error))

        self._tasks.put(work)
        good, value = done.get()
        if not good:
            raise value
        return value  # type: ignore[no-any-return]

    def _live_outside(self) -> None:
        unshare(CLONE_NEWNET)
        while True:
            self._tasks.get()()

    def _build_world(self) -> None:
        from pyroute2 import IPRoute

        with IPRoute() as links:
            lo = links.link_lookup(ifname="lo")[0]
            links.link("set", index=lo, state="up")
            for address in (*WORLD, *WORLD6):
                links.addr("add", index=lo, address=address, prefixlen=128 if ":" in address else 32, **no_dad(address))
            links.link("add", ifname="up0", kind="veth", peer={"ifname": "wan0", "net_ns_fd": self._host})
            up = links.link_lookup(ifname="up0")[0]
            for address, prefix in ((ROUTER, 24), ("2001:db8:1::2", 64)):
                links.addr("add", index=up, address=address, prefixlen=prefix, **no_dad(address))
            links.link("set", index=up, state="up")
            links.route("add", dst="198.19.0.0/16", gateway=HOST)

    def _build_host(self) -> None:
        from pyroute2 import IPRoute

        if ROOT:
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        with IPRoute() as links:
            links.link("set", index=links.link_lookup(ifname="lo")[0], state="up")
            wan = links.link_lookup(ifname="wan0")[0]
            for address, prefix in ((HOST, 24), ("2001:db8:1::1", 64)):
                links.addr("add", index=wan, address=address, prefixlen=prefix, **no_dad(address))
            links.link("set", index=wan, state="up")
            links.route("add", dst="default", gateway=ROUTER)
            links.route("add", dst="default", gateway="2001:db8:1::2", family=socket.AF_INET6)

    def _certify(self) -> Path | None:
        """A CA of the test's own (``ca.pem``), and a certificate for a.test and b.test with its key, in one file."""
        if not shutil.which("openssl"):
            return None
        key, curve = ("-newkey", "ec", "-pkeyopt"), "ec_paramgen_curve:P-256"
        ca, own = self.folder / "ca", self.folder / "own"
        commands = [
            f"req -x509 {' '.join(key)} {curve} -nodes -days 1 -subj /CN=test-CA -keyout {ca}.key -out {ca}.pem",
            f"req {' '.join(key)} {curve} -nodes -subj /CN=a.test -keyout {own}.key -out {own}.csr",
        ]
        for command in commands:
            subprocess.run(["openssl", *command.split()], check=True, capture_output=True)
        extra = self.folder / "san"
        extra.write_text("subjectAltName=DNS:a.test,DNS:b.test")
        sign = f"x509 -req -in {own}.csr -CA {ca}.pem -CAkey {ca}.key -CAcreateserial -days 1 -extfile {extra}"
        subprocess.run(["openssl", *sign.split(), "-out", f"{own}.pem"], check=True, capture_output=True)
        whole = self.folder / "server.pem"
        whole.write_bytes(own.with_suffix(".pem").read_bytes() + own.with_suffix(".key").read_bytes())
        return whole

    @property
    def authority(self) -> str:
        """The CA's certificate, to be mounted."""
        return str(self.folder / "ca.pem")

    def name(self, name: str, *addresses: str) -> None:
        """Have a name resolve to addresses."""
        rows = [f"{name}. 1 {'AAAA' if ':' in address else 'A'} {address}" for address in addresses]
        self.zone.records[name + "."] = rows

    def run(self, argv: list[str], *allow: str, **options: Any) -> nsbox.Result:
        """Run a command with filtered egress; keeps the result."""
        self.result = nsbox.run(argv, **{"net": "filtered", "allow": allow, **options})
        return self.result

    def inside(self, code: str, *allow: str, **options: Any) -> Any:
        """What an expression is inside, with the functions of ``INSIDE``."""
        result = self.run(["python3", "-c", f"{INSIDE}\nprint(repr({code}))"], *allow, **options)
        assert result.ok, (result, result.stderr_text)
        return eval(result.stdout_text.splitlines()[-1])

    def rows(self, **wanted: Any) -> list[dict[str, Any]]:
        """The report's destinations that have these fields."""
        assert self.result
        found = self.result.boundary["destinations"]
        return [row for row in found if all(row.get(key) == value for key, value in wanted.items())]


def no_dad(address: str) -> dict[str, int]:
    """IFA_F_NODAD: an IPv6 address is of use at once."""
    return {"flags": 0x02} if ":" in address else {}


def drop_capabilities() -> None:
    """The calling thread gives all of them up (capset(2))."""
    head, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(head, none):
        raise OSError(ctypes.get_errno(), "capset")


def in_a_world(case: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a child process with a ``World``, which is its first argument; the others are parameters."""

    @functools.wraps(case)
    def test(**parameters: Any) -> None:
        pytest.importorskip("pyroute2")
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            world = None
            try:
                world = World()
                case(world, **parameters)
            except BaseException:
                os.write(writer, traceback.format_exc().encode()[-60000:])
            finally:
                if world:
                    shutil.rmtree(world.folder, ignore_errors=True)
                os._exit(0)
        os.close(writer)
        with open(reader, encoding="utf-8") as report:
            problem = report.read()
        os.waitpid(child, 0)
        if problem.startswith("skip "):
            pytest.skip(problem)
        if problem:
            pytest.fail(problem, pytrace=False)

    signature = inspect.signature(case)
    test.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return test


INSIDE = r"""
import errno, os, socket, struct, sys, time

def family(host):
    return socket.AF_INET6 if ":" in host else socket.AF_INET

def word(error):
    return errno.errorcode.get(error.errno, type(error).__name__)

def tcp(host, port, data=b"", timeout=5):
    with socket.socket(family(host), socket.SOCK_STREAM) as s:
        s.settimeout(timeout)
        try:
            s.connect((host, port))
            s.sendall(data)
            return s.recv(65536)
        except OSError as error:
            return word(error)

def get(host, port=80):
    got = tcp(host, port, b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n" % host.encode())
    return got if isinstance(got, str) else got[9:12].decode()

def udp(host, port, data=b"x", timeout=1, connect=False):
    with socket.socket(family(host), socket.SOCK_DGRAM) as s:
        s.settimeout(timeout)
        try:
            if connect:
                s.connect((host, port)); s.send(data)
            else:
                s.sendto(data, (host, port))
            return s.recvfrom(65536)[0]
        except OSError as error:
            return word(error)

def dns(name, kind=1, server="192.0.0.1", stream=False):
    query = struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0)
    query += b"".join(bytes((len(x),)) + x.encode() for x in name.split(".")) + b"\0" + struct.pack("!HH", kind, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM if stream else socket.SOCK_DGRAM) as s:
        s.settimeout(3)
        try:
            s.connect((server, 53))
            s.sendall(struct.pack("!H", len(query)) + query if stream else query)
            reply = s.recv(4096)[2 if stream else 0:]
        except OSError as error:
            return word(error)
    rows = [i for i in range(len(reply) - 13) if (reply[i:i + 4], reply[i + 8:i + 10]) == (b"\0\1\0\1", b"\0\4")]
    return reply[3] & 15, [socket.inet_ntoa(reply[i + 10:i + 14]) for i in rows]

def attempt(f, *args):
    try:
        return f(*args)
    except OSError as error:
        return word(error)
"""
