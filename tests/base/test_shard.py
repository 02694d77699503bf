"""Splitting indices: every index in one part, parts of almost one size, for any numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.base.shard import Region, buckets, part, split


@given(st.integers(0, 200), st.integers(1, 40))
def test_split(n, parts):
    """Contiguous, in order, complete, sizes differing by at most one with the longer ones first."""
    pieces = split(n, parts)
    assert [i for piece in pieces for i in piece] == list(range(n))
    sizes = [len(piece) for piece in pieces]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert pieces == tuple(part(n, parts, index) for index in range(parts))


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 40))
def test_buckets(sizes, limit):
    """Consecutive and complete; none over the limit unless it is one item, none that the next would
    have fitted.
    """
    groups = buckets(sizes, limit)
    assert [i for group in groups for i in group] == list(range(len(sizes)))
    assert all(len(group) > 0 for group in groups)
    totals = [sum(sizes[i] for i in group) for group in groups]
    assert all(
        total <= limit or len(group) == 1 for total, group in zip(totals, groups, strict=True)
    )
    for total, group in zip(totals, groups[1:], strict=False):
        assert total + sizes[group.start] > limit


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: part(-1, 2, 0), "part 0 of 2 parts of -1 items"),
        (lambda: part(5, 0, 0), "0 parts"),
        (lambda: part(5, 2, 2), "part 2 of 2"),
        (lambda: part(5, 2, -1), "part -1 of 2"),
        (lambda: split(5, 0), None),
        (lambda: buckets([1], 0), "bucket of 0 bytes"),
    ],
)
def test_what_does_not_exist(make, words):
    """The numbers are in the message."""
    if words is None:
        assert make() == ()
        return
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "region",
    [
        Region((4, 6), 1, 2, 4),
        Region((5,), 0, 0, 5),
        Region((6, 2), 0, 1, 2, repeats=2),
        Region((3, 12, 2), 1, 0, 3, repeats=3),
        Region((2, 3), 0, 1, 1),
    ],
    ids=str,
)
def test_a_region_goes_back_where_it_came_from(region):
    full = np.arange(np.prod(region.shape)).reshape(region.shape)
    part = region.take(full).copy()
    assert part.shape == region.local_shape
    other = np.full(region.shape, -1)
    region.put(other, part)
    assert np.array_equal(region.take(other), part)
    assert (other >= 0).sum() == part.size
    assert np.array_equal(other[other >= 0], full[other >= 0])


def test_the_regions_of_an_axis_cover_it():
    """Also where the pieces differ in length and come from several repeats."""
    full = np.arange(2 * 3 * 7 * 5).reshape(2, 21, 5)
    other = np.zeros_like(full)
    for mine in split(7, 4):
        region = Region(full.shape, 1, mine.start, mine.stop, repeats=3)
        region.put(other, region.take(full))
    assert np.array_equal(other, full)


@pytest.mark.parametrize(
    "wrong", [(2, 0, 1, 1), (0, 3, 2, 1), (0, 0, 5, 1), (1, 0, 2, 4), (0, 0, 3, 2)], ids=str
)
def test_a_region_that_does_not_exist_is_refused(wrong):
    with pytest.raises(ValueError, match="does not exist"):
        Region((4, 6), *wrong)
