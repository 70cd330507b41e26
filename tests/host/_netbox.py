"""A network namespace made from a NetPlan, in Python: what native/ does for a sandbox, and nothing else of one.

``NetBox(plan)`` is a process in user and network namespaces of its own, whose sockets have been passed out. Commands
run inside it without any capability. Both are programs (this file, and _enter.py), not forks: the tests have threads.
"""

import ctypes
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from _enter import CLONE_NEWNET, CLONE_NEWUSER, call, setns, unshare

import nsbox
from nsbox.plan.net import NetPlan
from nsbox.resources.netlink import exchange

__all__ = ["CLONE_NEWNET", "CLONE_NEWUSER", "NFT", "NetBox", "map_ids", "setns", "unshare"]

NFT = shutil.which("nft", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
_ENTER = str(Path(__file__).with_name("_enter.py"))
_libc = ctypes.CDLL(None, use_errno=True)


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
        with theirs:
            self._holder = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": str(Path(nsbox.__file__).parents[1])},
            )
        assert self._holder.stdin
        with self._holder.stdin as pipe:
            pickle.dump(plan, pipe)
        data, fds, _, _ = socket.recv_fds(ours, 65536, 64)
        if not data.startswith(b"ok "):
            self._holder.wait()
            ours.close()
            os.unlink(self._resolv_conf)
            raise RuntimeError(data.decode())
        self.fds = dict(zip(data.decode().split()[1:], fds, strict=True))
        self._control = ours
        self._namespaces = [
            os.open(f"/proc/{self._holder.pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("user", "net")
        ]

    def _entering(self, resolv_conf: str, argv: Sequence[str]) -> dict[str, Any]:
        """What Popen has to be told to start a command inside."""
        words = [sys.executable, "-I", "-S", _ENTER, *map(str, self._namespaces), resolv_conf, *argv]
        return {"args": words, "pass_fds": self._namespaces, "text": True}

    def popen(self, argv: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
        """Start a command inside, without capabilities (its user namespace is one further in)."""
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.STDOUT)
        return subprocess.Popen(**self._entering(self._resolv_conf, argv), **options)

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
        return subprocess.run(**self._entering("-", [NFT or "nft", "list", "ruleset"]), capture_output=True).stdout

    def close_fds(self) -> None:
        """Close the passed-out sockets, where no gateway has taken them over."""
        for fd in self.fds.values():
            os.close(fd)

    def close(self) -> None:
        if self._control.fileno() < 0:
            return
        self._control.close()
        self._holder.wait()
        os.unlink(self._resolv_conf)
        for fd in self._namespaces:
            os.close(fd)

    def __enter__(self) -> "NetBox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def hold(control: socket.socket) -> None:
    """Make the namespaces and what the plan on standard input wants in them; stay until the other end is closed."""
    plan: NetPlan = pickle.load(sys.stdin.buffer)
    uid, gid = os.geteuid(), os.getegid()
    try:
        unshare(CLONE_NEWUSER | CLONE_NEWNET)
        map_ids("self", uid, gid)
        made = make_sockets(plan)
    except Exception as error:
        control.send(f"{type(error).__name__}: {error}".encode())
        return
    socket.send_fds(control, [("ok " + " ".join(made)).encode()], [sock.fileno() for sock in made.values()])
    for sock in made.values():
        sock.close()
    control.recv(1)


if __name__ == "__main__":
    hold(socket.socket(fileno=int(sys.argv[1])))
