"""Dropout whose mask is a function of a key and the sample's place in the global batch: the same under any layout."""

from __future__ import annotations

from math import prod

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.counter import random_bits
from nnmpi.errors import ShapeError, UsageError
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import real
from nnmpi.tensor.tensor import Tensor


class Dropout(Function):
    """x with elements set to 0 at random and the others scaled up, so that the mean stays."""

    __slots__ = ("columns", "first_row", "key", "rate")

    def __init__(self, rate: float, key: tuple[int, int], first_row: int, columns: Array | None) -> None:
        self.rate, self.key, self.first_row, self.columns = rate, key, first_row, columns

    def forward(self, x: Array) -> Array:
        xp = namespace(x)
        rows = x.shape[0] if x.ndim else 1
        columns = prod(x.shape[1:]) if self.columns is None else xp.asarray(self.columns)
        bits = random_bits(xp, self.first_row, rows, columns, self.key)
        kept = (bits >= xp.uint32(min(round(self.rate * 2**32), 2**32 - 1))).reshape(x.shape)
        factor = kept * xp.asarray(1 / (1 - self.rate), dtype=x.dtype)
        self.saved = (factor,)
        result: Array = x * factor
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (grad * self.saved[0],)


def dropout(x: Tensor, rate: float, key: tuple[int, int], first_row: int = 0, columns: Array | None = None) -> Tensor:
    """Return x with each element dropped with probability `rate`, the others divided by 1 - rate.

    Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", 2014.

    Args:
        x: (rows, ...); a row is a sample.
        key: two 32-bit numbers (`backend.counter.key_pair`): another pair for every step and layer.
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
    return x if rate == 0 else Dropout(float(rate), key, first_row, columns)(real("dropout", x))
