"""What filtered egress needs: nf_tables and transparent proxying in a network namespace, veth pairs, forwarding."""

import errno
import os
import socket
import struct
from collections.abc import Callable
from typing import TypeVar

from nsbox.doctor import attempt as a
from nsbox.doctor.attempt import Outcome, attempt
from nsbox.doctor.fact import Fact, as_root, number, read, sysctl
from nsbox.doctor.identity import is_privileged

T = TypeVar("T")
_NETLINK_ROUTE, _NETLINK_NETFILTER = 0, 12
_NLMSG_ERROR = 2
_REQUEST, _ACK, _EXCL, _CREATE, _APPEND = 0x1, 0x4, 0x200, 0x400, 0x800
_RTM_NEWLINK = 16
_NESTED = 0x8000
_NFT = 10  # NFNL_SUBSYS_NFTABLES
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NEWTABLE, _NEWCHAIN, _NEWRULE = _NFT << 8, _NFT << 8 | 3, _NFT << 8 | 6
_INET, _PREROUTING, _MANGLE = 1, 0, -150
_NOT_FOR_USERS = "not needed: an ordinary user's egress goes through the gateway"


def attribute(kind: int, payload: bytes) -> bytes:
    """One netlink attribute, padded to 4 bytes (netlink(7))."""
    return struct.pack("=HH", 4 + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)


def nested(kind: int, *attributes: bytes) -> bytes:
    return attribute(kind | _NESTED, b"".join(attributes))


def message(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags, sequence, 0) + body


def errors(answer: bytes) -> list[tuple[int, int]]:
    """(sequence number, error number) of every acknowledgement in what a netlink socket gave."""
    found = []
    while len(answer) >= 16:
        length, kind, _, sequence, _ = struct.unpack_from("=IHHII", answer)
        if length < 16 or length > len(answer):
            break
        if kind == _NLMSG_ERROR and length >= 20:
            found.append((sequence, -struct.unpack_from("=i", answer, 16)[0]))
        answer = answer[(length + 3) & ~3 :]
    return found


def _request(family: int, messages: bytes, steps: dict[int, str]) -> None:
    """Send messages and wait until each numbered one is acknowledged; the first error names its step."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, family) as link:
        link.bind((0, 0))
        link.send(messages)
        waiting = set(steps)
        while waiting:
            for sequence, code in errors(link.recv(1 << 16)):
                if code:
                    raise OSError(code, os.strerror(code), steps.get(sequence, "the batch"))
                waiting.discard(sequence)


def _nft(kind: int, flags: int, sequence: int, *attributes: bytes) -> bytes:
    return message(kind, _REQUEST | flags, sequence, struct.pack("!BBH", _INET, 0, 0) + b"".join(attributes))


def _batch(*messages: bytes) -> bytes:
    edge = struct.pack("!BBH", 0, 0, _NFT)
    return b"".join((message(_BATCH_BEGIN, _REQUEST, 0, edge), *messages, message(_BATCH_END, _REQUEST, 0, edge)))


def _text(kind: int, text: str) -> bytes:
    return attribute(kind, text.encode() + b"\0")


def _word(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("!I", value & 0xFFFFFFFF))


def _table(sequence: int) -> bytes:
    return _nft(_NEWTABLE, _ACK | _CREATE | _EXCL, sequence, _text(1, "doctor"))


def _make_table() -> None:
    a.enter_user_namespace(a.CLONE_NEWNET, "CLONE_NEWNET")
    _request(_NETLINK_NETFILTER, _batch(_table(1)), {1: "NFT_MSG_NEWTABLE"})


def _make_tproxy() -> None:
    """table inet, chain prerouting, rule ``meta l4proto tcp tproxy ip to :940``: as the gateway has it."""
    a.enter_user_namespace(a.CLONE_NEWNET, "CLONE_NEWNET")
    chain = _nft(
        _NEWCHAIN, _ACK | _CREATE, 2, _text(1, "doctor"), _text(3, "pre"),
        nested(4, _word(1, _PREROUTING), _word(2, _MANGLE)), _text(7, "filter"),
    )  # fmt: skip
    expressions = (
        ("meta", nested(2, _word(1, 1), _word(2, 16))),  # l4proto → register 1
        ("cmp", nested(2, _word(1, 1), _word(2, 0), nested(3, attribute(1, b"\x06")))),
        ("immediate", nested(2, _word(1, 1), nested(2, attribute(1, struct.pack("!H", 940))))),
        ("tproxy", nested(2, _word(1, 2), _word(3, 1))),  # family IPv4, port from register 1
    )
    rule = _nft(
        _NEWRULE, _ACK | _CREATE | _APPEND, 3, _text(1, "doctor"), _text(2, "pre"),
        nested(4, *(nested(1, _text(1, name), data) for name, data in expressions)),
    )  # fmt: skip
    steps = {1: "NFT_MSG_NEWTABLE", 2: "NFT_MSG_NEWCHAIN", 3: "NFT_MSG_NEWRULE with tproxy"}
    _request(_NETLINK_NETFILTER, _batch(_table(1), chain, rule), steps)


def _make_veth() -> None:
    a.unshare(a.CLONE_NEWNET, "CLONE_NEWNET")
    body = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + attribute(3, b"nsbox0\0") + nested(18, attribute(1, b"veth"))
    _request(
        _NETLINK_ROUTE,
        message(_RTM_NEWLINK, _REQUEST | _ACK | _CREATE | _EXCL, 1, body),
        {1: "RTM_NEWLINK of a veth pair"},
    )


def nf_tables(outcome: Outcome) -> Fact:
    if outcome.ok:
        return Fact("nf_tables", True, True)
    if outcome.errno in (errno.EPROTONOSUPPORT, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOENT):
        reason = f"{outcome.error}: the kernel has no nf_tables, so --net filtered cannot be had"
        return Fact("nf_tables", False, False, reason, load_module("nf_tables"))
    reason = f"{outcome.error}: --net filtered cannot be had"
    return Fact("nf_tables", False, False, reason, "allow AF_NETLINK sockets in the filter around this process")


def nft_tproxy(outcome: Outcome) -> Fact:
    if outcome.ok:
        return Fact("nft_tproxy", True, True)
    reason = f"{outcome.error}: the gateway cannot take over connections"
    return Fact("nft_tproxy", False, False, reason, load_module("nft_tproxy", "nft_socket"))


def veth(outcome: Outcome) -> Fact:
    if outcome.ok:
        return Fact("veth", True, True)
    absent = outcome.errno in (errno.EOPNOTSUPP, errno.ENODEV)
    reason = f"{outcome.error}: egress goes through the gateway instead"
    remedy = load_module("veth") if absent else "give this process CAP_NET_ADMIN (in a container: --cap-add NET_ADMIN)"
    return Fact("veth", False, False, reason, remedy)


def ip_forward(setting: int | None, privileged: bool) -> Fact:
    if not privileged:
        return Fact("ip_forward", True, _NOT_FOR_USERS)
    if setting:
        return Fact("ip_forward", True, True)
    reason = "the host forwards no packets, so egress by veth cannot leave it; the gateway does without"
    return Fact("ip_forward", False, False, reason, sysctl("net.ipv4.ip_forward", 1))


def find_uplinks() -> dict[str, str]:
    """Family → interface that the host's default route leaves by. Raises OSError."""
    from pyroute2 import IPRoute

    with IPRoute() as links:
        names = {link["index"]: link.get_attr("IFLA_IFNAME") for link in links.get_links()}
        found = {}
        for family, word in ((socket.AF_INET, "IPv4"), (socket.AF_INET6, "IPv6")):
            outputs = [route.get_attr("RTA_OIF") for route in links.get_default_routes(family=family)]
            if outputs:
                found[word] = names.get(outputs[0], "several")
    return found


def uplink(found: dict[str, str] | OSError) -> Fact:
    if isinstance(found, OSError):
        reason = f"the host's routes cannot be read: {found.strerror}"
        return Fact("uplink", False, False, reason, "allow AF_NETLINK sockets in the filter around this process")
    if found:
        return Fact("uplink", True, ", ".join(f"{family} by {name}" for family, name in found.items()))
    reason = "the host has no default route: filtered egress reaches no further than the networks it is attached to"
    return Fact("uplink", False, False, reason, as_root("ip route add default via ADDRESS-OF-THE-ROUTER"))


def forward_rules(dropping: list[str] | OSError, privileged: bool) -> Fact:
    """``dropping``: nft tables of others that drop what the host forwards."""
    if not privileged:
        return Fact("forward_rules", True, _NOT_FOR_USERS)
    if isinstance(dropping, OSError):
        reason = f"nf_tables cannot be asked: {dropping.strerror}"
        return Fact("forward_rules", False, False, reason, load_module("nf_tables"))
    if not dropping:
        return Fact("forward_rules", True, True)
    reason = f"the nft table {dropping[0]} drops what the host forwards; the gateway is used instead of veth"
    return Fact("forward_rules", False, False, reason, f"accept interfaces nsbx* in its forward chain ({dropping[0]})")


def _asked(question: Callable[[], T]) -> T | OSError:
    try:
        return question()
    except OSError as error:
        return error


def _dropping() -> list[str]:
    from nsbox.resources import netlink, nft

    with netlink.open_socket(_NETLINK_NETFILTER) as sock:
        return nft.dropping_tables(sock, nft.FORWARD)


def load_module(*names: str) -> str:
    """The command that loads kernel modules now and at each boot."""
    words = " ".join(names)
    return as_root(f"modprobe -a {words} && printf '%s\\n' {words} >> /etc/modules-load.d/nsbox.conf")


def facts(user_namespaces: bool) -> list[Fact]:
    """All facts of this module."""
    privileged = is_privileged()
    found = []
    if user_namespaces:
        found.append(nf_tables(attempt(_make_table)))
        if found[0].ok:
            found.append(nft_tproxy(attempt(_make_tproxy)))
    found.append(veth(attempt(_make_veth)) if privileged else Fact("veth", True, _NOT_FOR_USERS))
    found.append(ip_forward(number(read("/proc/sys/net/ipv4/ip_forward")), privileged))
    found.append(forward_rules(_asked(_dropping) if privileged else [], privileged))
    return [*found, uplink(_asked(find_uplinks))]
