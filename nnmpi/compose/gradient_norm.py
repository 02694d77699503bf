"""The length of the whole model's gradient, of which each rank has a part: every element counted once.

replicated over dp      the sum over a replica's ranks is the whole already
replicated over tp      only the first rank of the tensor group counts it
tied over stages        only the first stage counts it
shards                  each counts its own
"""

import math

from nnmpi.compose.arrange import Arrangement
from nnmpi.optim.clip import sum_of_squares
from nnmpi.tensor.parameter import FlatStorage


def gradient_norm(storage: FlatStorage, arrangement: Arrangement) -> float:
    """Return the Euclidean length of the global gradient; collective over the replica's ranks."""
    squares = [
        sum_of_squares([grad])
        for span, _, grad in storage.held()
        if grad is not None and arrangement.counts(span.parameter.name, span.parameter)
    ]
    mesh = arrangement.mesh
    group = mesh.world if arrangement.layout.zero else mesh.model
    return math.sqrt(group.sum_floats([_exact_sum(squares)])[0])


def _exact_sum(values: list[float]) -> float:
    """Return the sum, rounded once; infinity or NaN where a value is."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
