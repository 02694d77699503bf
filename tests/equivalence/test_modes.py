"""Evaluation, under every kind of layout, changes nothing of the training around it."""

from itertools import islice

import pytest

from nnmpi.nn import BatchNorm
from tests.equivalence.cover import kinds
from tests.equivalence.reference import batches, build, evaluate, release
from tests.equivalence.rows import NOISY

pytestmark = pytest.mark.simulated


def test_evaluating_between_steps_changes_nothing(group, alone):
    """Before, between and after steps, under every kind of layout; batches of 49 and 41 rows, cut
    into microbatches.
    """
    setup = NOISY

    def work(worker):
        result = []
        for batch in islice(batches(setup, worker), 4):
            report = evaluate(setup, worker)
            assert report.samples == 90
            result += [report.loss, report.accuracy, worker.step(batch).loss]
        release(worker)
        return result

    expected = work(build(setup, alone))
    for layout in kinds(group.size, setup):
        result = work(build(setup, group, layout, synchronous_sends=True, replays=False))
        assert all(group.gather(result == pytest.approx(expected, rel=1e-9))), layout


def test_evaluation_uses_running_statistics_and_leaves_them(group):
    for layout in kinds(group.size, NOISY):
        worker = build(NOISY, group, layout)
        norms = [layer for _, layer in worker.model.named_modules() if isinstance(layer, BatchNorm)]
        before = [norm.running_mean.data.copy() for norm in norms]
        evaluate(NOISY, worker)
        same = [
            (norm.running_mean.data == old).all() for norm, old in zip(norms, before, strict=True)
        ]
        assert all(map(all, group.gather(list(map(bool, same)))))
        release(worker)
