"""Gradient norms against exact sums, what is not finite, clipping in place, and the loss scale."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi import nn
from nnmpi.base.errors import CheckpointError
from nnmpi.optim import clip_by_global_norm, global_norm, optimizer
from nnmpi.optim.clip import FIRST, LEAST, LossScale, sum_of_squares


@given(st.lists(st.lists(st.floats(-1e100, 1e100), max_size=30), max_size=4))
def test_norm_of_several_arrays(lists):
    """The norm is that of all numbers together; math.fsum adds the squares without rounding."""
    expected = math.sqrt(math.fsum(value * value for values in lists for value in values))
    assert global_norm([np.array(values) for values in lists]) == pytest.approx(
        expected, rel=1e-14, abs=1e-300
    )


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-7), ("float64", 1e-13)])
def test_blocks_are_added_in_float64(dtype, tolerance, monkeypatch):
    """A million equal numbers: one float32 sum would stop growing long before the end."""
    monkeypatch.setattr(optimizer, "HOST_BLOCK_BYTES", 4096)
    grad = np.full(1_000_003, 0.1, dtype)
    expected = math.fsum(grad.astype("float64") ** 2)
    assert sum_of_squares([grad]) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("size", [1e30, 3e38, 1e-30, 1e-40])
def test_float32_squares_that_overflow_or_underflow(size):
    """Squared in float32 these are infinity or zero; their norm is neither."""
    grads = [np.full((2, 2), size, "float32"), np.zeros(3, "float32")]
    assert global_norm(grads) == pytest.approx(2 * float(grads[0][0, 0]), rel=1e-12, abs=0)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_not_finite_comes_through_and_is_left_in_place(bad, dtype):
    """Clipping cannot mend such a gradient: the norm says so, and the arrays keep the evidence."""
    grads = [np.ones(5, dtype), np.array([2, bad, 3], dtype)]
    saved = [grad.copy() for grad in grads]
    norm = clip_by_global_norm(grads, 1.0)
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf
    for grad, copy in zip(grads, saved, strict=True):
        np.testing.assert_array_equal(grad, copy)


@given(
    st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=9), min_size=1, max_size=3),
    st.floats(0.1, 20),
)
def test_clipped_gradients_point_the_same_way_and_are_short_enough(lists, max_norm):
    grads = [np.array(values) for values in lists]
    saved = np.concatenate(grads)
    norm = clip_by_global_norm(grads, max_norm)
    assert norm == pytest.approx(np.linalg.norm(saved), rel=1e-13)
    assert global_norm(grads) <= max_norm
    shrink = max_norm / (norm + 1e-6)
    np.testing.assert_allclose(np.concatenate(grads), saved * min(1, shrink), rtol=1e-13)
    if shrink >= 1:
        np.testing.assert_array_equal(np.concatenate(grads), saved)


def test_no_large_copy_is_made():
    """The norm of 8 MB of float32 needs no more than two blocks of float64, also when it overflows
    float32.
    """
    grads = [np.full(2_000_000, 1e25, "float32")]
    tracemalloc.start()
    try:
        clip_by_global_norm(grads, 1.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


def test_an_overflow_halves_it_and_counting_begins_anew():
    scale = LossScale(8, good_steps=3)
    scale.grow()
    scale.grow()
    assert scale.shrink()
    assert (scale.value, scale.good, scale.skipped) == (4, 0, 1)
    scale.grow()
    scale.grow()
    assert scale.value == 4
    scale.grow()
    assert scale.value == 8


def test_at_its_smallest_no_step_is_skipped():
    scale = LossScale()
    assert scale.value == FIRST
    skipped = 0
    while scale.shrink():
        skipped += 1
    assert scale.value == LEAST
    assert skipped == scale.skipped == 16


def test_its_state_is_put_back():
    first, other = LossScale(good_steps=5), LossScale(good_steps=5)
    first.shrink()
    first.grow()
    first.grow()
    other.load(first.state())
    for _ in range(3):
        first.grow()
        other.grow()
    assert first.state() == other.state() == {"value": FIRST, "good": 0, "skipped": 1}


@pytest.mark.parametrize(
    "state", [{}, {"value": 2.0, "good": 1}, {"value": None, "good": 1, "skipped": 0}]
)
def test_a_state_that_lacks_something_is_refused(state):
    scale = LossScale()
    with pytest.raises(CheckpointError, match="loss scale lacks a value"):
        scale.load(state)
    assert scale.value == FIRST


def test_parameters_that_a_step_leaves_out_do_not_count():
    """The last step's gradients are still in their part of the flat array."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2)).initialize()
    x = np.ones((1, 3), np.float32)
    for layer in (model[0], model[1]):
        model.zero_grad()
        layer(x).sum().backward()
        norm = clip_by_global_norm(model.parameters(), 0.5)
        assert norm == pytest.approx(8**0.5)
    model[1].weight.grad = 0 * model[1].weight.data  # set by hand, and not in the flat array
    norm = clip_by_global_norm(model.parameters(), 0.5)
    assert norm == pytest.approx(0.25)  # of the bias


@pytest.mark.parametrize(
    "take",
    [
        lambda model: [*model.parameters()],
        lambda model: iter(model.parameters()),
        lambda model: [*model[0].parameters(), *model.parameters()],  # each counts once
        lambda model: [*model[0].parameters(), *model[1].parameters()],
    ],
)
def test_lists_of_parameters_as_in_pytorch(take):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).initialize()
    other = nn.Linear(3, 2).initialize()
    (model(np.ones((1, 3), np.float32)).sum() + other(np.ones((1, 3), np.float32)).sum()).backward()
    expected = np.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
    both = [*take(model), *other.parameters()]
    assert global_norm(both) == pytest.approx(np.sqrt(expected**2 + 8), rel=1e-6)
    assert clip_by_global_norm(take(model), 0.5) == pytest.approx(expected, rel=1e-6)
    assert global_norm(model.parameters()) == pytest.approx(0.5, rel=1e-5)
    assert global_norm(model[1].weight) == global_norm(model[1].weight.grad)
