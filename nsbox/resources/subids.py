"""Ranges of subordinate ids for an unprivileged caller, through newuidmap(1) and newgidmap(1).

Only these set-uid programs may map more than the own id, and only ranges that /etc/subuid and /etc/subgid give to
the caller. The caller itself stays the payload's id inside; the range fills the ids around it.
"""

from __future__ import annotations

import os

from nsbox.errors import HostError
from nsbox.light import NamedTuple

WANTED = 65536
_PROGRAMS = {"uid": "newuidmap", "gid": "newgidmap"}


class Range(NamedTuple):
    """``size`` host ids from ``first`` on."""

    first: int
    size: int


def parse(text: str, names: tuple[str, ...]) -> Range | None:
    """The largest range that a subuid(5) or subgid(5) file gives to one of ``names``."""
    found = []
    for line in text.splitlines():
        owner, _, numbers = line.partition(":")
        first, _, count = numbers.partition(":")
        if owner in names and first.isdigit() and count.isdigit():
            found.append(Range(int(first), int(count)))
    return max(found, key=lambda item: item.size, default=None)


def ranges(uid: int) -> tuple[Range, Range]:
    """The caller's subordinate uid and gid ranges. Raises HostError, with the remedy, where there are none."""
    try:
        import pwd

        names: tuple[str, ...] = (pwd.getpwuid(uid).pw_name, str(uid))
    except KeyError:
        names = (str(uid),)
    out = []
    for path in ("/etc/subuid", "/etc/subgid"):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                found = parse(file.read(), names)
        except OSError:
            found = None
        if found is None or found.size < 2:
            raise HostError(
                f"subids: {path} gives no range to {names[0]}",
                remedy=f"run as root: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {names[0]}",
            )
        out.append(found)
    return out[0], out[1]


def mapping(inside: int, own: int, extra: Range) -> list[tuple[int, int, int]]:
    """(inside, outside, count) extents: ``own`` at ``inside``, and ``extra`` on the ids before and after it."""
    before = min(inside, extra.size)
    after = min(WANTED - inside - 1, extra.size - before)
    extents = [(0, extra.first, before), (inside, own, 1), (inside + 1, extra.first + before, after)]
    return [extent for extent in extents if extent[2] > 0]


def write(pid: int, kind: str, extents: list[tuple[int, int, int]]) -> None:
    """Have newuidmap or newgidmap write a map. Raises HostError."""
    words = [_PROGRAMS[kind], str(pid), *(str(number) for extent in extents for number in extent)]
    try:
        child = os.posix_spawnp(words[0], words, {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"})
    except OSError as error:
        raise HostError(
            f"subids: cannot run {words[0]}: {error.strerror}", remedy="install it: apt-get install uidmap"
        ) from None
    _, status = os.waitpid(child, 0)
    if status:
        raise HostError(
            f"subids: {' '.join(words)} was refused (status {os.waitstatus_to_exitcode(status)})",
            remedy="see that /etc/subuid and /etc/subgid give you the range and that newuidmap is set-uid root",
        )
