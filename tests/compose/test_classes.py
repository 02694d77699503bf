"""Logits that are shared out over a tensor group: the serial losses, accuracies and weights, and nothing gathered."""

from typing import Any

import numpy as np
import pytest

from nnmpi import data, nn, optim
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.runner import sum_cross_entropy
from nnmpi.compose.worker import Worker
from nnmpi.data.loader import Loader
from nnmpi.errors import UsageError
from nnmpi.nn.sharding import Sharding
from nnmpi.timeline import Timeline, recording
from tests.harness.refusals import told


def train(group: Group, layout: Layout, smoothing: float) -> tuple[dict[str, Any], int]:
    """Return an epoch's numbers, and how often something was gathered."""
    samples, _ = data.load("digits")
    samples = samples.take(np.arange(70))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 23), nn.ReLU(), nn.Linear(23, 10))
    model.sharding = {"1": Sharding.REPLICATED, "3": Sharding.VOCAB}
    where = arrange(model, group, layout, np.zeros((4, 8, 8, 1)), "float64")
    where.model.initialize(seed=0, dtype="float64")
    loss = sum_cross_entropy(where, smoothing) if smoothing else None
    worker = Worker(where.model, optim.SGD(where.model.storage, lr=0.1), group, loss=loss, arrangement=where)
    loader = Loader(samples, 32, rank=where.data_rank, world=where.data_ranks, microbatches=3, dtype="float64")
    timeline = Timeline()
    with recording(timeline):
        reports = [worker.step(batch) for batch in loader.epoch(0)]
    evaluation = worker.evaluate(loader.epoch(0))
    numbers = {"accuracy": evaluation.accuracy, "loss": evaluation.loss}
    numbers |= {"losses": [r.loss for r in reports], "hits": [r.accuracy for r in reports]}
    numbers |= worker.state()[0].to_dict(everywhere=True)
    worker.release()
    where.free()
    return numbers, sum(event.name == "all-gather" for event in timeline.events)


@pytest.mark.simulated
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.needs_ranks(2, 4, 6, 8))])
def test_classes_apart_give_the_serial_run(group: Group, pp: int, smoothing: float) -> None:
    if group.size % pp:
        return
    found, gathered = train(group, Layout(dp=1, pp=pp, tp=group.size // pp), smoothing)
    expected, _ = train(group.split(group.rank), Layout(), smoothing)
    different = [
        name for name, value in expected.items() if not np.allclose(found[name], value, rtol=1e-11, atol=1e-13)
    ]
    assert not any(group.gather(different)), different
    assert group.gather(gathered) == [0] * group.size


@pytest.mark.simulated
def test_a_loss_that_would_see_a_part_of_the_classes_is_refused(group: Group) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))
    model.sharding = {"1": Sharding.VOCAB}
    where = arrange(model, group, Layout(dp=1, tp=group.size), np.zeros((2, 4)))
    where.model.initialize()
    optimizer = optim.SGD(where.model.storage, lr=0.1)
    found = told(
        UsageError,
        lambda: Worker(where.model, optimizer, group, loss=lambda x, y: (x * x).sum(), arrangement=where).release(),
    )
    where.free()
    assert all(group.gather(found == "" if group.size == 1 else "would see a part of them alone" in found))
