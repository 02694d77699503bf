"""Batches for language models: sentences of many lengths, in batches that divide nothing."""

import numpy as np

from nnmpi.data.dataset import IGNORED
from nnmpi.data.loader import Batch
from nnmpi.data.sampler import cut_batch

TIME, TOKENS, MICROBATCHES = 7, 23, 3
SHAPES = ((7, TIME), (5, 4), (11, TIME), (2, 5))  # rows and tokens of each step's batch


def batch(step: int, rank: int, world: int, whole: bool = False) -> Batch:
    """Return a rank's part of a batch of drawn tokens, or its whole microbatches; sentences end
    anywhere.
    """
    draw = np.random.default_rng(step)
    rows, time = SHAPES[step]
    x, y = (draw.integers(0, TOKENS, (rows, time)) for _ in range(2))
    y[np.arange(time) >= draw.integers(0, time + 1, (rows, 1))] = IGNORED
    everyones, local = (
        cut_batch(rows, microbatches=MICROBATCHES),
        cut_batch(rows, rank, world, MICROBATCHES, whole),
    )
    targets = tuple(int((y[everyone.start : everyone.stop] >= 0).sum()) for everyone in everyones)
    places = [np.arange(item.stop - item.start) + item.first_row for item in local]
    indices = np.concatenate([np.zeros(0, np.int64), *places])
    return Batch(
        x[indices], y[indices], indices, local, rows, 0, step, len(everyones), targets=targets
    )
