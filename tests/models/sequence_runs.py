"""Training runs of language models, whatever the layout: sentences of many lengths, in batches that divide nothing."""

from collections.abc import Callable
from typing import Any

import numpy as np

from nnmpi import optim
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.worker import Worker
from nnmpi.data.dataset import IGNORED
from nnmpi.data.loader import Batch
from nnmpi.data.sampler import cut_batch
from nnmpi.nn.module import Module
from tests.worker_options import grouped

TIME, TOKENS, MICROBATCHES, STEPS = 7, 23, 3, 4
SHAPES = ((7, TIME), (5, 4), (11, TIME), (2, 5))  # rows and tokens of each step's batch

Run = tuple[list[tuple[float, float]], dict[str, Any]]


def batch(step: int, rank: int, world: int, whole: bool = False) -> Batch:
    """Return a rank's part of a batch of drawn tokens, or its whole microbatches; sentences end anywhere."""
    draw = np.random.default_rng(step)
    rows, time = SHAPES[step]
    x, y = (draw.integers(0, TOKENS, (rows, time)) for _ in range(2))
    y[np.arange(time) >= draw.integers(0, time + 1, (rows, 1))] = IGNORED
    everyones, own = cut_batch(rows, microbatches=MICROBATCHES), cut_batch(rows, rank, world, MICROBATCHES, whole)
    targets = tuple(int((y[each.start : each.stop] >= 0).sum()) for each in everyones)
    places = [np.arange(each.stop - each.start) + each.first_row for each in own]
    indices = np.concatenate([np.zeros(0, np.int64), *places])
    return Batch(x[indices], y[indices], indices, own, rows, 0, step, len(everyones), targets=targets)


def train(group: Group, build: Callable[[], Module], layout: Layout, dtype: str = "float64", **options: Any) -> Run:
    """Return each step's loss and gradient norm, and the last weights."""
    where = arrange(build(), group, layout, np.zeros((2, TIME), np.int64), dtype)
    model = where.model.initialize(seed=5, dtype=dtype)
    optimizer = optim.Adam(model.storage, lr=1e-2)
    worker = Worker(model, optimizer, group, arrangement=where, **grouped(**{"seed": 3, "clip": 0.5, **options}))
    parts = [batch(step, where.data_rank, where.data_ranks, layout.fixed) for step in range(STEPS)]
    reports = [worker.step(each) for each in parts]
    weights = worker.state()[0].to_dict(everywhere=True)
    worker.release()
    where.free()
    return [(report.loss, report.grad_norm) for report in reports], weights


def compare(found: Run, serial: Run) -> tuple[float, float]:
    """Return how far a run is from the serial one: losses and norms relative, weights absolute."""
    assert serial[1].keys() == found[1].keys()
    ours, expected = np.array(found[0]), np.array(serial[0])
    relative = float((np.abs(ours - expected) / expected).max())
    return relative, max(float(np.abs(value - found[1][name]).max()) for name, value in serial[1].items())


def differences(build: Callable[[], Module], ranks: int, layout: Layout) -> tuple[float, float]:
    """Return how far a layout on simulated ranks is from the serial run, as `compare` does."""
    (serial,) = simulate(lambda group: train(group, build, Layout()), 1)
    return compare(simulate(lambda group: train(group, build, layout), ranks)[0], serial)
