"""Neighbours on a ring and random pairs: everybody agrees who is with whom, and all pairings are equally likely."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.errors import UsageError
from nnmpi.synchrony.neighbours import matching, ring


def test_ring_is_the_picture() -> None:
    assert [ring(rank, 5) for rank in range(5)] == [(4, 1), (0, 2), (1, 3), (2, 4), (3, 0)]
    assert ring(0, 1) == ()
    assert [ring(rank, 2) for rank in range(2)] == [(1,), (0,)]


@given(st.integers(1, 70))
def test_neighbours_are_mutual(size: int) -> None:
    for rank in range(size):
        assert rank not in ring(rank, size)
        assert all(rank in ring(other, size) for other in ring(rank, size))


@given(st.integers(1, 65), st.integers(0, 2**40), st.integers(0, 10**6))
def test_a_matching_pairs_all_but_one_of_an_odd_number(size: int, seed: int, step: int) -> None:
    partners = matching(size, seed, step)
    assert [partners[partners[rank]] for rank in range(size)] == list(range(size))
    assert sum(partners[rank] == rank for rank in range(size)) == size % 2
    assert partners == matching(size, seed, step)


def test_matchings_depend_on_seed_and_step() -> None:
    assert len({tuple(matching(16, seed, step)) for seed in range(10) for step in range(10)}) == 100


@pytest.mark.parametrize("size", [4, 5, 6])
def test_all_pairs_come_equally_often(size: int) -> None:
    """With 4000 draws a pair's share is off by a fortieth of its square root at most (5 standard deviations)."""
    draws = 4000
    counts = Counter((rank, other) for step in range(draws) for rank, other in enumerate(matching(size, 3, step)))
    share = 1 / size if size % 2 else 1 / (size - 1)  # an odd rank out is its own partner as often as another's
    for rank in range(size):
        for other in range(size):
            expected = share if size % 2 or rank != other else 0
            assert abs(counts[rank, other] / draws - expected) <= 5 * np.sqrt(share / draws) * (expected > 0)


@pytest.mark.parametrize(("size", "rate"), [(2, 0.0), (4, 1 / 3), (7, 1 / 2), (16, 7 / 15), (64, 31 / 63)])
def test_random_pairs_shrink_differences_as_boyd_says(size: int, rate: float) -> None:
    """The square shrinks, on average over the pairings, by the second eigenvalue of the mean mixing matrix."""
    mean = np.zeros((size, size))
    for step in range(1500):
        mean += 0.5 * (np.eye(size) + np.eye(size)[matching(size, 0, step)]) / 1500
    x = np.random.default_rng(0).standard_normal(size)
    x -= x.mean()
    assert x @ mean @ x / (x @ x) == pytest.approx(rate, abs=0.04)  # W is a projection: x W' W x = x W x


@pytest.mark.parametrize("call", [lambda: ring(4, 4), lambda: ring(-1, 4), lambda: matching(0, 0, 0)])
def test_what_does_not_exist_is_refused(call: object) -> None:
    with pytest.raises(UsageError, match="rank"):
        call()  # type: ignore[operator]
