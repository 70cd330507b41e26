"""Replaces the values of secrets in what comes out of a sandbox, also where a value is cut in two by the transport.

Masked are the value itself and its usual spellings: base64 (also of a longer text that it is part of), hexadecimal, and
percent-encoding. Not masked is what a program computes from it in another way: masking keeps secrets out of logs by
accident, it is no wall against a payload that means to leak one. Egress rules and short lives are.
"""

import base64
import heapq
import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote, quote_plus

from nsbox.secrets import MIN_MASKED

#: Shorter values would be found everywhere.
MIN_LENGTH = MIN_MASKED
MASK = "***"


def spellings(value: bytes) -> set[bytes]:
    """The value, and what it looks like encoded."""
    found = {value, value.hex().encode(), value.hex().upper().encode()}
    found |= {value.strip()}
    try:
        text = value.decode()
    except UnicodeDecodeError:
        pass
    else:
        quoted = quote(text, safe="")
        # Encoders agree neither on the case of the digits nor on the slash.
        found |= {form.encode() for form in (quoted, quote(text), quote_plus(text), re.sub("%..", _lower, quoted))}
        found.add(text.encode("unicode_escape"))
        found.add(_json(text))
    found |= _base64_forms(value)
    return {form for form in found if len(form) >= MIN_LENGTH}


def _lower(match: "re.Match[str]") -> str:
    return match[0].lower()


def _json(text: str) -> bytes:
    import json

    return json.dumps(text)[1:-1].encode()


def _base64_forms(value: bytes) -> set[bytes]:
    """The characters of base64 that depend on the value alone, for each of the three ways that it can be aligned."""
    found = set()
    for before in range(3):
        whole = base64.b64encode(bytes(before) + value)
        # 6 bits a character: those that hold bits of what is before or after are left out.
        start = (before * 8 + 5) // 6
        end = (before + len(value)) * 8 // 6
        form = whole[start:end]
        found |= {form, form.translate(bytes.maketrans(b"+/", b"-_"))}
    # The ends are seen by anybody who knows what they look like.
    found |= {base64.b64encode(value), base64.urlsafe_b64encode(value)}
    return {form for form in found if len(form) >= 2 * MIN_LENGTH}


class Masker:
    """Masks one stream. ``feed`` gives what can be given already; ``flush`` the rest, at the end."""

    def __init__(self, secrets: "Mapping[str, bytes] | Iterable[bytes]", *, encoded: bool = True) -> None:
        named = secrets.items() if isinstance(secrets, Mapping) else (("", value) for value in secrets)
        self._masks: dict[bytes, bytes] = {}
        self.too_short: tuple[str, ...] = ()  #: names of secrets that are not masked since they are in every text
        self.seen: set[str] = set()  #: names of the secrets that came by
        self._names: dict[bytes, str] = {}
        for name, value in named:
            if len(value) < MIN_LENGTH:
                self.too_short += (name,)
                continue
            mask = f"***{name}***".encode() if name else MASK.encode()
            for form in spellings(value) if encoded else {value}:
                self._masks.setdefault(form, mask)
                self._names.setdefault(form, name)
        # Longest first, so that a value that contains another is masked whole.
        ordered = sorted(self._masks, key=lambda form: (-len(form), form))
        self._keep = max(map(len, ordered), default=1) - 1
        self._forms = tuple(ordered)
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What is safe to pass on after this piece; the start of a value may be held back until its end is known."""
        if not self._forms:
            return data
        text = self._held + data
        cut = self._cut(text)
        self._held = text[cut:]
        return self._replace(text[:cut])

    def flush(self) -> bytes:
        """The rest. The masker is as new after it."""
        rest, self._held = self._held, b""
        return self._replace(rest)

    def mask(self, text: bytes) -> bytes:
        """A whole text at once, apart from the stream."""
        return self._replace(text)

    def mask_text(self, text: str) -> str:
        """A whole text at once."""
        try:
            return self._replace(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # half a surrogate pair, which is no byte of a path
            return self._replace(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")

    def _replace(self, text: bytes) -> bytes:
        out, position = [], 0
        for start, form in self._matches(text):
            self.seen.add(self._names[form])
            out += [text[position:start], self._masks[form]]
            position = start + len(form)
        return b"".join([*out, text[position:]]) if out else text

    def _matches(self, text: bytes) -> Iterator[tuple[int, bytes]]:
        """(where, what) from left to right, the longest first at each place. No regular expression, for ``re`` keeps
        what it has compiled: the values would stay in its cache."""
        found = [(at, number) for number, form in enumerate(self._forms) if (at := text.find(form)) >= 0]
        heapq.heapify(found)
        position = 0
        while found:
            at, number = found[0]
            form = self._forms[number]
            if at >= position:
                yield at, form
                position = at + len(form)
            at = text.find(form, position)
            heapq.heapreplace(found, (at, number)) if at >= 0 else heapq.heappop(found)

    def _begins(self, tail: bytes) -> bool:
        """Whether more bytes could make this one of the values."""
        return any(len(tail) < len(form) and form.startswith(tail) for form in self._forms)

    def _cut(self, text: bytes) -> int:
        """Where the part ends that no later byte can change.

        A match that ends before the hold-back is certain. One that reaches into it, or the start of a value at the end
        of the text, waits.
        """
        # The leftmost place from which the text to its end is the beginning of a value.
        first = max(0, len(text) - self._keep)
        waiting = next((at for at in range(first, len(text)) if self._begins(text[at:])), len(text))
        if waiting == len(text):
            return waiting
        # A value that started earlier and overlaps that place is masked by its own right: cut behind it.
        position = 0
        for start, form in self._matches(text):
            if start >= waiting:
                break
            position = start + len(form)
        return max(waiting, position)
