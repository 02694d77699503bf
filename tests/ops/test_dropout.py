"""Dropout: how much it drops, that the mean stays, and that the mask depends on its key and place
alone.
"""

import numpy as np
import pytest

from nnmpi import Tensor
from nnmpi.backend.random import key_pair
from nnmpi.base.shard import split
from nnmpi.ops import dropout

ROWS, COLUMNS = 200, 500


def mask(rate, key, first_row=0, rows=ROWS):
    """Return which elements of an array of ones are kept."""
    return dropout(Tensor(np.ones((rows, COLUMNS))), rate, key, first_row).data != 0


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_the_rate_is_right(rate, seed):
    """Of 100,000 elements, within 4 standard deviations; so are single rows and columns, within
    5.
    """
    saved = mask(rate, key_pair("test", seed))
    deviation = np.sqrt(rate * (1 - rate))
    assert abs(saved.mean() - (1 - rate)) < 4 * deviation / np.sqrt(saved.size)
    for axis, n in ((0, ROWS), (1, COLUMNS)):
        assert np.abs(saved.mean(axis) - (1 - rate)).max() < 5 * deviation / np.sqrt(n)


def test_what_is_kept_is_scaled():
    """So that the mean stays; the gradient goes the same way."""
    x = Tensor(np.random.default_rng(0).uniform(1, 2, (ROWS, COLUMNS)), requires_grad=True)
    y = dropout(x, 0.25, (1, 2))
    saved = y.data != 0
    np.testing.assert_allclose(y.data, x.data * saved / 0.75, rtol=1e-15)
    assert abs(y.data.mean() / x.data.mean() - 1) < 0.01
    y.backward(np.full(y.shape, 3.0))
    np.testing.assert_allclose(x.grad, saved * 4.0, rtol=1e-15)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 200, 300])
def test_the_mask_is_the_same_under_any_sharding(parts):
    """Rows know their place in the global batch; ranks without rows are no trouble."""
    key = key_pair("dropout", 0, 3, "5")
    pieces = [mask(0.4, key, part.start, len(part)) for part in split(ROWS, parts)]
    np.testing.assert_array_equal(np.concatenate(pieces), mask(0.4, key))


def test_another_key_is_another_mask():
    """Masks of different steps, layers and seeds agree as often as chance has it, and in no shifted
    place either.
    """
    keys = [
        key_pair("dropout", *what)
        for what in ((0, 0, "1"), (0, 1, "1"), (0, 0, "2"), (1, 0, "1"), (0, 0, "11"))
    ]
    masks = [mask(0.5, key) for key in keys]
    for i, first in enumerate(masks):
        for j, other in enumerate(masks[:i]):
            for shift in (0, 1, 2):
                agree = (first[shift:] == other[: ROWS - shift]).mean()
                assert abs(agree - 0.5) < 4 * 0.5 / np.sqrt(first.size - shift * COLUMNS), (
                    i,
                    j,
                    shift,
                )
