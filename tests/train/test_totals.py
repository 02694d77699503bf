"""Totals are sums over samples and steps, divided once."""

import json

import pytest

from nnmpi.compose.segment import Tally, sum_up
from nnmpi.compose.trainer import Totals


def test_a_mean_weighs_samples_not_steps() -> None:
    full = Totals(steps=1, samples=60, targets=60, loss_sum=60 * 1.0, score_sum=30)
    short = Totals(steps=1, samples=20, targets=20, loss_sum=20 * 3.0, score_sum=20)
    both = full.plus(short)
    assert (both.steps, both.samples, both.loss, both.accuracy) == (2, 80, 1.5, 0.625)


def test_json_keeps_every_bit() -> None:
    totals = Totals(3, 7, 9, 0.1 + 0.2, 1 / 3, 1e-9, 2**-40, 0.7, 1.1)
    assert Totals.from_json(json.loads(json.dumps(totals.to_json()))) == totals


def test_no_steps_give_zeros_not_errors() -> None:
    none = Totals()
    assert (none.loss, none.accuracy, none.samples_per_second, none.per_step(0.0)) == (0, 0, 0, 0)
    assert none.breakdown().startswith("step 0.00 ms")


def test_breakdown_adds_up_to_the_step() -> None:
    totals = Totals(steps=10, samples=100, compute_s=0.6, sync_s=0.2, input_s=0.1, wall_s=1.0)
    assert totals.breakdown() == (
        "step 100.00 ms = compute 60.00 ms (60 %) + synchronisation 20.00 ms (20 %) "
        "+ input 10.00 ms (10 %) + other 10.00 ms (10 %)"
    )
    assert totals.samples_per_second == pytest.approx(100.0)


def test_communication_is_told_per_step_beside_its_prediction() -> None:
    totals = Totals(steps=10, sync_s=0.3, hidden_s=0.1, comm_bytes=20 * 2**20, comm_calls=25)
    assert totals.communication() == (
        "communication per step: 2.5 calls, 2 MB; exposed 30.00 ms, hidden by computing 10.00 ms (25 %); "
        "no fit to predict it by"
    )
    known = totals.plus(Totals(steps=10, predicted_s=0.05, predicted_steps=10))
    assert known.communication().endswith("predicted 5 ms")


def test_parts_of_more_than_the_step_are_not_hidden() -> None:
    totals = Totals(steps=1, compute_s=0.8, sync_s=0.4, wall_s=1.0)
    assert totals.breakdown().endswith("+ other -200.00 ms (-20 %)")


def test_gradients_that_last_several_steps_add_up_to_the_workers_time() -> None:
    """Two workers, one of which computes a whole segment of 4 steps at one gradient, as a backup worker may."""
    quick = Tally(Totals(steps=4, compute_s=3.6, sync_s=0.4))
    slow = Tally(Totals(steps=1, compute_s=4.0))
    totals = sum_up([quick, slow, Tally()], batches=4, seconds=4.0)  # the third rank is a server
    assert totals.compute_s + totals.sync_s == pytest.approx(totals.wall_s)
