"""Ranks that have been let go: each has the model and the optimizer for itself, whoever held them
before.
"""

import numpy as np
import pytest

import nnmpi
from nnmpi import GradientExchange, Layout, NnmpiError, Sync, Worker, arrange, models
from nnmpi.base.errors import UsageError
from tests.asynchronous.runs import (
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
from tests.harness.refusals import usage_error
from tests.worker_options import work

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("sync", EVERY_MODE, ids=name_of)
def test_all_ranks_have_the_optimizers_state(group, sync, name):
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
def test_a_synchronous_run_goes_on_from_servers(group, name):
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
def test_a_released_worker_refuses_steps(group, pp):
    """In a sentence and on all ranks, and nothing is sent; to release it again does nothing."""
    setup = SETUPS["mlp"]
    worker = build_worker(setup, group, Layout(pp=group.size) if pp else Layout(dp=group.size))
    batch = next(iter(batches(setup, worker)))
    worker.release()
    release(worker)
    usage_error("was released; make a new one", worker.step, batch)
    group.barrier()


X, Y = np.random.default_rng(0).normal(size=(4, 6)), np.arange(4) % 3


def small():
    return models.mlp((6,), 3, hidden=[8, 8])


def worker_of(group, model, **options):
    return work(model, group, **options)


ON_2 = pytest.mark.needs_ranks(2)


@ON_2
@pytest.mark.parametrize("then", ["same", "gathered", "gathered after", "plain", "own loop"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_model_that_zero_sharded_goes_on(group, zero, then):
    where = arrange(small(), group, Layout(zero=zero))
    model = where.model.initialize(seed=0, storage=where.storage)
    worker = worker_of(group, model, arrangement=where)
    losses = [worker.step(X, Y).loss]
    if then == "gathered":
        worker.strategy.gather_model()
    worker.release()
    if then == "gathered after":
        worker.strategy.gather_model()
    if then in ("plain", "own loop"):
        with pytest.raises(UsageError, match=r"call gather_model\(\) of its strategy"):
            worker_of(group, model) if then == "plain" else nnmpi.DataParallel(model, group)
        group.barrier()
        return
    other = worker_of(group, model, arrangement=where if then == "same" else None)
    losses += [other.step(X, Y).loss for _ in range(2)]
    other.release()
    plain = worker_of(group, small().initialize(seed=0))
    assert losses == pytest.approx([plain.step(X, Y).loss for _ in range(3)], rel=1e-5)
    plain.release()


@ON_2
@pytest.mark.parametrize(
    "fail",
    [
        lambda group, model: worker_of(
            group,
            model,
            arrangement=arrange(
                model, group, Layout(activation_memory="least", offload="/proc/none/there")
            ),
        ),
        lambda group, model: nnmpi.ShardedDataParallel(model, group, algorithm="none such"),
        lambda group, model: worker_of(group, model, exchange=GradientExchange(bucket_bytes=0)),
    ],
)
def test_a_constructor_that_fails_leaves_nothing(group, fail):
    model = small().initialize(seed=0)
    texts = []
    for _ in range(2):
        with pytest.raises(NnmpiError) as caught:
            fail(group, model)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    worker = worker_of(group, model)
    plain = worker_of(group, small().initialize(seed=0))
    assert worker.step(X, Y).loss == plain.step(X, Y).loss
    worker.release()
    plain.release()


@ON_2
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2, split=(3, 3))])
def test_a_model_is_arranged_once(group, layout):
    where = arrange(small(), group, layout)
    usage_error("is arranged already", arrange, where.model, group, layout)
