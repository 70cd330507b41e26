"""Attempts to reach the host and others by the network."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

from nsbox.selftest.stage import Noted, Stage, noted, staged


class Service:
    """A TCP and a UDP service on one port of the host's loopback, that answers and counts who came."""

    def __init__(self) -> None:
        self._calls: list[None] = []
        self._tcp = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._tcp.getsockname()[1]
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("127.0.0.1", self.port))
        self._over = False
        self._threads = [threading.Thread(target=self._serve, args=(one,)) for one in (self._tcp, self._udp)]

    def _serve(self, one: socket.socket) -> None:
        one.settimeout(0.05)
        while not self._over:
            with contextlib.suppress(OSError):  # nobody came, or he does not wait for the answer
                # Counted first: whoever has an answer has been counted.
                if one is self._tcp:
                    with one.accept()[0] as client:
                        self._calls.append(None)
                        client.sendall(b"selftest")
                else:
                    caller = one.recvfrom(16)[1]
                    self._calls.append(None)
                    one.sendto(b"selftest", caller)

    @property
    def came(self) -> int:
        """How often it was called."""
        return len(self._calls)

    def __enter__(self) -> "Service":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for thread in self._threads:
            thread.join()
        self._tcp.close()
        self._udp.close()


def _ways(port: int) -> dict[str, str]:
    """Every way that the host's loopback is called by: description → words of the program."""
    return {
        "a service on the host's loopback": f"connect:127.0.0.1:{port}",
        "the same by UDP": f"datagram:127.0.0.1:{port}",
        "the same by 0.0.0.0": f"connect:0.0.0.0:{port}",
        "the same by IPv4 in IPv6": f"connect:::ffff:127.0.0.1:{port}",
    }


@staged("N01")
def no_network(stage: Stage) -> Iterator[Noted]:
    """Nothing but the sandbox's own loopback."""
    names = ("example.com", "metadata.google.internal")
    with Service() as service:
        ways = _ways(service.port)
        control = stage.outside("other_links", "resolve:localhost", *ways.values())
        before = service.came
        inside = stage.inside("own_loopback", "other_links", *(f"resolve:{name}" for name in names), *ways.values())
        came = service.came - before
    works = inside.get("own_loopback") == "done"
    links = inside.get("other_links", "")
    yield noted(
        "N01",
        "links other than loopback",
        works=works,
        stopped=links == "none",
        control=f"its own loopback works; outside: {control['other_links']}",
        inside=links,
    )
    for name in names:
        seen = inside.get(f"resolve:{name}", "")
        yield noted(
            "N01",
            f"resolving {name}",
            works=control["resolve"] == "done",
            stopped=seen != "done",
            control="a resolver works outside",
            inside=seen,
        )
    for what, word in ways.items():
        shown, seen = control[word], inside.get(word, "")
        yield noted("N01", what, works=shown == "done", stopped=seen != "done" and not came, control=shown, inside=seen)


@staged("N02")
def empty_list(stage: Stage) -> Iterator[Noted]:
    """Filtered egress with nothing on its list."""
    with Service() as service:
        word, rule = f"connect:127.0.0.1:{service.port}", f"127.0.0.1:{service.port}"
        control = stage.inside(word, net="filtered", allow=[rule]).get("connect", "")
        inside = stage.inside(word, net="filtered", allow=[]).get("connect", "")
    yield noted(
        "N02", "an empty list", works=control == "done", stopped=inside != "done", control=control, inside=inside
    )


@staged("N08")
def neighbours(stage: Stage) -> Iterator[Noted]:
    """Another port than the one that is allowed; another sandbox."""
    with Service() as allowed, Service() as other:
        rule = [f"127.0.0.1:{allowed.port}"]
        ways = _ways(other.port)
        good = f"connect:127.0.0.1:{allowed.port}"
        inside = stage.inside(good, *ways.values(), net="filtered", allow=rule)
    for what, word in ways.items():
        seen = inside.get(word, "")
        yield noted(
            "N08",
            f"{what}, beside one that is allowed",
            works=inside.get(good) == "done",
            stopped=seen != "done" and other.came == 0,
            control=f"the allowed one: {inside.get(good)}",
            inside=seen,
        )
    found: list[str] = []
    code = (
        "import socket, time; s = socket.create_server(('0.0.0.0', 8123)); "
        "socket.create_connection(('127.0.0.1', 8123)); print('up', flush=True); time.sleep(0.4)"
    )

    def look(_: bytes) -> None:
        found.append(stage.inside("connect:127.0.0.1:8123").get("connect", ""))

    works = stage.run([*stage.command()[:1], "-c", code], on_stdout=look).ok
    yield noted(
        "N08",
        "a service of another sandbox",
        works=works and bool(found),
        stopped="done" not in found,
        control="in its own sandbox it is reached",
        inside=", ".join(found) or "not looked at",
    )


@staged("N09")
def unix_sockets(stage: Stage) -> Iterator[Noted]:
    """Abstract ones and those in the file system, on this host and with its network."""
    path, name = os.path.join(stage.place("unix"), "s"), f"@nsbox-selftest-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
        abstract.bind("\0" + name[1:])
        named.bind(path)
        os.chmod(path, 0o777)
        for server, what, where in ((abstract, "an abstract socket", name), (named, "a socket by its path", path)):
            server.listen()
            control = stage.outside(f"unix:{where}")["unix"]
            inside = stage.inside(f"unix:{where}").get("unix", "")
            yield noted("N09", what, works=control == "done", stopped=inside != "done", control=control, inside=inside)
