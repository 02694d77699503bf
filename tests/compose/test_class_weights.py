"""Class weights and ignored labels: the mean is over the weights of all ranks' labels, as in the
serial run, and as the operation itself gives it.
"""

from functools import partial

import numpy as np
import pytest

import nnmpi
from nnmpi import AsynchronousWorker, Layout, NnmpiError, Sync, Worker, data, models, nn, ops
from nnmpi.base.errors import UsageError
from nnmpi.base.shard import split
from tests.harness.refusals import refuses, usage_error
from tests.worker_options import arranged, sgd

WEIGHT = np.array([0.2, 3.0, 0.0, 1.5])
DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(11, 6)), DRAW.integers(0, 4, 11)
IGNORING = np.where(np.arange(11) % 4 == 1, -100, Y)  # some do not count

LOSSES = {
    "layer": nn.CrossEntropyLoss(WEIGHT, reduction="none", ignore_index=-100),
    "function": partial(
        ops.cross_entropy, weight=WEIGHT, reduction="none", ignore_index=-100, label_smoothing=0.1
    ),
    "nll": nn.NLLLoss(WEIGHT, reduction="none"),
    "no weights": nn.CrossEntropyLoss(reduction="none", ignore_index=-100),
}


def plain(loss):
    """Return the mean over all labels, as the operation computes it."""
    function = getattr(loss, "func", getattr(loss, "function", None))
    options = {**getattr(loss, "keywords", getattr(loss, "options", {})), "reduction": "mean"}
    return partial(function, **options)


def train(group, name, layout):
    model, options = models.mlp((6,), 4, hidden=[8, 8]), {"lr": 0.3, "loss": LOSSES[name]}
    worker = arranged(model, group, layout, dtype="float64", **options)
    where = worker.arrangement
    found = []
    for start in (0, 5, 10):
        part = split(min(5, 11 - start), where.data_ranks)[where.data_rank]
        rows = slice(start + part.start, start + part.stop)
        found.append(worker.step(X[rows], IGNORING[rows]).loss)
    ranks = {"rank": where.data_rank, "world": where.data_ranks}
    loader = data.Loader(
        data.Dataset("d", X, Y, 4), 5, microbatches=2, shuffle=False, dtype="float64", **ranks
    )
    return [*found, worker.evaluate(loader.epoch(0)).loss]


def by_hand(name):
    model = models.mlp((6,), 4, hidden=[8, 8]).initialize(seed=0, dtype="float64")
    optimizer, loss, found = sgd(model, 0.3), plain(LOSSES[name]), []
    for start in (0, 5, 10):
        model.zero_grad()
        result = loss(model(X[start : start + 5]), IGNORING[start : start + 5])
        result.backward()
        optimizer.step()
        found.append(result.item())
    return [*found, loss(model(X), Y).item()]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "ranks, layout",
    [
        (1, Layout()),
        (3, Layout()),
        (2, Layout(zero=2)),
        (2, Layout(dp=1, pp=2, split=(3, 3))),
        (2, Layout(dp=1, tp=2)),
    ],
)
def test_the_mean_is_over_the_weights_of_all_labels(name, ranks, layout):
    for found in nnmpi.simulate(lambda group: train(group, name, layout), ranks):
        np.testing.assert_allclose(found, by_hand(name), rtol=1e-9)


def test_what_cannot_be_one_mean_is_refused():
    def program(group, loss, kind=Worker):
        model = models.mlp((6,), 4).initialize(seed=0)
        kind(model, sgd(model, 0.3), group, loss=loss)

    def simulated(loss, kind=Worker):
        nnmpi.simulate(lambda group: program(group, loss, kind), 2)

    for reduction in ("mean", "sum"):
        with pytest.raises(UsageError, match='reduction="none"'):
            simulated(nn.CrossEntropyLoss(WEIGHT, reduction=reduction))
    usage_error(
        "ignores label 3", lambda: simulated(nn.CrossEntropyLoss(reduction="none", ignore_index=3))
    )
    asynchronous = partial(AsynchronousWorker, sync=Sync("asp"))
    refuses(
        NnmpiError,
        r"class weights.*synchronous Worker",
        lambda: simulated(LOSSES["layer"], asynchronous),
    )


TOKENS = np.random.default_rng(1).integers(0, 4, (8, 7))
NEXT = np.where(np.arange(48).reshape(8, 6) % 11 == 3, -1, TOKENS[:, 1:])


@pytest.mark.parametrize(
    "ranks, layout, microbatches",
    [(1, Layout(), 4), (3, Layout(), 2), (2, Layout(sp=2, dp=1), 1), (4, Layout(pp=2, dp=2), 2)],
)
def test_of_sequences_every_label_that_counts_has_its_weight(ranks, layout, microbatches):
    """Also where positions are sharded, and where a microbatch counts fewer labels."""
    loss = nn.CrossEntropyLoss(WEIGHT, reduction="none", ignore_index=-1)
    samples = data.Dataset("t", TOKENS[:, :-1], NEXT, 4)

    def train(group):
        model, sample = models.gpt(4, 6, 8, 1, 2), samples.x[:1]
        worker = arranged(model, group, layout, sample, "float64", lr=0.5, loss=loss)
        where = worker.arrangement
        ranks = {"rank": where.data_rank, "world": where.data_ranks}
        loader = data.Loader(samples, 4, microbatches=microbatches, shuffle=False, **ranks)
        found = [worker.step(batch).loss for batch in loader.epoch(0)]
        return [*found, worker.evaluate(loader.epoch(0)).loss]

    model, right = models.gpt(4, 6, 8, 1, 2).initialize(0, "float64"), []
    optimizer = sgd(model, 0.5)
    for rows in (slice(0, 4), slice(4, 8)):
        model.zero_grad()
        mean = plain(loss)(model(samples.x[rows]), NEXT[rows])
        mean.backward()
        optimizer.step()
        right.append(mean.item())
    right.append(plain(loss)(model(samples.x), NEXT).item())
    for found in nnmpi.simulate(train, ranks):
        np.testing.assert_allclose(found, right, rtol=1e-9)


def test_sharded_classes_are_refused():
    def program(group):
        net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
        net.sharding = {"1": nn.Sharding.VOCAB}
        arranged(net, group, Layout(tp=2, dp=1), loss=LOSSES["layer"])

    usage_error(r"this loss would see only part.*Sharding\.COLUMN", nnmpi.simulate, program, 2)
