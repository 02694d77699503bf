"""Losses and accuracies of sequences are means over the tokens that are to be predicted, under
every layout.

The rows of a batch have from none to seven of them: a mean over rows, or a mean of the ranks'
means, is another number.
"""

from functools import partial

import numpy as np
import pytest

from nnmpi import AsynchronousWorker, Sync, Tensor, Worker, ops, simulate
from nnmpi.base.errors import UsageError
from nnmpi.data import IGNORED, Loader
from tests.equivalence import own
from tests.equivalence.rows import TIME, TOKENS, tokens
from tests.worker_options import sgd, work

BATCH = 7


def model():
    return own.perceiving((TIME,), TOKENS).initialize(seed=0, dtype="float64")


def trained(group, sync=None):
    """Return the weights after two epochs, and the first one's totals."""
    net = model()
    optimizer = sgd(net, 0.3)
    worker = (
        Worker(net, optimizer, group)
        if sync is None
        else AsynchronousWorker(net, optimizer, group, sync)
    )
    loader = Loader(tokens(), BATCH, group, dtype="float64")
    totals = [
        worker.run(loader, epoch, 0, 3, 3 * epoch, lambda _: 0.3).totals for epoch in range(2)
    ]
    weights = worker.state()[0].to_dict(everywhere=True)
    worker.release()
    return weights, totals[0]


def test_a_mean_is_over_the_labels_that_count(group):
    """Against a loss that is written out, row by row."""
    net, updated = model(), model()
    batch = next(iter(Loader(tokens(), BATCH, microbatches=3).epoch(0)))
    report = work(updated, group, 0.3).step(batch)
    saved = batch.y >= 0
    logits = net(Tensor(batch.x)).numpy()
    losses = (
        np.log(np.exp(logits).sum(-1))
        - np.take_along_axis(logits, np.maximum(batch.y, 0)[..., None], -1)[..., 0]
    )
    assert report.targets == batch.own_targets == batch.global_targets == saved.sum() != saved.size
    assert batch.targets == tuple(saved[cut.start : cut.stop].sum() for cut in batch.cuts)
    assert report.loss == pytest.approx(losses[saved].mean(), rel=1e-13)
    assert report.accuracy == (logits.argmax(-1) == batch.y)[saved].mean() <= 1
    assert report.samples == BATCH
    net.zero_grad()
    ops.cross_entropy(net(Tensor(batch.x)), batch.y, ignore_index=IGNORED).backward()
    squares = sum(float((parameter.grad**2).sum()) for parameter in net.parameters())
    assert report.grad_norm == pytest.approx(squares**0.5, rel=1e-12)


@pytest.mark.parametrize("sync", [Sync("local", local_steps=1), Sync("ssp", staleness=0)], ids=str)
def test_workers_that_meet_after_every_step_do(sync):
    """A local step and a mean weighted by tokens, or gradients that a server adds up, are the
    synchronous step.
    """
    ((expected, full),) = simulate(trained, 1)
    for weights, totals in simulate(partial(trained, sync=sync), 3):
        for name, value in expected.items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-11, atol=1e-13, err_msg=name)
        assert totals.targets == full.targets and 0 <= totals.accuracy <= 1
        if sync.sync != "local":  # whose ranks see their own weights between two means
            assert totals.loss == pytest.approx(full.loss, rel=1e-11)


def test_samples_of_ones_own_are_counted_over_all_workers():
    def main(group):
        loader = Loader(tokens(), BATCH, group, partition="iid", microbatches=2)
        batch = list(loader.epoch(1))[1]
        return batch.own_targets, batch.targets

    result = simulate(main, 3)
    assert sum(own for own, _ in result) == sum(result[0][1])
    assert len({targets for _, targets in result}) == 1


def test_a_loss_that_ignores_what_is_counted_is_refused(group):
    net = model()
    loss = partial(ops.cross_entropy, reduction="sum", ignore_index=0)
    with pytest.raises(UsageError, match="the loss ignores label 0, .* ignore_index=-1"):
        work(net, group, loss=loss)
