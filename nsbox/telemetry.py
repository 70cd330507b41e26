"""The boundary log as OpenTelemetry traces: a span for each sandbox, an event on it for each event. Optional extra."""

import json
from typing import Any

from nsbox.errors import HostError

_MOST_OPEN = 4096


class SpanSink:
    """Spans begin with sandbox.start and end with sandbox.end; what belongs to none becomes a span of its own."""

    def __init__(self, tracer: Any = None) -> None:
        if tracer is None:
            try:
                from opentelemetry import trace  # type: ignore[import-not-found, unused-ignore]
            except ImportError:
                remedy = "run: pip install 'nsbox[otel]'"
                raise HostError("OpenTelemetry is not installed", remedy=remedy) from None
            tracer = trace.get_tracer("nsbox")
        self.tracer = tracer
        self.spans: dict[str, Any] = {}

    def write(self, event: dict[str, Any], line: bytes) -> None:
        """Pass one event on."""
        sandbox, name = str(event["sandbox"]), str(event["event"])
        attributes = _attributes(event)
        span = self.spans.get(sandbox)
        if span is None:
            span = self.tracer.start_span(name if name != "sandbox.start" else "nsbox.sandbox", attributes=attributes)
            if name != "sandbox.start" or len(self.spans) >= _MOST_OPEN:
                span.end()
            else:
                self.spans[sandbox] = span
            return
        span.add_event(name, attributes=attributes)
        if name == "sandbox.end":
            del self.spans[sandbox]
            span.end()

    def close(self) -> None:
        """End what is still open."""
        while self.spans:
            self.spans.popitem()[1].end()


def _attributes(event: dict[str, Any]) -> dict[str, Any]:
    """Scalars as they are; attributes know no structure, so that the rest is JSON."""
    out = {}
    for name, value in event.items():
        plain = isinstance(value, str | bool | int | float)
        out[f"nsbox.{name}"] = value if plain else json.dumps(value)
    return out
