"""Egress by a veth pair (veth(4)), for a caller with CAP_NET_ADMIN: packets are routed by the kernel, at full speed.

Inside: the same sets and chains as the gateway's, deny by default both ways; the sandbox has no capability over them.
On the host: one nft table per process, for every sandbox of ours by the prefix of its interface. The kernel removes it
with the socket that owns it (NFT_TABLE_F_OWNER), so a killed process leaves none; the pair goes with its namespace.
Sandboxes are addressed by the slot of their id range, which no other process holds at the same time.
"""

import errno
import fcntl
import functools
import os
import socket
import struct
import threading
import time

from nsbox.errors import HostError
from nsbox.plan.address import LOOPBACK, V4, V6, Network
from nsbox.plan.net import EgressLimits, NetPlan, NetPolicy, SocketSpec
from nsbox.resources import gateway, netlink, nft
from nsbox.resources.netplan import add_address, has_ipv6, link_up, local_default
from nsbox.resources.netrules import (
    BLOCK,
    HERE6,
    RESOLVER,
    TABLE,
    address_rules,
    connection_accepted,
    connection_from_outside,
    members,
    no_new_connection,
    own_chain,
    policy_chains,
    raw_address,
    refuse_chain,
    sets,
)
from nsbox.resources.nft import Message, Table

PREFIX = "nsbx"  #: of the interfaces on the host
SLOTS = 1 << 15
_LO, _ETH0, _FIRST_INDEX = 1, 2, 0x4E530000
_SIOCGSKNS = 0x894C
_RTM_NEWLINK, _RTM_DELLINK, _RTM_NEWROUTE = 16, 17, 24
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_NET_NS_FD, _IFLA_TXQ, _IFLA_RXQ = 3, 18, 28, 31, 32
_LINGER_S, _OLD_LINK_S = 1.0, 0.2
COUNTED = 1024  #: destinations whose traffic is counted each by itself
HELD = ("net_connections", "net_rate", "net_bytes")  #: counters of what a limit held back
COUNTERS = ("con4", "est4", "tx4", "rx4")  # SYNs sent, SYN-ACKs got, packets and bytes each way


def addresses(slot: int) -> tuple[str, str]:
    """(the host's end, the sandbox's end) of a slot."""
    first = BLOCK.value + 2 * (slot % SLOTS)
    return tuple(socket.inet_ntoa(struct.pack("!I", first + end)) for end in (0, 1))  # type: ignore[return-value]


def _rules(policy: NetPolicy, own: tuple[Network, ...], *, ipv6: bool) -> bytes:
    """The ruleset inside as one batch."""
    table = Table(TABLE)
    families = (V4, V6) if ipv6 else (V4,)
    key = ("ipv4", "proto", "port")
    parts = [table.create(), *map(table.counter, ("other", *HELD)), *sets(table, families), *own_chain(table, families)]
    parts += [table.set(name, n, key, COUNTED, counted_for=86400) for n, name in enumerate(COUNTERS, 40)]
    parts += refuse_chain(table, families)
    where = nft.destination(V4, port=True)
    parts += [table.chain("more"), table.chain("ok"), *_limits(table, policy.limits)]
    parts += [table.rule("more", *where, nft.remember("tx4")), table.rule("more", nft.verdict(nft.ACCEPT))]
    parts += [table.rule("ok", *where, nft.remember("con4")), table.rule("ok", nft.verdict(0, "more"))]
    parts += [*policy_chains(table), *address_rules(table, policy, own, (V4,)), table.chain("out", nft.OUTPUT, 0)]
    # To the sandbox itself, which is where refusals go too.
    parts.append(table.rule("out", *nft.interface_is("lo", output=True), *nft.family_is(V4), nft.verdict(nft.ACCEPT)))
    # Neighbour discovery and its kin; only loopback has IPv6.
    parts.append(table.rule("out", *nft.interface_is("eth0", output=True), *nft.family_is(V6), nft.verdict(nft.DROP)))
    parts += [table.rule("out", nft.verdict(0, name)) for name in ("own", "gone")]
    parts += [
        table.rule("out", *no_new_connection(), nft.verdict(0, "more")),
        table.rule("out", nft.verdict(0, "rules")),
    ]
    parts += [*members(table, "out", (V4,)), table.rule("out", nft.verdict(0, "den"))]
    parts += [table.chain("in", nft.INPUT, 0)]
    parts += [table.rule("in", *nft.interface_is("lo", output=False), nft.verdict(nft.ACCEPT))]
    # What comes in besides was let through by the host's connection tracking; a server inside is never reached.
    parts += [table.rule("in", *connection_from_outside(), nft.verdict(nft.DROP))]
    parts.append(table.rule("in", *connection_accepted(), *nft.source(V4), nft.remember("est4")))
    for number in (socket.IPPROTO_TCP, socket.IPPROTO_UDP):
        counted = (*nft.protocol_is(number), *nft.source(V4), nft.remember("rx4"))
        parts.append(table.rule("in", *counted, nft.verdict(nft.ACCEPT)))
    for number in (socket.IPPROTO_TCP, socket.IPPROTO_UDP, socket.IPPROTO_ICMP):
        parts.append(table.rule("in", *nft.family_is(V4), *nft.protocol_is(number), nft.verdict(nft.ACCEPT)))
    return nft.batch(parts)


def _limits(table: Table, limits: EgressLimits) -> list[Message]:
    """The first rules of ``ok``, where connections begin, and of ``more``, which all that leaves goes through."""
    parts = []
    if limits.connections is not None:
        many = (*nft.first_packet(), nft.beyond_connections(limits.connections), nft.count("net_connections"))
        parts.append(table.rule("ok", *many, nft.verdict(0, "den")))
    if limits.rate is not None:
        # TCP tries again in a second, as it waits in the gateway's queue.
        fast = (*nft.first_packet(), nft.beyond_rate(limits.rate), nft.count("net_rate"))
        parts.append(table.rule("ok", *fast, nft.verdict(nft.DROP)))
    if limits.bytes_out is not None:
        parts.append(
            table.rule("more", nft.beyond_bytes(limits.bytes_out), nft.count("net_bytes"), nft.verdict(0, "rej"))
        )
    return parts


@functools.lru_cache(maxsize=64)
def plan_veth(policy: NetPolicy, own: tuple[Network, ...] = (), *, ipv6: bool | None = None) -> NetPlan:
    """What is done inside before the pair is there; the same for every slot. IPv6 is refused at once inside."""
    ipv6 = has_ipv6() if ipv6 is None else ipv6
    links = [link_up(_LO), add_address(_LO, RESOLVER, 32)]
    if ipv6:
        links += [add_address(_LO, HERE6, 128), local_default(HERE6)]
    return NetPlan(
        path="veth",
        rtnl=netlink.numbered(links),
        nft=_rules(policy, (BLOCK, *own), ipv6=ipv6),
        sockets=(
            SocketSpec("dns_udp", V4, int(socket.SOCK_DGRAM), address=(RESOLVER, 53)),
            SocketSpec("dns_tcp", V4, int(socket.SOCK_STREAM), address=(RESOLVER, 53), backlog=64),
        ),
        resolv_conf=f"# the sandbox's own resolver\nnameserver {RESOLVER}\noptions edns0\n",
    )


def _pair(slot: int, namespace: int) -> tuple[int, int, bytes]:
    """RTM_NEWLINK of both ends, each with an index of our choice and one queue."""
    queues = netlink.attribute(_IFLA_TXQ, struct.pack("=I", 1)) + netlink.attribute(_IFLA_RXQ, struct.pack("=I", 1))
    # IFF_UP here would be asked for before its other end exists: ENOTCONN.
    peer = struct.pack("=BxHiII", 0, 0, _ETH0, 0, 0) + netlink.attribute(_IFLA_IFNAME, b"eth0\0") + queues
    peer += netlink.attribute(_IFLA_NET_NS_FD, struct.pack("=i", namespace))
    data = netlink.nested(2, netlink.attribute(1, peer))
    info = netlink.nested(_IFLA_LINKINFO, netlink.attribute(1, b"veth\0"), data)
    name = netlink.attribute(_IFLA_IFNAME, f"{PREFIX}{slot:x}\0".encode())
    body = struct.pack("=BxHiII", 0, 0, _FIRST_INDEX + slot, 1, 1) + name + queues + info
    return _RTM_NEWLINK, netlink.CREATE | netlink.EXCL, body


def _default_route(via: str) -> tuple[int, int, bytes]:
    body = struct.pack("=BBBBBBBBI", V4, 0, 0, 0, 254, 3, 0, 1, 0)
    index = netlink.attribute(4, struct.pack("=I", _ETH0))
    return _RTM_NEWROUTE, netlink.CREATE | netlink.EXCL, body + index + netlink.attribute(5, raw_address(via))


def _host_rules(name: str) -> bytes:
    """The host's side: out to anywhere but the host and other sandboxes, back only what was asked for."""
    table = Table(name)
    ours_in = nft.interface_is(PREFIX, output=False, prefix=True)
    ours_out = nft.interface_is(PREFIX, output=True, prefix=True)
    parts = [table.create(owned=True)]
    parts += [table.chain("input", nft.INPUT, -10, nft.ACCEPT), table.rule("input", *ours_in, nft.verdict(nft.DROP))]
    parts.append(table.chain("forward", nft.FORWARD, -10, nft.ACCEPT))
    parts.append(table.rule("forward", *ours_in, *ours_out, nft.verdict(nft.DROP)))
    foreign = (*nft.to_network(BLOCK, source=True, inverted=True), nft.verdict(nft.DROP))
    parts.append(table.rule("forward", *ours_in, *foreign))
    parts.append(table.rule("forward", *ours_in, *nft.family_is(V6), nft.verdict(nft.DROP)))
    parts.append(table.rule("forward", *ours_out, *nft.established(), nft.verdict(nft.ACCEPT)))
    parts.append(table.rule("forward", *ours_out, nft.verdict(nft.DROP)))
    parts.append(table.chain("post", nft.POSTROUTING, 100, nft.ACCEPT, kind="nat"))
    parts.append(table.rule("post", *nft.to_network(BLOCK, source=True), nft.masquerade()))
    return nft.batch(parts)


def obstacle() -> HostError | None:
    """Why this host cannot carry egress by veth; None if it can."""
    with open("/proc/sys/net/ipv4/ip_forward", encoding="ascii") as setting:
        if setting.read().strip() != "1":
            return HostError(
                "the host forwards no packets, so egress by veth cannot leave it",
                remedy="run: sysctl -w net.ipv4.ip_forward=1, or use --net-path gateway",
                errno=errno.ENETUNREACH,
            )
    with netlink.open_socket(12) as sock:
        try:
            dropping = nft.dropping_tables(sock, nft.FORWARD)
        except OSError as error:
            return HostError(
                f"nf_tables cannot be asked: {error.strerror}", remedy="modprobe nf_tables", errno=error.errno
            )
    if dropping:
        return HostError(
            f"the nft table {dropping[0]!r} drops what the host forwards, which no rule of ours can undo",
            remedy=f"accept interfaces {PREFIX}* there, or use --net-path gateway",
            errno=errno.EACCES,
        )
    return None


def choose(path: str, policy: NetPolicy, own: tuple[Network, ...], *, privileged: bool) -> str:
    """``veth`` or ``gateway`` for ``auto``: packets where rules are addresses out in IPv4 and the host forwards.

    Names need the gateway's look into the streams; loopback and the host's own addresses are only reached from it.
    Raises HostError where ``path`` asks for what cannot be.
    """
    near = [*own, *LOOPBACK]
    if path == "veth":
        if not privileged:
            raise HostError("egress by veth needs root", remedy="use --net-path gateway", errno=errno.EPERM)
        if problem := obstacle():
            raise problem
        return path
    suits = all(
        rule.network and rule.network.family == V4 and not any(rule.network.within(block) for block in near)
        for rule in policy.rules
    )
    return "veth" if path == "auto" and privileged and policy.rules and suits and not obstacle() else "gateway"


def _exchange_once_free(sock: socket.socket, batch: bytes) -> None:
    """A slot may be taken again before the kernel has removed the pair that was there: 20 ms after its namespace."""
    deadline = time.monotonic() + _OLD_LINK_S
    while True:
        try:
            netlink.exchange(sock, batch)
            return
        except OSError as error:
            if error.errno != errno.EEXIST or time.monotonic() > deadline:
                raise
            time.sleep(0.005)


class VethHost:
    """The host's side of all sandboxes of this process; gone a second after the last of them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._nft: socket.socket | None = None
        self._idle_since = 0.0
        self._name = f"nsbox-{os.getpid()}"

    def attach(self, slot: int, inside: int) -> "Veth":
        """Connect a namespace; ``inside`` is the rtnetlink socket that was made in it. Raises HostError."""
        problem = obstacle()
        if problem:
            raise problem
        with self._lock:
            if self._nft is None:
                self._open()
            self._count += 1
        try:
            self._connect(slot, inside)
        except OSError as error:
            self._leave()
            raise HostError(f"no veth pair: {error.strerror}", remedy="run: nsbox doctor", errno=error.errno) from None
        return Veth(self, slot)

    def _open(self) -> None:
        sock = netlink.open_socket(12)
        try:
            netlink.exchange(sock, _host_rules(self._name))
        except OSError as error:
            sock.close()
            remedy = "modprobe -a nft_masq nft_ct, or use --net-path gateway"
            raise HostError(f"the host's nft rules: {error.strerror}", remedy=remedy, errno=error.errno) from None
        self._nft = sock

    @staticmethod
    def _connect(slot: int, inside: int) -> None:
        here, there = addresses(slot)
        with socket.socket(fileno=os.dup(inside)) as link, netlink.open_socket(0) as host:
            namespace = fcntl.ioctl(link, _SIOCGSKNS, 0)
            try:
                made = [_pair(slot, namespace), add_address(_FIRST_INDEX + slot, here, 31)]
                _exchange_once_free(host, netlink.numbered(made))
            finally:
                os.close(namespace)
            blocking = link.getblocking()
            link.setblocking(True)
            netlink.exchange(
                link, netlink.numbered([link_up(_ETH0), add_address(_ETH0, there, 31), _default_route(here)])
            )
            link.setblocking(blocking)

    def _leave(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._idle_since = time.monotonic()
                loop = gateway.shared().loop
                # Removing a table waits for every processor (synchronize_rcu): 13 ms, so not between two sandboxes.
                loop.soon(lambda: loop.later(_LINGER_S, self._remove_idle))

    def _remove_idle(self) -> None:
        with self._lock:
            if self._nft and not self._count and time.monotonic() - self._idle_since >= _LINGER_S:
                self._nft.close()
                self._nft = None


class Veth:
    """One sandbox's pair. ``close`` after the namespace has ended: the kernel has removed the pair then, or does."""

    def __init__(self, host: VethHost, slot: int) -> None:
        self._host: VethHost | None = host
        self.name, self.slot = f"{PREFIX}{slot:x}", slot

    def close(self) -> None:
        """Idempotent."""
        host, self._host = self._host, None
        if host:
            host._leave()


_shared: tuple[int, VethHost] | None = None
_lock = threading.Lock()


def shared() -> VethHost:
    """The host's side of this process. A forked child gets its own."""
    global _shared
    with _lock:
        if _shared is None or _shared[0] != os.getpid():
            _shared = (os.getpid(), VethHost())
        return _shared[1]
