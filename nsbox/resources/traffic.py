"""What a sandbox reached and what it was refused: counters by destination, and the limits that were touched.

Bounded: a sandbox that scans the world fills ``MOST`` rows and is counted in one more.
"""

import time
from collections.abc import Callable
from typing import Any

from nsbox.plan.net import EgressLimits

MOST = 4096
Log = Callable[[str, dict[str, Any]], None]


class Row:
    """One destination. ``connections`` counts flows for UDP, refused datagrams, and questions for DNS."""

    __slots__ = ("connections", "rx_bytes", "tx_bytes")

    def __init__(self) -> None:
        self.connections = self.tx_bytes = self.rx_bytes = 0


class Traffic:
    """The record of one sandbox. Belongs to the loop's thread."""

    def __init__(self, limits: EgressLimits, log: Log | None) -> None:
        self.limits = limits
        self._log = log
        self._rows: dict[tuple[str, str, int, str, str], Row] = {}
        self._touched: dict[str, list[Any]] = {}
        self.open = 0  #: connections and flows
        self.tx_bytes = self.rx_bytes = 0
        self._tokens = limits.rate or 0.0
        self._filled_at = time.monotonic()

    def event(self, event: str, **fields: Any) -> None:
        """Pass an event on to the boundary log. Its own trouble is not ours."""
        if self._log:
            self._log(event, fields)

    def row(self, host: str, address: str, port: int, protocol: str, verdict: str) -> Row:
        """The counters of a destination."""
        name = (host, address, port, protocol, verdict)
        found = self._rows.get(name)
        if found is None:
            if len(self._rows) >= MOST:
                name = ("", "", 0, protocol, verdict)
            found = self._rows.setdefault(name, Row())
        return found

    def connect(self, host: str, address: str, port: int, protocol: str, verdict: str, reason: str = "") -> Row:
        """One more connection, allowed or denied."""
        row = self.row(host, address, port, protocol, verdict)
        row.connections += 1
        why = {"reason": reason} if reason else {}
        self.event("connect", host=host, address=address, port=port, protocol=protocol, verdict=verdict, **why)
        return row

    def sent(self, row: Row, count: int) -> bool:
        """Count bytes that the sandbox sends; False: no more may leave."""
        limit = self.limits.bytes_out
        if limit is not None and self.tx_bytes + count > limit:
            self.touch("net_bytes", limit)
            return False
        self.tx_bytes += count
        row.tx_bytes += count
        return True

    def received(self, row: Row, count: int) -> None:
        """Count bytes that the sandbox gets."""
        self.rx_bytes += count
        row.rx_bytes += count

    def touch(self, limit: str, value: float) -> None:
        """A limit held something back."""
        entry = self._touched.get(limit)
        if entry is None:
            self._touched[limit] = [value, 1, time.time()]
        else:
            entry[1] += 1

    def held(self, limit: str, value: float, count: int) -> None:
        """A limit that the kernel holds has held so much back until now."""
        if count:
            self._touched.setdefault(limit, [value, count, time.time()])[1] = count

    def room(self) -> bool:
        """Whether one more connection may be open."""
        limit = self.limits.connections
        if limit is not None and self.open >= limit:
            self.touch("net_connections", limit)
            return False
        return True

    def wait(self) -> float:
        """Seconds until the next connection may begin (token bucket of one second's worth); 0 takes its token."""
        rate = self.limits.rate
        if rate is None:
            return 0.0
        now = time.monotonic()
        self._tokens = min(max(rate, 1.0), self._tokens + (now - self._filled_at) * rate)
        self._filled_at = now
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        self.touch("net_rate", rate)
        return (1.0 - self._tokens) / rate

    def unused(self) -> None:
        """Nothing came after all: the token that ``wait`` took goes back."""
        self._tokens += 1.0

    def destinations(self) -> list[dict[str, Any]]:
        """The rows as the report has them."""
        return [
            {
                **({"host": host} if host else {}),
                "address": address,
                "port": port,
                "protocol": protocol,
                "verdict": verdict,
                "connections": row.connections,
                "tx_bytes": row.tx_bytes,
                "rx_bytes": row.rx_bytes,
            }
            for (host, address, port, protocol, verdict), row in self._rows.items()
        ]

    def limits_hit(self) -> list[dict[str, Any]]:
        """The limits that held something back."""
        return [
            {"limit": name, "value": value, "count": count, "first_at": first}
            for name, (value, count, first) in self._touched.items()
        ]
