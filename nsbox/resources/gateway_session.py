"""One sandbox's egress as the host side sees it: its policy, what it looked up, its connections, its record."""

import socket
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from nsbox.errors import HostError
from nsbox.plan.address import V4, V6, WIDTH, Address, Network
from nsbox.plan.net import NetPolicy, Rule
from nsbox.resources import netlink, netrecord, nft
from nsbox.resources.dns import DnsServer
from nsbox.resources.gateway_accept import Listener
from nsbox.resources.gateway_tcp import Relay
from nsbox.resources.gateway_udp import Flow, UdpListener
from nsbox.resources.netrules import BLOCK, POLICY_CHAINS, TABLE, address_rules
from nsbox.resources.peek import Peek
from nsbox.resources.traffic import Log, Traffic

if TYPE_CHECKING:
    from nsbox.resources.gateway import Gateway

KEEP_S = 300.0  #: an address stays reachable at least so long after a look-up: programs cache longer than the TTL says
_MOST_ADDRESSES = 900  # of names, in each session; below SET_SIZE of the sets inside


class Verdict(NamedTuple):
    """What the policy says of a destination."""

    allowed: bool
    names: tuple[str, ...] = ()  #: those it was looked up as
    look: bool = False  #: a name lets it through: the stream has to say the same one
    reason: str = ""


class GatewaySession:
    """One sandbox's egress. ``close`` ends its connections and gives its descriptors back."""

    def __init__(self, gateway: "Gateway", sandbox: str, policy: NetPolicy, log: Log | None, path: str) -> None:
        self.sandbox, self.policy, self._path = sandbox, policy, path
        self.loop, self.dial, self.upstream = gateway.loop, gateway.dial, gateway.upstream
        self.own = gateway.own() if path == "gateway" else (BLOCK, *gateway.own())
        self.ipv6 = path == "gateway" and gateway.has_route(V6)
        self.traffic = Traffic(policy.limits, log)
        self.relays: set[Relay] = set()
        self.flows: dict[object, Flow] = {}
        self._names: dict[Address, dict[str, float]] = {}
        self._mirror: frozenset[tuple[str, bytes]] = frozenset()
        self._sockets: dict[str, socket.socket] = {}
        self._parts: list[Any] = []
        self._final: tuple[list[dict[str, Any]], list[dict[str, Any]]] | None = None
        self._gateway = gateway

    @property
    def ended(self) -> bool:
        return self._final is not None

    # Policy

    def judge(self, address: Address, port: int, protocol: str) -> Verdict:
        """What the policy says of a connection to an address."""
        policy, now = self.policy, time.monotonic()
        if policy.by_address(address, port, protocol, self.own):
            return Verdict(True, tuple(self._names.get(address, ()))[-1:])
        names = tuple(name for name, until in self._names.get(address, {}).items() if until > now)
        allowed = tuple(name for name in names if policy.for_name(name, address, port, protocol, self.own))
        if allowed:
            return Verdict(True, allowed[::-1], look=True)
        return Verdict(False, names, reason=policy.why_special(address, self.own) or "no rule")

    def objection(self, relay: Relay, found: Peek) -> str:
        """Why a connection that a name let through may not go on; empty if it may. Names the relay's host."""
        if found.kind == "other":
            return ""
        if found.kind == "more":
            return "does not say whom it is for"
        relay.host = found.name or relay.host
        if found.problem:
            return found.problem
        verdict = self.judge(relay.address, relay.port, "tcp")
        return (
            "" if found.name in verdict.names else f"{found.kind} names a host that was not looked up at this address"
        )

    def learn(self, name: str, addresses: Iterable[Address], ttl: float) -> bool:
        """Open addresses that a permitted name was resolved to; False if there is no room or the kernel refuses."""
        until = time.monotonic() + max(ttl, KEEP_S)
        fresh = {address: {**self._names.get(address, {}), name: until} for address in addresses}
        if len(self._names | fresh) > _MOST_ADDRESSES or any(len(names) > 64 for names in fresh.values()):
            self.traffic.touch("net_addresses", _MOST_ADDRESSES)
            return False
        names = self._names | fresh
        wanted = self._mirror | self._keys(self.policy, fresh)
        if wanted != self._mirror and not self._commit(self._change(wanted), wanted):
            return False
        self._names = names
        return True

    def _keys(self, policy: NetPolicy, names: Mapping[Address, Iterable[str]]) -> frozenset[tuple[str, bytes]]:
        """The elements of the sets inside that open these addresses."""
        found = set()
        for address, known in names.items():
            n = 4 if address.family == V4 else 6
            for port, protocol in {pair for name in known for pair in policy.ports(name)}:
                where, number = (f"ok{n}", port) if port else (f"all{n}", None)
                found.add((where, nft.key(address, protocol, number)))
        return frozenset(found)

    def _change(self, wanted: frozenset[tuple[str, bytes]]) -> list[nft.Message]:
        table = nft.Table(TABLE)
        parts: list[nft.Message] = []
        for make, difference in ((table.without, self._mirror - wanted), (table.elements, wanted - self._mirror)):
            for name in sorted({name for name, _ in difference}):
                keys = [key for where, key in difference if where == name]
                # An attribute holds at most 64 KiB.
                parts += (make(name, keys[at : at + 1000]) for at in range(0, len(keys), 1000))
        return parts

    def _commit(self, parts: list[nft.Message], wanted: frozenset[tuple[str, bytes]]) -> bool:
        try:
            if parts:
                netlink.exchange(self._sockets["nft"], nft.batch(parts))
        except OSError:
            self.traffic.touch("net_rules", 0)
            return False
        self._mirror = wanted
        return True

    def _sweep(self) -> None:
        """Forget addresses whose time is over and that nothing uses."""
        now = time.monotonic()
        used = {flow.address for flow in self.flows.values()} | {relay.address for relay in self.relays}
        for address in used & self._names.keys():
            self._names[address] = {name: max(until, now + KEEP_S) for name, until in self._names[address].items()}
        left = {address: {n: u for n, u in names.items() if u > now} for address, names in self._names.items()}
        left = {address: names for address, names in left.items() if names}
        wanted = self._keys(self.policy, left)
        if self._commit(self._change(wanted), wanted):
            self._names = left
        self._sweeper = self.loop.later(60.0, self._sweep)

    def _swap(self, policy: NetPolicy) -> None:
        """The new policy in one transaction. If that fails the old one stays, inside and here."""
        table = nft.Table(TABLE)
        families = (V4, V6) if "tcp6" in self._sockets else (V4,)
        wanted = self._keys(policy, self._names)
        # Connections that the kernel routes would go on; the relay's are ended below.
        lost = tuple(_rule(element) for element in self._mirror - wanted) if self._path == "veth" else ()
        inner = policy._replace(refusals=(*policy.refusals, *lost))
        rules = [*map(table.flush, POLICY_CHAINS), *address_rules(table, inner, self.own, families)]
        batch = nft.batch([*rules, *self._change(wanted)])
        try:
            netlink.exchange(self._sockets["nft"], batch)
        except OSError as error:
            raise HostError(
                f"the policy was not changed: {error.strerror}", remedy="the former one still holds", errno=error.errno
            ) from None
        self._mirror, self.policy = wanted, policy
        for relay in [relay for relay in self.relays if not self.judge(relay.address, relay.port, "tcp").allowed]:
            relay.abort()
        for flow in [flow for flow in self.flows.values() if not self.judge(flow.address, flow.port, "udp").allowed]:
            flow.end()

    # For the owner, from any thread

    def allow(self, items: Iterable[object]) -> None:
        """Permit more, at once. Raises SpecError, HostError; then nothing has changed."""
        policy = self.policy.allow(items)
        self.loop.ask(lambda: self._swap(policy))

    def deny(self, items: Iterable[object]) -> None:
        """Refuse from now on, and end connections that are refused thereby. Raises SpecError, HostError."""
        policy = self.policy.deny(items)
        self.loop.ask(lambda: self._swap(policy))

    def record(self) -> list[dict[str, Any]]:
        """Every destination with verdict and counts, as the report has them; also after ``close``."""
        return self._final[0] if self._final else self.loop.ask(self._destinations)

    def limits_hit(self) -> list[dict[str, Any]]:
        """Limits that were touched; also after ``close``."""
        return self._final[1] if self._final else self.loop.ask(self._limits_hit)

    @property
    def bytes(self) -> tuple[int, int]:
        """(sent, received) by the sandbox."""
        return self.traffic.tx_bytes, self.traffic.rx_bytes

    def close(self) -> None:
        """End everything. The record stays. Idempotent."""
        if self._final is None:
            self.loop.ask(self._end)

    # In the loop's thread

    def start(self, fds: Mapping[str, int]) -> None:
        """Take the descriptors over."""
        for name, fd in fds.items():
            self._sockets[name] = sock = socket.socket(fileno=fd)
            sock.setblocking(name in ("nft", "rtnl"))
        for name, sock in self._sockets.items():
            if name.startswith("tcp"):
                self._parts.append(Listener(self, sock))
            elif name.startswith("udp"):
                self._parts.append(UdpListener(self, sock, self._sockets["raw" + name[3:]]))
        if "dns_udp" in self._sockets:
            self._parts.append(DnsServer(self, self._sockets["dns_udp"], self._sockets["dns_tcp"]))
        self._sweeper = self.loop.later(60.0, self._sweep)

    def _destinations(self) -> list[dict[str, Any]]:
        """What went through here or through the kernel, and what the rules inside refused before it came so far."""
        return self.traffic.destinations() + self._counted_inside()

    def _limits_hit(self) -> list[dict[str, Any]]:
        self._counted_inside()
        return self.traffic.limits_hit()

    def _counted_inside(self) -> list[dict[str, Any]]:
        sock = self._sockets.get("nft")
        found = netrecord.refused(sock, self._names) if sock else []
        if sock and self._path == "veth":
            allowed = netrecord.routed(sock, self._names)
            self.traffic.tx_bytes = sum(row["tx_bytes"] for row in allowed)
            self.traffic.rx_bytes = sum(row["rx_bytes"] for row in allowed)
            found += allowed
            held, limits = nft.counters(sock, TABLE), self.policy.limits
            most = {"net_connections": limits.connections, "net_rate": limits.rate, "net_bytes": limits.bytes_out}
            for name, value in most.items():
                self.traffic.held(name, value or 0, held.get(name, 0))
        return found

    def _end(self) -> None:
        if self._final is not None:
            return
        try:
            inside = self._counted_inside()
        except OSError:
            inside = []
        for row in inside:
            self.traffic.event("connect", **row)  # nobody saw these one by one
        self._final = self.traffic.destinations() + inside, self.traffic.limits_hit()
        self._sweeper.cancel()
        for part in self._parts:
            part.close()
        for relay in list(self.relays):
            relay.abort()
        for flow in list(self.flows.values()):
            flow.end()
        for sock in self._sockets.values():
            self.loop.close(sock)
        self._gateway.forget(self)


def _rule(element: tuple[str, bytes]) -> Rule:
    """The rule that refuses what an element of a set inside permitted."""
    name, key = element
    size = 4 if name.endswith("4") else 16
    family = V4 if size == 4 else V6
    network = Network(family, int.from_bytes(key[:size], "big"), WIDTH[family])
    port = int.from_bytes(key[size + 4 : size + 6], "big")
    return Rule("", network, port, "tcp" if key[size] == socket.IPPROTO_TCP else "udp")
