"""Landlock as one more layer: where the payload may write, and no signals or abstract sockets beyond its box."""

from __future__ import annotations

from nsbox.light import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

# landlock(7). Later ABIs add rights; one asks only for what the kernel knows.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
SCOPE_ABSTRACT_UNIX, SCOPE_SIGNAL = 1, 2
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}


class Ruleset(NamedTuple):
    """What landlock_create_ruleset and landlock_add_rule get. All zero: no ruleset."""

    handled: int = 0
    scoped: int = 0
    rules: tuple[tuple[str, int], ...] = ()


def rights(abi: int) -> int:
    """Every file-system right that a kernel of this ABI can restrict."""
    return max((mask for since, mask in _RIGHTS.items() if since <= abi), default=0)


def ruleset(abi: int, writable: Iterable[str]) -> Ruleset:
    """Read and execute everywhere, write beneath ``writable`` (absolute places inside) only."""
    if abi < 1:
        return Ruleset()
    handled = rights(abi)
    read = (READ_FILE | READ_DIR | EXECUTE) & handled
    rules = [("/", read)]
    rules += [(place, handled & ~(0 if place == "/dev" else IOCTL_DEV)) for place in writable]
    scoped = SCOPE_ABSTRACT_UNIX | SCOPE_SIGNAL if abi >= 6 else 0
    return Ruleset(handled, scoped, tuple(rules))
