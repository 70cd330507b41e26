"""A network of the benchmark's own, so that no setting of the host's is changed and no packet leaves the machine."""

import ctypes
import json
import os
from collections.abc import Callable
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


def unshare(flags: int) -> None:
    """unshare(2), which os has from Python 3.12 on. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")


def enter() -> None:
    """This process goes to network (and, for an ordinary user, user) namespaces of its own; nothing leads back."""
    if os.geteuid():
        uid, gid = os.geteuid(), os.getegid()
        unshare(CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1\n"), ("gid_map", f"{gid} {gid} 1\n")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    unshare(CLONE_NEWNET)


def forward() -> None:
    """Have the network namespace that this process is in pass packets on. Raises OSError."""
    with open("/proc/sys/net/ipv4/ip_forward", "w", encoding="ascii") as setting:
        setting.write("1")


def apart(call: Callable[[], Any], *, network: bool = True) -> Any:
    """What ``call`` returns (JSON can hold it) in a child, whose network is its own and passes packets on, if wanted.
    Raises RuntimeError where the child failed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            if network:
                enter()
                forward()
            with open(writer, "w", encoding="utf-8") as answer:
                answer.write(json.dumps(call()))
            status = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, encoding="utf-8") as answer:
        said = answer.read()
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("the measurement failed in its own network; what it said is above")
    return json.loads(said)
