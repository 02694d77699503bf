"""One interface for every way of training: the same calls, and what each says of what it did."""

import numpy as np
import pytest

from nnmpi import AsynchronousWorker, Numerics, Sync, Worker
from nnmpi.comm.synchrony.slow import NOT_SLOW, Slow
from tests.asynchronous.runs import all_reduced, loader_of, rate
from tests.compose.small_runs import BATCHES, ROWS, build, optimizer_of, weights

SLOW = Slow.parse("ms=2;rank=0,factor=3")
KINDS = {
    "in step": lambda group, slow: Worker(*made(), group, seed=3, slow=slow),
    "servers": lambda group, slow: AsynchronousWorker(
        *made(), group, Sync("ssp", staleness=0), slow=slow
    ),
    "averaging": lambda group, slow: AsynchronousWorker(
        *made(), group, Sync("local", local_steps=1), slow=slow
    ),
}


def made():
    model = build()
    return model, optimizer_of(model)


def train(trainer, *ends, progress=None):
    """Train two epochs, in segments that end at these batches and at the end of each."""
    loader, result = loader_of(trainer.group, trainer.model), []
    for epoch in range(2):
        points = [0, *ends, BATCHES]
        for first, stop in zip(points, points[1:], strict=False):
            step = epoch * BATCHES + first
            result.append(
                trainer.run(loader, epoch, first, stop, step, rate, progress=progress).totals
            )
    return result


@pytest.mark.simulated
@pytest.mark.parametrize("kind", KINDS)
def test_each_trains_up_to_a_point_by_the_same_call(group, kind):
    """And comes to the weights of the synchronous run, wherever its segments end."""
    trainer = KINDS[kind](group, NOT_SLOW)
    text = []
    totals = train(trainer, 1, 4, progress=text.append)
    trainer.release()
    np.testing.assert_allclose(
        weights(trainer.model), all_reduced(group, "sgd", build()), rtol=1e-9, atol=1e-12
    )
    assert [total.steps for total in totals] == [1, 3, BATCHES - 4] * 2
    assert sum(total.samples for total in totals) == 2 * ROWS
    assert all(
        0 < total.loss < 3 and 0 <= total.accuracy <= 1 and total.wall_s > 0 for total in totals
    )
    rank_hears = trainer.in_step or group.is_root
    assert len(text) == (2 * BATCHES * trainer.reporters if rank_hears else 0)
    assert trainer.scalars() == {"kind": "SGD", "steps": 2 * BATCHES, "lr": trainer.optimizer.lr}
    assert (trainer.describe_exchange() == "") == (not trainer.in_step)


@pytest.mark.simulated
@pytest.mark.parametrize("kind", KINDS)
def test_each_can_be_slow_on_purpose(group, kind):
    trainer = KINDS[kind](group, SLOW)
    text = []
    (first, _) = train(trainer, progress=text.append)
    assert first.wall_s >= BATCHES * 0.002 * 3  # in step, all ranks say so: they meet in each step
    assert all(
        item.totals.compute_s >= 0.002 * (3 if item.worker == group.rank == 0 else 1)
        for item in text
    )
    trainer.release()


def test_steps_in_step_are_those_of_the_library_user(group):
    """`run` is `step` for each batch, bit for bit; its totals are the sums of their reports."""
    first, other = (KINDS["in step"](group, NOT_SLOW) for _ in range(2))
    assert isinstance(other, Worker)
    (totals, _) = train(first)
    losses = 0.0
    for epoch in range(2):
        for number, batch in enumerate(loader_of(group, other.model).epoch(epoch)):
            report = other.step(batch, lr=rate(epoch * BATCHES + number))
            losses += report.loss_sum if epoch == 0 else 0.0
    assert np.array_equal(weights(first.model), weights(other.model))
    assert totals.loss_sum == losses
    for item in (first, other):
        item.release()


def test_numbers_of_a_checkpoint_go_to_any_other_trainer(group):
    """Also the loss scale, to one that has it."""
    model = build("float32")
    half = Worker(model, optimizer_of(model), group, numerics=Numerics(precision="fp16"))
    scaling = half.scaling
    scaling.shrink()
    values = {**half.scalars(), "steps": 9, "virtual": None}
    assert values["loss_scale"] == scaling.state()
    plain = KINDS["in step"](group, NOT_SLOW)
    plain.load_scalars(values)
    assert plain.scalars()["steps"] == 9
    scaling.shrink()
    half.load_scalars(values)
    assert half.scalars() == {name: item for name, item in values.items() if name != "virtual"}
    half.load_scalars(plain.scalars() | {"virtual": None})  # it goes on with the scale that it has
    assert half.scalars() == {name: item for name, item in values.items() if name != "virtual"}
    plain.release()
    half.release()
