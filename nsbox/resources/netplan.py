"""A policy as what is done in a new network namespace: links, addresses and routes, the nft ruleset, the sockets.

The gateway's namespace has nothing but ``lo``. A local default route loops every packet back into it, prerouting hands it
to our transparent listeners (Documentation/networking/tproxy.rst), and the host side, which holds those, sees the
original destination, asks the policy and relays. So the rules in here only give programs good errors and count what
was refused; a payload that could flush them would still reach nothing but the gateway.
"""

import functools
import os
import socket
import struct
from collections.abc import Iterable

from nsbox.plan.address import V4, V6, Address, Network, parse_address, special
from nsbox.plan.net import NetPlan, NetPolicy, Rule, SocketSpec
from nsbox.resources import netlink, nft
from nsbox.resources.nft import Message, Table

# RFC 7335 keeps 192.0.0.0/29 for the two ends of such a translation: never anybody's real destination. The IPv6 block
# is a random one (RFC 4193).
HERE4, RESOLVER, OURS4 = "192.0.0.2", "192.0.0.1", "192.0.0.0/29"
HERE6, OURS6 = "fd6e:7362:78aa::2", "fd6e:7362:78aa::/64"
PORT = 940  #: of the listeners; below 1024, where payloads do not bind
TABLE = "nsbox"
SET_SIZE, SEEN_SIZE = 1024, 256
_IP_TRANSPARENT, _IP_RECVORIGDSTADDR, _IPV6_TRANSPARENT, _IPV6_RECVORIGDSTADDR = 19, 20, 75, 74
_RTM_NEWLINK, _RTM_NEWADDR, _RTM_NEWROUTE = 16, 20, 24
_LO = 1  # the kernel gives lo this index in every new namespace
_SYN = b"\x02"


def _raw(text: str) -> bytes:
    return socket.inet_pton(V6 if ":" in text else V4, text)


def _network(text: str) -> Network:
    base, _, prefix = text.partition("/")
    address = parse_address(base)
    assert address is not None
    return Network(address.family, address.value, int(prefix))


def link_up(index: int) -> tuple[int, int, bytes]:
    """RTM_NEWLINK that brings an interface up."""
    return _RTM_NEWLINK, 0, struct.pack("=BxHiII", 0, 0, index, 1, 1)


def add_address(index: int, text: str, prefix: int) -> tuple[int, int, bytes]:
    """RTM_NEWADDR, without duplicate address detection for IPv6."""
    raw = _raw(text)
    body = struct.pack("=BBBBI", V6 if len(raw) == 16 else V4, prefix, 0x02 if len(raw) == 16 else 0, 0, index)
    return _RTM_NEWADDR, netlink.CREATE | netlink.EXCL, body + netlink.attribute(2, raw) + netlink.attribute(1, raw)


def local_default(source: str) -> tuple[int, int, bytes]:
    """RTM_NEWROUTE: every address is a local one, on lo, and packets leave as ``source``."""
    raw = _raw(source)
    family, scope = (V6, 0) if len(raw) == 16 else (V4, 254)
    body = struct.pack("=BBBBBBBBI", family, 0, 0, 0, 254, 3, scope, 2, 0)
    output = netlink.attribute(4, struct.pack("=I", _LO))
    return _RTM_NEWROUTE, netlink.CREATE | netlink.EXCL, body + output + netlink.attribute(7, raw)


def _sets(table: Table, families: Iterable[int]) -> Iterable[Message]:
    for family in families:
        ip, n = ("ipv4", 4) if family == V4 else ("ipv6", 6)
        yield table.set(f"ok{n}", n, (ip, "proto", "port"), SET_SIZE)
        yield table.set(f"all{n}", n + 10, (ip, "proto"), SET_SIZE)
        yield table.set(f"den{n}", n + 20, (ip, "proto", "port"), SEEN_SIZE, counted_for=86400)


def _address_rule(rule: Rule, code: int) -> Iterable[tuple[bytes, ...]]:
    assert rule.network
    for protocol in ("tcp", "udp"):
        if rule.protocol in ("", protocol):
            port = (nft.payload(2, 2, 2), nft.compare(struct.pack("!H", rule.port))) if rule.port else ()
            number = socket.IPPROTO_TCP if protocol == "tcp" else socket.IPPROTO_UDP
            yield (*nft.to_network(rule.network), *nft.protocol_is(number), *port, nft.verdict(code))


def address_rules(table: Table, policy: NetPolicy, own: tuple[Network, ...], families: Iterable[int]) -> Iterable[Message]:
    """The rules of the chain ``rules``: refusals, then the special networks that rules name, then what is never reached."""
    lines: list[tuple[bytes, ...]] = []
    by_address = [rule for rule in policy.rules if rule.network and rule.network.family in families]
    for rule in policy.refusals:
        if rule.network and rule.network.family in families:
            lines += _refusal(rule)
    inside = [rule for rule in by_address if rule.network and special(Address(*rule.network[:2]), own)]
    for rule in (*inside, *(rule for rule in by_address if rule not in inside)):
        lines += _address_rule(rule, nft.ACCEPT)
    return [table.rule("rules", *line) for line in lines]


def _refusal(rule: Rule) -> Iterable[tuple[bytes, ...]]:
    return [(*line[:-1], nft.verdict(0, "den")) for line in _address_rule(rule, nft.DROP)]


def _own_chain(table: Table, families: Iterable[int]) -> Iterable[Message]:
    yield table.chain("own")
    for family in families:
        for text in ("127.0.0.0/8", OURS4) if family == V4 else ("::1/128", OURS6):
            yield table.rule("own", *nft.to_network(_network(text)), nft.verdict(nft.ACCEPT))


def _refuse_chain(table: Table, families: Iterable[int]) -> Iterable[Message]:
    """Count, then answer what programs understand: ECONNREFUSED for TCP and UDP, EHOSTUNREACH for the rest."""
    yield table.chain("rej")
    yield table.rule("rej", *nft.protocol_is(socket.IPPROTO_TCP), nft.reject(1))
    yield table.rule("rej", *nft.protocol_is(socket.IPPROTO_UDP), nft.reject(2, 1))
    yield table.rule("rej", nft.reject(2, 3))
    yield table.chain("den")
    for family in families:
        for number in (socket.IPPROTO_TCP, socket.IPPROTO_UDP):
            counted = (*nft.destination(family, port=True), nft.remember(f"den{4 if family == V4 else 6}"))
            yield table.rule("den", *nft.protocol_is(number), *counted, nft.verdict(0, "rej"))
    # The set is full, or the protocol has no ports.
    yield table.rule("den", nft.count("other"), nft.verdict(0, "rej"))


def gateway_rules(policy: NetPolicy, own: tuple[Network, ...], *, ipv6: bool) -> bytes:
    """The whole ruleset of a gateway's namespace as one batch."""
    table = Table(TABLE)
    families = (V4, V6) if ipv6 else (V4,)
    parts = [table.create(), table.counter("other"), *_sets(table, families), *_own_chain(table, families)]
    parts += _refuse_chain(table, families)
    parts += [table.chain("rules"), *address_rules(table, policy, own, families)]
    parts.append(table.chain("out", nft.OUTPUT, 0))
    # Only what opens a connection is judged here; the rest of it finds a socket or is answered with a reset.
    no_syn = (*nft.protocol_is(socket.IPPROTO_TCP), nft.payload(2, 13, 1), nft.mask(_SYN), nft.compare(b"\0"))
    parts.append(table.rule("out", *no_syn, nft.verdict(nft.ACCEPT)))
    parts += [table.rule("out", nft.verdict(0, "own")), table.rule("out", nft.verdict(0, "rules"))]
    for family in families:
        n = 4 if family == V4 else 6
        for name, port in ((f"ok{n}", True), (f"all{n}", False)):
            found = (*nft.destination(family, port=port), nft.member(name))
            parts.append(table.rule("out", *found, nft.verdict(nft.ACCEPT)))
    parts.append(table.rule("out", nft.verdict(0, "den")))
    parts += [table.chain("pre", nft.PREROUTING, -150), table.rule("pre", nft.verdict(0, "own"))]
    for family, address in ((V4, "127.0.0.1"), (V6, "::1")):
        for number in (socket.IPPROTO_TCP, socket.IPPROTO_UDP) if family in families else ():
            taken = (*nft.family_is(family), *nft.protocol_is(number), *nft.tproxy(family, address, PORT))
            parts.append(table.rule("pre", *taken, nft.verdict(nft.ACCEPT)))
    return nft.batch(parts)


def _sockets(*, ipv6: bool, udp: bool) -> Iterable[SocketSpec]:
    stream, datagram, raw = int(socket.SOCK_STREAM), int(socket.SOCK_DGRAM), int(socket.SOCK_RAW)
    yield SocketSpec("dns_udp", V4, datagram, address=(RESOLVER, 53))
    yield SocketSpec("dns_tcp", V4, stream, address=(RESOLVER, 53), backlog=64)
    see4 = ((socket.SOL_IP, _IP_TRANSPARENT, 1),)
    yield SocketSpec("tcp4", V4, stream, options=see4, address=("127.0.0.1", PORT), backlog=1024)
    if udp:
        see4 += ((socket.SOL_IP, _IP_RECVORIGDSTADDR, 1),)
        yield SocketSpec("udp4", V4, datagram, options=see4, address=("127.0.0.1", PORT))
        yield SocketSpec("raw4", V4, raw, socket.IPPROTO_RAW)
    if ipv6:
        see6 = ((socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1), (socket.IPPROTO_IPV6, _IPV6_TRANSPARENT, 1))
        yield SocketSpec("tcp6", V6, stream, options=see6, address=("::1", PORT), backlog=1024)
        if udp:
            see6 += ((socket.IPPROTO_IPV6, _IPV6_RECVORIGDSTADDR, 1),)
            yield SocketSpec("udp6", V6, datagram, options=see6, address=("::1", PORT))
            yield SocketSpec("raw6", V6, raw, socket.IPPROTO_RAW)


@functools.cache
def has_ipv6() -> bool:
    """Whether the host's kernel has IPv6 and it is not disabled."""
    return os.path.exists("/proc/net/if_inet6")


@functools.lru_cache(maxsize=64)
def plan_net(policy: NetPolicy, own: tuple[Network, ...] = (), *, ipv6: bool | None = None, live: bool = True) -> NetPlan:
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
