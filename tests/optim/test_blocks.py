"""Blocks cover their arrays exactly once, as views, whatever the shape."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.optim import blocks
from nnmpi.optim.blocks import ScratchArrays, block_elements, pieces

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@given(SHAPES, st.integers(1, 40), st.booleans())
def test_pieces_of_several_arrays_belong_together(shape, limit, transposed):
    """Pieces show the same elements of every array, also when one of them is not contiguous."""
    first = np.arange(math.prod(shape), dtype="float64").reshape(shape)
    second = np.asfortranarray(first) if transposed else first.copy()
    seen = 0
    for a, b in pieces([first, second], limit):
        np.testing.assert_array_equal(a, b)
        assert np.shares_memory(a, first)
        assert np.shares_memory(b, second)
        seen += a.size
    assert seen == first.size


def test_scratch_is_shared_and_bounded(monkeypatch):
    """One pair of arrays serves all buffers of a dtype and is never larger than a block or the largest buffer."""
    monkeypatch.setattr(blocks, "HOST_BLOCK_BYTES", 64)
    small, large, wide = np.zeros(3, "float32"), np.zeros(1000, "float32"), np.zeros(5)
    assert block_elements(large) == 16
    scratch = ScratchArrays([small, large, wide])
    first, second = scratch.like(large[:16].reshape(4, 4))
    assert first.shape == second.shape == (4, 4)
    assert not np.shares_memory(first, second)
    assert first.base.size == 16
    assert np.shares_memory(scratch.like(small)[0], first)
    assert scratch.like(wide)[0].dtype == np.float64
    assert scratch.like(wide)[0].size == 5
