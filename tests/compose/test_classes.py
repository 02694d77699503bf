"""Logits that are shared out over a tensor group: nothing is gathered, and what is refused."""

from functools import partial
from itertools import islice

import numpy as np
import pytest

from nnmpi import Layout, Worker, arrange, nn, ops, optim
from nnmpi.base.errors import UsageError
from nnmpi.base.timeline import Timeline, tracing
from nnmpi.compose.inference import Inference
from nnmpi.nn import Sharding
from nnmpi.tensor import gather_shards
from tests.compose.small_runs import dataset
from tests.equivalence import own
from tests.equivalence.reference import Setup, batches, build, evaluate, release, run
from tests.harness.refusals import told


@pytest.mark.simulated
def test_nothing_is_gathered(group):
    timeline = Timeline()
    with tracing(timeline):
        run(Setup(own.halves, microbatches=3), group, Layout(dp=1, tp=group.size))
    names = [event.name for event in timeline.events]
    assert group.gather(names.count("all-gather")) == [0] * group.size


@pytest.mark.simulated
def test_a_loss_that_would_see_a_part_of_the_classes_is_refused(group):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))
    model.sharding = {"1": Sharding.VOCAB}
    where = arrange(model, group, Layout(dp=1, tp=group.size), np.zeros((2, 4)))
    where.model.initialize()
    optimizer = optim.SGD(where.model.storage, lr=0.1)
    result = told(
        UsageError,
        lambda: Worker(
            where.model, optimizer, group, loss=lambda x, y: (x * x).sum(axis=1), arrangement=where
        ).release(),
    )
    where.free()
    assert all(
        group.gather(result == "" if group.size == 1 else "would see only part of them" in result)
    )


class Net(nn.Module):
    """A module of one's own, whose head leaves each rank some of the classes."""

    def __init__(self):
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.sharding = {"head": Sharding.COLUMN}

    def forward(self, x):
        """Return logits."""
        return self.head(ops.tanh(self.first(x)))


# The last has made the logits whole by itself.
LOSSES = {
    "own": None,
    "partial": partial(ops.cross_entropy, reduction="none"),
    "whole": lambda z, y: ops.cross_entropy(gather_shards(z), y, reduction="none"),
}


@pytest.mark.simulated(max_size=4)
@pytest.mark.parametrize("name", LOSSES)
def test_a_head_that_leaves_parts(group, name):
    """Losses, scores and outputs are those of all classes, also where a rank has none."""
    setup = Setup(lambda *_: Net(), data=dataset, worker={"loss": LOSSES[name]})

    def train(ranks):
        worker = build(setup, ranks, Layout(tp=ranks.size))
        reports = [worker.step(batch) for batch in islice(batches(setup, worker), 3)]
        reports.append(evaluate(setup, worker))
        outputs = Inference(worker.arrangement, worker.backend)(dataset(7).x.astype("float64"))
        release(worker)
        return [[report.loss for report in reports], [report.score for report in reports], outputs]

    for result, right in zip(train(group), train(group.split(group.rank)), strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-9)
