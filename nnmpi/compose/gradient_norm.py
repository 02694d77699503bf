"""The length of the whole model's gradient, of which each rank has a part: every element counted once.

replicated over dp      the sum over a replica's ranks is the whole already
replicated over tp      only the first rank of the tensor group counts it
tied over stages        only the first stage counts it
shards                  each counts its own
"""

import math
from collections.abc import Iterator

from nnmpi.backend.array import Array
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.runner import DeferredScalars, Values
from nnmpi.optim.clip import read_squares, sum_of_squares, write_squares
from nnmpi.tensor.flat import FlatStorage

SQUARES = "squares"  # the first part of their names in `DeferredScalars`


def gradient_norm(storage: FlatStorage, arrangement: Arrangement) -> float:
    """Return the Euclidean length of the global gradient; collective over the replica's ranks."""
    squares = [
        sum_of_squares([grad])
        for span, _, grad in storage.held()
        if grad is not None and arrangement.counts(span.parameter.name, span.parameter)
    ]
    return _root_of_sum(squares, arrangement)


def note_squares(scalars: DeferredScalars, storage: FlatStorage, arrangement: Arrangement | None = None) -> None:
    """Ask a device for the squares of this rank's part of the gradient, without waiting; then see `read_norm`."""
    for name, grad in _parts(storage, arrangement):
        write_squares(grad, scalars.place((SQUARES, name)))


def read_norm(values: Values, storage: FlatStorage, arrangement: Arrangement | None = None) -> float:
    """Return the Euclidean length of the global gradient; collective over the replica's ranks.

    Args:
        values: what was read after `note_squares`; `read_squares` says when the device is asked again.
    """
    squares = [read_squares(values[SQUARES, name], grad) for name, grad in _parts(storage, arrangement)]
    return math.sqrt(sum(squares)) if arrangement is None else _root_of_sum(squares, arrangement)


def _root_of_sum(squares: list[float], arrangement: Arrangement) -> float:
    """Return the square root of the sum over all ranks that have something else to count; collective over them."""
    mesh = arrangement.mesh
    group = mesh.world if arrangement.layout.zero else mesh.model
    return math.sqrt(group.sum_floats([_exact_sum(squares)])[0])


def _parts(storage: FlatStorage, arrangement: Arrangement | None) -> Iterator[tuple[int, Array]]:
    """Yield what this rank counts of the gradients, numbered.

    It is as few pieces as there can be, since a device takes as long to begin with a short one as with a long one:
    parameters that lie together are one.
    """
    if arrangement is None:
        yield from enumerate(storage.grads)
        return
    if arrangement.layout.zero:
        held = [grad for span, _, grad in storage.held() if arrangement.counts(span.parameter.name, span.parameter)]
        yield from ((i, grad) for i, grad in enumerate(held) if grad is not None and grad.size)
        return
    found: list[tuple[int, int, int]] = []
    for span in storage.spans:
        if not arrangement.counts(span.parameter.name, span.parameter):
            found.append((-1, 0, 0))  # what follows does not lie beside what came before
        elif found and found[-1][0] == span.buffer:
            found[-1] = (span.buffer, found[-1][1], span.stop)  # with the gap between them, which holds zeros
        else:
            found.append((span.buffer, span.start, span.stop))
    pieces = [each for each in found if each[0] >= 0]
    yield from ((i, storage.grads[buffer][start:stop]) for i, (buffer, start, stop) in enumerate(pieces))


def _exact_sum(values: list[float]) -> float:
    """Return the sum, rounded once; infinity or NaN where a value is."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
