"""Training runs of language models on simulated ranks, whatever the layout: batches that divide nothing."""

from collections.abc import Callable
from typing import Any

import numpy as np

from nnmpi import optim
from nnmpi.comm.group import Group
from nnmpi.comm.simulated.world import simulate
from nnmpi.compose.arrange import arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.worker import Worker
from nnmpi.data.loader import Batch, Cut
from nnmpi.nn.module import Module
from nnmpi.shard import split

ROWS, TIME, TOKENS, MICROBATCHES, STEPS = 11, 7, 23, 3, 3

Run = tuple[list[tuple[float, float]], dict[str, Any]]


def batch(step: int, rank: int, world: int, rows: int = ROWS) -> Batch:
    """Return a rank's part of a batch of drawn tokens."""
    draw = np.random.default_rng(step)
    x, y = (draw.integers(0, TOKENS, (rows, TIME)) for _ in range(2))
    cuts, places = [], list[int]()
    for number, part in enumerate(split(rows, MICROBATCHES)):
        own = split(len(part), world)[rank]
        first = part.start + own.start
        cuts.append(Cut(len(places), len(places) + len(own), first, number))
        places += range(first, first + len(own))
    indices = np.array(places, np.int64)
    return Batch(x[indices], y[indices], indices, tuple(cuts), rows, 0, step, MICROBATCHES)


def train(group: Group, build: Callable[[], Module], layout: Layout, **options: Any) -> Run:
    """Return each step's loss and gradient norm, and the last weights."""
    where = arrange(build(), group, layout, np.zeros((2, TIME), np.int64), "float64")
    model = where.model.initialize(seed=5, dtype="float64")
    worker = Worker(model, optim.Adam(model.storage, lr=1e-2), group, arrangement=where, seed=3, **options)
    reports = [worker.step(batch(step, where.data_rank, where.data_ranks)) for step in range(STEPS)]
    weights = worker.state()[0].to_dict(everywhere=True)
    return [(report.loss, report.grad_norm) for report in reports], weights


def differences(build: Callable[[], Module], ranks: int, layout: Layout) -> tuple[float, float]:
    """Return how far a layout is from the serial run: losses and norms relative, weights absolute."""
    ((serial, weights),) = simulate(lambda group: train(group, build, Layout()), 1)
    found, theirs = simulate(lambda group: train(group, build, layout), ranks)[0]
    assert weights.keys() == theirs.keys()
    ours, expected = np.array(found), np.array(serial)
    relative = float((np.abs(ours - expected) / expected).max())
    return relative, max(float(np.abs(weights[name] - theirs[name]).max()) for name in weights)
