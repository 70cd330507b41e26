"""The host side of every sandbox's filtered egress: one thread and one loop for all of them.

``Gateway.attach`` takes the sockets that were made inside a network namespace (``plan_net``) and answers a session. The
policy is asked here, for every connection, with the address that is then dialled; the ruleset inside only mirrors it.
Order of a look-up: the answer is parsed, its addresses enter the sets inside in one acknowledged batch, then the
program gets them.
"""

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from nsbox.errors import HostError
from nsbox.plan.address import V4, V6, Address, Network
from nsbox.plan.net import NetPolicy
from nsbox.resources import hostnet, netlink, nft
from nsbox.resources.dns import DnsServer, Upstream
from nsbox.resources.gateway_tcp import Listener, Relay
from nsbox.resources.gateway_udp import Flow, UdpListener
from nsbox.resources.loop import Loop
from nsbox.resources.netrules import POLICY_CHAINS, TABLE, address_rules
from nsbox.resources.peek import Peek
from nsbox.resources.traffic import Log, Traffic

KEEP_S = 300.0  #: an address stays reachable at least so long after a look-up: programs cache longer than the TTL says
_MOST_ADDRESSES = 900  # of names, in each session; below SET_SIZE of the sets inside
Dial = Callable[[Address, int], tuple[int, tuple[str, int]]]


class Verdict(NamedTuple):
    """What the policy says of a destination."""

    allowed: bool
    names: tuple[str, ...] = ()  #: those it was looked up as
    look: bool = False  #: a name lets it through: the stream has to say the same one
    reason: str = ""


def dial_directly(address: Address, port: int) -> tuple[int, tuple[str, int]]:
    """(family, where to connect to) of a destination."""
    return address.family, (str(address), port)


class GatewaySession:
    """One sandbox's egress. ``close`` ends its connections and gives its descriptors back."""

    def __init__(self, gateway: "Gateway", sandbox: str, policy: NetPolicy, log: Log | None) -> None:
        self.sandbox, self.policy = sandbox, policy
        self.loop, self.dial, self.own = gateway.loop, gateway.dial, gateway.own()
        self.upstream = gateway.upstream
        self.ipv6 = gateway.has_route(V6)
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
            self.traffic.touch("egress_addresses", _MOST_ADDRESSES)
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
        table, parts = nft.Table(TABLE), []
        for make, difference in ((table.without, self._mirror - wanted), (table.elements, wanted - self._mirror)):
            for name in sorted({name for name, _ in difference}):
                parts.append(make(name, [key for where, key in difference if where == name]))
        return parts

    def _commit(self, parts: list[nft.Message], wanted: frozenset[tuple[str, bytes]]) -> bool:
        try:
            if parts:
                netlink.exchange(self._sockets["nft"], nft.batch(parts))
        except OSError as error:
            self.traffic.event("limit", limit="nft", reason=error.strerror)
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
        rules = [*map(table.flush, POLICY_CHAINS), *address_rules(table, policy, self.own, families)]
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
        return self._final[1] if self._final else self.loop.ask(self.traffic.limits_hit)

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
        """What went through here, and what the rules inside refused before it came so far."""
        found = self.traffic.destinations()
        sock = self._sockets.get("nft")
        if sock is None:
            return found
        for name, width in (("den4", 4), ("den6", 16)) if "tcp6" in self._sockets else (("den4", 4),):
            for key, packets, _ in nft.counted(sock, TABLE, name):
                address = Address(V4 if width == 4 else V6, int.from_bytes(key[:width], "big"))
                protocol = "tcp" if key[width] == socket.IPPROTO_TCP else "udp"
                port = int.from_bytes(key[width + 4 : width + 6], "big")
                found.append(_refused(address, port, protocol, packets, self._names.get(address)))
        if others := nft.counter_value(sock, TABLE, "other"):
            found.append(_refused(None, 0, "other", others, None))
        return found

    def _end(self) -> None:
        if self._final is not None:
            return
        try:
            destinations = self._destinations()
        except OSError:
            destinations = self.traffic.destinations()
        self._final = destinations, self.traffic.limits_hit()
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


def _refused(
    address: Address | None, port: int, protocol: str, count: int, names: Mapping[str, float] | None
) -> dict[str, Any]:
    return {
        **({"host": next(reversed(list(names)))} if names else {}),
        "address": str(address) if address else "",
        "port": port,
        "protocol": protocol,
        "verdict": "denied",
        "connections": count,
        "tx_bytes": 0,
        "rx_bytes": 0,
    }


class Gateway:
    """The loop and what all sessions share. ``resolvers``: (address, port) of the upstream ones, default the host's."""

    def __init__(
        self,
        *,
        resolvers: Iterable[tuple[str, int]] | None = None,
        dial: Dial = dial_directly,
        own: tuple[Network, ...] | None = None,
    ) -> None:
        self.loop = Loop("nsbox-gateway")
        self.dial = dial
        self.upstream = Upstream(self.loop, tuple(resolvers) if resolvers is not None else None)
        self._own = own
        self._sessions: set[GatewaySession] = set()

    def own(self) -> tuple[Network, ...]:
        """The host's own addresses and gateways."""
        return hostnet.own_networks() if self._own is None else self._own

    def has_route(self, family: int) -> bool:
        """Whether the host has a way to the rest of the world in a family."""
        return self.dial is not dial_directly or hostnet.has_route(family)

    def attach(self, sandbox: str, policy: NetPolicy, fds: Mapping[str, int], log: Log | None = None) -> GatewaySession:
        """Serve a sandbox. Owns ``fds`` from here on, also when it raises. Raises HostError.

        Does not wait for the loop, which takes calls in the order they were made.
        """
        try:
            if not self.loop.alive:
                raise HostError("the gateway is closed", remedy="attach to a new one", errno=errno.ESHUTDOWN)
            session = GatewaySession(self, sandbox, policy, log)
        except BaseException:
            for fd in fds.values():
                os.close(fd)
            raise
        self.loop.soon(lambda: self._start(session, fds))
        return session

    def _start(self, session: GatewaySession, fds: Mapping[str, int]) -> None:
        self._sessions.add(session)
        session.start(fds)

    def _end_all(self) -> None:
        for session in list(self._sessions):
            session._end()

    def forget(self, session: GatewaySession) -> None:
        self._sessions.discard(session)

    def close(self) -> None:
        """End every session and the thread."""
        with contextlib.suppress(RuntimeError):
            self.loop.ask(self._end_all)
        self.loop.stop()


_shared: tuple[int, Gateway] | None = None
_lock = threading.Lock()


def shared() -> Gateway:
    """The gateway of this process, started when first asked for. A forked child gets its own."""
    global _shared
    with _lock:
        if _shared is None or _shared[0] != os.getpid():
            _shared = (os.getpid(), Gateway())
        return _shared[1]
