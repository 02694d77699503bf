"""Training through shared memory, and with the fused update, against other ways: the same run to
the last bit.
"""

from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from nnmpi import Group
from nnmpi.base.errors import DivergenceError
from nnmpi.comm.mpi import mpi_world
from nnmpi.optim.updates import OPTIMIZERS, is_elementwise
from tests.equivalence import reference

SETUP = reference.Setup(dtype="float32")


@pytest.fixture
def ranks(group):
    """The ranks as a group of their own, with a memory of its own."""
    return Group(group.comm)


def build(group, optimizer="adamw", **options):
    """Return a worker for the digits."""
    return reference.build(replace(SETUP, optimizer=optimizer), group, **options)


def batches(group):
    """Return this rank's parts of an epoch's batches."""
    return [*islice(reference.parts(SETUP, group.rank, group.size), 4)]


def train(worker, parts):
    """Return each step's loss and gradient length."""
    return [[report.loss, report.grad_norm] for report in map(worker.step, parts)]


def weights(model):
    """Return all weights, as text."""
    return b"".join(array.tobytes() for array in model.state().values()).hex()


ON_HOST = pytest.mark.host_only("the fused update, which is of arrays in the memory of the node")


@ON_HOST
@pytest.mark.both_worlds
@pytest.mark.parametrize("optimizer", [*filter(is_elementwise, OPTIMIZERS)])
def test_the_fused_update_gives_the_bits_of_shared_sums(ranks, optimizer):
    fused, plain = (
        build(ranks, optimizer, fused_update=True),
        build(ranks, optimizer, allreduce="shared"),
    )
    steps = [train(worker, batches(ranks)) for worker in (fused, plain)]
    right = [fused.strategy.is_fused, np.allclose(steps[0], steps[1], rtol=1e-6)]
    right += [[loss for loss, _ in steps[0]] == [loss for loss, _ in steps[1]]]
    right += [weights(fused.model) == weights(plain.model)]
    ours, theirs = (worker.state()[1].to_dict(everywhere=True) for worker in (fused, plain))
    right += [
        fused.scalars() == plain.scalars(),
        all(np.array_equal(ours[name], theirs[name]) for name in theirs),
    ]
    assert all(map(all, ranks.gather([bool(item) for item in right])))


@ON_HOST
@pytest.mark.simulated
def test_a_fused_update_of_what_is_not_finite_does_not_happen(ranks):
    worker, parts = build(ranks, fused_update=True), batches(ranks)
    worker.step(parts[0])
    before = weights(worker.model)
    parts[1].x[...] = np.inf
    with pytest.raises(DivergenceError), np.errstate(all="ignore"):
        worker.step(parts[1])
    right = weights(worker.model) == before
    assert all(ranks.gather(right))


@ON_HOST
@pytest.mark.mpi
@pytest.mark.parametrize(
    "way", [{"allreduce": "shared"}, {"allreduce": "auto"}, {"fused_update": True}], ids=str
)
@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 5])
def test_without_room_it_goes_another_way_and_says_so(ranks, way, after, monkeypatch):
    """The room ends after so many windows: for flags, weights, gradients, the optimizer's state
    ...
    """
    left = SimpleNamespace(windows=after)

    def free_bytes(need):
        left.windows -= 1
        return 0 if left.windows < 0 else mpi_world.ENDLESS

    reference = build(ranks, allreduce="native")
    train(reference, batches(ranks))
    monkeypatch.setattr(mpi_world, "free_bytes", free_bytes)
    worker = build(ranks, **way)
    monkeypatch.undo()
    steps = train(worker, batches(ranks))
    fused = worker.strategy.is_fused
    choices = () if fused else worker.strategy.exchange.choices
    text = "has only 0 free" in worker.notice + str(choices)
    full = fused or {choice.algorithm for choice in choices} == {"shared"}
    # it simply chooses something else
    silent = "allreduce" in way and (ranks.size == 1 or way["allreduce"] == "auto")
    outcome = [text or silent or (full and left.windows >= 0), np.isfinite(steps).all()]
    outcome += [
        np.allclose(worker.model.storage.data[0], reference.model.storage.data[0], atol=2e-3)
    ]
    assert all(map(all, ranks.gather([bool(item) for item in outcome])))
