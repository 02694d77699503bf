"""Compiled steps and what works on several ranks."""

from typing import Any

import numpy as np
import pytest

import nnmpi
from nnmpi import models, nn, optim
from nnmpi.comm.group import Group
from nnmpi.data.loader import Loader
from nnmpi.errors import GraphError, UsageError
from nnmpi.parallel.data import DataParallel
from tests.equivalence.reference import digits
from tests.harness.refusals import told
from tests.nn.test_compiled import step_of


def parts(group: Group) -> tuple[nn.Module, optim.SGD, Any, Any]:
    """Return a model, its optimizer, and this rank's own samples."""
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).initialize(seed=0, dtype="float64")
    generator = np.random.default_rng(group.rank)
    x, y = generator.standard_normal((6, 4)), generator.integers(0, 2, 6)
    return model, optim.SGD(model.storage, lr=0.1), x, y


@pytest.mark.simulated
def test_a_step_that_was_recorded_before_is_recorded_again(group: Group) -> None:
    """Else each rank would go on with its own gradients: the eager step says that it is not within `running`."""
    model, optimizer, x, y = parts(group)

    step = nnmpi.compile(step_of(model, optimizer))
    step(x, y)
    before = optimizer.steps
    parallel = DataParallel(model, group)
    found = told((UsageError, GraphError), lambda: step(x, y))
    refused = "call parallel.backward(loss, samples)" in found and optimizer.steps == before
    assert group.gather(refused) == [group.size > 1] * group.size
    parallel.release()


@pytest.mark.simulated
def test_a_worker_is_no_part_of_a_compiled_step(group: Group) -> None:
    """Its steps would be done once, when the step is recorded."""
    dataset = digits()
    model = models.mlp(dataset.sample_shape, dataset.classes).initialize(seed=0)
    worker = nnmpi.Worker(model, optim.SGD(model.storage, lr=0.1), group)
    batch = next(Loader(dataset, 32, rank=group.rank, world=group.size, workers=0).epoch(0))
    compiled = nnmpi.compile(lambda: worker.step(batch))
    with pytest.raises(UsageError, match="Worker's step or evaluation cannot be part of a compiled step"):
        compiled()
    evaluated = nnmpi.compile(lambda: worker.evaluate([batch]))
    with pytest.raises(UsageError, match="cannot be part of a compiled step"):
        evaluated()
    worker.release()
