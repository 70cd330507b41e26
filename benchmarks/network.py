"""What filtered egress costs: throughput, round trips, new connections and start, against the bare host path.

    python benchmarks/network.py [--rounds N] [--starts N] [--json FILE]

The program makes its own host and world, two network namespaces joined by a veth pair, so that no packet leaves the
machine and no setting of it is changed. The same client talks to the same server from the host and from sandboxes on
each path, in turns. Run it as root (gateway and veth) and as an ordinary user (gateway).
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from nsbox.bench import netns
from nsbox.bench.frame import Benchmark, Found, Setting, main, ratio_table, table
from nsbox.bench.measure import Samples, measure, median, spawn, summary
from nsbox.bench.runtime import PYTHON

HOST, WORLD, PORT = "198.51.100.1", "203.0.113.5", 9000
BASELINE = "host"
METRICS = {
    "up_gbit": "sent, Gbit/s",
    "down_gbit": "received, Gbit/s",
    "tcp_us": "round trip TCP, µs",
    "udp_us": "round trip UDP, µs",
    "connections": "new connections/s",
}

# One connection of each kind after the other; prints the figures as JSON.
CLIENT = """
import json, socket, sys, time
where, size, trips, many = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
def connect(word):
    s = socket.create_connection(where, 10); s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1); s.send(word)
    return s
out, block = {}, bytearray(1 << 18)
s, began = connect(b"S"), time.perf_counter()
for _ in range(size >> 18): s.sendall(block)
s.shutdown(socket.SHUT_WR); s.recv(1)
out["up_gbit"] = size * 8e-9 / (time.perf_counter() - began)
s, began, got = connect(b"G%15d" % size), time.perf_counter(), 0
while count := s.recv_into(block): got += count
out["down_gbit"] = got * 8e-9 / (time.perf_counter() - began)
def trip(s):
    times = []
    for _ in range(trips):
        began = time.perf_counter(); s.send(b"ping"); s.recv(64); times.append(time.perf_counter() - began)
    return sorted(times)[trips // 2] * 1e6
out["tcp_us"] = trip(connect(b"R"))
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(where); s.settimeout(5)
out["udp_us"] = trip(s)
began = time.perf_counter()
for _ in range(many):
    s = connect(b"C"); s.recv(1); s.close()
out["connections"] = many / (time.perf_counter() - began)
print(json.dumps(out))
"""


def serve_one(client: socket.socket) -> None:
    """S: take everything; G: send so many bytes; R: answer each message; C: one byte."""
    buffer = bytearray(1 << 18)
    with client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        word = client.recv(1)
        if word == b"S":
            while client.recv_into(buffer):
                pass
            client.send(b"k")
        elif word == b"G":
            left = int(client.recv(15, socket.MSG_WAITALL))
            while left > 0:
                left -= client.send(memoryview(buffer)[: min(left, len(buffer))])
        elif word == b"R":
            while client.recv(64):
                client.send(b"pong")
        else:
            client.send(b"x")
            client.recv(1)  # the client closes first: whoever does cannot use the pair of ports again for a minute


def serve(ready: int) -> None:
    """The world's server, for ever; says so on ``ready`` once it listens."""
    listener = socket.create_server(("", PORT), backlog=1024)
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind((WORLD, PORT))  # answers come from the address that was asked

    def answer() -> None:
        while True:
            data, peer = datagrams.recvfrom(64)
            datagrams.sendto(data, peer)

    threading.Thread(target=answer, daemon=True).start()
    os.write(ready, b"1")
    while True:
        client, _ = listener.accept()
        threading.Thread(target=serve_one, args=(client,), daemon=True).start()


def start_world() -> int:
    """The pid of a process in a network namespace of its own that serves once it is told that its links are there."""
    asked, told = os.pipe()
    listens, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            netns.unshare(netns.CLONE_NEWNET)
            os.write(ready, b"0")
            os.read(asked, 1)
            configure_world()
            serve(ready)
        finally:
            os._exit(1)
    os.read(listens, 1)
    configure_host(pid)
    os.write(told, b"1")
    if os.read(listens, 1) != b"1":
        raise RuntimeError("the world could not be made")
    for fd in (asked, told, listens, ready):
        os.close(fd)
    return pid


def configure_world() -> None:
    from pyroute2 import IPRoute

    with IPRoute() as links:
        for name in ("lo", "up0"):
            links.link("set", index=links.link_lookup(ifname=name)[0], state="up")
        links.addr("add", index=links.link_lookup(ifname="lo")[0], address=WORLD, prefixlen=32)
        links.addr("add", index=links.link_lookup(ifname="up0")[0], address="198.51.100.2", prefixlen=24)


def configure_host(world: int) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as links:
        links.link("add", ifname="wan0", kind="veth", peer={"ifname": "up0", "net_ns_pid": world})
        for name in ("lo", "wan0"):
            links.link("set", index=links.link_lookup(ifname=name)[0], state="up")
        links.addr("add", index=links.link_lookup(ifname="wan0")[0], address=HOST, prefixlen=24)
        links.route("add", dst="default", gateway="198.51.100.2")
    if os.geteuid() == 0:
        netns.forward()


def words(mebibytes: int, trips: int, connections: int) -> list[str]:
    """The client's command line."""
    return [PYTHON, "-c", CLIENT, WORLD, str(PORT), str(mebibytes << 20), str(trips), str(connections)]


def from_host(argv: list[str]) -> dict[str, float]:
    found: dict[str, float] = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    return found


def spec_for(path: str) -> Any:
    """A Spec with egress by that path and nothing that slows the client down; "none" has no network."""
    import nsbox

    allow = () if path == "none" else (WORLD, f"{WORLD}/udp")
    limits: dict[str, Any] = dict.fromkeys(
        ("net_connections", "net_bytes", "net_rate", "cpus", "cpu_time", "timeout"), "unlimited"
    )
    return nsbox.Spec(allow=allow, net_path="auto" if path == "none" else path, **limits)


def from_sandbox(path: str, argv: list[str]) -> dict[str, float]:
    import nsbox

    result = nsbox.run(argv, spec_for(path))
    if not result.ok:
        raise RuntimeError(f"{path}: {result!r} {result.stderr_text}")
    found: dict[str, float] = json.loads(result.stdout)
    return found


def traffic(paths: list[str], rounds: int, argv: list[str]) -> dict[str, dict[str, float]]:
    """Medians of each figure on each path, and as a share of the host's."""
    subjects: dict[str, Callable[[], dict[str, float]]] = {BASELINE: lambda: from_host(argv)}
    subjects |= {path: (lambda path=path: from_sandbox(path, argv)) for path in paths}  # type: ignore[misc]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
    order, draw = list(subjects), random.Random(1)
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            found[name].append(subjects[name]())
    return {
        name: {key: round(median([row[key] for row in rows]), 2) for key in METRICS} for name, rows in found.items()
    }


def starts(paths: list[str], runs: int) -> tuple[dict[str, Any], Samples]:
    """What a sandbox costs with egress on each path, against one without; posix_spawn, to judge the machine."""
    import nsbox

    def start(path: str) -> Callable[[], object]:
        spec = spec_for(path)

        def once() -> None:
            if not nsbox.run(["/bin/true"], spec).ok:
                raise RuntimeError(f"/bin/true with {path}")

        return once

    subjects = {name: start(name) for name in ("none", *paths)}
    samples = measure({**subjects, "posix_spawn": lambda: spawn(["/bin/true"])}, runs, 10)
    return {name: summary(samples[name], samples["none"]) for name in subjects}, samples["posix_spawn"]


def run(settings: dict[str, Any]) -> Found:
    mebibytes, trips, connections = (int(settings[name]) for name in ("mib", "trips", "connections"))
    netns.enter()
    world = start_world()
    try:
        paths = ["gateway", "veth"] if os.geteuid() == 0 else ["gateway"]
        costs, baseline = starts(paths, int(settings["starts"]))
        figures = traffic(paths, int(settings["rounds"]), words(mebibytes, trips, connections))
    finally:
        os.kill(world, signal.SIGKILL)
        os.waitpid(world, 0)
    return {"traffic": figures, "start": costs}, baseline


def traffic_table(report: dict[str, Any]) -> str:
    """The figures, each with its ratio to the host's."""
    names = list(report["traffic"])
    rows = []
    for key, text in METRICS.items():
        host = report["traffic"][BASELINE][key]
        cells = [f"{report['traffic'][name][key]:.1f} ({report['traffic'][name][key] / host:.2f})" for name in names]
        rows.append([text, *cells])
    return table(["", *names], rows)


def text(report: dict[str, Any]) -> list[str]:
    return [traffic_table(report), ratio_table("/bin/true with egress", "none", report["start"])]


BENCHMARK = Benchmark(
    "network",
    "What filtered egress costs, against the bare host path.",
    (
        Setting("rounds", 5, 1, 1, "rounds of traffic"),
        Setting("starts", 200, 2, 5, "rounds of starts"),
        Setting("mib", 512, 1, 16, "MiB each way"),
        Setting("trips", 5000, 1, 200, "round trips"),
        Setting("connections", 1000, 1, 50, "new connections"),
    ),
    run,
    text,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
