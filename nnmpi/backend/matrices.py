"""How matrices lie in memory, and which calls of a BLAS multiply stacks of them with the fewest copies.

BLAS counts by columns, NumPy by rows: a matrix that lies in rows is, to BLAS, its transpose. So it is asked for

    out^T (m, n)  =  b^T (m, k)  a^T (k, n)            instead of            out (n, m)  =  a (n, k)  b (k, m)

and all three are read as they lie. An operand that lies in columns (a transposed view) is the other way round, for
which BLAS has a flag; rows may be further apart than they are long (a slice of columns, a head of attention): `lead`.

    in rows        in columns       neither: copied
    ..[# # # #]..  [#]. [#]. [#].   [#].[#].[#].        . between the elements of a row and of a column
    ..[# # # #]..  [#]. [#]. [#].
    lead: 8        lead: 3          [#].[#].[#].

A stack is one call if its matrices are equally far apart in each of the three arrays (0 for one that serves all).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.precision import is_floating
from nnmpi.errors import DtypeError, ShapeError

# What a call costs, and a copy: measured in microseconds on the host's side, and as bytes per second of the memory.
# Both are guesses of an order of magnitude, which is all the choice below needs.
CALL_S, COPY_S, COPY_BYTES_PER_S = 5e-6, 1e-5, 1.5e12

LIMIT = 2**31 - 1  # of numbers given to BLAS
HALF_BYTES = 2  # float16 and bfloat16 are the only floating dtypes of this size

Shape = tuple[int, ...]
Axis = tuple[int, tuple[int, ...]]  # its length, and per array the elements from one to the next


@dataclass(frozen=True)
class StridedLayout:
    """Where the elements of an array of two or more axes lie.

    Attributes:
        shape: of the array.
        strides: in elements, as long as the shape; an array with a negative one is copied.
    """

    shape: Shape
    strides: Shape

    @property
    def flipped(self) -> StridedLayout:
        """The matrices transposed."""
        return StridedLayout((*self.shape[:-2], *self.shape[:-3:-1]), (*self.strides[:-2], *self.strides[:-3:-1]))

    @property
    def packed(self) -> StridedLayout:
        """The same array, C-contiguous."""
        strides = [1]
        for length in self.shape[:0:-1]:
            strides.append(strides[-1] * max(length, 1))
        return StridedLayout(self.shape, tuple(reversed(strides)))

    @property
    def matrix(self) -> tuple[int, int, int, int]:
        """Rows, columns, and the elements from one to the next of each."""
        return self.shape[-2], self.shape[-1], self.strides[-2], self.strides[-1]

    def over(self, leading: Shape) -> Shape:
        """Return the strides of the leading axes when the array is broadcast to these."""
        own = [0 if length == 1 else stride for length, stride in zip(self.shape[:-2], self.strides[:-2], strict=True)]
        return (0,) * (len(leading) - len(own)) + tuple(own)


@dataclass(frozen=True)
class Plan:
    """Calls of `gemmEx` or `gemmStridedBatchedEx`, in BLAS's order and words: first (m, k) x second (k, n).

    Attributes:
        copies: whether a, b, out must be replaced by contiguous copies before, which all below is about.
        swapped: whether the first operand is a, because the result lies in columns; else it is b.
        m, n, k: the sizes.
        flags: for the first and the second, 1 if it is to be transposed.
        leads: for the first, the second and the result.
        apart: likewise the elements from one matrix to the next.
        batch: the number of matrices in a call.
        starts: per call, the elements to skip in each of the three.
    """

    copies: tuple[bool, bool, bool]
    swapped: bool
    m: int
    n: int
    k: int
    flags: tuple[int, int]
    leads: tuple[int, int, int]
    apart: tuple[int, int, int]
    batch: int
    starts: tuple[tuple[int, int, int], ...]


def form(rows: int, columns: int, down: int, right: int) -> tuple[int, int] | None:
    """Return 0 for a matrix that lies in rows, 1 for one in columns, with its lead; None if it lies otherwise.

    Args:
        down: elements from one row to the next.
        right: elements from one column to the next.
    """
    if (right == 1 or columns == 1) and (rows == 1 or down >= columns):
        return 0, max(columns, 1) if rows == 1 else down
    if (down == 1 or rows == 1) and (columns == 1 or right >= rows):
        return 1, max(rows, 1) if columns == 1 else right
    return None


def collapse(axes: Sequence[Axis]) -> list[Axis]:
    """Return as few axes that run over the same elements in the same order."""
    result: list[Axis] = []
    for length, strides in axes:
        if length == 1:
            continue
        if result and all(outer == inner * length for outer, inner in zip(result[-1][1], strides, strict=True)):
            result[-1] = (result[-1][0] * length, strides)
        else:
            result.append((length, strides))
    return result


def plan(a: StridedLayout, b: StridedLayout, out: StridedLayout, itemsize: int) -> Plan:
    """Return the calls for out = a @ b, none of whose sizes is 0, copying what BLAS cannot read and what saves calls.

    Args:
        itemsize: of an element in bytes.
    """
    leading, arrays = out.shape[:-2], (a, b, out)
    must = [_must_copy(x) for x in arrays]
    least = _with_copies(a, b, out, must)
    if len(least.starts) == 1:
        return least
    may = [needed or _is_spread(x, leading) for x, needed in zip(arrays, must, strict=True)]
    fewest = _with_copies(a, b, out, may)
    more = [x for x, needed, worth in zip(arrays, must, may, strict=True) if worth and not needed]
    price_s = sum(COPY_S + 2 * itemsize * prod(x.shape) / COPY_BYTES_PER_S for x in more)
    return fewest if price_s < CALL_S * (len(least.starts) - len(fewest.starts)) else least


def _must_copy(x: StridedLayout) -> bool:
    return min(x.strides) < 0 or form(*x.matrix) is None


def _is_spread(x: StridedLayout, leading: Shape) -> bool:
    """Return whether a copy would be one stack and the array is none; not if the copy would have to be larger."""
    strides = x.over(leading)
    repeated = any(length > 1 and stride == 0 for length, stride in zip(leading, strides, strict=True))
    return not repeated and len(collapse([(n, (s,)) for n, s in zip(leading, strides, strict=True)])) > 1


def _with_copies(a: StridedLayout, b: StridedLayout, out: StridedLayout, copied: Sequence[bool]) -> Plan:
    """Return the calls when these of the three are copied."""
    a, b, out = (x.packed if to_copy else x for x, to_copy in zip((a, b, out), copied, strict=True))
    swapped = _form(out)[0] == 1
    if swapped:  # out^T = b^T a^T lies in rows
        a, b, out = b.flipped, a.flipped, out.flipped
    a, b, out = _stacked_up(a, b, out)
    leading = out.shape[:-2]
    steps = zip(b.over(leading), a.over(leading), out.over(leading), strict=True)
    axes = collapse(list(zip(leading, steps, strict=True)))
    batch: Axis = (1, (0, 0, 0))
    if axes:
        batch = axes.pop(max(range(len(axes)), key=lambda i: axes[i][0]))
    starts = [
        _triple(sum(i * apart[x] for i, (_, apart) in zip(index, axes, strict=True)) for x in range(3))
        for index in product(*(range(length) for length, _ in axes))
    ]
    forms = _form(b), _form(a), _form(out)
    return Plan(
        copies=(copied[0], copied[1], copied[2]),
        swapped=swapped,
        m=b.shape[-1],
        n=a.shape[-2],
        k=a.shape[-1],
        flags=(forms[0][0], forms[1][0]),
        leads=_triple(lead for _, lead in forms),
        apart=_triple(batch[1]),
        batch=batch[0],
        starts=tuple(starts),
    )


def _stacked_up(
    a: StridedLayout, b: StridedLayout, out: StridedLayout
) -> tuple[StridedLayout, StridedLayout, StridedLayout]:
    """Return one matrix in the place of a stack, where one b serves all and those of a and out lie one below another.

    [a1]         [a1 b]          It is one product then, and a larger one, which devices are quicker at.
    [a2]  [b] =  [a2 b]
    """
    leading = out.shape[:-2]
    over_a, over_b, over_out = (x.over(leading) for x in (a, b, out))
    if any(stride for length, stride in zip(leading, over_b, strict=True) if length > 1):
        return a, b, out
    steps = zip((*over_a, a.strides[-2]), (*over_out, out.strides[-2]), strict=True)
    axes = collapse(list(zip(out.shape[:-1], steps, strict=True)))
    if len(axes) != 1:
        return a, b, out
    rows, (down_a, down_out) = axes[0]
    tall_a = StridedLayout((rows, a.shape[-1]), (down_a, a.strides[-1]))
    tall_out = StridedLayout((rows, out.shape[-1]), (down_out, out.strides[-1]))
    out_form = form(*tall_out.matrix)
    if form(*tall_a.matrix) is None or out_form is None or out_form[0] == 1:
        return a, b, out
    return tall_a, StridedLayout(b.shape[-2:], b.strides[-2:]), tall_out


def _form(x: StridedLayout) -> tuple[int, int]:
    found = form(*x.matrix)
    assert found is not None, x
    return found


def _triple(values: Iterable[int]) -> tuple[int, int, int]:
    first, second, third = values
    return first, second, third


@lru_cache(1024)
def product_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a @ b.

    Raises:
        ShapeError: when they do not fit.
    """
    if min(len(a), len(b)) < 2 or a[-1] != b[-2]:
        raise ShapeError(f"no product of arrays of shapes {a} and {b}: it needs (..., n, k) and (..., k, m)")
    try:
        leading = np.broadcast_shapes(a[:-2], b[:-2])
    except ValueError:
        raise ShapeError(f"no product of arrays of shapes {a} and {b}: the leading axes do not fit") from None
    return (*leading, a[-2], b[-1])


def check_operands(a: Array, b: Array, out: Array) -> None:
    """Refuse a product of these arrays that is none.

    Args:
        a: (..., n, k).
        b: (..., k, m).
        out: where the product is to go.

    Raises:
        DtypeError: for two dtypes, or a result that they cannot have.
        ShapeError: when they do not fit.
    """
    if not is_floating(a.dtype):
        raise DtypeError(f"no product of {a.dtype} arrays: convert them to a floating dtype")
    if a.dtype != b.dtype:
        raise DtypeError(f"no product of {a.dtype} and {b.dtype}: convert one of them")
    if out.dtype != a.dtype and not (a.dtype.itemsize == HALF_BYTES and out.dtype == np.float32):
        raise DtypeError(f"the product of {a.dtype} arrays cannot be written to {out.dtype}")
    shape = product_shape(a.shape, b.shape)
    if out.shape != shape:
        raise ShapeError(f"the product of shapes {a.shape} and {b.shape} is {shape}, but the place for it {out.shape}")
