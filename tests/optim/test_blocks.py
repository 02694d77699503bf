"""Blocks cover their arrays exactly once, as views, whatever the shape."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.optim import blocks
from nnmpi.optim.blocks import ScratchArrays, block_elements, cut, pieces

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@given(SHAPES, st.integers(1, 40))
def test_pieces_cover_every_element_once(shape, limit):
    """Adding 1 to each piece adds 1 to each element, and no piece is larger than the limit or empty."""
    array = np.zeros(shape)
    for index in cut(shape, limit):
        piece = array[index]
        assert np.shares_memory(piece, array)
        assert 0 < piece.size <= limit
        piece += 1
    assert (array == 1).all()


def test_cut_takes_long_runs():
    """Blocks are as many whole rows as fit; rows that do not fit are cut themselves."""
    assert list(cut((5,), 2)) == [(slice(0, 2), ...), (slice(2, 4), ...), (slice(4, 5), ...)]
    assert list(cut((4, 3), 7)) == [(slice(0, 2), ...), (slice(2, 4), ...)]
    assert [len(index) for index in cut((2, 4), 3)] == [3, 3, 3, 3]


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


def test_contiguous_arrays_are_cut_as_flat_ones():
    """A short last dim does not make small blocks."""
    array = np.zeros((5, 3, 2))
    assert [a.shape for (a,) in pieces([array], 16)] == [(16,), (14,)]
    assert [a.shape for (a,) in pieces([array.transpose(1, 0, 2)], 16)] == [(1, 5, 2)] * 3


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
