"""Sizes, durations, counts and shares as people write them."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsbox import units
from nsbox.errors import SpecError

PARSERS = (units.size, units.seconds, units.count, units.share)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("512M", 512 << 20),
        ("512m", 512 << 20),
        ("512MB", 512 << 20),
        ("512MiB", 512 << 20),
        ("1.5G", 3 << 29),
        ("2t", 2 << 40),
        ("10k", 10240),
        (" 1K ", 1024),
        ("0.0001K", 1),
        (7, 7),
        (7.9, 7),
    ],
)
def test_size(text: str | float, value: int) -> None:
    assert units.size("memory", text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("30", 30.0),
        ("30s", 30.0),
        ("500ms", 0.5),
        ("2m", 120.0),
        ("1.5h", 5400.0),
        ("1H", 3600.0),
        (0.25, 0.25),
        (3, 3.0),
    ],
)
def test_seconds(text: str | float, value: float) -> None:
    assert units.seconds("timeout", text) == value


def test_count_and_share() -> None:
    assert units.count("pids", "64") == units.count("pids", 64) == 64
    assert units.share("cpus", "1.5") == units.share("cpus", 1.5) == 1.5


@pytest.mark.parametrize("parse", PARSERS)
def test_unlimited(parse: Callable[[str, object], object]) -> None:
    assert parse("x", "unlimited") is None


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("value", [0, -1, "0", "-1", "-5", 2**63, float("inf"), float("nan"), "9" * 400])
def test_out_of_range(parse: Callable[[str, object], object], value: object) -> None:
    with pytest.raises(SpecError, match=r"^limit: "):
        parse("limit", value)


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "value", ["", " ", "M", "1X", "1 M", "1,5", "0x10", "1e3", "١", "none", "1MM", None, True, [], b"1", "1\n2"]
)
def test_senseless(parse: Callable[[str, object], object], value: object) -> None:
    with pytest.raises(SpecError, match=r"^limit: ") as caught:
        parse("limit", value)
    assert "\n" not in str(caught.value)


@given(st.one_of(st.text(max_size=12), st.integers(), st.floats(), st.booleans(), st.none(), st.binary(max_size=4)))
def test_only_ever_a_good_value_or_spec_error(value: Any) -> None:
    for parse in PARSERS:
        try:
            got = parse("x", value)
        except SpecError:
            continue
        assert got is None if value == "unlimited" else got is not None and 0 < got < 2**62


@given(st.integers(1, 2**40), st.sampled_from([("", 0), ("K", 10), ("M", 20)]))
def test_size_is_exact(number: int, unit: tuple[str, int]) -> None:
    assert units.size("x", f"{number}{unit[0]}") == number << unit[1]
