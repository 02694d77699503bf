"""Rows of a table picked by integers, and dropout by a table of random bits."""

from math import prod
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, Residuals
from nnmpi.backend.kernels.dense import DenseKernels
from nnmpi.backend.precision import is_low
from nnmpi.backend.random import random_bits

LONG_ROWS = 128  # features


class TableKernels(DenseKernels):
    """Embeddings and dropout by the array library's functions. They are not recorded call by call: `xp` is a module."""

    __slots__ = ()

    def embedding(self, xp: Any, table: Array, indices: Array, dtype: np.dtype[Any]) -> Array:
        """Return rows of a table, (..., features).

        Args:
            xp: the arrays' module.
            table: (entries, features).
            indices: (...), integers in 0..entries-1; for any other one a device's kernels give a row of NaN, and here
                it must not be.
            dtype: of the result.
        """
        return self.cast(xp, table[indices], dtype)

    def embedding_grad(
        self,
        xp: Any,
        grad: Array,
        indices: Array,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        into: Array | None,
        add: bool,
    ) -> Array:
        """Return the gradient of the table: each row's, added up by the entry that it is of, in float32 or more.

        Args:
            xp: the arrays' module.
            grad: (..., features), the gradient of the rows.
            indices: (...), integers.
            shape: (entries, features), the table's.
            dtype: the table's, and the result's.
            into: where the result may be written, or None.
            add: whether `into` holds what may be added to: the result is `into` itself if that was done.
        """
        wide = np.dtype(np.float32) if is_low(dtype) else dtype
        spread: Array = xp.zeros(shape, dtype=wide) if into is None or wide != dtype else into
        if spread is into and not add:
            spread[...] = 0
        _add_rows(xp, spread, indices, self.cast(xp, grad, wide))
        return self.cast(xp, spread, dtype)

    def look_up(self, xp: Any, table: Array, indices: Array) -> tuple[Array, Residuals]:
        """Return the rows of a part of a table, zeros for indices that are not in it, and what the gradient needs.

        Args:
            xp: the arrays' module.
            table: (entries, features), the part.
            indices: (n,), integers of any size, counted from the part's first entry.

        Returns:
            (n, features), and the residuals.
        """
        here = xp.flatnonzero((indices >= 0) & (indices < len(table)))
        own = indices[here]
        rows: Array = xp.zeros((indices.size, table.shape[1]), dtype=table.dtype)
        rows[here] = table[own]
        return rows, (here, own)

    def look_up_grad(self, xp: Any, grad: Array, residuals: Residuals, to_table: Array) -> None:
        """Write the gradient of the part of the table.

        Args:
            xp: the arrays' module.
            grad: (n, features), the gradient of the rows.
            residuals: what `look_up` returned.
            to_table: (entries, features).
        """
        here, own = residuals
        to_table[...] = 0
        _add_rows(xp, to_table, own, grad[here])

    def dropout(
        self, xp: Any, x: Array, rate: float, key: tuple[int, int], first_row: int, columns: Array | None
    ) -> tuple[Array, Residuals]:
        """Return x with elements set to 0 at random and the others divided by 1 - rate, and what the gradient needs.

        Args:
            xp: the array's module.
            x: (rows, ...).
            rate: the probability of 0, in [0, 1).
            key, first_row: as for `random_bits`.
            columns: (elements of a row,) uint32, their places in a whole row; None for 0, 1 ...
        """
        rows = x.shape[0] if x.ndim else 1
        bits = random_bits(xp, first_row, rows, prod(x.shape[1:]) if columns is None else columns, key)
        kept = (bits >= xp.uint32(min(round(rate * 2**32), 2**32 - 1))).reshape(x.shape)
        factor = kept * xp.asarray(1 / (1 - rate), dtype=x.dtype)
        return x * factor, (factor,)

    def dropout_grad(self, xp: Any, grad: Array, rate: float, residuals: Residuals) -> Array:
        """Return the gradient of x, like grad.

        Args:
            xp: the array's module.
            grad: (rows, ...), the gradient of the result.
            rate: that of `dropout`.
            residuals: from `dropout`.
        """
        result: Array = grad * residuals[0]
        return result


def _add_rows(xp: Any, table: Array, indices: Array, rows: Array) -> None:
    """Add rows (..., features) to those of a table that indices (...) pick, one after the other.

    NumPy's own `add.at` goes element by element: for long rows a loop is five times as fast.
    """
    if type(table) is np.ndarray and table.shape[1] >= LONG_ROWS:
        for place, row in zip(indices.reshape(-1).tolist(), rows.reshape(-1, table.shape[1]), strict=True):
            table[place] += row
    else:
        xp.add.at(table, indices, rows)
