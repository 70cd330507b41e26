"""Subordinate ids: whose range, and how it is laid around the caller's own id."""

import pytest

from nsbox.errors import HostError
from nsbox.resources import subids

FILE = "# comment\nalice:100000:65536\nbob:200000:10\n1001:300000:65536\nalice:900000:70000\nbroken\nalice:x:1\n"


def test_the_largest_range_of_a_name_or_number() -> None:
    assert subids.parse(FILE, ("alice",)) == (900000, 70000)
    assert subids.parse(FILE, ("carol", "1001")) == (300000, 65536)
    assert subids.parse(FILE, ("nobody",)) is None


@pytest.mark.parametrize("inside", [0, 1, 1000, 65533])
def test_every_id_inside_is_mapped_once(inside: int) -> None:
    extents = subids.mapping(inside, 4242, subids.Range(100000, 65536))
    covered = [number for first, _, count in extents for number in range(first, first + count)]
    assert sorted(covered) == list(range(65536))
    assert (inside, 4242, 1) in extents
    outside = [number for _, first, count in extents for number in range(first, first + count)]
    assert len(set(outside)) == len(outside)
    assert all(number == 4242 or 100000 <= number < 165536 for number in outside)


def test_a_small_range_reaches_as_far_as_it_goes() -> None:
    assert subids.mapping(1000, 7, subids.Range(500, 10)) == [(0, 500, 10), (1000, 7, 1)]


def test_no_range_names_the_remedy() -> None:
    with pytest.raises(HostError, match="usermod --add-subuids"):
        subids.ranges(4_000_000_000)
