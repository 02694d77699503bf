"""The embedding: rows of a table picked by integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnmpi.backend.array import Array, is_array, namespace
from nnmpi.backend.casting import FLOAT32, cast, device_kernels, widened
from nnmpi.backend.precision import is_low
from nnmpi.backend.recording import perform
from nnmpi.errors import DtypeError, ShapeError
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import read_as
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
        spread = None if is_low(dtype) else self.into(0)
        if spread is None:
            spread = xp.zeros(shape, dtype=FLOAT32 if is_low(dtype) else dtype)
        else:
            spread[...] = 0
        xp.add.at(spread, indices, widened(xp, grad) if is_low(dtype) else grad)
        return cast(xp, spread, dtype), None


class ReadEmbedding(Function):
    """table[indices] in the dtype that mixed precision reads tables in, and on a device; the gradient is the table's.

    On a device an index out of range gives NaN, and its gradient goes nowhere.

    Args:
        reads: the dtype of the rows.
        kernels: the device's; None for none.
    """

    __slots__ = ("kernels", "reads")

    def __init__(self, reads: np.dtype[Any], kernels: Any) -> None:
        self.reads, self.kernels = reads, kernels

    def forward(self, table: Array, indices: Array) -> Array:
        xp = namespace(table)
        self.saved = (table.shape, table.dtype, indices)
        if self.kernels is None:
            return cast(xp, table[indices], self.reads)
        rows: Array = xp.empty((*indices.shape, table.shape[1]), self.reads)
        self.kernels.embedding(xp.ascontiguousarray(table), xp.ascontiguousarray(indices), rows)
        return rows

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        shape, dtype, indices = self.saved
        xp = namespace(grad)
        place, add = self.sum_into(0)
        if self.kernels is not None:
            spread = xp.empty(shape, dtype) if place is None else place
            self.kernels.embedding_grad(xp.ascontiguousarray(grad), xp.ascontiguousarray(indices), spread, add)
            return spread, None
        spread = xp.zeros(shape, dtype=dtype) if place is None or add else place
        spread[...] = 0
        xp.add.at(spread, indices, cast(xp, grad, dtype))
        return spread, None


def embedding(table: Tensor, indices: Any) -> Tensor:
    """Return the rows of a table (entries, features) that integer indices (...) pick: (..., features).

    They are of the table's dtype; in a mode of mixed precision (see `backend.precision`) of the lower one. On a device
    with its kernels nobody waits for a look at indices that are there already: one out of range gives a row of NaN.

    Raises:
        DtypeError: when the indices are not integers.
        ShapeError: when an index is outside 0..entries-1 (the first such is named), or the table is no matrix.
    """
    places = indices.data if isinstance(indices, Variable) else indices
    if not is_array(places):
        places = np.asarray(places)  # looked at on the host, wherever the table is
    if places.dtype.kind not in "iu":
        raise DtypeError(f"embedding needs integer indices, not {places.dtype}")
    if table.ndim != 2:
        raise ShapeError(f"embedding needs a table (entries, features), not one of shape {table.shape}")
    kernels = device_kernels(table.data)
    if kernels is None or type(places) is np.ndarray:
        perform(_check_indices, places, table.shape[0])
        places = namespace(table.data).asarray(places)
    reads = read_as("embedding", table)
    if kernels is None and reads == table.data.dtype:
        return Embedding()(table, places)
    return ReadEmbedding(reads, kernels)(table, places)


def _check_indices(places: Array, entries: int) -> None:
    wrong = (places < 0) | (places >= entries)
    if wrong.any():
        first = int(places.reshape(-1)[int(wrong.reshape(-1).argmax())])
        raise ShapeError(f"embedding index {first} is outside 0..{entries - 1}")
