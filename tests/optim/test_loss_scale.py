"""The loss scale follows overflows and good steps."""

import pytest

from nnmpi.errors import CheckpointError
from nnmpi.optim.loss_scale import FIRST, LEAST, LossScale


def test_an_overflow_halves_it_and_counting_begins_anew() -> None:
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


def test_at_its_smallest_no_step_is_skipped() -> None:
    scale = LossScale()
    assert scale.value == FIRST
    skipped = 0
    while scale.shrink():
        skipped += 1
    assert scale.value == LEAST
    assert skipped == scale.skipped == 16


def test_its_state_is_put_back() -> None:
    one, other = LossScale(good_steps=5), LossScale(good_steps=5)
    one.shrink()
    one.grow()
    one.grow()
    other.load(one.state())
    for _ in range(3):
        one.grow()
        other.grow()
    assert one.state() == other.state() == {"value": FIRST, "good": 0, "skipped": 1}


@pytest.mark.parametrize("state", [{}, {"value": 2.0, "good": 1}, {"value": None, "good": 1, "skipped": 0}])
def test_a_state_that_lacks_something_is_refused(state: dict[str, object]) -> None:
    scale = LossScale()
    with pytest.raises(CheckpointError, match="loss scale lacks a value"):
        scale.load(state)
    assert scale.value == FIRST
