"""Losses and accuracies of sequences are means over the tokens that are to be predicted, under every layout.

The rows of a batch have from none to seven of them: a mean over rows, or a mean of the ranks' means, is another number.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest

from nnmpi import nn, ops, optim
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.asynchronous import AsynchronousWorker
from nnmpi.compose.worker import Worker
from nnmpi.data.dataset import IGNORED
from nnmpi.data.loader import Loader
from nnmpi.errors import UsageError
from nnmpi.synchrony.sync import Sync
from nnmpi.tensor.tensor import Tensor
from tests.equivalence import own
from tests.equivalence.rows import TIME, TOKENS, tokens

BATCH = 7


def model() -> nn.Module:
    return own.perceiving((TIME,), TOKENS).initialize(seed=0, dtype="float64")


def train(group: Group) -> dict[str, Any]:
    """Return what two epochs gave."""
    net = model()
    worker = Worker(net, optim.SGD(net.storage, lr=0.3), group)
    loader = Loader(tokens(), BATCH, microbatches=3, dtype="float64")
    reports = [worker.step(batch) for epoch in range(2) for batch in loader.epoch(epoch)]
    found: dict[str, Any] = worker.state()[0].to_dict(everywhere=True)
    return found | {
        name: [getattr(each, name) for each in reports]
        for name in ("loss", "accuracy", "samples", "targets", "grad_norm")
    }


@pytest.fixture(scope="module")
def serial() -> dict[str, Any]:
    return simulate(lambda group: train(group), 1)[0]


def check_equal(found: dict[str, Any], serial: dict[str, Any]) -> None:
    assert found.keys() == serial.keys()
    for name, value in serial.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-11, atol=1e-13, err_msg=name)


def test_a_mean_is_over_the_labels_that_count(serial: dict[str, Any]) -> None:
    """Against a loss that is written out, row by row."""
    whole, net = tokens(), model()
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


@pytest.mark.parametrize("sync", [Sync("local", local_steps=1), Sync("ssp", staleness=0)], ids=str)
def test_workers_that_meet_after_every_step_do(serial: dict[str, Any], sync: Sync) -> None:
    """A local step and a mean weighted by tokens, or gradients that a server adds up, are the synchronous step."""

    def main(group: Group) -> tuple[dict[str, Any], float, float, int]:
        net = model()
        worker = AsynchronousWorker(net, optim.SGD(net.storage, lr=0.3), group, sync)
        loader = Loader(tokens(), BATCH, rank=group.rank, world=group.size, dtype="float64")
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
        loader = Loader(tokens(), BATCH, rank=group.rank, world=group.size, partition="iid", microbatches=2)
        batch = list(loader.epoch(1))[1]
        return batch.own_targets, batch.targets

    found = simulate(main, 3)
    assert sum(own for own, _ in found) == sum(found[0][1])
    assert len({targets for _, targets in found}) == 1


def test_a_loss_that_ignores_what_is_counted_is_refused(group: Group) -> None:
    net = model()
    loss = partial(ops.cross_entropy, reduction="sum", ignore_index=0)
    with pytest.raises(UsageError, match="the loss ignores label 0, .* ignore_index=-1"):
        Worker(net, optim.SGD(net.storage, lr=0.1), group, loss=loss)
