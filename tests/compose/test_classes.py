"""Logits that are shared out over a tensor group: nothing is gathered, and what is refused."""

import numpy as np
import pytest

from nnmpi import nn, optim
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.worker import Worker
from nnmpi.errors import UsageError
from nnmpi.nn.sharding import Sharding
from nnmpi.timeline import Timeline, recording
from tests.equivalence import own
from tests.equivalence.reference import Setup, run
from tests.harness.refusals import told


@pytest.mark.simulated
def test_nothing_is_gathered(group: Group) -> None:
    timeline = Timeline()
    with recording(timeline):
        run(Setup(own.halves, microbatches=3), group, Layout(dp=1, tp=group.size))
    names = [event.name for event in timeline.events]
    assert group.gather(names.count("all-gather")) == [0] * group.size


@pytest.mark.simulated
def test_a_loss_that_would_see_a_part_of_the_classes_is_refused(group: Group) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))
    model.sharding = {"1": Sharding.VOCAB}
    where = arrange(model, group, Layout(dp=1, tp=group.size), np.zeros((2, 4)))
    where.model.initialize()
    optimizer = optim.SGD(where.model.storage, lr=0.1)
    found = told(
        UsageError,
        lambda: Worker(
            where.model, optimizer, group, loss=lambda x, y: (x * x).sum(axis=1), arrangement=where
        ).release(),
    )
    where.free()
    assert all(group.gather(found == "" if group.size == 1 else "would see a part of them alone" in found))
