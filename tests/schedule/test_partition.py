"""Cutting layers into stages: against all cuts there are, with and without a limit of memory."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from nnmpi.base.errors import LayoutError
from nnmpi.schedule.partition import partition

many_layers = st.lists(st.integers(0, 6), min_size=1, max_size=9)


def every_cut(layers, stages):
    for inner in combinations(range(1, layers), stages - 1):
        yield tuple(range(a, b) for a, b in pairwise((0, *inner, layers)))


def sums(cut, numbers):
    return [sum(numbers[i] for i in stage) for stage in cut]


def goodness(cut, times):
    """Return (slowest stage, sum of squares): less is better."""
    result = sums(cut, times)
    return max(result), sum(item**2 for item in result)


@drawn(many_layers, st.data())
def test_no_cut_within_the_limit_is_better(times, data):
    """Nor without a limit; where none is within it, the sentence says the least possible."""
    stages = data.draw(st.integers(1, len(times)))
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(times), max_size=len(times)))
    limit = data.draw(st.none() | st.integers(0, 20))
    most = sum(sizes) if limit is None else limit
    allowed = [cut for cut in every_cut(len(times), stages) if max(sums(cut, sizes)) <= most]
    if allowed:
        cut = partition(times, stages, *(() if limit is None else (sizes, limit)))
        assert cut in allowed
        assert goodness(cut, times) == min(goodness(other, times) for other in allowed)
    else:
        least = min(max(sums(cut, sizes)) for cut in every_cut(len(times), stages))
        with pytest.raises(LayoutError, match=f"least possible is {least}, and the largest layer"):
            partition(times, stages, sizes, limit)


def test_memory_goes_before_time():
    assert partition([1, 1, 1, 1], 2, [9, 1, 1, 1], 9) == (range(1), range(1, 4))
    assert partition([1, 1, 1, 1], 2, [9, 1, 1, 1]) == (range(2), range(2, 4))


@pytest.mark.parametrize(
    "given, words",
    [
        (([1, 2], 3), "2 layers cannot be cut into 3 stages; give 1 to 2 stages"),
        (([1, 2], 0), "into 0 stages"),
        (
            ([1, 2, 3], 2, [4, 40, 5], 39),
            "2 stages do not fit 39 bytes .* least possible is 44, .* number 1, has 40",
        ),
    ],
)
def test_what_cannot_be_cut(given, words):
    with pytest.raises(LayoutError, match=words):
        partition(*given)
