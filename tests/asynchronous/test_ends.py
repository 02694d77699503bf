"""How segments end: by signals, by values that are not finite, and with a state that any other run
can go on from.
"""

import signal

import numpy as np
import pytest

from nnmpi import Sync, nn
from nnmpi.asynchronous.worker import average_buffers
from nnmpi.base.errors import DivergenceError
from nnmpi.compose.losses import SumCrossEntropy
from tests.asynchronous.runs import (
    EVERY_MODE,
    equal_on_all,
    everything,
    make,
    name_of,
    skip_unless_fitting,
    train,
)
from tests.compose.small_runs import BATCH, BATCHES, build, weights

pytestmark = pytest.mark.both_worlds

SMALL, MANY = 2, 31  # rows of a batch, and batches of these


def after(calls, number):
    """Return what says that a signal came, at its n-th call."""
    left = calls

    def poll_signal():
        nonlocal left
        left -= 1
        return number if left <= 0 else 0

    return poll_signal


@pytest.mark.parametrize("sync", EVERY_MODE, ids=name_of)
def test_a_signal_on_one_rank_ends_all_after_whole_batches(group, sync):
    """A worker's rank or the server's; then training goes on where it was."""
    skip_unless_fitting(group, sync)
    for who in sorted({0, group.size - 1}):
        worker = make(group, sync, slow="ms=1")
        poll_signal = (
            after(2 if sync.has_server else 1, signal.SIGTERM) if group.rank == who else lambda: 0
        )
        report = train(worker, ((0, 0, MANY),), SMALL, poll_signal=poll_signal)[0]
        assert report.signal == signal.SIGTERM
        assert 0 < report.batches < MANY
        assert report.totals.samples == SMALL * report.batches
        assert len(set(group.gather(report.batches))) == 1
        assert equal_on_all(group, weights(worker.model))
        rest = train(worker, ((0, report.batches, MANY),), SMALL)[0]
        assert (rest.signal, rest.batches) == (0, MANY - report.batches)
        worker.release()


@pytest.mark.parametrize("sync", EVERY_MODE, ids=name_of)
@pytest.mark.parametrize("value", [float("nan"), 1.0], ids=["loss", "gradient"])
def test_a_value_that_is_not_finite_ends_all_with_the_name_of_its_rank(group, sync, value):
    skip_unless_fitting(group, sync)
    # it has rows of every batch but one
    guilty, calls, right = min(group.size, BATCH) - 1, 0, SumCrossEntropy(None)

    def loss(logits, labels, reduction="sum"):
        nonlocal calls
        calls += 1
        result = right(logits, labels)
        if group.rank == guilty and 2 <= calls < 6:
            # 0, whose gradient overflows
            result = result * value + ((logits - logits.detach()) * 1e200 * 1e200).sum()
        return result

    worker = make(group, sync, loss=loss, evaluation_loss=right, slow="ms=1")
    named = pytest.raises(DivergenceError, match=f"rank {guilty}")
    with named as caught, np.errstate(all="ignore"):
        for epoch in range(20):  # in asp it may compute too few parts of the first ones
            train(worker, ((epoch, 0, BATCHES),))
    assert len(set(group.gather(str(caught.value)))) == 1
    assert np.isfinite(weights(worker.model)).all()  # it was not used
    calls = 100
    assert equal_on_all(group, weights(worker.model))
    report = train(worker, ((0, 0, 3),))[0]
    assert (report.batches, report.signal) == (3, 0)
    worker.release()


def move(group, old, sync, name):
    """Return a worker in another mode, with all that the old one had."""
    values = [state.to_dict(everywhere=True) for state in old.state()]
    steps = max(group.gather(old.optimizer.steps))
    expected = everything(old)
    old.release()
    new = make(group, sync, name, model=build("float64"))
    for parameter in new.model.parameters():
        parameter.data[...] = 7.0
    for state, result in zip(new.state(), values, strict=True):
        state.scatter(result.__getitem__)
    new.optimizer.steps = steps
    assert np.array_equal(everything(new), expected), sync
    return new


def test_a_run_goes_on_in_another_mode(group):
    """Each gets the state of the one before, bit for bit, though different ranks have it."""
    worker = make(group, Sync("asp"), "momentum")
    for sync in (sync for sync in EVERY_MODE if group.size >= sync.mode.fewest):
        worker = move(group, worker, sync, "momentum")
        steps = worker.optimizer.steps
        train(worker, ((0, 0, 2),))
        assert worker.optimizer.steps > steps
        assert equal_on_all(group, weights(worker.model))
    worker.release()


def test_running_statistics_are_averaged_by_steps(group):
    model = nn.Sequential(nn.BatchNorm(3)).initialize(0)
    buffers = dict(model.named_buffers())
    for buffer in buffers.values():
        buffer.data[...] = group.rank + 1
    average_buffers(model, group, group.rank)
    total = sum(range(group.size))
    expected = sum(rank * (rank + 1) for rank in range(group.size)) / total if total else 1.0
    assert all(np.allclose(buffer.data, expected, rtol=1e-6) for buffer in buffers.values())
    average_buffers(model, group, 0)  # where nobody did a step nothing changes
    assert all(np.allclose(buffer.data, expected, rtol=1e-6) for buffer in buffers.values())
