"""Sizes and durations as people write them: ``512M``, ``1.5G``, ``30s``, ``2m``, and the word ``unlimited``."""

from nsbox.errors import SpecError
from nsbox.light import re

_SIZE = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_TIME = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
UNLIMITED = "unlimited"


def _parse(name: str, text: str, pattern: str, units: dict[str, int] | dict[str, float], example: str) -> float:
    found = re.fullmatch(pattern, text.strip(), re.IGNORECASE | re.ASCII)
    if not found:
        raise SpecError(f"{name}: {text!r} is not understood; write {example} or {UNLIMITED!r}")
    return float(found[1]) * units[found[2].lower()]


def _positive(name: str, value: float, example: str) -> float:
    if value >= 2**62:
        raise SpecError(f"{name}: is larger than anything that could be; write {example} or {UNLIMITED!r}")
    if not value > 0:
        raise SpecError(f"{name}: must be more than 0, not {max(value, -(2**62)):g}; write {example} or {UNLIMITED!r}")
    return value


def size(name: str, value: object) -> int | None:
    """Bytes from an int or a text such as ``512M`` (K, M, G, T are powers of 1024); None for ``unlimited``."""
    if value == UNLIMITED:
        return None
    if isinstance(value, str):
        value = _parse(name, value, r"(-?\d+(?:\.\d+)?)([kmgt]?)(?:i?b)?", _SIZE, "a size such as 512M")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{name}: wants a size in bytes or a text such as 512M, not {value!r}")
    return max(1, int(_positive(name, value, "a size such as 512M")))


def seconds(name: str, value: object) -> float | None:
    """Seconds from a number or a text such as ``30s``, ``2m``, ``500ms``; None for ``unlimited``."""
    if value == UNLIMITED:
        return None
    if isinstance(value, str):
        value = _parse(name, value, r"(-?\d+(?:\.\d+)?)(ms|s|m|h|)", _TIME, "a time such as 30s")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{name}: wants seconds or a text such as 30s, not {value!r}")
    return float(_positive(name, value, "a time such as 30s"))


def count(name: str, value: object) -> int | None:
    """A whole number of at least 1, or None for ``unlimited``."""
    if value == UNLIMITED:
        return None
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,20}", value.strip(), re.ASCII):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecError(f"{name}: wants a whole number, not {value!r}")
    return int(_positive(name, value, "a whole number such as 64"))


def share(name: str, value: object) -> float | None:
    """A number of processors such as 1.5, or None for ``unlimited``."""
    return _number(name, value, "processors", "a number such as 1.5")


def rate(name: str, value: object) -> float | None:
    """A number of events a second such as 100, or None for ``unlimited``."""
    return _number(name, value, "connections a second", "a number such as 100")


def _number(name: str, value: object, unit: str, example: str) -> float | None:
    if value == UNLIMITED:
        return None
    if isinstance(value, str):
        value = _parse(name, value, r"(-?\d+(?:\.\d+)?)()", {"": 1.0}, example)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{name}: wants a number of {unit}, not {value!r}")
    return float(_positive(name, value, example))
