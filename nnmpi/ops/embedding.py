"""The embedding: rows of a table picked by integers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, Dtype, is_array, namespace
from nnmpi.backend.kernels import kernels_for
from nnmpi.backend.precision import FLOAT32, cast, is_low
from nnmpi.backend.recording import perform
from nnmpi.errors import DtypeError, ShapeError
from nnmpi.tensor.function import Function, Grads
from nnmpi.tensor.operand import read_as, refuse_parts, whole_values
from nnmpi.tensor.placement import Placement, is_cut, uncut
from nnmpi.tensor.tensor import Tensor

LONG_ROWS = 128  # features


class EmbeddingFunction(Function):
    """table[indices]; an entry that is picked twice gets the sum of both rows' gradients.

    Args:
        reads: the dtype of the rows, the lower one in mixed precision; the gradient is of the
            table's.
    """

    __slots__ = ("reads",)

    def __init__(self, reads: Dtype) -> None:
        self.reads = reads

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on the ranks: as the indices do."""
        table, indices = inputs
        refuse_parts(self, table, why="needs a whole table")
        return uncut(self, indices, (), "")

    def forward(self, table: Array, indices: Array) -> Array:
        kernels = kernels_for(table, "embedding")
        self.saved = (table.shape, table.dtype, indices, kernels)
        if kernels is None:
            return cast(namespace(table), table[indices], self.reads)
        return kernels.embedding(namespace(table), table, indices, self.reads)

    def backward(self, grad: Array) -> Grads:
        (shape, dtype, indices, kernels), xp = self.saved, namespace(grad)
        place, add = self.sum_into(0)
        if kernels is not None:
            return kernels.embedding_grad(xp, grad, indices, shape, dtype, place, add), None
        wide = FLOAT32 if is_low(dtype) else dtype
        spread: Array = xp.zeros(shape, dtype=wide) if place is None or wide != dtype else place
        if spread is place and not add:
            spread[...] = 0
        add_rows(xp, spread, indices, cast(xp, grad, wide))
        return cast(xp, spread, dtype), None


def embedding(
    table: Tensor,
    indices: Any,
    entries: int | None = None,
    make: Callable[..., Function] = EmbeddingFunction,
) -> Tensor:
    """Return rows of a table (entries, features) at integer indices (...): (..., features).

    Where the table is a rank's part of one with more `entries`, `make` says what picks its rows.

    They are of the table's dtype; in a mode of mixed precision (see `backend.precision`) of the
    lower one. A device's kernels do not check indices that lie there, which would stop it: one out
    of range gives a row of NaN.

    Raises:
        DtypeError: when the indices are not integers.
        ShapeError: when an index is outside 0..entries-1 (the first such is named), or the table is
            no matrix.
    """
    places = indices.data if is_cut(indices) else whole_values("embedding", indices)
    if not is_array(places):
        places = np.asarray(places)  # looked at on the host, wherever the table is
    if places.dtype.kind not in "iu":
        raise DtypeError(f"embedding needs integer indices, not {places.dtype}")
    if table.ndim != 2:
        raise ShapeError(
            f"embedding needs a table (entries, features), not one of shape {table.shape}"
        )
    if kernels_for(table.data, "embedding") is None or type(places) is np.ndarray:
        perform(_check_indices, places, table.shape[0] if entries is None else entries)
        places = namespace(table.data).asarray(places)
    return make(read_as("embedding", table))(table, indices if is_cut(indices) else places)


def _check_indices(places: Array, entries: int) -> None:
    wrong = (places < 0) | (places >= entries)
    if wrong.any():
        first = int(places.reshape(-1)[int(wrong.reshape(-1).argmax())])
        raise ShapeError(f"embedding index {first} is outside 0..{entries - 1}")


def add_rows(xp: Any, table: Array, indices: Array, rows: Array) -> None:
    """Add rows (..., features) to those of a table that indices (...) pick, one after the other.

    NumPy's own `add.at` goes element by element: for long rows a loop is five times as fast.
    """
    if type(table) is np.ndarray and table.shape[1] >= LONG_ROWS:
        for place, row in zip(
            indices.reshape(-1).tolist(), rows.reshape(-1, table.shape[1]), strict=True
        ):
            table[place] += row
    else:
        xp.add.at(table, indices, rows)
