"""A policy as what is done in a new network namespace: links, addresses and routes, the nft ruleset, the sockets.

The gateway's namespace has nothing but ``lo``. A local default route loops every packet back into it, prerouting hands
it to our transparent listeners (Documentation/networking/tproxy.rst), and the host side, which holds those, sees the
original destination, asks the policy and relays. So the rules in here only give programs good errors and count what
was refused; a payload that could flush them would still reach nothing but the gateway.
"""

import functools
import os
import socket
import struct
from collections.abc import Iterable

from nsbox.errors import HostError
from nsbox.plan.address import V4, V6, Network
from nsbox.plan.net import NetPlan, NetPolicy, SocketSpec
from nsbox.resources import netlink, nft
from nsbox.resources.netrules import (
    HERE4,
    HERE6,
    PORT,
    RESOLVER,
    TABLE,
    address_rules,
    members,
    no_new_connection,
    own_chain,
    policy_chains,
    raw_address,
    refuse_chain,
    sets,
)
from nsbox.resources.nft import Table

_IP_TRANSPARENT, _IP_RECVORIGDSTADDR, _IPV6_TRANSPARENT, _IPV6_RECVORIGDSTADDR = 19, 20, 75, 74
_RTM_NEWLINK, _RTM_NEWADDR, _RTM_NEWROUTE = 16, 20, 24
_LO = 1  # the kernel gives lo this index in every new namespace


def link_up(index: int) -> tuple[int, int, bytes]:
    """RTM_NEWLINK that brings an interface up."""
    return _RTM_NEWLINK, 0, struct.pack("=BxHiII", 0, 0, index, 1, 1)


def add_address(index: int, text: str, prefix: int) -> tuple[int, int, bytes]:
    """RTM_NEWADDR, without duplicate address detection for IPv6."""
    raw = raw_address(text)
    body = struct.pack("=BBBBI", V6 if len(raw) == 16 else V4, prefix, 0x02 if len(raw) == 16 else 0, 0, index)
    return _RTM_NEWADDR, netlink.CREATE | netlink.EXCL, body + netlink.attribute(2, raw) + netlink.attribute(1, raw)


def local_default(source: str) -> tuple[int, int, bytes]:
    """RTM_NEWROUTE: every address is a local one, on lo, and packets leave as ``source``."""
    raw = raw_address(source)
    family, scope = (V6, 0) if len(raw) == 16 else (V4, 254)
    body = struct.pack("=BBBBBBBBI", family, 0, 0, 0, 254, 3, scope, 2, 0)
    output = netlink.attribute(4, struct.pack("=I", _LO))
    return _RTM_NEWROUTE, netlink.CREATE | netlink.EXCL, body + output + netlink.attribute(7, raw)


def gateway_rules(policy: NetPolicy, own: tuple[Network, ...], *, ipv6: bool) -> bytes:
    """The whole ruleset of a gateway's namespace as one batch."""
    table = Table(TABLE)
    families = (V4, V6) if ipv6 else (V4,)
    parts = [table.create(), table.counter("other"), *sets(table, families), *own_chain(table, families)]
    parts += refuse_chain(table, families)
    parts += [table.chain("ok"), table.rule("ok", nft.verdict(nft.ACCEPT))]
    parts += [*policy_chains(table), *address_rules(table, policy, own, families)]
    parts.append(table.chain("out", nft.OUTPUT, 0))
    parts.append(table.rule("out", *no_new_connection(), nft.verdict(nft.ACCEPT)))
    parts += [table.rule("out", nft.verdict(0, name)) for name in ("own", "gone", "rules")]
    parts += members(table, "out", families)
    parts.append(table.rule("out", nft.verdict(0, "den")))
    parts.append(table.chain("pre", nft.PREROUTING, -150))
    parts += [table.rule("pre", nft.verdict(0, "host")), table.rule("pre", nft.verdict(0, "own"))]
    for family, address in ((V4, "127.0.0.1"), (V6, "::1")):
        for number in (socket.IPPROTO_TCP, socket.IPPROTO_UDP) if family in families else ():
            taken = (*nft.family_is(family), *nft.protocol_is(number), *nft.tproxy(family, address, PORT))
            parts.append(table.rule("pre", *taken, nft.verdict(nft.ACCEPT)))
    return nft.batch(parts)


def _sockets(*, ipv6: bool, udp: bool) -> Iterable[SocketSpec]:
    stream, datagram, raw = int(socket.SOCK_STREAM), int(socket.SOCK_DGRAM), int(socket.SOCK_RAW)
    yield SocketSpec("dns_udp", V4, datagram, address=(RESOLVER, 53))
    yield SocketSpec("dns_tcp", V4, stream, address=(RESOLVER, 53), backlog=64)
    see4: tuple[tuple[int, int, int], ...] = ((socket.SOL_IP, _IP_TRANSPARENT, 1),)
    yield SocketSpec("tcp4", V4, stream, options=see4, address=("127.0.0.1", PORT), backlog=1024)
    if udp:
        see4 += ((socket.SOL_IP, _IP_RECVORIGDSTADDR, 1),)
        yield SocketSpec("udp4", V4, datagram, options=see4, address=("127.0.0.1", PORT))
        yield SocketSpec("raw4", V4, raw, socket.IPPROTO_RAW)
    if ipv6:
        level = int(socket.IPPROTO_IPV6)
        see6: tuple[tuple[int, int, int], ...] = ((level, socket.IPV6_V6ONLY, 1), (level, _IPV6_TRANSPARENT, 1))
        yield SocketSpec("tcp6", V6, stream, options=see6, address=("::1", PORT), backlog=1024)
        if udp:
            see6 += ((level, _IPV6_RECVORIGDSTADDR, 1),)
            yield SocketSpec("udp6", V6, datagram, options=see6, address=("::1", PORT))
            yield SocketSpec("raw6", V6, raw, socket.IPPROTO_RAW)


def failure(step: str, code: int) -> HostError:
    """The error for a step inside that failed: ``rtnl``, ``nft``, or the name of a socket."""
    reason = os.strerror(code)
    if step == "nft":
        modules = "nf_tables nft_tproxy nft_reject_inet"
        text = f"the kernel takes no ruleset for filtered egress: {reason}"
        return HostError(text, remedy=f"as root run: modprobe -a {modules}, then nsbox doctor", errno=code)
    if step == "rtnl":
        text = f"loopback addresses and routes cannot be set in the sandbox: {reason}"
        return HostError(text, remedy="run: nsbox doctor", errno=code)
    text = f"the socket {step} of the gateway cannot be made in the sandbox: {reason}"
    return HostError(text, remedy="run: nsbox doctor; the kernel needs CONFIG_NF_TPROXY_IPV4 and _IPV6", errno=code)


@functools.cache
def has_ipv6() -> bool:
    """Whether the host's kernel has IPv6 and it is not disabled."""
    return os.path.exists("/proc/net/if_inet6")


@functools.lru_cache(maxsize=64)
def plan_net(
    policy: NetPolicy, own: tuple[Network, ...] = (), *, ipv6: bool | None = None, live: bool = True
) -> NetPlan:
    """The gateway's plan for a policy.

    ``own``: the host's own addresses and gateways. ``live``: the policy may change while the sandbox runs, so that the
    sockets for UDP are made though no rule asks for them yet.
    """
    ipv6 = has_ipv6() if ipv6 is None else ipv6
    links = [link_up(_LO), add_address(_LO, HERE4, 32), local_default(HERE4)]
    if ipv6:
        links += [add_address(_LO, HERE6, 128), local_default(HERE6)]
    udp = live or any(rule.protocol == "udp" for rule in policy.rules)
    return NetPlan(
        path="gateway",
        rtnl=netlink.numbered(links),
        nft=gateway_rules(policy, own, ipv6=ipv6),
        sockets=tuple(_sockets(ipv6=ipv6, udp=udp)),
        resolv_conf=f"# the sandbox's own resolver\nnameserver {RESOLVER}\noptions edns0\n",
    )
