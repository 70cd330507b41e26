"""The boundary log for people: one line an event, or one run as a story. Reads only; the printing is the command's."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nsbox import diff
from nsbox.errors import SpecError

Event = dict[str, Any]
Part = tuple[str, str]  #: a piece of text and its style, by the names of rich
_LOUD, _BAD, _SOFT, _GOOD = "bold", "bold red", "dim", "green"
_MAX_LINE = 1 << 20
POLL_S = 0.2


def events(
    path: str,
    *,
    sandbox: str | None = None,
    follow: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """The events of a log, those of one sandbox (by the beginning of its id) if asked for.

    A line that is none becomes ``{"event": "unreadable", "text": …}``. With ``follow``, what is appended comes as it is
    written, also after the file was replaced, until ``stop()``. Raises SpecError when the file cannot be read.
    """
    for line in _lines(path, follow, stop):
        event = parse(line)
        if sandbox is None or str(event.get("sandbox", "")).startswith(sandbox):
            yield event


def parse(line: bytes) -> Event:
    """A line as event; never raises."""
    try:
        event = json.loads(line)
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            return event
    except (ValueError, RecursionError):
        pass
    return {"event": "unreadable", "text": line[:200].decode("utf-8", "replace").rstrip("\n")}


def _lines(path: str, follow: bool, stop: Callable[[], bool]) -> Iterator[bytes]:
    try:
        file = open(path, "rb")  # noqa: SIM115 - replaced while it is read
    except OSError as error:
        raise SpecError(f"log: {path}: {error.strerror}; name a log that you may read") from None
    rest, fresh = b"", None
    try:
        while True:
            while line := file.readline(_MAX_LINE):
                rest += line
                # A writer writes whole lines, a reader may come in between two pages of one.
                if rest.endswith(b"\n") or len(rest) > _MAX_LINE:
                    yield rest
                    rest = b""
            if fresh is not None:  # what was left in the old one has been read
                file.close()
                file, fresh, rest = fresh, None, b""
                continue
            if not follow or stop():
                break
            time.sleep(POLL_S)
            fresh = _replaced(path, file.fileno(), file.tell())
        if rest:
            yield rest
    finally:
        file.close()


def _replaced(path: str, fd: int, position: int) -> Any:
    """The file that is under the name by now, opened, when it is another or was cut; else None."""
    mine = os.fstat(fd)
    try:
        there = os.stat(path)
        if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino) and there.st_size >= position:
            return None
        return open(path, "rb")
    except OSError:  # not there at the moment
        return None


def parts(event: Event) -> list[Part]:
    """One event as one line, in pieces with a style. Never raises, and holds no control character."""
    name = str(event.get("event"))
    writer = _WRITERS.get(name)
    if writer is None:
        return [(escaped(str(event.get("text", event)))[:300], _SOFT)]
    head = [(f"{_clock(event)} ", _SOFT), (f"{_text(event, 'sandbox')[:8]:<8} ", _SOFT), (f"{name:<14} ", _LOUD)]
    try:
        body = writer(event)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError):
        body = [(escaped(json.dumps(event))[:300], _SOFT)]
    cut = [(f"  (cut: {_list(event.get('truncated'))})", _SOFT)] if event.get("truncated") else []
    return head + body + cut


def plain(pieces: Iterable[Part]) -> str:
    """The pieces without their styles."""
    return "".join(text for text, _ in pieces).rstrip()


def rich_text(pieces: Iterable[Part]) -> Any:
    """The pieces as ``rich.text.Text``. Raises ImportError where rich is not installed."""
    from rich.text import Text  # type: ignore[import-not-found, unused-ignore]

    return Text.assemble(*pieces)


def story(run: Iterable[Event]) -> Iterator[str]:
    """One run as sentences, in the order in which it happened, with the time since it began."""
    begun: float | None = None
    for event in run:
        writer = _WRITERS.get(str(event.get("event")))
        if writer is None:
            continue
        now = _seconds(event)
        begun = now if begun is None else begun
        try:
            text = plain(writer(event))
        except (TypeError, ValueError, KeyError, AttributeError, IndexError):
            text = escaped(json.dumps(event))[:300]
        words = _WORDS.get(str(event["event"]), str(event["event"]))
        yield f"{max(0.0, now - begun):9.3f} s  {words} {text}".rstrip()


_WORDS = {
    "sandbox.start": "A sandbox is made for",
    "input": "It sees",
    "secret.deliver": "It is given the secret",
    "secret.revoke": "It loses the secret",
    "dns.query": "It asks for the name",
    "connect": "It connects to",
    "limit": "It touches the limit",
    "output": "It leaves",
    "sandbox.end": "It is gone:",
    "command": "It has run",
    "policy": "Its network policy is changed:",
    "refusal": "Refused:",
    "coverage": "The process has executed",
}


def escaped(text: str) -> str:
    """Text without anything that a terminal acts upon, tabs included."""
    return diff.escaped(text).replace("\t", "\\t")


def _clock(event: Event) -> str:
    return _text(event, "ts")[11:23].rstrip("Z") or "--:--:--.---"


def _seconds(event: Event) -> float:
    from datetime import datetime

    try:
        return datetime.fromisoformat(str(event.get("ts"))).timestamp()
    except ValueError:
        return 0.0


def _text(event: Event, name: str) -> str:
    return escaped(str(event.get(name, "")))


def _list(values: Any) -> str:
    return ", ".join(escaped(str(value)) for value in values)


def _verdict(event: Event) -> Part:
    verdict = _text(event, "verdict")
    return f" {verdict}", _GOOD if verdict == "allowed" else _BAD


def _start(event: Event) -> list[Part]:
    import shlex

    out: list[Part] = [(escaped(shlex.join(map(str, event["argv"]))), ""), (f"  net {_text(event, 'net')}", _SOFT)]
    if event.get("open_egress"):
        out.append(("  open egress", _BAD))
    for title, name, style in (("let through", "sensitive_mounts", _BAD), ("covered", "masked", _SOFT)):
        if event.get(name):
            out.append((f"  {title}: {_list(item['path'] for item in event[name])}", style))
    if event.get("found"):
        out.append((f"  credentials inside: {_list(event['found'])}", _BAD))
    return out


def _input(event: Event) -> list[Part]:
    mode = {"ro": "read-only", "rw": "writable", "cow": "copy-on-write"}.get(_text(event, "mode"), _text(event, "mode"))
    return [(_text(event, "path"), ""), (f"  {mode}", _LOUD if mode == "writable" else _SOFT)]


def _deliver(event: Event) -> list[Part]:
    ttl = f", for {event['ttl_s']:g} s" if "ttl_s" in event else ""
    return [(_text(event, "name"), ""), (f"  as {_text(event, 'delivered_as')}{ttl}", _SOFT)]


def _revoke(event: Event) -> list[Part]:
    return [(_text(event, "name"), ""), (f"  {_text(event, 'why')}", _SOFT)]


def _query(event: Event) -> list[Part]:
    answers = [(f"  {_list(event['answers'])}", _SOFT)] if event.get("answers") else []
    return [(f"{_text(event, 'name')} {_text(event, 'kind')}", ""), _verdict(event), *answers]


def _connect(event: Event) -> list[Part]:
    host, address = _text(event, "host"), _text(event, "address")
    place = f"{host} ({address})" if host else address
    out: list[Part] = [(f"{place}:{_text(event, 'port')}/{_text(event, 'protocol')}", ""), _verdict(event)]
    if event.get("connections", 1) != 1:
        out.append((f"  {_text(event, 'connections')} times", _SOFT))
    if "tx_bytes" in event or "rx_bytes" in event:
        out.append((f"  {_text(event, 'tx_bytes') or 0} bytes out, {_text(event, 'rx_bytes') or 0} in", _SOFT))
    return [*out, *([(f"  {_text(event, 'why')}", _SOFT)] if event.get("why") else [])]


def _limit(event: Event) -> list[Part]:
    value = f" of {_text(event, 'value')}" if "value" in event else ""
    return [(f"{_text(event, 'limit')}{value}", _BAD), (f"  {_text(event, 'count')} times", _SOFT)]


def _output(event: Event) -> list[Part]:
    action = _text(event, "action")
    out: list[Part] = [(f"{_text(event, 'path')}  {_text(event, 'change')}, {_text(event, 'bytes')} bytes", "")]
    if event.get("trusted_by_host"):
        out.append(("  the host would act upon it", _BAD))
    if event.get("secrets"):
        out.append((f"  contains {_list(event['secrets'])}", _BAD))
    style = _BAD if action in ("held_back", "conflict") else _SOFT
    why = f": {_text(event, 'why')}" if event.get("why") else ""
    return [*out, (f"  {action.replace('_', ' ')}{why}", style)]


def _end(event: Event) -> list[Part]:
    reason = _text(event, "reason")
    code = f" {_text(event, 'exit_code')}" if "exit_code" in event else ""
    signal = f" by signal {_text(event, 'signal')}" if "signal" in event else ""
    good = reason == "exited" and event.get("exit_code") == 0
    return [(f"{reason}{code}{signal}", _GOOD if good else _BAD), (f"  after {event['lifetime_seconds']:.3f} s", _SOFT)]


def _command(event: Event) -> list[Part]:
    import shlex

    argv = escaped(shlex.join(map(str, event["argv"])))
    code = f" {event['exit_code']}" if "exit_code" in event else ""
    signal = f" by signal {event['signal']}" if "signal" in event else ""
    good = _text(event, "reason") == "exited" and event.get("exit_code") == 0
    ended = (f"  {_text(event, 'reason')}{code}{signal}", _GOOD if good else _BAD)
    return [(argv, ""), ended, (f"  after {event['seconds']:.3f} s", _SOFT)]


def _policy(event: Event) -> list[Part]:
    action = _text(event, "action")
    wide = [("  open egress", _BAD)] if event.get("open_egress") else []
    return [(f"{action} {_list(event['rules'])}", _GOOD if action == "deny" else _LOUD), *wide]


def _refusal(event: Event) -> list[Part]:
    path = f"{_text(event, 'path')}: " if event.get("path") else ""
    word = [(f"  ({_text(event, 'word')})", _SOFT)] if event.get("word") else []
    return [(f"{path}{_text(event, 'why')}", _BAD), *word]


def _coverage(event: Event) -> list[Part]:
    return [
        (
            f"{_text(event, 'sandboxed')} in sandboxes, {_text(event, 'bare')} past them",
            "" if not event["bare"] else _BAD,
        )
    ]


_WRITERS: dict[str, Callable[[Event], list[Part]]] = {
    "sandbox.start": _start,
    "input": _input,
    "secret.deliver": _deliver,
    "secret.revoke": _revoke,
    "dns.query": _query,
    "connect": _connect,
    "limit": _limit,
    "output": _output,
    "sandbox.end": _end,
    "command": _command,
    "policy": _policy,
    "refusal": _refusal,
    "coverage": _coverage,
}
