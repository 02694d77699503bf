"""Losses and accuracies of sequences are means over the tokens that are to be predicted, under every layout.

The rows of a batch have from none to five of them: a mean over rows, or a mean of the ranks' means, is another number.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest

from nnmpi import nn, ops, optim
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.arrange import arrange
from nnmpi.compose.asynchronous import AsynchronousWorker
from nnmpi.compose.layout import Layout
from nnmpi.compose.worker import Worker
from nnmpi.data.dataset import IGNORED, Dataset
from nnmpi.data.loader import Loader
from nnmpi.errors import UsageError
from nnmpi.nn.sharding import Sharding
from nnmpi.synchrony.sync import Sync
from nnmpi.tensor.tensor import Tensor

CLASSES, TIME, ROWS, BATCH = 7, 5, 17, 7


def samples() -> Dataset:
    random = np.random.default_rng(5)
    x = random.integers(0, CLASSES, (ROWS, TIME)).astype(np.uint16)
    y = random.integers(0, CLASSES, (ROWS, TIME))
    for row, length in enumerate(random.integers(0, TIME + 1, ROWS)):
        y[row, length:] = IGNORED
    return Dataset("tokens", x, y, CLASSES)


def model() -> nn.Module:
    made = nn.Sequential(nn.Embedding(CLASSES, 6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    made.sharding = {"1": Sharding.COLUMN, "3": Sharding.VOCAB}
    return made


def train(group: Group, layout: Layout, **options: Any) -> dict[str, Any]:
    """Return what two epochs and an evaluation gave on a layout."""
    where = arrange(model(), group, layout, samples().rows(np.arange(2)), "float64")
    where.model.initialize(seed=0, dtype="float64")
    optimizer = optim.SGD(where.model.storage, lr=0.3)
    worker = Worker(where.model, optimizer, group, arrangement=where, **options)
    loader = Loader(
        samples(),
        BATCH,
        rank=where.data_rank,
        world=where.data_ranks,
        microbatches=3,
        whole=layout.fixed,
        dtype="float64",
    )
    reports = [worker.step(batch) for epoch in range(2) for batch in loader.epoch(epoch)]
    tested = worker.evaluate(Loader(samples(), 6, rank=where.data_rank, world=where.data_ranks).epoch(0))
    found: dict[str, Any] = worker.state()[0].to_dict(everywhere=True)
    worker.release()
    where.free()
    for name in ("loss", "accuracy", "samples", "targets", "grad_norm"):
        found[name] = [getattr(each, name) for each in reports]
    return found | {"tested": [tested.loss, tested.accuracy, tested.samples, tested.targets]}


@pytest.fixture(scope="module")
def serial() -> dict[str, Any]:
    return simulate(lambda group: train(group, Layout()), 1)[0]


def check_equal(found: dict[str, Any], serial: dict[str, Any]) -> None:
    assert found.keys() == serial.keys()
    for name, value in serial.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-11, atol=1e-13, err_msg=name)


def test_a_mean_is_over_the_labels_that_count(serial: dict[str, Any]) -> None:
    """Against a loss that is written out, row by row."""
    whole, net = samples(), model().initialize(seed=0, dtype="float64")
    batch = next(iter(Loader(whole, BATCH, microbatches=3).epoch(0)))
    kept = batch.y >= 0
    logits = net(Tensor(batch.x)).numpy()
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.maximum(batch.y, 0)[..., None], -1)[..., 0]
    assert serial["targets"][0] == batch.own_targets == batch.global_targets == kept.sum() != kept.size
    assert batch.targets == tuple(kept[cut.start : cut.stop].sum() for cut in batch.cuts)
    assert serial["loss"][0] == pytest.approx(losses[kept].mean(), rel=1e-13)
    assert serial["accuracy"][0] == (logits.argmax(-1) == batch.y)[kept].mean() <= 1
    assert serial["samples"] == [7, 7, 3] * 2
    net.zero_grad()
    ops.cross_entropy(net(Tensor(batch.x)), batch.y, ignore_index=IGNORED).backward()
    squares = sum(float((parameter.grad**2).sum()) for parameter in net.parameters())
    assert serial["grad_norm"][0] == pytest.approx(squares**0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (3, Layout()),
        (8, Layout()),  # more ranks than the last batch has rows
        (2, Layout(pp=2, schedule="gpipe")),
        (3, Layout(pp=3, schedule="1f1b")),
        (2, Layout(pp=2, schedule="zero-bubble")),
        (2, Layout(tp=2)),
        (6, Layout(pp=2, dp=3)),
        (8, Layout(pp=2, dp=2, tp=2)),
        (3, Layout(reduction="fixed")),
    ],
    ids=str,
)
def test_every_layout_divides_by_the_tokens_of_the_global_batch(
    serial: dict[str, Any], ranks: int, layout: Layout
) -> None:
    for found in simulate(lambda group: train(group, layout), ranks):
        check_equal(found, serial)


@pytest.mark.parametrize("sync", [Sync("local", local_steps=1), Sync("ssp", staleness=0)], ids=str)
def test_workers_that_meet_after_every_step_do(serial: dict[str, Any], sync: Sync) -> None:
    """A local step and a mean weighted by tokens, or gradients that a server adds up, are the synchronous step."""

    def main(group: Group) -> tuple[dict[str, Any], float, float, int]:
        net = model().initialize(seed=0, dtype="float64")
        worker = AsynchronousWorker(net, optim.SGD(net.storage, lr=0.3), group, sync)
        loader = Loader(samples(), BATCH, rank=group.rank, world=group.size, dtype="float64")
        totals = [worker.run(loader, epoch, 0, 3, 3 * epoch, lambda _: 0.3).totals for epoch in range(2)]
        found = worker.state()[0].to_dict(everywhere=True)
        worker.release()
        return found, totals[0].loss, totals[0].accuracy, totals[0].targets

    expected = {name: value for name, value in serial.items() if "." in name}
    for found, loss, accuracy, targets in simulate(main, 3):
        check_equal(found, expected)
        counts = serial["targets"][:3]
        assert targets == sum(counts) and 0 <= accuracy <= 1
        if sync.mode != "local":  # whose ranks see their own weights between two means
            assert loss == pytest.approx(np.average(serial["loss"][:3], weights=counts), rel=1e-11)


def test_samples_of_ones_own_are_counted_over_all_workers() -> None:
    def main(group: Group) -> tuple[int, tuple[int, ...]]:
        loader = Loader(samples(), BATCH, rank=group.rank, world=group.size, partition="iid", microbatches=2)
        batch = list(loader.epoch(1))[1]
        return batch.own_targets, batch.targets

    found = simulate(main, 3)
    assert sum(own for own, _ in found) == sum(found[0][1])
    assert len({targets for _, targets in found}) == 1


def test_a_loss_that_ignores_what_is_counted_is_refused(group: Group) -> None:
    net = model().initialize(seed=0, dtype="float64")
    loss = partial(ops.cross_entropy, reduction="sum", ignore_index=0)
    with pytest.raises(UsageError, match="the loss ignores label 0, .* ignore_index=-1"):
        Worker(net, optim.SGD(net.storage, lr=0.1), group, loss=loss)
