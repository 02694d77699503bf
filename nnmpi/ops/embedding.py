"""The embedding: rows of a table picked by integers."""

from __future__ import annotations

from typing import Any

from nnmpi.backend.array import Array, namespace
from nnmpi.errors import DtypeError, ShapeError
from nnmpi.tensor.function import Function
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.variable import Variable


class Embedding(Function):
    """table[indices]; a row picked twice gets both gradients."""

    def forward(self, table: Array, indices: Array) -> Array:
        self.saved = (table.shape, table.dtype, indices)
        result: Array = table[indices]
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        shape, dtype, indices = self.saved
        xp = namespace(grad)
        spread = self.into(0)
        if spread is None:
            spread = xp.zeros(shape, dtype=dtype)
        else:
            spread[...] = 0
        xp.add.at(spread, indices, grad)
        return spread, None


def embedding(table: Tensor, indices: Any) -> Tensor:
    """Return the rows of a table (entries, features) that integer indices (...) pick: (..., features).

    Raises:
        DtypeError: when the indices are not integers.
        ShapeError: when an index is outside 0..entries-1 (the first such is named), or the table is no matrix.
    """
    places = indices.data if isinstance(indices, Variable) else namespace(table.data).asarray(indices)
    if places.dtype.kind not in "iu":
        raise DtypeError(f"embedding needs integer indices, not {places.dtype}")
    if table.ndim != 2:
        raise ShapeError(f"embedding needs a table (entries, features), not one of shape {table.shape}")
    wrong = (places < 0) | (places >= table.shape[0])
    if wrong.any():
        first = int(places.reshape(-1)[int(wrong.reshape(-1).argmax())])
        raise ShapeError(f"embedding index {first} is outside 0..{table.shape[0] - 1}")
    return Embedding()(table, places)
