"""A change set as a unified diff for people: escaped, bounded, and honest about what it does not show."""

import os
from collections.abc import Iterator
from typing import NamedTuple

from nsbox import tree
from nsbox.change import DELETED, MODE_CHANGED, Change, ChangeSet

# difflib needs time that grows with the square of the lines.
MAX_FILE_BYTES, MAX_FILE_LINES, MAX_TOTAL_BYTES = 256 << 10, 4000, 4 << 20


class _Side(NamedTuple):
    lines: list[str]
    note: str = ""


def escaped(text: str) -> str:
    """Text that a terminal shows as it is: control, invisible and direction-changing characters as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\t" else _escape(c) for c in text)


def _escape(char: str) -> str:
    number = ord(char)
    if 0xDC80 <= number <= 0xDCFF:  # a byte that is not UTF-8, by surrogateescape
        return f"\\x{number - 0xDC00:02x}"
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def unified(changes: ChangeSet, upper_fd: int, lower_path: str | None, *, max_bytes: int = MAX_TOTAL_BYTES) -> str:
    """The change set as text, about ``max_bytes`` of it at most. Raises OSError when ``lower_path`` is not there."""
    lower = -1 if lower_path is None else os.open(lower_path, tree.DIRECTORY)
    pieces, left = [], max_bytes
    try:
        with tree.Walker(upper_fd, lend=True) as new, tree.Walker(lower) as old:
            for number, entry in enumerate(changes.entries):
                if left <= 0:
                    pieces.append(f"... {len(changes.entries) - number} more changes are not shown\n")
                    break
                piece = "".join(line + "\n" for line in _entry(entry, old if lower >= 0 else None, new))
                pieces.append(piece)
                left -= len(piece)
    finally:
        if lower >= 0:
            os.close(lower)
    pieces += [f"... not looked at: {what}\n" for what in changes.truncated]
    return "".join(pieces)


def _entry(entry: Change, old: tree.Walker | None, new: tree.Walker) -> Iterator[str]:
    name = escaped(entry.path)
    yield f"{entry.change} {entry.kind} {name}{_details(entry)}"
    if entry.trusted_by_host:
        yield f"! held back unless allowed by name: {entry.trusted_by_host}"
    if entry.secrets:
        yield f"! contains the secret{'s' if len(entry.secrets) > 1 else ''} {', '.join(map(escaped, entry.secrets))}"
    before = entry.before
    was_file = before is not None and before.kind == "file" and old is not None
    is_file = entry.kind == "file" and entry.change != DELETED
    if entry.change == MODE_CHANGED or not (was_file or is_file):
        return
    left = _lines(old, entry.path) if was_file and old is not None else _Side([])
    right = _lines(new, entry.path) if is_file else _Side([])
    note = left.note or right.note
    if note:
        yield f"  ({note})"
        return
    import difflib

    from_name = f"a/{name}" if was_file else "/dev/null"
    to_name = f"b/{name}" if is_file else "/dev/null"
    yield from difflib.unified_diff(left.lines, right.lines, from_name, to_name, lineterm="")


def _details(entry: Change) -> str:
    parts = []
    if entry.before is not None and entry.before.mode != entry.mode and entry.change != DELETED:
        parts.append(f"mode {entry.before.mode:04o} to {entry.mode:04o}")
    elif entry.mode & 0o111 and entry.kind == "file" and entry.before is None:
        parts.append("executable")
    if entry.target is not None:
        parts.append(f"leads to {escaped(entry.target)}")
    if entry.linked_to is not None:
        parts.append(f"the same file as {escaped(entry.linked_to)}")
    if entry.note:
        parts.append(entry.note)
    return f" ({', '.join(parts)})" if parts else ""


def _lines(walker: tree.Walker, path: str) -> _Side:
    parents, name = tree.split(path)
    try:
        fd, status = tree.open_file(walker.directory(parents), name, lend=walker.lend)
    except OSError as error:
        return _Side([], f"cannot be read: {error.strerror}")
    try:
        if status.st_size > MAX_FILE_BYTES:
            return _Side([], f"too large to show: {status.st_size} bytes")
        data = tree.exactly(fd, MAX_FILE_BYTES)
    finally:
        os.close(fd)
    if b"\0" in data:
        return _Side([], f"binary, {len(data)} bytes")
    # Only the line feed ends a line for a compiler; what Python takes for one besides would be shown as such.
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    lines[-1:] = [f"{lines[-1]}\\ (no newline at the end)"] if lines[-1] else []
    if len(lines) > MAX_FILE_LINES:
        return _Side([], f"too long to show: {len(lines)} lines")
    return _Side([escaped(line) for line in lines])
