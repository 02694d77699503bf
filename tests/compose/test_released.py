"""Ranks that have been let go: each has the model and the optimizer for itself, whoever held them
before.
"""

import numpy as np
import pytest

from nnmpi.base.errors import UsageError
from nnmpi.comm.group import Group
from nnmpi.comm.synchrony.sync import Sync
from nnmpi.compose.layout import Layout
from nnmpi.compose.worker import Worker
from tests.compose.asynchronous_runs import (
    EVERY_MODE,
    all_reduced,
    equal_on_all,
    loader_of,
    make,
    name_of,
    rate,
    skip_unless_fitting,
    train,
)
from tests.compose.small_runs import BATCHES, build, weights
from tests.equivalence.cover import SETUPS
from tests.equivalence.reference import batches, release, tolerance
from tests.equivalence.reference import build as build_worker

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("sync", EVERY_MODE, ids=name_of)
def test_all_ranks_have_the_optimizers_state(group: Group, sync: Sync, name: str) -> None:
    """Not the servers alone, each that of its shard."""
    skip_unless_fitting(group, sync)
    worker = make(group, sync, name)
    train(worker)
    saved = worker.state()[1].to_dict(everywhere=True)
    worker.release()
    storage, slots = worker.model.storage, worker.optimizer.slots()
    local = {
        f"{slot}/{span.parameter.name}": storage.view(span, slots[slot])
        for slot in slots
        for span in storage.spans
    }
    assert local.keys() == saved.keys()
    assert all(group.gather(all(np.array_equal(local[name], saved[name]) for name in local)))
    assert len(set(group.gather(worker.optimizer.steps))) == 1


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_synchronous_run_goes_on_from_servers(group: Group, name: str) -> None:
    """An epoch through servers in step, and one of all-reduces: two epochs of these."""
    worker = make(group, Sync("ssp", staleness=0), name)
    train(worker, ((0, 0, BATCHES),))
    worker.release()
    model = worker.model
    synchronous = Worker(model, worker.optimizer, group, seed=3)
    for number, batch in enumerate(loader_of(group, model).epoch(1)):
        synchronous.step(batch, lr=rate(BATCHES + number))
    synchronous.release()
    assert equal_on_all(group, weights(model))
    limit = tolerance("float64", 2 * BATCHES, "adam" if name == "adam" else "sgd")
    np.testing.assert_allclose(
        weights(model), all_reduced(group, name, build()), rtol=limit, atol=limit
    )


@pytest.mark.parametrize("pp", [True, False], ids=["pipeline", "replicas"])
@pytest.mark.simulated(max_size=16)  # layers of the model
def test_a_released_worker_refuses_steps(group: Group, pp: bool) -> None:
    """In a sentence and on all ranks, and nothing is sent; to release it again does nothing."""
    setup = SETUPS["mlp"]
    worker = build_worker(setup, group, Layout(pp=group.size) if pp else Layout(dp=group.size))
    batch = next(iter(batches(setup, worker)))
    worker.release()
    release(worker)
    with pytest.raises(UsageError, match="was released; make a new one"):
        worker.step(batch)
    group.barrier()
