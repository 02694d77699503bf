"""Sums over many rows that stay accurate, and blocks of rows that fit the cache.

A long sum in float32 loses small summands: the sum of 100,000 equal numbers is off by 5e-4. So rows
are summed in blocks, and the blocks' sums in float64.

    rows     | 512 | 512 | 512 | rest |
    float32    sum   sum   sum   sum
                |_____|__+__|_____|
    float64              sum

On a device it is a single call: its threads sum in parts anyway.

`in_blocks` computes by blocks of rows that stay in the cache during several passes. A pass over a
cached block takes a quarter of the time of a pass over memory. On a device all rows are one block,
since each further call would cost more than it computes.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, empty, namespace, ones
from nnmpi.backend.recording import call

# A block of this many float32 elements, its results and its scratch arrays fit 1 MiB, the smallest
# L2 cache of server processors.
ELEMENTS = 2**16
ROWS = 512  # in a block
WIDE = 512  # elements of a row; NumPy is slower on shorter rows
# NumPy copies an operand that is repeated for each row, unless a row fills its buffer of 8,192
# elements: such rows take half the time of shorter ones.
LONG = 8192
LONG_ROWS = 128  # elements, see `add_rows`


def row_sum(rows: Array, out: Array | None = None) -> Array:
    """Return the sum over the rows.

    Args:
        rows: (count, n), float32 or float64; on the host best C-contiguous.
        out: (n,), receives the sum; None for a new array.
    """
    count, n = rows.shape
    if not isinstance(rows, np.ndarray):
        return namespace(rows).add.reduce(rows, axis=0, out=out)
    sums = np.empty((n,), rows.dtype, like=rows) if out is None else out
    if count <= ROWS or not rows.flags.c_contiguous:
        np.dot(ones(rows, count), rows, out=sums)  # twice as fast as add.reduce
        return sums
    full = count // ROWS
    parts = np.empty((full + 1, n), rows.dtype, like=rows)
    blocks = rows[: full * ROWS].reshape(full, ROWS, n)
    np.matmul(ones(rows, ROWS)[None], blocks, out=parts[:full].reshape(full, 1, n))
    np.dot(ones(rows, count - full * ROWS), rows[full * ROWS :], out=parts[full])
    np.add.reduce(parts, axis=0, dtype=np.float64, out=sums)
    return sums


def row_dots(a: Array, b: Array) -> Array:
    """Return the products of the rows of a (..., n) with b's, or with b (n,), as (..., 1)."""
    if isinstance(a, np.ndarray):
        return np.vecdot(a, b)[..., None]  # by BLAS, twice as fast as NumPy's sums
    return (a * b).sum(axis=-1, keepdims=True)


def row_totals(x: Array) -> Array:
    """Return the sums of rows (..., n), as (..., 1)."""
    if isinstance(x, np.ndarray):
        return row_dots(x, ones(x, x.shape[-1]))
    return x.sum(axis=-1, keepdims=True)


def sum_over(x: Array, axes: tuple[int, ...], keepdims: bool = False) -> Array:
    """Return the sum over some axes, in x's dtype if that is floating point.

    Args:
        x: of any shape and dtype.
        axes: counted from 0.
        keepdims: whether they stay, with length 1.
    """
    leading, rest = len(axes), x.shape[len(axes) :]
    over_rows = axes == tuple(range(leading)) and 0 < leading < x.ndim and x.size > 0
    wide = isinstance(x, np.ndarray) and x.dtype.kind == "f" and x.dtype.itemsize > 2  # not float16
    if wide and over_rows and x.flags.c_contiguous:
        # NumPy sums pairwise along the last axis only; over rows it adds one by one
        total = row_sum(x.reshape(-1, prod(rest)))
        return total.reshape((1,) * leading + rest if keepdims else rest)
    return namespace(x).add.reduce(
        x, axis=axes, dtype=x.dtype if x.dtype.kind == "f" else None, keepdims=keepdims
    )


def repeated(values: Array, pixels: int) -> Array:
    """Return values (c,) repeated per pixel, (pixels * c,), as operands of long rows."""
    result = np.empty((pixels, values.size), values.dtype, like=values)
    np.copyto(result, values)
    return result.reshape(result.size)


def in_blocks(function: Callable[..., Any], *operands: Any) -> tuple[Array, ...]:
    """Return function(*operands), which works row by row, computed while a block is in the cache.

    A recording notes the calls on each block, so that a replay computes the same bits.

    Args:
        function: returns arrays with as many rows, or None if it writes to rows.
        operands: rows (..., n) first, of which one with a single axis is a row; others (rows, ...),
            what is repeated for each row, and numbers.
    """
    rows = operands[0]
    if rows.ndim < 2 or rows.size <= ELEMENTS or not isinstance(rows, np.ndarray):
        return function(*operands)
    results: tuple[Array, ...] = ()
    are_cut = [getattr(x, "ndim", 0) > 1 and len(x) == len(rows) for x in operands]
    for part in row_blocks(rows):
        given = [x[part] if is_cut else x for x, is_cut in zip(operands, are_cut, strict=True)]
        blocks = function(*given) or ()
        if not results:  # what is returned as it came, or twice, takes no memory
            known = dict(zip(map(id, given), operands, strict=True))
            for x in blocks:
                if id(x) not in known:
                    known[id(x)] = empty(namespace(rows), (len(rows), *x.shape[1:]), x.dtype)
            results = tuple(known[id(x)] for x in blocks)
            own = [
                i
                for i, x in enumerate(results)
                if not any(x is y for y in (*operands, *results[:i]))
            ]
        for i in own:
            results[i][part] = blocks[i]
    return results


def row_blocks(rows: Array, elements: int = 0) -> list[slice]:
    """Return slices that cover the first axis, of so many elements, by default `ELEMENTS`; at least
    one, which is empty for an empty array.
    """
    count, most = len(rows), elements or ELEMENTS
    if not isinstance(rows, np.ndarray) or rows.size <= most:
        return [slice(0, count)]
    return [*slices(count, max(1, most * count // rows.size))]


def slices(count: int, size: int) -> Iterator[slice]:
    """Yield slices of up to `size` out of `count`."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def add_rows(table: Array, indices: Array, rows: Array) -> None:
    """Add rows (..., *shape) to the rows of a table (entries, *shape) at indices (...), in order.

    NumPy's `add.at` works element by element; for long rows this loop is five times as fast.
    """
    if isinstance(table, np.ndarray) and prod(table.shape[1:]) >= LONG_ROWS:
        call(_add_long_rows, (indices, rows), (table,))
    else:
        namespace(table).add.at(table, indices, rows)


def _add_long_rows(indices: Array, rows: Array, table: Array) -> None:
    rows = rows.reshape(indices.size, *table.shape[1:])
    for i, row in zip(indices.reshape(-1).tolist(), rows, strict=True):
        table[i] += row
