"""Sums over many rows that keep their digits.

One long sum in float32 loses what is small beside it: the sum of 100,000 equal numbers is off by
5e-4. So rows are added up in blocks, and the blocks' sums in float64.

    rows     | 512 | 512 | 512 | rest |
    float32    sum   sum   sum   sum
                |_____|__+__|_____|
    float64              sum

On a device, whose threads add up parts anyway, it is one call.

`row_blocks` cuts rows into blocks that stay in a cache while several passes run over them. A pass
over megabytes costs what memory costs, a pass over a block that lies in the cache a quarter of
that. On a device, where each call costs more than it computes, everything is one block.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, ones

ROWS = 512  # in a block
WIDE = 512  # elements of a row, from which on NumPy computes as fast as it can


def row_sum(xp: Any, rows: Array, out: Array | None = None) -> Array:
    """Return the sum over the rows.

    Args:
        xp: the array library, or a recorder's stand-in for it.
        rows: (count, n), float32 or float64; on the host best C-contiguous.
        out: (n,), where to write it; None for a new array.
    """
    count, n = rows.shape
    if type(rows) is not np.ndarray:
        return xp.add.reduce(rows, axis=0, out=out)
    sums: Array = xp.empty((n,), rows.dtype) if out is None else out
    if count <= ROWS or not rows.flags.c_contiguous:
        xp.dot(ones(xp, count, rows.dtype), rows, out=sums)  # twice as fast as adding up rows
        return sums
    full = count // ROWS
    parts = xp.empty((full + 1, n), rows.dtype)
    blocks = rows[: full * ROWS].reshape(full, ROWS, n)
    xp.matmul(ones(xp, ROWS, rows.dtype)[None], blocks, out=parts[:full].reshape(full, 1, n))
    xp.dot(ones(xp, count - full * ROWS, rows.dtype), rows[full * ROWS :], out=parts[full])
    xp.add.reduce(parts, axis=0, dtype=np.float64, out=sums)
    return sums


def sum_over(xp: Any, x: Array, axes: Sequence[int], keepdims: bool = False) -> Array:
    """Return the sum over some axes, in x's dtype where that is a floating one.

    Args:
        xp: as above.
        x: of any shape and dtype.
        axes: which, from 0 up.
        keepdims: whether they stay, with length 1.
    """
    axes = tuple(axes)
    leading, saved = len(axes), x.shape[len(axes) :]
    over_rows = axes == tuple(range(leading)) and 0 < leading < x.ndim and x.size > 0
    wide = (
        type(x) is np.ndarray
        and x.dtype.kind == "f"
        and x.dtype.itemsize >= np.dtype("float32").itemsize
    )
    if wide and over_rows and x.flags.c_contiguous:
        # NumPy adds up rows one by one, what lies side by side pairwise
        total = row_sum(xp, x.reshape(-1, prod(saved)))
        return total.reshape((1,) * leading + saved if keepdims else saved)
    return xp.add.reduce(
        x, axis=axes, dtype=x.dtype if x.dtype.kind == "f" else None, keepdims=keepdims
    )


# A block of that many float32, its results and its scratch fit into 1 MiB, the smallest L2 cache of
# server processors.
ELEMENTS = 2**16


def row_blocks(rows: Array) -> list[slice]:
    """Return slices that cover the first axis, at least one; those of an empty array are empty."""
    count = len(rows)
    if type(rows) is not np.ndarray or rows.size <= ELEMENTS:
        return [slice(0, count)]
    step = max(1, ELEMENTS * count // rows.size)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]
