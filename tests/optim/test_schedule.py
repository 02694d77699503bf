"""Schedules stay within their bounds at every step, and meet where they should."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.base.errors import UsageError
from nnmpi.optim import (
    ConstantRate,
    Cosine,
    MultiStep,
    OneCycle,
    ReduceOnPlateau,
    StepDecay,
    WarmRestarts,
    Warmup,
)

RATES = st.floats(0, 1e3)
STEPS = st.integers(0, 10**12)
CONSTANTS = st.builds(ConstantRate, RATES)
STEP_DECAYS = st.builds(StepDecay, RATES, st.integers(1, 10**6), st.floats(0, 1))
COSINES = st.builds(Cosine, RATES, st.integers(1, 10**9), st.floats(0, 1))
PLAIN = st.one_of(CONSTANTS, STEP_DECAYS, COSINES)
WARMUPS = st.builds(Warmup, st.integers(0, 10**6), PLAIN)


@given(st.one_of(PLAIN, WARMUPS), STEPS)
def test_rates_are_numbers_between_zero_and_the_first_rate(schedule, step):
    """Never negative, never NaN, never above the rate that was asked for."""
    peak = schedule.then.lr if isinstance(schedule, Warmup) else schedule.lr
    rate = schedule(step)
    assert isinstance(rate, float)
    assert 0 <= rate <= peak


@given(PLAIN)
def test_the_first_update_has_the_rate_itself(schedule):
    assert schedule(0) == schedule.lr


@given(PLAIN, STEPS, STEPS)
def test_decays_never_rise(schedule, one, other):
    early, late = sorted((one, other))
    assert schedule(late) <= schedule(early) + 1e-12 * schedule.lr  # the cosine's last bit


@given(COSINES, STEPS)
def test_cosine_ends_at_the_floor_and_stays(schedule, beyond):
    floor = schedule.final * schedule.lr
    assert schedule(schedule.total) == floor
    assert schedule(schedule.total + beyond) == floor
    assert schedule(beyond) >= floor


def test_cosine_by_hand():
    """A quarter of the way: (1 + cos 45 degrees) / 2."""
    assert Cosine(0.1, 8)(2) == pytest.approx(0.1 * (1 + math.sqrt(0.5)) / 2)
    assert [round(Cosine(1.0, 3)(step), 10) for step in range(5)] == [1.0, 0.75, 0.25, 0.0, 0.0]


def test_step_decay_by_hand():
    assert [StepDecay(8.0, every=2, factor=0.5)(step) for step in range(7)] == [8, 8, 4, 4, 2, 2, 1]
    assert StepDecay(8.0, every=1, factor=0.0)(1) == 0.0


@given(WARMUPS, STEPS)
def test_after_the_warm_up_the_other_schedule_counts_from_its_own_start(schedule, step):
    assert schedule(schedule.steps + step) == schedule.then(step)


def test_warm_up_by_hand():
    assert [Warmup(3, ConstantRate(8.0))(step) for step in range(5)] == [2, 4, 6, 8, 8]


def test_several_drops():
    assert [MultiStep(8.0, (1, 3), factor=0.5)(step) for step in range(5)] == [8, 4, 4, 2, 2]


def test_one_cycle_is_that_of_pytorch():
    """Its numbers for max_lr=1 and 10 steps, to its rounding."""
    theirs = [
        0.04,
        0.52,
        1.0,
        0.950484632,
        0.8117456539,
        0.6112620219,
        0.3887419781,
        0.1882583461,
        0.049519368,
        4e-6,
    ]
    result = [OneCycle(1.0, 10)(step) for step in range(12)]
    assert result == pytest.approx([*theirs, 4e-6, 4e-6], abs=1e-9)


def test_one_cycle_may_begin_at_its_top():
    assert [OneCycle(1.0, 10, rise=rise)(0) for rise in (0.0, 0.1)] == pytest.approx(
        [1.0, 1.0], rel=0.1
    )


def test_a_plateau():
    """Losses that fall by less than the threshold count as none; after a drop it waits anew."""
    rate = ReduceOnPlateau(1.0, factor=0.5, patience=1)
    assert [rate(loss) for loss in (4, 3, 3, 2.99999, 3, 3, 1, 1)] == [
        1,
        1,
        1,
        0.5,
        0.5,
        0.25,
        0.25,
        0.25,
    ]
    rate = ReduceOnPlateau(1.0, patience=0, threshold=0)  # the same loss is none below it
    assert [rate(loss) for loss in (2, 2)] == [1, 0.1]
    rate = ReduceOnPlateau(1.0, patience=1)  # NaN is no improvement, also as the first loss
    assert [rate(loss) for loss in (math.nan, 3, 2, math.nan, 1)] == [1.0] * 5
    rate = ReduceOnPlateau(1.0, patience=1)  # losses below 0, which rise, or fall by too little
    losses = (-1, -0.9, -0.8, -1.00001, -1.00002, -2, -2)
    assert [rate(loss) for loss in losses] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 0.01])


def test_a_plateau_goes_on_from_its_state():
    first, losses = ReduceOnPlateau(1.0, patience=1), (3.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0)
    for cut in range(len(losses)):
        first, second = ReduceOnPlateau(1.0, patience=1), ReduceOnPlateau(1.0, patience=1)
        for loss in losses[:cut]:
            first(loss)
        second.load(json.loads(json.dumps(first.state())))
        assert [second(loss) for loss in losses[cut:]] == [first(loss) for loss in losses[cut:]]


def test_warm_restarts_are_pytorchs():
    """The numbers of CosineAnnealingWarmRestarts(T_0=3, T_mult=2), and of T_mult=1."""
    growing = [WarmRestarts(1.0, 3, 2)(step) for step in range(10)]
    assert growing[:4] == pytest.approx([1, 0.75, 0.25, 1])
    assert growing[4:9] == pytest.approx([0.9330127, 0.75, 0.5, 0.25, 0.0669873])
    assert growing[9] == 1
    assert [WarmRestarts(1.0, 3, 1)(step) for step in range(3)] * 2 == [
        WarmRestarts(1.0, 3, 1)(step) for step in range(6)
    ]
    with pytest.raises(UsageError, match="growth is 0.5; give a number of at least 1"):
        WarmRestarts(1.0, 3, 0.5)
