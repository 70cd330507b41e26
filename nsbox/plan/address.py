"""IP addresses as numbers, blocks of them, and the blocks that are never the internet."""

import functools
import socket
from typing import NamedTuple

V4, V6 = int(socket.AF_INET), int(socket.AF_INET6)
WIDTH = {V4: 32, V6: 128}


class Address(NamedTuple):
    """An IP address as a number, so that networks compare by shifting."""

    family: int
    value: int

    def __str__(self) -> str:
        return socket.inet_ntop(self.family, self.value.to_bytes(WIDTH[self.family] // 8, "big"))


class Network(NamedTuple):
    """A block of addresses."""

    family: int
    value: int
    prefix: int

    def holds(self, address: Address) -> bool:
        """Whether an address is one of this block."""
        if address.family != self.family:
            return False
        rest = WIDTH[self.family] - self.prefix
        return address.value >> rest == self.value >> rest

    def within(self, other: "Network") -> bool:
        """Whether every address of this block is one of ``other``."""
        return self.prefix >= other.prefix and other.holds(Address(self.family, self.value))

    def __str__(self) -> str:
        return f"{Address(self.family, self.value)}/{self.prefix}"


def parse_address(text: str) -> Address | None:
    """An address in the usual notation; IPv4 in IPv6 (``::ffff:a.b.c.d``) becomes IPv4. None: not an address."""
    for family in (V4, V6):
        try:
            value = int.from_bytes(socket.inet_pton(family, text), "big")
        except (OSError, ValueError):
            continue
        if family == V6 and value >> 32 == 0xFFFF:
            return Address(V4, value & 0xFFFFFFFF)
        return Address(family, value)
    return None


def _net(text: str) -> Network:
    base, _, prefix = text.partition("/")
    family = V6 if ":" in base else V4
    return Network(family, int.from_bytes(socket.inet_pton(family, base), "big"), int(prefix or WIDTH[family]))


def _table(**kinds: str) -> tuple[tuple[Network, str], ...]:
    return tuple((_net(text), kind.replace("_", " ")) for kind, texts in kinds.items() for text in texts.split())


# IANA special-purpose registries (RFC 6890), and what the clouds answer credentials on. The narrower stands first.
SPECIAL = _table(
    metadata_address="169.254.169.254 169.254.170.2 169.254.170.23 169.254.169.123 100.100.100.200 168.63.129.16"
    " 192.0.0.192 fd00:ec2::254 fd00:ec2::23 fd20:ce::254",
    loopback="127.0.0.0/8 ::1",
    this_host="0.0.0.0/8 ::",
    link_local="169.254.0.0/16 fe80::/10",
    shared_by_carriers="100.64.0.0/10",
    private="10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 192.0.0.0/24 fc00::/7 fec0::/10",
    multicast="224.0.0.0/4 ff00::/8",
    reserved="240.0.0.0/4",
    IPv4_in_IPv6="64:ff9b::/96 64:ff9b:1::/48 2002::/16 2001::/32 ::/96 ::ffff:0:0:0/96 ::ffff:0:0/96",
)
LOOPBACK = tuple(network for network, kind in SPECIAL if kind == "loopback")
EMBEDDED = tuple((_net(text), shift) for text, shift in (("64:ff9b::/96", 0), ("2002::/16", 80), ("::/96", 0)))


@functools.lru_cache(maxsize=4096)
def special(address: Address, own: tuple[Network, ...] = ()) -> tuple[Network, str] | None:
    """The special block that an address lies in and what it is called; ``own``: the host's addresses and gateways."""
    for network in own:
        if network.holds(address):
            return network, "the host's own"
    for network, kind in SPECIAL:
        if network.holds(address):
            return network, kind
    return None
