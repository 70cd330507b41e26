"""Filtered egress of one sandbox, whichever way it is carried: chosen, attached, recorded, ended."""

from collections.abc import Sequence
from typing import Any

from nsbox.plan.net import EgressLimits, NetPlan, NetPolicy
from nsbox.resources import gateway, hostnet, netplan, veth
from nsbox.resources.gateway_session import GatewaySession

Log = Any


def plan(
    allow: Sequence[str], path: str, *, privileged: bool, limits: EgressLimits | None = None
) -> tuple[NetPolicy, NetPlan]:
    """The policy that ``allow`` writes and what is done for it inside. Raises SpecError, HostError."""
    policy, own = NetPolicy.parse(allow, limits), hostnet.own_networks()
    if veth.choose(path, policy, own, privileged=privileged) == "veth":
        return policy, veth.plan_veth(policy, own)
    return policy, netplan.plan_net(policy, own)


class Egress:
    """What serves one sandbox's network while it runs. Made before the payload starts; ``close`` after it has ended."""

    def __init__(
        self, sandbox: str, policy: NetPolicy, plan: NetPlan, fds: Sequence[int], slot: int, log: Log | None = None
    ) -> None:
        self.path = plan.path
        names = ["rtnl", "nft", *(spec.name for spec in plan.sockets)]
        self._veth: veth.Veth | None = None
        by_name = dict(zip(names, fds, strict=True))
        if plan.path == "veth":
            try:
                self._veth = veth.shared().attach(slot, by_name["rtnl"])
            except BaseException:
                gateway.close_all(by_name)
                raise
        try:
            self.session: GatewaySession = gateway.shared().attach(sandbox, policy, by_name, log, path=plan.path)
        except BaseException:
            self.close()
            raise

    def allow(self, rules: Sequence[str]) -> None:
        """Permit more, at once. Raises SpecError, HostError; then nothing has changed."""
        self.session.allow(rules)

    def deny(self, rules: Sequence[str]) -> None:
        """Refuse from now on, and end connections that are refused thereby. Raises SpecError, HostError."""
        self.session.deny(rules)

    def record(self) -> list[dict[str, Any]]:
        """Every destination, as the report has them."""
        return self.session.record()

    def limits_hit(self) -> list[dict[str, Any]]:
        """The network's limits that were touched."""
        return self.session.limits_hit()

    def end(self) -> tuple[int, int]:
        """Serve nothing any more; the record stays. (bytes sent, bytes received) by the sandbox."""
        self.session.close()
        return self.session.bytes

    def close(self) -> None:
        """Give everything back, once the namespace has ended. Idempotent."""
        session = getattr(self, "session", None)
        if session is not None:
            session.close()
        if self._veth is not None:
            self._veth.close()
