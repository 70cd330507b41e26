"""What a policy lets through, whatever way it is written."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsbox.errors import SpecError
from nsbox.plan.address import Network, parse_address, special
from nsbox.plan.net import NetPolicy, SocketSpec, parse_rule


def reaches(
    policy: NetPolicy, address: str, port: int = 443, protocol: str = "tcp", own: tuple[Network, ...] = ()
) -> bool:
    parsed = parse_address(address)
    assert parsed
    return policy.by_address(parsed, port, protocol, own)


def by_name(policy: NetPolicy, name: str, address: str, port: int = 443, protocol: str = "tcp") -> bool:
    parsed = parse_address(address)
    assert parsed
    return policy.for_name(name, parsed, port, protocol)


@pytest.mark.parametrize(
    "text, normal",
    [
        ("pypi.org:443", "pypi.org:443"),
        ("*.PyPI.org.", "*.pypi.org"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("*", "*"),
        ("_dmarc.example.org", "_dmarc.example.org"),
        ("ntp.example:123/udp", "ntp.example:123/udp"),
        ("1.2.3.4", "1.2.3.4/32"),
        ("1.2.3.0/24:80/udp", "1.2.3.0/24:80/udp"),
        ("1.2.3.4/tcp", "1.2.3.4/32"),
        ("127.1:9", "127.0.0.1/32:9"),
        ("0x7f000001", "127.0.0.1/32"),
        ("2130706433:1", "127.0.0.1/32:1"),
        ("0177.0.0.1", "127.0.0.1/32"),
        ("::ffff:1.2.3.4", "1.2.3.4/32"),
        ("::ffff:1.2.3.0/120", "1.2.3.0/24"),
        ("2001:DB8::1", "2001:db8::1/128"),
        ("[2001:db8::1]:80", "[2001:db8::1/128]:80"),
        ("[2001:db8::/32]:80", "[2001:db8::/32]:80"),
        ("[2001:db8::]/32:80", "[2001:db8::/32]:80"),
    ],
)
def test_rules_are_normalised(text: str, normal: str) -> None:
    rule = parse_rule(text)
    assert str(rule) == normal
    assert parse_rule(str(rule)) == rule


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ":80",
            "a:",
            "a:b",
            "a:0",
            "a:65536",
            "a:-1",
            "a:١",
            "http://a",
            "user@a",
            "a/24",
            "a b",
            "a\nb",
            "a\x00",
        ),
        *(
            "a\x7f.b",
            "-a",
            "a..b",
            "." * 3,
            "*.",
            "a.*",
            "*a.b",
            "*.*.b",
            "1.2.3.4.5",
            "a.1",
            "1.2.3.4/33",
            "1.2.3.4/8",
        ),
        *("::1/129", "fe80::1%eth0", "[::1", "[]:80", "1.2.3.4/x", "1.2.3.4/", "x" * 64, "a." * 127 + "abc", None, 7),
    ],
)
def test_anything_else_is_refused_and_named(text: object) -> None:
    with pytest.raises(SpecError, match="allow: "):
        parse_rule(text)


@given(st.text(max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        rule = parse_rule(text)
    except SpecError:
        return
    assert bool(rule.name) != bool(rule.network)
    assert parse_rule(str(rule)) == rule


def test_an_empty_list_is_none() -> None:
    policy = NetPolicy.parse([])
    assert policy == NetPolicy()
    assert not reaches(policy, "8.8.8.8")
    assert not policy.names("example.org")
    assert not policy.by_name
    assert not policy.open


SPECIAL = [
    *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.31.255.255", "192.168.1.1", "169.254.0.5", "100.64.0.1"),
    *("169.254.169.254", "168.63.129.16", "100.100.100.200", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1"),
    *(
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "64:ff9b::808:808",
        "2002:7f00:1::",
        "2001:0:1::",
        "::ffff:10.0.0.1",
        "::7f00:1",
    ),
]


@pytest.mark.parametrize("address", SPECIAL)
def test_special_addresses_are_refused_above_every_rule(address: str) -> None:
    everything = NetPolicy.parse(["*", "0.0.0.0/0", "::/0", "0.0.0.0/0/udp"])
    assert everything.open
    assert not reaches(everything, address)
    assert not reaches(everything, address, 53, "udp")
    assert not by_name(everything, "rebinding.example", address)
    assert reaches(everything, "93.184.216.34")
    assert by_name(everything, "example.org", "93.184.216.34")


@pytest.mark.parametrize("address", [a for a in SPECIAL if ":" not in a])
def test_unless_a_rule_names_that_very_address(address: str) -> None:
    policy = NetPolicy.parse([f"{address}:443", "0.0.0.0/0"])
    assert reaches(policy, address, 443)
    assert not reaches(policy, address, 80)
    assert not by_name(policy, "rebinding.example", address)


def test_a_block_inside_the_special_one_opens_it_a_wider_one_does_not() -> None:
    assert reaches(NetPolicy.parse(["10.1.0.0/16"]), "10.1.2.3")
    assert not reaches(NetPolicy.parse(["10.0.0.0/7"]), "10.1.2.3")
    assert not reaches(NetPolicy.parse(["169.254.0.0/16"]), "169.254.169.254"), "metadata needs to be named by itself"
    assert reaches(NetPolicy.parse(["169.254.169.254"]), "169.254.169.254")


def test_ipv4_inside_ipv6_does_not_open_what_it_hides() -> None:
    assert not reaches(NetPolicy.parse(["64:ff9b::/96"]), "64:ff9b::7f00:1")
    assert not reaches(NetPolicy.parse(["64:ff9b::/96", "0.0.0.0/0"]), "64:ff9b::a9fe:a9fe")
    assert reaches(NetPolicy.parse(["64:ff9b::/96"]), "64:ff9b::808:808")
    assert not reaches(NetPolicy.parse(["2002::/16"]), "2002:a00:1::1")


def test_the_hosts_own_addresses() -> None:
    own = (parse_rule("203.0.113.7").network,)
    assert own[0]
    policy = NetPolicy.parse(["203.0.113.0/24"])
    assert not reaches(policy, "203.0.113.7", own=(own[0],))
    assert reaches(policy, "203.0.113.8", own=(own[0],))
    assert reaches(NetPolicy.parse(["203.0.113.7"]), "203.0.113.7", own=(own[0],))
    found = parse_address("203.0.113.7")
    assert found
    assert special(found, (own[0],)) == (own[0], "the host's own")


def test_names() -> None:
    policy = NetPolicy.parse(["pypi.org:443", "*.example.org", "ntp.example:123/udp"])
    for name, answer in (
        *(("pypi.org", True), ("www.pypi.org", False), ("notpypi.org", False), ("pypi.org.evil.example", False)),
        *(("a.example.org", True), ("a.b.example.org", True), ("example.org", False), ("xexample.org", False)),
    ):
        assert policy.names(name) is answer, name
    assert by_name(policy, "pypi.org", "151.101.0.223")
    assert not by_name(policy, "pypi.org", "151.101.0.223", 80)
    assert not by_name(policy, "pypi.org", "151.101.0.223", 443, "udp")
    assert by_name(policy, "ntp.example", "151.101.0.223", 123, "udp")
    assert not reaches(policy, "151.101.0.223"), "an address counts only once it was looked up"


def test_quic_is_never_let_through_by_name() -> None:
    assert not by_name(NetPolicy.parse(["*/udp", "*:443/udp"]), "example.org", "151.101.0.223", 443, "udp")
    assert reaches(NetPolicy.parse(["151.101.0.223:443/udp"]), "151.101.0.223", 443, "udp")


def test_deny_wins_until_allowed_again() -> None:
    policy = NetPolicy.parse(["*.example.org", "198.51.100.0/24"])
    less = policy.deny(["bad.example.org", "198.51.100.9"])
    assert policy.names("bad.example.org"), "values do not change"
    assert not less.names("bad.example.org")
    assert not by_name(less, "bad.example.org", "203.0.113.1")
    assert less.names("good.example.org")
    assert not reaches(less, "198.51.100.9")
    assert not by_name(less, "good.example.org", "198.51.100.9"), "an address refused is refused for names too"
    assert reaches(less, "198.51.100.8")
    assert reaches(less.allow(["198.51.100.9"]), "198.51.100.9")
    assert NetPolicy.parse(["a.example", "b.example"]).deny("a.example").rules == (parse_rule("b.example"),)
    assert not reaches(NetPolicy.parse(["198.51.100.9"]).deny(["198.51.100.9:25"]), "198.51.100.9", 25)


@given(st.integers(0, 2**32 - 1), st.integers(0, 32), st.integers(0, 2**32 - 1))
def test_blocks_hold_what_ipaddress_says(base: int, prefix: int, value: int) -> None:
    import ipaddress

    block = ipaddress.ip_network((base, prefix), strict=False)
    network = parse_rule(str(block)).network
    address = parse_address(str(ipaddress.IPv4Address(value)))
    assert network
    assert address
    assert network.holds(address) == (ipaddress.IPv4Address(value) in block)


def test_sockaddr() -> None:
    four = SocketSpec("a", socket.AF_INET, socket.SOCK_DGRAM, address=("127.0.0.1", 940)).sockaddr()
    assert (len(four), four[2:8]) == (16, b"\x03\xac\x7f\0\0\1")
    six = SocketSpec("a", socket.AF_INET6, socket.SOCK_DGRAM, address=("::1", 940)).sockaddr()
    assert (len(six), six[2:4], six[8:24]) == (28, b"\x03\xac", bytes(15) + b"\1")
    assert SocketSpec("a", socket.AF_INET, socket.SOCK_RAW).sockaddr() == b""
