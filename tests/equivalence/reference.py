"""A run as values: what the contract compares, for any group of ranks and any model."""

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count, islice
from typing import Any

import numpy as np

from nnmpi import Worker, arrange, models, optim
from nnmpi.backend.array import Array
from nnmpi.base import clock
from nnmpi.compose.losses import SumCrossEntropy
from nnmpi.compose.state import gradient_state
from nnmpi.data import Loader, load
from nnmpi.data.dataset import Samples
from nnmpi.nn import Module
from tests.device.here import on_device
from tests.worker_options import grouped

# 90 samples in batches of 29 leave a last batch of 3: nothing divides, and with more than 3 ranks
# some have no rows. The fifth step is the next epoch's first: a batch of the usual size after a
# short one.
SAMPLES, BATCH_SIZE, STEPS = 90, 29, 5


@cache
def digits():
    """Return the first samples of the bundled digits' training part."""
    train, _ = load("digits")
    return train.take(np.arange(SAMPLES))


@dataclass(frozen=True)
class Setup:
    """One training run, whatever the number of ranks.

    Attributes:
        model: of (sample_shape, classes), with `model_options`.
        data: what it is trained on.
        worker: its options, flat; see `tests.worker_options`.
        prepare: what is done to samples before the model sees them.
    """

    model: Callable[..., Module] = models.mlp
    model_options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adam"
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float64"
    microbatches: int = 1
    batch_size: int = BATCH_SIZE
    worker: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Array], Array] = lambda x: x
    data: Callable[[], Samples] = digits
    smoothing: float = 0.0


@dataclass(frozen=True)
class Run:
    """What a run did: the losses of its steps, the first gradient, the last weights, and an
    evaluation.

    Gradient and weights are the whole model's; under a layout only rank 0 has them.
    """

    losses: list[float]
    gradient: dict[str, Array]
    norms: list[float]
    weights: dict[str, Array]
    evaluation: tuple[float, float]


_serial_runs = deque(maxlen=12)  # of a file's tests, which use the same few
_under_way = []  # what simulated ranks of this process compute
LOOK_S = 0.01


def run(setup, group, layout=None, **worker_options):
    """Train for some steps on the group; layout and worker options say how, and must not change
    what.
    """
    worker = build(setup, group, layout, **worker_options)
    losses, norms, gradient = [], [], None
    for batch in islice(batches(setup, worker), STEPS):
        report = worker.step(batch)
        losses.append(report.loss)
        norms.append(report.grad_norm)
        if gradient is None:
            gradient = gather_gradient(worker)
    evaluation = evaluate(setup, worker)
    assert gradient is not None
    weights = worker.state()[0].to_dict(everywhere=layout is None)
    release(worker)
    return Run(
        losses,
        gradient,
        norms,
        weights,
        (evaluation.loss, float(np.nan_to_num(evaluation.accuracy))),
    )


def serial_run(setup, alone, layout=None, **worker_options):
    """Return the run of one rank, made by the first test that asks for it; not to be changed."""
    expected = (setup, layout, worker_options, on_device())
    while expected in _under_way:
        clock.sleep(LOOK_S)
    for asked, result in _serial_runs:
        if asked == expected:
            return result
    _under_way.append(expected)
    try:
        result = run(setup, alone, layout, **worker_options)
    finally:
        _under_way.remove(expected)
    _serial_runs.append((expected, result))
    return result


def build(setup, group, layout=None, counts=False, replays=True, **worker_options):
    """Return a worker with a new model.

    Args:
        counts: whether its ledger counts a pass, which is then eager, and takes all ranks of a
            process three times as long.
        replays: whether passes are recorded, which takes half of so short a run, and replayed.
    """
    dataset = setup.data()
    model = setup.model(dataset.sample_shape, dataset.classes, **setup.model_options)
    where, given = None, {name: worker_options[name] for name in {"backend"} & {*worker_options}}
    if layout is not None:
        sample = setup.prepare(dataset.rows(np.arange(4), setup.dtype))
        where = arrange(model, group, layout, sample, dtype=setup.dtype, **given)
        model, given["storage"] = where.model, where.storage
    model.initialize(seed=5, dtype=setup.dtype, **given)
    optimizer = optim.build(
        setup.optimizer, model.storage, **{"lr": 1e-2, **setup.optimizer_options}
    )
    loss = SumCrossEntropy(where, setup.smoothing) if setup.smoothing else None
    options = {"check": True, "seed": 3, "loss": loss, **setup.worker, **worker_options}
    worker = Worker(model, optimizer, group, arrangement=where, **grouped(**options))
    if not counts:
        worker._counted_bytes = sys.maxsize
    if not replays:
        worker.passes.replay._refused = True
    return worker


def place(worker):
    """Return which part of each batch a rank takes, and of how many."""
    return worker.arrangement.data_rank, worker.arrangement.data_ranks


def batches(setup, worker):
    """Yield a rank's parts of the batches, epoch after epoch."""
    full = worker.arrangement.layout.fixed_order
    yield from parts(setup, *place(worker), full)


def parts(setup, rank=0, world=1, whole=False):
    """Yield a part of each batch, or all of it."""
    options = {
        "microbatches": setup.microbatches,
        "whole_microbatches": whole,
        "dtype": setup.dtype,
        "workers": 0,
    }
    loader = Loader(setup.data(), setup.batch_size, seed=1, rank=rank, world=world, **options)
    for epoch in count():
        for batch in loader.epoch(epoch):
            yield replace(batch, x=setup.prepare(batch.x))


def evaluate(setup, worker):
    """Return the evaluation of all samples."""
    rank, world = place(worker)
    loader = Loader(
        setup.data(), 49, rank=rank, world=world, shuffle=False, dtype=setup.dtype, workers=0
    )
    return worker.evaluate(replace(batch, x=setup.prepare(batch.x)) for batch in loader.epoch(0))


def release(worker):
    """Give back what a worker holds of MPI: many follow one another here. Collective."""
    worker.release()
    worker.arrangement.mesh.free()


def gather_gradient(worker):
    """Return the gradient that the last step used, of the whole model; with a layout on rank 0
    alone.

    Nothing after a fused update, which uses the gradients up.
    """
    if worker.strategy.is_fused:
        return {}
    where = worker.arrangement
    return gradient_state(where).to_dict(everywhere=where.is_plain)


# What a rounding error grows by from one step to the next: a gradient divides by batch statistics,
# and Adam's update divides by the gradient's own size, so small gradients' errors become large.
# Twice what was seen in 20 runs.
def growth(optimizer):
    """Return that factor for an optimizer's name: SGD alone does not divide."""
    return 2.0 if optimizer == "sgd" else 4.0


def tolerance(dtype, steps, optimizer):
    """Return how far apart two orders of summation may be after some steps, relative to the largest
    value.

    Independent rounding errors of a sum grow with the square root of its length; the factor 30 is
    for the layers.
    """
    return 30 * float(np.sqrt(SAMPLES)) * float(np.finfo(dtype).eps) * growth(optimizer) ** steps


def differences(parallel, serial, setup, exact=False):
    """Return in words what differs by more than the tolerance, or at all; an empty list for equal
    runs.
    """
    steps = len(serial.losses)
    pairs = [
        ("loss of step 1", 0, parallel.losses[:1], serial.losses[:1]),
        *(
            (f"{name}'s gradient of step 1", 0, g, serial.gradient[name])
            for name, g in parallel.gradient.items()
        ),
        ("losses", steps, parallel.losses, serial.losses),
        ("gradient norms", steps, parallel.norms, serial.norms),
        *([] if exact else [("evaluation", steps, parallel.evaluation, serial.evaluation)]),
        *((name, steps, parallel.weights[name], value) for name, value in serial.weights.items()),
    ]
    result = []
    for name, step, ours, theirs in pairs:
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        error = float(np.abs(ours - theirs).max(initial=0)) / max(
            1.0, float(np.abs(theirs).max(initial=0))
        )
        limit = 0.0 if exact else tolerance(setup.dtype, step, setup.optimizer)
        if not error <= limit:
            result.append(f"{name} differs by {error:.3g}, more than {limit:.3g}")
    return result


def assert_same(group, parallel, serial, setup, what, exact=False):
    """Fail on all ranks if a run differs from the serial one, which rank 0 has."""
    result = differences(parallel, serial, setup, exact) if serial is not None else []
    everyones = group.gather([result, parallel.losses, parallel.norms])
    assert not everyones[0][0], f"{what}: {everyones[0][0]}"
    assert all(theirs[1:] == everyones[0][1:] for theirs in everyones), (
        f"{what}: ranks report different numbers"
    )
