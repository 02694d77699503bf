"""Views for convolution and pooling: windows without copies, corners, padding.

Images are (batch, height, width, channels). `windows` of a 3x3 kernel over one row of pixels a b c
d e:

    window 0   a b c          the same memory, seen as (batch, out_height, out_width, kernel_height,
    window 1     b c d        kernel_width, channels); copying it is im2col
    window 2       c d e

`corners` of a 2x2 pooling over four rows of four pixels returns one plane per position in the
pooling's windows:

    a b | c d
    e f | g h          planes   a c   b d   e g   f h
    ----+----                   i k   j l   m o   n p
    i j | k l
    m n | o p
"""

from contextlib import suppress
from math import prod
from typing import TypeAlias

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.program.record import viewed
from nnmpi.base.errors import UsageError, check_int, check_ints

RowsAndColumns = tuple[int, int]  # rows, columns
PairLike: TypeAlias = int | RowsAndColumns  # one number for both
Triple: TypeAlias = int | tuple[int, int, int]  # of volumes: depth, rows, columns


def pair(name: str, value: PairLike, least: int) -> RowsAndColumns:
    """Convert an integer or a pair of integers to a pair; check both.

    Args:
        name: of the option, for the error.
        value: an integer, or two.
        least: the smallest value allowed.

    Raises:
        UsageError: for a value below `least`, or another number of values.
    """
    with suppress(ValueError):  # also of `check_int`
        first, second = value if isinstance(value, tuple | list) else (value, value)
        return check_int(name, first, least), check_int(name, second, least)
    raise UsageError(f"{name} must be one or two whole numbers of at least {least}, not {value!r}")


def triple(name: str, value: Triple, least: int) -> tuple[int, int, int]:
    """Convert an integer or three (depth, rows, columns) to three; check them.

    Raises:
        UsageError: for a value below `least`, or another number of values.
    """
    values = check_ints(name, value if isinstance(value, tuple | list) else (value,) * 3, least)
    if len(values) != 3:
        raise UsageError(f"{name} must be one or three whole numbers, not {value!r}")
    return values


def bordered(x: Array, padding: RowsAndColumns, value: float) -> Array:
    """Return x (n, h, w, c) padded by rows and columns of `value`; x itself without padding.

    Args:
        x: (n, h, w, c).
        padding: rows above and below, columns on the left and on the right.
        value: of the border's elements.
    """
    rows, columns = padding
    if rows == 0 and columns == 0:
        return x
    n, h, w, c = x.shape
    result = namespace(x).full((n, h + 2 * rows, w + 2 * columns, c), value, x.dtype)
    np.copyto(result[:, rows : rows + h, columns : columns + w], x)
    return result


def out_size(size: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> int:
    """Return the number of windows along an axis; 0 or less if none fits.

    Args:
        size: elements of the axis.
        kernel, stride, padding, dilation: along this axis, in elements.
    """
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def windows(
    x: Array, kernel: RowsAndColumns, stride: RowsAndColumns, dilation: RowsAndColumns = (1, 1)
) -> Array:
    """Return a view (n, out_h, out_w, kernel_h, kernel_w, c) of all windows.

    Overlapping windows share pixels: do not write to these.

    Args:
        x: (n, h, w, c), with its border.
        kernel, stride, dilation: rows and columns.
    """
    n, h, w, c = x.shape
    batch, row, column, channel = x.strides
    shape = (n, *map(out_size, (h, w), kernel, stride, (0, 0), dilation), *kernel, c)
    strides = (
        batch,
        row * stride[0],
        column * stride[1],
        row * dilation[0],
        column * dilation[1],
        channel,
    )
    if prod(shape) == 0:
        return namespace(x).zeros(shape, x.dtype)
    return viewed(namespace(x).lib.stride_tricks.as_strided, x, shape=shape, strides=strides)


def corners(x: Array, pool: RowsAndColumns) -> Array:
    """Return x (n, h, w, ...) as (pool_h, pool_w, n, h // pool_h, w // pool_w, ...), a view.

    Rows and columns beyond the last window are ignored.
    """
    (p, q), (n, h, w) = pool, x.shape[:3]
    rows, columns = h // p, w // q
    # reshape only splits axes, so it returns a view
    covered = x[:, : rows * p, : columns * q].reshape(n, rows, p, columns, q, *x.shape[3:])
    return covered.transpose(2, 4, 0, 1, 3, *range(5, covered.ndim))
