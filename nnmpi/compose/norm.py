"""The length of the whole model's gradient, of which each rank has a part: every element counted once.

replicated over dp      the sum over a replica's ranks is the whole already
replicated over tp      only the first rank of the tensor group counts it
tied over stages        only the first stage counts it
shards                  each counts its own
"""

from __future__ import annotations

import math

from nnmpi.compose.arrange import Arrangement
from nnmpi.optim.clip import sum_of_squares
from nnmpi.tensor.flat import FlatStorage


def gradient_norm(storage: FlatStorage, arrangement: Arrangement) -> float:
    """Return the Euclidean length of the global gradient; collective over the replica's ranks.

    In a fixed order of sums the parameters' squares are added exactly, so that it does not matter who has which.
    """
    squares = {
        span.parameter.name: sum_of_squares([storage.grads[span.buffer][span.start : span.stop]])
        for span in storage.spans
        if arrangement.counts(span.parameter.name, span.parameter)
    }
    group = arrangement.mesh.model
    if arrangement.layout.fixed:
        return math.sqrt(_exact_sum([value for own in group.gather(list(squares.values())) for value in own]))
    return math.sqrt(group.sum_floats([_exact_sum(list(squares.values()))])[0])


def _exact_sum(values: list[float]) -> float:
    """Return the sum, rounded once; infinity or NaN where a value is."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
