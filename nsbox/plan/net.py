"""What a sandbox may reach: one immutable value that the packet path, the relay and the resolver all ask.

A rule is a name, ``*.name``, an address or a CIDR, with a port (0: any) and a protocol. Addresses that mean the host or
its surroundings (``SPECIAL``) are refused above every rule, unless a rule names that very address or a network inside
the special one: ``0.0.0.0/0`` opens the internet, never ``169.254.169.254``.
"""

import re
import socket
import struct
from collections.abc import Iterable
from typing import NamedTuple

from nsbox.errors import SpecError
from nsbox.plan.address import EMBEDDED, V4, WIDTH, Address, Network, parse_address, special

_WAYS = "write NAME, *.NAME, ADDRESS or CIDR, then :PORT and /udp where wanted, such as pypi.org:443"
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)


class Rule(NamedTuple):
    """One ``HOST[:PORT][/PROTOCOL]``. Exactly one of ``name`` and ``network`` counts."""

    name: str = ""  #: normalised; ``*.`` in front stands for at least one label, ``*`` for every name
    network: Network | None = None
    port: int = 0  #: 0: every port
    protocol: str = ""  #: tcp, udp; "" in a refusal: both

    def names(self, name: str) -> bool:
        """Whether the rule speaks of this normalised name."""
        if not self.name.startswith("*"):
            return bool(self.name) and name == self.name
        return self.name == "*" or name.endswith(self.name[1:])

    def serves(self, port: int, protocol: str) -> bool:
        """Whether the rule speaks of this port."""
        return self.port in (0, port) and self.protocol in ("", protocol)

    def __str__(self) -> str:
        host = self.name or str(self.network)
        if self.port and ":" in host:
            host = f"[{host}]"
        return host + (f":{self.port}" if self.port else "") + (f"/{self.protocol}" if self.protocol != "tcp" else "")


def normal_name(text: str) -> str:
    """A host name in lower case and ASCII without a trailing dot. Raises ValueError for what no host can be called."""
    name = text[:-1] if text.endswith(".") else text
    if not name.isascii():
        try:
            name = name.encode("idna").decode()
        except UnicodeError as error:
            raise ValueError(f"cannot be written in ASCII ({error})") from None
    name = name.lower()
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise ValueError("is not a host name")
    if re.fullmatch(r"\d+|0x[0-9a-f]*", name.rsplit(".", 1)[-1]):
        raise ValueError("ends in a number but is not an address")
    return name


def _network(host: str) -> Network | None:
    """The block that ``host`` writes, if it is one; also in the notations of inet_aton(3): 127.1, 0x7f000001."""
    base, slash, length = host.partition("/")
    address = parse_address(base)
    if address is None and re.fullmatch(r"[0-9a-fx.]+", base, re.ASCII | re.IGNORECASE):
        try:
            address = Address(V4, int.from_bytes(socket.inet_aton(base), "big"))
        except OSError:
            return None
    if address is None:
        if slash:
            raise ValueError("is not a CIDR")
        return None
    width = WIDTH[address.family]
    if slash and not re.fullmatch(r"\d{1,3}", length, re.ASCII):
        raise ValueError("wants the length of the prefix after the slash")
    prefix = int(length) if slash else width
    if ":" in base and address.family == V4 and slash:
        prefix -= 96
    if not 0 <= prefix <= width:
        raise ValueError(f"has a prefix that is not between 0 and {width}")
    rest = width - prefix
    if address.value & ((1 << rest) - 1):
        whole = Network(address.family, address.value >> rest << rest, prefix)
        raise ValueError(f"has bits beyond its prefix; did you mean {whole}")
    return Network(address.family, address.value, prefix)


def parse_rule(item: object, *, option: str = "allow", default: str = "tcp") -> Rule:
    """One rule from its text. Raises SpecError."""
    if isinstance(item, Rule):
        return item
    if not isinstance(item, str) or not item:
        raise SpecError(f"{option}: wants a text, not {item!r}; {_WAYS}")
    if "://" in item or "@" in item:
        raise SpecError(f"{option}: {item!r} is a URL, not a host; {_WAYS}")
    text, _, word = item.rpartition("/")
    protocol = word.lower() if word.lower() in ("udp", "tcp") and text else default
    host = text if word.lower() in ("udp", "tcp") and text else item
    port = ""
    if bracketed := re.fullmatch(r"\[([^][]*)\](/\d+)?(?::(.*))?", host, re.DOTALL):
        host, port = bracketed[1] + (bracketed[2] or ""), bracketed[3]
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
        port = port or "missing"
    if port and not (re.fullmatch(r"\d{1,5}", port, re.ASCII) and 0 < int(port) < 65536):
        raise SpecError(f"{option}: {item!r}: the port is a number from 1 to 65535; {_WAYS}")
    try:
        network = _network(host)
        star = "*." if host.startswith("*.") else ""
        name = "" if network else "*" if host == "*" else star + normal_name(host[len(star) :])
    except ValueError as error:
        raise SpecError(f"{option}: {item!r} {error}; {_WAYS}") from None
    return Rule(name, network, int(port or 0), protocol)


class EgressLimits(NamedTuple):
    """How much of the network a sandbox may use; None is an explicit ``unlimited``."""

    connections: int | None = 512  #: open at once, flows of UDP among them
    rate: float | None = 1000.0  #: new connections a second; more have to wait
    bytes_out: int | None = 1 << 30  #: bytes sent by the sandbox in its life


class NetPolicy(NamedTuple):
    """The rules of one sandbox. No rule: nothing is reached."""

    rules: tuple[Rule, ...] = ()
    refusals: tuple[Rule, ...] = ()  #: win over ``rules``
    limits: EgressLimits = EgressLimits()

    @classmethod
    def parse(cls, allow: Iterable[object], limits: EgressLimits | None = None) -> "NetPolicy":
        """A policy from texts. An empty list means none. Raises SpecError."""
        return cls(limits=limits or EgressLimits()).allow(allow)

    def allow(self, items: Iterable[object]) -> "NetPolicy":
        """The policy with more rules; takes back refusals that say the same."""
        new = [parse_rule(item) for item in ((items,) if isinstance(items, str) else items)]
        taken_back = {rule._replace(protocol=word) for rule in new for word in ("", rule.protocol)}
        rules = tuple(dict.fromkeys((*self.rules, *new)))
        return self._replace(rules=rules, refusals=tuple(rule for rule in self.refusals if rule not in taken_back))

    def deny(self, items: Iterable[object]) -> "NetPolicy":
        """The policy with what ``items`` name refused, whatever the rules say."""
        texts = (items,) if isinstance(items, str) else items
        new = [parse_rule(item, option="deny", default="") for item in texts]
        gone = {rule._replace(protocol=word) for rule in new for word in ("tcp", "udp") if rule.protocol in ("", word)}
        rules = tuple(rule for rule in self.rules if rule not in gone)
        return self._replace(rules=rules, refusals=tuple(dict.fromkeys((*self.refusals, *new))))

    @property
    def by_name(self) -> bool:
        """Whether any rule is a name, so that a resolver and a look into the streams are needed."""
        return any(rule.name for rule in self.rules)

    @property
    def open(self) -> bool:
        """Whether a rule matches everything."""
        return any(rule.name == "*" or (rule.network and rule.network.prefix == 0) for rule in self.rules)

    def names(self, name: str) -> bool:
        """Whether a normalised name may be looked up at all."""
        if any(rule.names(name) and not rule.port and not rule.protocol for rule in self.refusals):
            return False
        return any(rule.names(name) for rule in self.rules)

    def why_special(self, address: Address, own: tuple[Network, ...] = ()) -> str:
        """What forbids the address above every rule; empty when nothing does, or a rule names it."""
        found = special(address, own)
        if not found:
            return ""
        networks = [rule.network for rule in self.rules if rule.network and rule.network.within(found[0])]
        if not any(network.holds(address) for network in networks):
            return found[1]
        for network, shift in EMBEDDED:
            if network.holds(address) and address.value > 1:
                # A rule that names 64:ff9b::7f00:1 does not thereby name 127.0.0.1.
                return self.why_special(Address(V4, address.value >> shift & 0xFFFFFFFF), own)
        return ""

    def refuses(self, address: Address, port: int, protocol: str) -> bool:
        """Whether a refusal by address speaks of this destination."""
        return any(
            rule.network and rule.network.holds(address) and rule.serves(port, protocol) for rule in self.refusals
        )

    def by_address(self, address: Address, port: int, protocol: str, own: tuple[Network, ...] = ()) -> bool:
        """Whether a rule by address lets a connection through."""
        if self.refuses(address, port, protocol) or self.why_special(address, own):
            return False
        found = special(address, own)
        return any(
            rule.network.holds(address) and rule.serves(port, protocol)
            for rule in self.rules
            if rule.network and (not found or rule.network.within(found[0]))
        )

    def ports(self, name: str) -> frozenset[tuple[int, str]]:
        """The (port, protocol) pairs that rules open for a name; port 0 is every port."""
        if not self.names(name):
            return frozenset()
        return frozenset((rule.port, rule.protocol) for rule in self.rules if rule.names(name))

    def for_name(self, name: str, address: Address, port: int, protocol: str, own: tuple[Network, ...] = ()) -> bool:
        """Whether a rule by name lets a connection to an address of that name through.

        QUIC hides its names and is never let through by one: clients fall back to TCP.
        """
        if special(address, own) or self.refuses(address, port, protocol) or (port == 443 and protocol == "udp"):
            return False
        if any(rule.names(name) and rule.serves(port, protocol) for rule in self.refusals):
            return False
        return any(rule.names(name) and rule.serves(port, protocol) for rule in self.rules)


class SocketSpec(NamedTuple):
    """A socket to be made inside the network namespace and passed out, close-on-exec and non-blocking."""

    name: str
    family: int
    type: int
    protocol: int = 0
    options: tuple[tuple[int, int, int], ...] = ()  #: (level, name, int), set in order before bind
    address: tuple[str, int] | None = None
    backlog: int = 0  #: 0: does not listen

    def sockaddr(self) -> bytes:
        """The address to bind to as struct sockaddr_in (16 bytes) or sockaddr_in6 (28); empty: do not bind."""
        if self.address is None:
            return b""
        host, port = self.address
        head = struct.pack("=H", self.family) + struct.pack("!H", port)
        raw = socket.inet_pton(self.family, host)
        return head + (raw + bytes(8) if self.family == V4 else bytes(4) + raw + bytes(4))


class NetPlan(NamedTuple):
    """What is done in a new network namespace before the payload exists, as data.

    Both buffers go out in one send(2) each. The kernel works them off before send returns, answers every error, and
    acknowledges the message whose sequence number is ``LAST``: read until then, an error before it is the failure.
    """

    path: str  #: gateway or veth
    rtnl: bytes
    nft: bytes
    sockets: tuple[SocketSpec, ...]
    resolv_conf: str


LAST = 0x7FFFFFFF
