"""Where a run stands: what a step, an epoch and an evaluation change, and that JSON keeps it
all.
"""

import json
from dataclasses import asdict, replace
from math import inf

from nnmpi.compose.evaluation import Evaluation
from nnmpi.compose.stats import Totals
from nnmpi.metrics import METRICS
from nnmpi.train.checkpoint import Extent, RunState

STEP = Totals(steps=1, samples=4, targets=4, loss_sum=0.1, score_sum=3.0, wall_s=0.5)


def test_steps_are_counted_and_summed_up_until_an_epoch_ends():
    state = RunState()
    state.add(STEP)
    state.add(STEP.plus(STEP))
    assert (state.step, state.epoch, state.batch) == (3, 0, 3)
    assert state.in_epoch == STEP.plus(STEP.plus(STEP))
    state.end_epoch()
    assert (state.step, state.epoch, state.batch) == (3, 1, 0)
    assert state.in_epoch == Totals()


def test_the_first_of_the_best_evaluations_counts():
    """Of the accuracy the highest, of the loss and of errors the lowest; one that is not finite is
    never the best.
    """
    accuracy, mae = METRICS["accuracy"], METRICS["mae"]
    for by, best in ((accuracy, (0.7, 2)), (None, (1.5, 3)), (mae, (1.5, 3))):
        state = RunState()
        for step, share, loss in ((1, 0.0, inf), (2, 0.7, 2.5), (3, 0.6, 1.5), (4, 0.7, 1.5)):
            metrics = {"accuracy": share, "mae": loss}
            report = Evaluation(targets=1, loss_sum=loss, metrics=metrics)
            state = replace(state, step=step).after_evaluation(report, by, 0.0)
        assert (state.best, state.best_step) == best
    report = Evaluation(metrics={"accuracy": 0.0})
    assert RunState(step=1).after_evaluation(report, accuracy, 0.0).best_step == 1


def test_json_keeps_every_bit():
    state = RunState(7, 2, 1, STEP, STEP.plus(STEP), 1 / 3, 2, 0.1)
    assert RunState.from_json(json.loads(json.dumps({**asdict(state), "ranks": 3}))) == state


def test_passes_count_the_fraction_of_an_epoch():
    extent = Extent(epochs=3, steps=12, train_batches=4, test_batches=1, stop=12)
    assert extent.passes(RunState(step=9, epoch=2, batch=1)) == 2.25
