"""What the rulesets of both ways out have in common: sets, refusals that count, and a policy's rules by address.

Whatever is permitted goes through the chain ``ok``, whatever is not through ``den``.
"""

import socket
import struct
from collections.abc import Iterable

from nsbox.plan.address import LOOPBACK, SPECIAL, V4, V6, Address, Network, parse_address, special
from nsbox.plan.net import NetPolicy, Rule
from nsbox.resources import nft
from nsbox.resources.nft import Message, Table

# RFC 7335 keeps 192.0.0.0/29 for the two ends of such a translation: never anybody's real destination. The IPv6 block
# is a random one (RFC 4193).
HERE4, RESOLVER, OURS4 = "192.0.0.2", "192.0.0.1", "192.0.0.0/29"
HERE6, OURS6 = "fd6e:7362:78aa::2", "fd6e:7362:78aa::/64"
PORT = 65533  #: of the listeners; above what connect(2) chooses from, and nobody's well-known port
TABLE = "nsbox"
SET_SIZE, SEEN_SIZE = 1024, 256
# 198.19.0.0/16 of RFC 2544, which is nobody's destination: a /31 for each sandbox with a pair
BLOCK = Network(V4, 0xC6130000, 16)
POLICY_CHAINS = ("gone", "rules", "host")
_SYN, _SYN_ACK = b"\x02", b"\x12"


def raw_address(text: str) -> bytes:
    """An address in network byte order."""
    return socket.inet_pton(V6 if ":" in text else V4, text)


def network(text: str) -> Network:
    """The block that a CIDR writes."""
    base, _, prefix = text.partition("/")
    address = parse_address(base)
    assert address is not None
    return Network(address.family, address.value, int(prefix))


def sets(table: Table, families: Iterable[int]) -> Iterable[Message]:
    for family in families:
        ip, n = ("ipv4", 4) if family == V4 else ("ipv6", 6)
        yield table.set(f"ok{n}", n, (ip, "proto", "port"), SET_SIZE)
        yield table.set(f"all{n}", n + 10, (ip, "proto"), SET_SIZE)
        yield table.set(f"den{n}", n + 20, (ip, "proto", "port"), SEEN_SIZE, counted_for=86400)


def _matches(rule: Rule) -> Iterable[tuple[bytes, ...]]:
    assert rule.network
    for protocol in ("tcp", "udp"):
        if rule.protocol in ("", protocol):
            port = (nft.payload(2, 2, 2), nft.compare(struct.pack("!H", rule.port))) if rule.port else ()
            number = socket.IPPROTO_TCP if protocol == "tcp" else socket.IPPROTO_UDP
            yield (*nft.to_network(rule.network), *nft.protocol_is(number), *port)


def address_rules(
    table: Table, policy: NetPolicy, own: tuple[Network, ...], families: Iterable[int]
) -> Iterable[Message]:
    """The rules of the chains that a change of policy fills anew.

    ``gone``: refusals. ``rules``: addresses; inside a special block only rules for that block count. ``host``:
    loopback addresses that a rule names mean the host's, so they go to the gateway instead of the sandbox's own.
    """
    gone = [rule for rule in policy.refusals if rule.network and rule.network.family in families]
    rows = [table.rule("gone", *line, nft.verdict(0, "den")) for rule in gone for line in _matches(rule)]
    lines: list[tuple[bytes, ...]] = []
    narrow: list[Rule] = []
    wide: list[Rule] = []
    loopback: list[Rule] = []
    for rule in policy.rules:
        if rule.network and rule.network.family in families:
            found = special(Address(*rule.network[:2]), own)
            (narrow if found and rule.network.within(found[0]) else wide).append(rule)
            if any(rule.network.within(block) for block in LOOPBACK):
                loopback.append(rule)
    for rule in narrow:
        lines += ((*line, nft.verdict(0, "ok")) for line in _matches(rule))
    if wide:
        around = [rule.network for rule in wide if rule.network]
        for block in (*own, *(block for block, _ in SPECIAL)):
            if block.family in families and any(block.within(wider) for wider in around):
                lines.append((*nft.to_network(block), nft.verdict(0, "den")))
    for rule in wide:
        lines += ((*line, nft.verdict(0, "ok")) for line in _matches(rule))
    rows += [table.rule("rules", *line) for line in lines]
    for rule in loopback:
        for line in _matches(rule):
            assert rule.network
            home = "127.0.0.1" if rule.network.family == V4 else "::1"
            taken = nft.tproxy(rule.network.family, home, PORT)
            rows.append(table.rule("host", *line, *taken, nft.verdict(nft.ACCEPT)))
    return rows


def own_chain(table: Table, families: Iterable[int]) -> Iterable[Message]:
    yield table.chain("own")
    for family in families:
        for text in ("127.0.0.0/8", OURS4) if family == V4 else ("::1/128", OURS6):
            yield table.rule("own", *nft.to_network(network(text)), nft.verdict(nft.ACCEPT))


def refuse_chain(table: Table, families: Iterable[int]) -> Iterable[Message]:
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


def policy_chains(table: Table) -> list[Message]:
    """The chains that ``address_rules`` fills, empty."""
    return [table.chain(name) for name in POLICY_CHAINS]


def no_new_connection() -> tuple[bytes, ...]:
    """Go on if a TCP packet does not open a connection; the rest of one finds a socket or is answered with a reset."""
    return (*nft.protocol_is(socket.IPPROTO_TCP), nft.payload(2, 13, 1), nft.mask(_SYN), nft.compare(b"\0"))


def connection_from_outside() -> tuple[bytes, ...]:
    """Go on if a TCP packet opens a connection: SYN without ACK."""
    return (*nft.protocol_is(socket.IPPROTO_TCP), nft.payload(2, 13, 1), nft.mask(_SYN_ACK), nft.compare(_SYN))


def connection_accepted() -> tuple[bytes, ...]:
    """Go on if a TCP packet answers the opening of a connection: SYN and ACK."""
    return (*nft.protocol_is(socket.IPPROTO_TCP), nft.payload(2, 13, 1), nft.mask(_SYN_ACK), nft.compare(_SYN_ACK))


def members(table: Table, chain: str, families: Iterable[int]) -> Iterable[Message]:
    """Addresses that names were resolved to."""
    for family in families:
        n = 4 if family == V4 else 6
        for name, port in ((f"ok{n}", True), (f"all{n}", False)):
            yield table.rule(chain, *nft.destination(family, port=port), nft.member(name), nft.verdict(0, "ok"))
