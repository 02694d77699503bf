"""Dropout whose mask is a function of a key and the sample's place in the global batch: the same under any layout."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, TypeAlias

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.casting import device_kernels
from nnmpi.backend.counter import random_bits
from nnmpi.errors import ShapeError, UsageError
from nnmpi.tensor.convert import widely
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import real
from nnmpi.tensor.tensor import Tensor

Key: TypeAlias = tuple[int, int]
Place: TypeAlias = tuple[Key, int]  # the key, and the first row's place in the global batch


class Dropout(Function):
    """x with elements set to 0 at random and the others scaled up, so that the mean stays."""

    __slots__ = ("columns", "place", "rate")

    def __init__(self, rate: float, place: Callable[[], Place], columns: Array | None) -> None:
        self.rate, self.place, self.columns = rate, place, columns

    def forward(self, x: Array) -> Array:
        xp = namespace(x)
        rows = x.shape[0] if x.ndim else 1
        columns = prod(x.shape[1:]) if self.columns is None else xp.asarray(self.columns)
        key, first_row = self.place()
        bits = random_bits(xp, first_row, rows, columns, key)
        kept = (bits >= xp.uint32(min(round(self.rate * 2**32), 2**32 - 1))).reshape(x.shape)
        factor = kept * xp.asarray(1 / (1 - self.rate), dtype=x.dtype)
        self.saved = (factor,)
        result: Array = x * factor
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (grad * self.saved[0],)


class _DeviceDropout(Function):
    """The same by a device's kernel, which draws the mask again for the gradient: nothing is kept but the key."""

    __slots__ = ("columns", "place", "rate", "table")

    def __init__(self, rate: float, place: Callable[[], Place], columns: Array | None, table: Any) -> None:
        self.rate, self.place, self.columns, self.table = rate, place, columns, table

    def forward(self, x: Array) -> Array:
        columns = None if self.columns is None else namespace(x).asarray(self.columns)
        self.saved = (*self.place(), columns)
        return self._drop(x)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self._drop(grad),)

    def _drop(self, x: Array) -> Array:
        (key, first_row, columns), xp = self.saved, namespace(x)
        y: Array = xp.empty(x.shape, x.dtype)
        self.table.dropout(xp.ascontiguousarray(x), self.rate, key, first_row, columns, y)
        return y


def dropout(
    x: Tensor, rate: float, key: Key | Callable[[], Place], first_row: int = 0, columns: Array | None = None
) -> Tensor:
    """Return x with each element dropped with probability `rate`, the others divided by 1 - rate.

    Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", 2014.

    Args:
        x: (rows, ...); a row is a sample.
        key: two 32-bit numbers (`backend.counter.key_pair`): another pair for every step and layer. Or what returns
            them and the first row; it is asked in every pass, also when a compiled step is replayed.
        first_row: the place in the global batch of x's first row.
        columns: (elements of a row,) uint32; their places in a whole row, where x has only a part of each.

    Raises:
        UsageError: when the rate is not in [0, 1).
        ShapeError: when there is not one place for each element of a row.
    """
    if not 0 <= rate < 1:
        raise UsageError(f"dropout's rate is a probability in [0, 1), not {rate}")
    if columns is not None and columns.shape != (prod(x.shape[1:]),):
        raise ShapeError(f"dropout of rows of shape {x.shape[1:]} got the places of {columns.size} elements")
    place = key if callable(key) else lambda: (key, first_row)
    if rate == 0:
        return x
    table = device_kernels(real("dropout", x).data)
    if table is not None:
        return _DeviceDropout(float(rate), place, columns, table)(x)
    return widely(Dropout(float(rate), place, columns), x)
