"""A network namespace made from a NetPlan, in Python: what native/ does for a sandbox, and nothing else of one.

``NetBox(plan)`` is a process in user and network namespaces of its own, whose sockets have been passed out. Commands
run inside it without any capability.
"""

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from nsbox.plan.net import NetPlan
from nsbox.resources.netlink import exchange

CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWNS = 0x10000000, 0x40000000, 0x00020000
NFT = shutil.which("nft", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
_libc = ctypes.CDLL(None, use_errno=True)


def call(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    call(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    call(_libc.setns(fd, kind), "setns")


def map_ids(pid: int | str, uid: int, gid: int, inside: int = 0) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1\n"), ("gid_map", f"{inside} {gid} 1\n")):
        with open(f"/proc/{pid}/{name}", "w", encoding="ascii") as file:
            file.write(text)


def make_sockets(plan: NetPlan) -> dict[str, socket.socket]:
    """Play a plan in the caller's network namespace, exactly as native/net.c does."""
    made: dict[str, socket.socket] = {}
    for name, protocol, data in (("rtnl", 0, plan.rtnl), ("nft", 12, plan.nft)):
        sock = made[name] = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
        exchange(sock, data)
    for spec in plan.sockets:
        sock = made[spec.name] = socket.socket(spec.family, spec.type, spec.protocol)
        for level, name_, value in spec.options:
            sock.setsockopt(level, name_, value)
        if spec.sockaddr():
            call(_libc.bind(sock.fileno(), spec.sockaddr(), len(spec.sockaddr())), f"bind {spec.name}")
        if spec.backlog:
            sock.listen(spec.backlog)
        sock.setblocking(False)
    return made


class NetBox:
    """A holder process in its own user and network namespace; ``fds`` are the plan's sockets by name."""

    def __init__(self, plan: NetPlan) -> None:
        with tempfile.NamedTemporaryFile("w", prefix="netbox-", delete=False) as file:
            file.write(plan.resolv_conf)
        self._resolv_conf = os.path.realpath(file.name)
        ours, theirs = socket.socketpair()
        uid, gid = os.geteuid(), os.getegid()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            self._hold(theirs, plan, uid, gid)
        theirs.close()
        data, fds, _, _ = socket.recv_fds(ours, 65536, 64)
        if not data.startswith(b"ok "):
            os.waitpid(self.pid, 0)
            ours.close()
            os.unlink(self._resolv_conf)
            raise RuntimeError(data.decode())
        self.fds = dict(zip(data.decode().split()[1:], fds, strict=True))
        self._control = ours
        self._namespaces = [
            os.open(f"/proc/{self.pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("user", "net")
        ]

    @staticmethod
    def _hold(theirs: socket.socket, plan: NetPlan, uid: int, gid: int) -> None:
        try:
            unshare(CLONE_NEWUSER | CLONE_NEWNET)
            map_ids("self", uid, gid)
            made = make_sockets(plan)
            socket.send_fds(theirs, [("ok " + " ".join(made)).encode()], [sock.fileno() for sock in made.values()])
            for sock in made.values():
                sock.close()
            theirs.recv(1)  # until the other end is closed
        except BaseException as error:
            theirs.send(f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)

    def popen(self, argv: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
        """Start a command inside, without capabilities (its user namespace is one further in)."""
        user, net = self._namespaces

        def enter() -> None:
            setns(user, CLONE_NEWUSER)
            setns(net, CLONE_NEWNET)
            unshare(CLONE_NEWNS)
            call(_libc.mount(self._resolv_conf.encode(), b"/etc/resolv.conf", None, 0x1000, None), "bind resolv.conf")
            # Root in there would keep its capabilities over execve(2): drop the bounding set and forbid it.
            for capability in range(64):
                _libc.prctl(24, capability, 0, 0, 0)
            _libc.prctl(28, 0x2F, 0, 0, 0)  # SECBIT_NOROOT and its lock, among others
            _libc.prctl(38, 1, 0, 0, 0)

        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.STDOUT)
        return subprocess.Popen(argv, preexec_fn=enter, text=True, **options)

    def run(self, argv: Sequence[str], timeout: float = 20, **options: Any) -> tuple[int, str]:
        """(exit status, output) of a command inside."""
        with self.popen(argv, **options) as process:
            try:
                out, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
                return -1, out + "\n(timed out)"
        return process.returncode, out

    def python(self, code: str, *args: str, timeout: float = 20) -> str:
        """What a piece of Python prints inside."""
        return self.run([sys.executable, "-c", code, *args], timeout)[1].strip()

    def rules(self) -> str:
        """nft list ruleset, as the holder of the namespace sees it."""
        user, net = self._namespaces

        def enter() -> None:
            setns(user, CLONE_NEWUSER)
            setns(net, CLONE_NEWNET)

        return subprocess.run(
            [NFT or "nft", "list", "ruleset"], preexec_fn=enter, capture_output=True, text=True
        ).stdout

    def close_fds(self) -> None:
        """Close the passed-out sockets, where no gateway has taken them over."""
        for fd in self.fds.values():
            os.close(fd)

    def close(self) -> None:
        if self._control.fileno() < 0:
            return
        self._control.close()
        os.waitpid(self.pid, 0)
        os.unlink(self._resolv_conf)
        for fd in self._namespaces:
            os.close(fd)

    def __enter__(self) -> "NetBox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
