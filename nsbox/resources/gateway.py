"""The host side of every sandbox's filtered egress: one thread and one loop for all of them.

``Gateway.attach`` takes the sockets that were made inside a network namespace (``plan_net``) and answers a session. The
policy is asked here, for every connection, with the address that is then dialled; the ruleset inside only mirrors it.
Order of a look-up: the answer is parsed, its addresses enter the sets inside in one acknowledged batch, then the
program gets them.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Mapping

from nsbox.errors import HostError
from nsbox.plan.address import Address, Network
from nsbox.plan.net import NetPolicy
from nsbox.resources import hostnet
from nsbox.resources.dns import Upstream
from nsbox.resources.gateway_session import GatewaySession
from nsbox.resources.loop import Loop
from nsbox.resources.traffic import Log

__all__ = ["Gateway", "GatewaySession", "shared"]

Dial = Callable[[Address, int], tuple[int, tuple[str, int]]]


def dial_directly(address: Address, port: int) -> tuple[int, tuple[str, int]]:
    """(family, where to connect to) of a destination."""
    return address.family, (str(address), port)


def close_all(fds: Mapping[str, int]) -> None:
    """Close descriptors that nobody has taken over."""
    for fd in fds.values():
        os.close(fd)


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

    def attach(
        self, sandbox: str, policy: NetPolicy, fds: Mapping[str, int], log: Log | None = None, *, path: str = "gateway"
    ) -> GatewaySession:
        """Serve a sandbox: its packets, or for ``path`` veth only its look-ups and its policy. Raises HostError.

        Owns ``fds`` from here on, also when it raises. Does not wait for the loop, which takes calls in their order.
        """
        try:
            if not self.loop.alive:
                raise HostError("the gateway is closed", remedy="attach to a new one", errno=errno.ESHUTDOWN)
            session = GatewaySession(self, sandbox, policy, log, path)
        except BaseException:
            close_all(fds)
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
