"""Attempts on interfaces that are reached by descriptors: netlink, sockets of other kinds, terminals."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pty
import socket
import struct
from collections.abc import Callable

from .calls import ATTACKS, X86, call, libc


# K11
def netlink(protocol: int, kind: int, payload: bytes) -> Callable[[], object]:
    def attempt() -> object:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
        sock.settimeout(3)
        sock.send(struct.pack("IHHII", 16 + len(payload), kind, 5, 1, 0) + payload)
        answer = sock.recv(4096)
        code = struct.unpack_from("i", answer, 16)[0]
        if code:
            raise OSError(-code, "netlink")
        return "done"

    return attempt


ATTACKS["link_down"] = netlink(0, 16, struct.pack("BxHiII", 0, 0, 1, 0, 1))
ATTACKS["address_add"] = netlink(0, 20, struct.pack("BBBBI", 2, 8, 0, 0, 1) + struct.pack("HH4B", 8, 2, 10, 9, 8, 7))
ATTACKS["route_add"] = netlink(
    0, 24, struct.pack("BBBBBBBBI", 2, 0, 0, 0, 254, 4, 253, 1, 0) + struct.pack("HHI", 8, 4, 1)
)
ATTACKS["link_new"] = netlink(
    0, 16, struct.pack("BxHiII", 0, 0, 0, 0, 0) + struct.pack("HH", 16, 18) + struct.pack("HH6sxx", 10, 1, b"dummy\0")
)
ATTACKS["netfilter_list"] = lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
ATTACKS["audit"] = lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 9)
ATTACKS["uevent"] = lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15)
ATTACKS["sock_diag"] = lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4)


# K13
def sockets(family: int, kind: int, protocol: int = 0) -> Callable[[], object]:
    return lambda: socket.socket(family, kind, protocol)


SOCKETS = {
    "vsock": (40, 1),
    "alg": (38, 5),
    "packet": (17, 3),
    "packet_dgram": (17, 2),
    "xdp": (44, 3),
    "bluetooth": (31, 3),
    "raw_ip": (2, 3, 255),
    "raw_icmp": (2, 3, 1),
    "raw_ip6": (10, 3, 58),
    "sctp": (2, 1, 132),
    "dccp": (2, 6, 33),
    "udplite": (2, 2, 136),
    "mptcp": (2, 1, 262),
    "can": (29, 3, 1),
    "tipc": (30, 1),
    "rds": (21, 5),
    "kcm": (41, 2),
    "smc": (43, 1),
    "qipcrtr": (42, 2),
    "ax25": (3, 5),
    "x25": (9, 5),
    "llc": (26, 1),
    "pppox": (24, 1),
    "phonet": (35, 2),
    "nfc": (39, 5),
    "ieee802154": (36, 2),
    "caif": (37, 5),
    "rxrpc": (33, 2),
    "key": (15, 3, 2),
    "unspecified": (0, 1),
    "packet_in_inet": (2, 10, 0x0300),
}
for _name, _parts in SOCKETS.items():
    ATTACKS[f"socket_{_name}"] = sockets(*_parts)
ATTACKS["socket_high"] = lambda: (
    libc.syscall(41 if X86 else 198, ctypes.c_ulong(0x100000000 | 40), 1, 0) >= 0 or errno_raise()
)


def errno_raise() -> object:
    raise OSError(ctypes.get_errno(), "call")


# K14, K15
def terminal(request: int, argument: bytes) -> Callable[[], object]:
    def attempt() -> object:
        _, slave = pty.openpty()
        os.setsid() if os.getsid(0) != os.getpid() else None
        fcntl.ioctl(slave, 0x540E, 0)  # TIOCSCTTY
        return call("ioctl", slave, request, argument)

    return attempt


ATTACKS["tiocsti"] = terminal(0x5412, b"x")
ATTACKS["tiocsti_high"] = terminal(0x1_0000_5412, b"x")
ATTACKS["tioclinux"] = terminal(0x541C, b"\6")
ATTACKS["tioclinux_high"] = terminal(0xFFFF_FFFF_0000_541C, b"\6")
ATTACKS["tiocsetd"] = terminal(0x5423, struct.pack("i", 0))
ATTACKS["tioccons"] = terminal(0x541D, b"")
ATTACKS["open_tty"] = lambda: os.open("/dev/tty", os.O_RDWR)
ATTACKS["steal_tty"] = lambda: [fcntl.ioctl(fd, 0x540E, 1) for fd in range(3)]
