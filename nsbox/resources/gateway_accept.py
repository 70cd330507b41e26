"""Accepts a sandbox's connections, and refuses or begins to relay each."""

import errno
import socket
from typing import TYPE_CHECKING

from nsbox.plan.address import parse_address
from nsbox.resources.gateway_tcp import Relay, reset
from nsbox.resources.loop import READ

if TYPE_CHECKING:
    from nsbox.resources.gateway_session import GatewaySession

_ACCEPTS = 64  #: per turn of the loop, so that one sandbox does not starve the others
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """A transparent listener of a sandbox; the connections' own addresses are where they wanted to go."""

    def __init__(self, session: "GatewaySession", sock: socket.socket) -> None:
        self._session, self.sock = session, sock
        session.loop.watch(sock, READ, self._on_ready)

    def _on_ready(self, _: int) -> None:
        session = self._session
        for _turn in range(_ACCEPTS):
            pause = session.traffic.wait()
            if pause:
                self._rest(pause)
                return
            try:
                client, _peer = self.sock.accept()
            except BlockingIOError:
                session.traffic.unused()
                return
            except OSError as error:
                if error.errno in _SHORT_OF:
                    session.traffic.touch("descriptors", 0)
                    self._rest(0.1)
                return
            client.setblocking(False)
            self._begin(client)

    def _rest(self, seconds: float) -> None:
        loop = self._session.loop
        loop.change(self.sock, 0)
        loop.later(seconds, lambda: loop.change(self.sock, READ) if self.sock.fileno() >= 0 else None)

    def _begin(self, client: socket.socket) -> None:
        session = self._session
        host, port = client.getsockname()[:2]
        address = parse_address(host)
        verdict = session.judge(address, port, "tcp") if address else None
        if address is None or verdict is None or not verdict.allowed:
            session.traffic.connect("", host, port, "tcp", "denied", verdict.reason if verdict else "")
            reset(session.loop, client)
            return
        if not session.traffic.room():
            session.traffic.connect("", host, port, "tcp", "denied", "too many connections")
            reset(session.loop, client)
            return
        try:
            relay = Relay(session, client, address, port, verdict.names[0] if verdict.names else "")
        except OSError:
            session.traffic.touch("descriptors", 0)
            session.traffic.connect("", host, port, "tcp", "denied", "no descriptor is left")
            reset(session.loop, client)
            return
        relay.look_first() if verdict.look else relay.pass_on()

    def close(self) -> None:
        """Its socket is the session's."""
