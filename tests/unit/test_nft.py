"""The encoder, compared with what the nft command says of the ruleset that the kernel made of it."""

import struct
import sys
from pathlib import Path

import pytest

from nsbox.errors import SpecError
from nsbox.plan.net import LAST, EgressLimits, NetPolicy
from nsbox.resources import netlink
from nsbox.resources.netplan import plan_net
from nsbox.resources.veth import plan_veth

sys.path.insert(0, str(Path(__file__).parents[1] / "host"))
from _netbox import NFT, NetBox

POLICY = NetPolicy.parse(
    ["1.2.3.4:80", "5.6.7.0/24", "9.9.9.9:53/udp", "[2001:db8::1]:443", "127.0.0.1:8080", "a.test"]
)
EXPECTED = """
chain own {
    ip daddr 127.0.0.0/8 accept
    ip daddr 192.0.0.0/29 accept
    ip6 daddr ::1 accept
    ip6 daddr fd6e:7362:78aa::/64 accept
}
chain rej {
    meta l4proto tcp reject with tcp reset
    meta l4proto udp reject
    reject with icmpx admin-prohibited
}
chain den {
    update @den4 { ip daddr . meta l4proto . tcp dport } jump rej
    update @den4 { ip daddr . meta l4proto . udp dport } jump rej
    update @den6 { ip6 daddr . meta l4proto . tcp dport } jump rej
    update @den6 { ip6 daddr . meta l4proto . udp dport } jump rej
    counter name "other" jump rej
}
chain ok {
    accept
}
chain gone {
    ip daddr 5.6.7.9 meta l4proto tcp jump den
    ip daddr 5.6.7.9 meta l4proto udp jump den
}
chain rules {
    ip daddr 127.0.0.1 tcp dport 8080 jump ok
    ip daddr 1.2.3.4 tcp dport 80 jump ok
    ip daddr 5.6.7.0/24 meta l4proto tcp jump ok
    ip daddr 9.9.9.9 udp dport 53 jump ok
    ip6 daddr 2001:db8::1 tcp dport 443 jump ok
}
chain host {
    ip daddr 127.0.0.1 tcp dport 8080 tproxy ip to 127.0.0.1:65533 accept
}
chain out {
    type filter hook output priority filter; policy drop;
    tcp flags ! syn accept
    jump own
    jump gone
    jump rules
    ip daddr . meta l4proto . th dport @ok4 jump ok
    ip daddr . meta l4proto @all4 jump ok
    ip6 daddr . meta l4proto . th dport @ok6 jump ok
    ip6 daddr . meta l4proto @all6 jump ok
    jump den
}
chain pre {
    type filter hook prerouting priority mangle; policy drop;
    jump host
    jump own
    meta nfproto ipv4 meta l4proto tcp tproxy ip to 127.0.0.1:65533 accept
    meta nfproto ipv4 meta l4proto udp tproxy ip to 127.0.0.1:65533 accept
    meta nfproto ipv6 meta l4proto tcp tproxy ip6 to [::1]:65533 accept
    meta nfproto ipv6 meta l4proto udp tproxy ip6 to [::1]:65533 accept
}
"""


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


@pytest.mark.skipif(not NFT, reason="the nft command is not installed")
@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="the host has no IPv6")
def test_gateway_ruleset_reads_as_meant() -> None:
    plan = plan_net(POLICY.deny(["5.6.7.9"]), ipv6=True)
    with NetBox(plan) as box:
        box.close_fds()
        listed = lines(box.rules())
    assert listed[0] == "table inet nsbox {"
    found = listed[listed.index("chain own {") : -1]
    assert found == lines(EXPECTED)
    for n, kind in ((4, "ipv4_addr"), (6, "ipv6_addr")):
        at = listed.index(f"set ok{n} {{")
        assert listed[at + 1 : at + 4] == [f"type {kind} . inet_proto . inet_service", "size 1024", "flags timeout"]
        at = listed.index(f"set den{n} {{")
        assert "flags dynamic,timeout" in listed[at : at + 7]
        assert "counter" in listed[at : at + 7]


def test_a_batch_is_one_transaction_with_one_acknowledgement() -> None:
    plan = plan_net(POLICY, ipv6=False)
    found = list(netlink.messages(plan.nft))
    flags = [struct.unpack_from("=H", plan.nft, at + 6)[0] for at in offsets(plan.nft)]
    assert (found[0][0], found[-1][0]) == (0x10, 0x11)
    assert [sequence for _, sequence, _ in found].count(LAST) == 1
    assert found[-2][1] == LAST
    assert [bool(flag & netlink.ACK) for flag in flags] == [sequence == LAST for _, sequence, _ in found]
    assert list(netlink.messages(plan.rtnl))[-1][1] == LAST


def offsets(data: bytes) -> list[int]:
    at, found = 0, []
    while at < len(data):
        found.append(at)
        at += struct.unpack_from("=I", data, at)[0] + 3 & ~3
    return found


def test_without_ipv6_nothing_speaks_of_it() -> None:
    plan = plan_net(POLICY, ipv6=False)
    assert not any(spec.name.endswith("6") for spec in plan.sockets)
    assert b"ok6" not in plan.nft
    assert len(list(netlink.messages(plan.rtnl))) == 3


def test_sockets_for_udp_only_where_they_may_be_needed() -> None:
    names = {spec.name for spec in plan_net(NetPolicy.parse(["1.2.3.4"]), ipv6=True, live=False).sockets}
    assert names == {"dns_udp", "dns_tcp", "tcp4", "tcp6"}
    names = {spec.name for spec in plan_net(NetPolicy.parse(["1.2.3.4/udp"]), ipv6=False, live=False).sockets}
    assert names == {"dns_udp", "dns_tcp", "tcp4", "udp4", "raw4"}


def test_plans_are_pure_data_and_cached() -> None:
    assert plan_net(POLICY, ipv6=True) is plan_net(NetPolicy(*POLICY), ipv6=True)


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"\x10\0\0\0", bytes(64), b"\xff" * 64, struct.pack("=IHHII", 8, 2, 0, 1, 0) * 3]
)
def test_nonsense_from_netlink_ends(data: bytes) -> None:
    list(netlink.messages(data))
    netlink.attributes(data)


def test_as_many_rules_as_one_message_takes() -> None:
    some = NetPolicy.parse([f"203.0.{n}.0/24:443" for n in range(256)])
    with NetBox(plan_net(some, ipv6=True)) as box:
        box.close_fds()
    many = NetPolicy.parse([f"203.{n}.{m}.0/24:443" for n in range(8) for m in range(256)])
    with pytest.raises(SpecError, match="too many rules"):
        plan_net(many, ipv6=True)


LIMITED = """
chain more {
    quota over 20 kbytes counter name "net_bytes" jump rej
    update @tx4 { ip daddr . meta l4proto . th dport }
    accept
}
chain ok {
    ct status ! confirmed ct count over 5 counter name "net_connections" jump den
    ct status ! confirmed limit rate over 150/minute burst 2 packets counter name "net_rate" drop
    update @con4 { ip daddr . meta l4proto . th dport }
    jump more
}
"""


@pytest.mark.skipif(not NFT, reason="the nft command is not installed")
def test_limits_of_veth_read_as_meant() -> None:
    limited = NetPolicy.parse(["1.2.3.4"], EgressLimits(connections=5, rate=2.5, bytes_out=20 << 10))
    with NetBox(plan_veth(limited, ipv6=False)) as box:
        box.close_fds()
        listed = lines(box.rules())
    at = listed.index("chain more {")
    assert listed[at : at + len(lines(LIMITED))] == lines(LIMITED)
    unlimited = NetPolicy.parse(["1.2.3.4"], EgressLimits(None, None, None))
    with NetBox(plan_veth(unlimited, ipv6=False)) as box:
        box.close_fds()
        assert not [line for line in lines(box.rules()) if "jump rej" in line and "over" in line]
