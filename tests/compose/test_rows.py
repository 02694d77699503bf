"""Ranks of one replica compute the same rows: other rows are refused, in every layout."""

import numpy as np
import pytest

import nnmpi
from nnmpi import Layout, data, models
from tests.harness.refusals import usage_error
from tests.worker_options import arranged

LAYOUTS = [
    (2, {"tp": 2}),
    (2, {"pp": 2, "split": (3, 3)}),
    (2, {"sp": 2}),
    (4, {"dp": 2, "tp": 2}),
    (4, {"dp": 2, "sp": 2}),
]


def make(group, options):
    net = models.gpt(9, 6, 8, 1, 2) if "sp" in options else models.mlp((6,), 9, hidden=[8, 8])
    return arranged(net, group, Layout(**options), dtype="float64")


def rows(worker, seed, count=4):
    draw = np.random.default_rng(seed)
    if "0.tokens.weight" not in worker.arrangement.parameters:
        return draw.normal(size=(count, 6)), draw.integers(0, 9, count)
    tokens, labels = draw.integers(0, 9, (count, 6)), draw.integers(0, 9, (count, 6))
    labels[0, :3] = -1
    return tokens.astype("uint32"), labels


def reordered(worker):
    x, y = rows(worker, 0)
    order = np.random.default_rng(worker.group.rank).permutation(4)
    return worker.step(x[order], y[order]).loss


def augmented(worker):
    x, y = rows(worker, 0)
    if x.dtype.kind == "u":
        y = (y + worker.group.rank) % 9
    else:
        x = x + worker.group.rank
    where = worker.arrangement
    part = {"rank": where.data_rank, "world": where.data_ranks}
    loader = data.Loader(data.Dataset("own", x, y, classes=9), 4, **part, dtype="float64")
    return worker.step(next(iter(loader.epoch(0)))).loss


@pytest.mark.parametrize("ranks, options", LAYOUTS)
@pytest.mark.parametrize(
    "give",
    [
        lambda worker: worker.step(*rows(worker, worker.group.rank)),
        lambda worker: worker.step(*rows(worker, 0, 4 + worker.group.rank)),
        lambda worker: worker.evaluate(*rows(worker, worker.group.rank)),
        lambda worker: worker.evaluate([rows(worker, 0), rows(worker, worker.group.rank)]),
        reordered,
        augmented,
    ],
)
def test_other_rows_within_a_replica_are_refused(give, ranks, options):
    usage_error(
        r"replica were given different rows|ranks differ in batch",
        nnmpi.simulate,
        lambda group: give(make(group, options)),
        ranks,
    )


@pytest.mark.parametrize("ranks, options", [(1, {"sp": 1}), *LAYOUTS])
def test_own_rows_give_the_serial_losses(ranks, options):
    def program(group, options):
        worker = make(group, options)
        where = worker.arrangement
        x, y = rows(worker, 0)
        part = np.array_split(np.arange(4), where.data_ranks)[where.data_rank]
        first = worker.evaluate(x[part], y[part])
        losses = [worker.step(x[part], y[part]).loss for _ in range(3)]
        return [first.loss, first.accuracy, first.samples, *losses]

    alone = {key: 1 for key in options if key != "split"}
    (serial,) = nnmpi.simulate(lambda group: program(group, alone), 1)
    for result in nnmpi.simulate(lambda group: program(group, options), ranks):
        assert result == pytest.approx(serial, rel=1e-9)


def test_rows_without_microbatches_have_no_fixed_order():
    def program(group):
        worker = make(group, {"reduction": "fixed"})
        worker.step(*rows(worker, group.rank))

    usage_error("batches of a Loader with whole_microbatches", nnmpi.simulate, program, 2)


def test_a_loader_without_this_replicas_part_is_refused():
    def program(group):
        worker = make(group, {"dp": 2})
        loader = data.Loader(data.Dataset("own", *rows(worker, 0), classes=9), 4, dtype="float64")
        worker.step(next(iter(loader.epoch(0))))

    usage_error(r"each rank has rows 0-3 of the batch's 4; give every", nnmpi.simulate, program, 2)
