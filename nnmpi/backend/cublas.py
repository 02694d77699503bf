"""Matrix products on a device: cuBLAS through CuPy's undocumented bindings.

What is gained over cupy.matmul (14.2): float32 results of float16 and bfloat16, stacks of bfloat16
(which it refuses), stacks of float16 without a detour through float32, transposed views without a
copy, adding to what is there, TF32.

BLAS counts by columns, NumPy by rows: a matrix that lies in rows is, to BLAS, its transpose. So it
is asked for

    out^T (m, n)  =  b^T (m, k)  a^T (k, n)       instead of       out (n, m)  =  a (n, k)  b (k, m)

and all three are read as they lie. An operand that lies in columns (a transposed view) is the other
way round, for which BLAS has a flag; rows may be further apart than they are long (a slice of
columns, a head of attention): `lead`.

    in rows        in columns       neither: copied
    ..[# # # #]..  [#]. [#]. [#].   [#].[#].[#].     . between the elements of a row and of a column
    ..[# # # #]..  [#]. [#]. [#].
    lead: 8        lead: 3          [#].[#].[#].

A stack is one call if its matrices are equally far apart in each of the three arrays (0 for one
that serves all). What would take many calls is copied, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product as product_of
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array, Dtype, Shape, mixed_error
from nnmpi.errors import DtypeError, ShapeError

KEPT_PRODUCTS = 4096  # a run has as many as it has products of different shapes
FEW_CALLS = 8  # a copy costs about as much
LIMIT = 2**31 - 1  # of numbers given to BLAS

# cuBLAS's codes: cudaDataType_t of the elements, cublasComputeType_t of how they are added up.
REAL = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
COMPUTE_32F, COMPUTE_64F, COMPUTE_32F_FAST_TF32 = 68, 70, 77
DEFAULT_ALGORITHM = -1
# cublasMath_t: a long sum may be cut into parts, and these are not to be added up in the result's
# 16 bits.
WIDE_SUMS = 16

_SINGLE, _DOUBLE = np.dtype(np.float32), np.dtype(np.float64)

Product = Callable[[Any, Any, Any, bool], None]  # of arrays a and b, written or added to a third


def cublas_bindings() -> tuple[ModuleType, Callable[[], int]]:
    """Return CuPy's cuBLAS bindings, and the handle of this thread's current device.

    The bindings let the handle work on the current stream, at every call. They must be asked for as
    an attribute: it is then that CuPy looks for the library in the wheels that may bring it;
    importing the module finds it on the system's path alone.
    """
    bindings: ModuleType = importlib.import_module("cupy_backends.cuda.libs").cublas
    return bindings, importlib.import_module("cupy.cuda.device").get_cublas_handle


class Matrices(NamedTuple):
    """The memory layout of an array of two or more axes: shape and strides in elements."""

    shape: Shape
    strides: Shape

    @classmethod
    def of(cls, x: Array) -> Matrices:
        """Return where an array's elements lie."""
        size = x.dtype.itemsize
        return cls(
            x.shape, tuple(stride // size if stride % size == 0 else -1 for stride in x.strides)
        )

    @property
    def flipped(self) -> Matrices:
        """The matrices transposed."""
        return Matrices(
            (*self.shape[:-2], *self.shape[:-3:-1]), (*self.strides[:-2], *self.strides[:-3:-1])
        )

    @property
    def form(self) -> tuple[int, int] | None:
        """(0, lead) for row-major matrices, (1, lead) for column-major ones, else None."""
        (rows, columns), (down, right) = self.shape[-2:], self.strides[-2:]
        if min(self.strides) < 0:
            return None
        if (right == 1 or columns == 1) and (rows == 1 or down >= columns):
            return 0, max(columns, 1) if rows == 1 else down
        if (down == 1 or rows == 1) and (columns == 1 or right >= rows):
            return 1, max(rows, 1) if columns == 1 else right
        return None

    def over(self, leading: Shape) -> Shape:
        """Return the strides of the leading axes when the array is broadcast to these."""
        local = [
            0 if length == 1 else stride
            for length, stride in zip(self.shape[:-2], self.strides[:-2], strict=True)
        ]
        return (0,) * (len(leading) - len(local)) + tuple(local)

    def is_spread(self, leading: Shape) -> bool:
        """True if a copy, no larger than the array, would be one stack and the array is not."""
        strides = self.over(leading)
        repeated = any(
            length > 1 and stride == 0 for length, stride in zip(leading, strides, strict=True)
        )
        return not repeated and len(_collapsed(leading, strides)) > 1


class Products:
    """Products of CuPy's arrays.

    Args:
        xp: cupy.
    """

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp
        self._bindings, self._handle = cublas_bindings()
        self._prepared: dict[Any, Product] = {}
        # cuBLAS reads its two factors from the host's memory, in the type in which it adds up.
        self._factors = {dtype: np.array([0, 1], dtype) for dtype in (_SINGLE, _DOUBLE)}

    def multiply(self, a: Array, b: Array, out: Array, add: bool, tf32: bool) -> None:
        """Write, or add, a @ b to `out`; shapes and dtypes fit one another.

        Args:
            tf32: whether operands of float32 may be rounded to TF32.

        Raises:
            DtypeError, ShapeError: for dtypes and sizes that cuBLAS has not.
            DeviceError: when one of them is in the host's memory.
        """
        key = (
            a.shape,
            b.shape,
            out.shape,
            a.strides,
            b.strides,
            out.strides,
            a.dtype,
            b.dtype,
            out.dtype,
            tf32,
        )
        product = self._prepared.get(key)
        if product is None:
            if a.dtype.name not in REAL or out.dtype.name not in REAL:
                raise DtypeError(
                    f"a device multiplies no matrices of {a.dtype} to {out.dtype}; convert them"
                )
            if out.size == 0:
                return
            if a.shape[-1] == 0:
                if not add:
                    out.fill(0)
                return
            lies = [Matrices.of(x) for x in (a, b, out)]
            copied = [x.form is None for x in lies]
            if True not in copied:
                product, calls = self._prepare(lies, a.dtype, out.dtype, tf32)
                if calls > FEW_CALLS:
                    copied = [x.is_spread(out.shape[:-2]) for x in lies]
            if True in copied or product is None:
                self._multiply_copied(copied, a, b, out, add, tf32)
                return
            if len(self._prepared) >= KEPT_PRODUCTS:
                self._prepared.clear()
            self._prepared[key] = product
        product(a, b, out, add)

    def _prepare(
        self, lies: list[Matrices], given: Dtype, wanted: Dtype, tf32: bool
    ) -> tuple[Product, int]:
        """Return what multiplies arrays that BLAS can read as they lie, and how many calls it
        makes.
        """
        a, b, out = lies
        swapped = out.form is not None and out.form[0] == 1
        if swapped:  # out^T = b^T a^T lies in rows
            a, b, out = b.flipped, a.flipped, out.flipped
        three, leading = (b, a, out), out.shape[:-2]
        axes = _collapsed(leading, *(x.over(leading) for x in three))
        batch: Shape = (1, 0, 0, 0)
        if axes:
            batch = axes.pop(max(range(len(axes)), key=lambda i: axes[i][0]))
        stacked, forms = batch[0] > 1, [x.form or (0, 0) for x in three]
        m, n, k = b.shape[-1], a.shape[-2], a.shape[-1]
        if max(m, n, k, batch[0], *(lead for _, lead in forms)) > LIMIT:
            raise ShapeError(
                f"cuBLAS takes no sizes above {LIMIT}, as of shapes {a.shape} and {b.shape}; cut"
                " them"
            )
        bindings, wide, narrow = (
            self._bindings,
            given == _DOUBLE,
            wanted.itemsize < _SINGLE.itemsize,
        )
        function = bindings.gemmStridedBatchedEx if stacked else bindings.gemmEx
        compute = (
            COMPUTE_64F
            if wide
            else COMPUTE_32F_FAST_TF32
            if tf32 and given == _SINGLE
            else COMPUTE_32F
        )
        factors = self._factors[_DOUBLE if wide else _SINGLE]
        zero, item = factors.ctypes.data, factors.ctypes.data + factors.itemsize
        dtypes = given, given, wanted
        head = (forms[0][0], forms[1][0], m, n, k, item)
        # what stands behind the address of each of the three
        first, second, result = (
            (REAL[dtype.name], lead, *((apart,) if stacked else ()))
            for dtype, (_, lead), apart in zip(dtypes, forms, batch[1:], strict=True)
        )
        tail = (*result, *((batch[0],) if stacked else ()), compute, DEFAULT_ALGORITHM)
        starts = [  # per call, the bytes to skip in each of the three
            [
                x.itemsize * sum(i * axis[j] for i, axis in zip(at, axes, strict=True))
                for j, x in enumerate(dtypes, 1)
            ]
            for at in product_of(*(range(axis[0]) for axis in axes))
        ]

        def call(a: Any, b: Any, out: Any, add: bool) -> None:
            if swapped:
                a, b = b, a
            try:
                at_b, at_a, at_out = b.data.ptr, a.data.ptr, out.data.ptr
            except AttributeError as error:
                raise mixed_error((a, b)) or mixed_error((a, b, out)) or error from None
            handle, beta = self._handle(), item if add else zero
            if narrow:
                bindings.setMathMode(handle, WIDE_SUMS)  # each time: others use this handle too
            for x, y, z in starts:
                function(
                    handle, *head, at_b + x, *first, at_a + y, *second, beta, at_out + z, *tail
                )

        return call, len(starts)

    def _multiply_copied(
        self, copies: Sequence[bool], a: Array, b: Array, out: Array, add: bool, tf32: bool
    ) -> None:
        """Multiply contiguous copies of some of the arrays."""
        xp = self._xp
        a, b, place = (
            xp.array(x, order="C") if copy else x
            for x, copy in zip((a, b, out), copies, strict=True)
        )
        self.multiply(a, b, place, add, tf32)
        if place is not out:
            out[...] = place


@lru_cache(4)
def products_of(xp: ModuleType) -> Products:
    """Return the products of a library's arrays, with the calls that it has made."""
    return Products(xp)


def _collapsed(lengths: Shape, *strides: Shape) -> list[Shape]:
    """Return as few axes that run over the same elements in the same order: each its length and its
    strides.
    """
    result: list[Shape] = []
    for length, *steps in zip(lengths, *strides, strict=True):
        if length == 1:
            continue
        if result and all(
            outer == inner * length for outer, inner in zip(result[-1][1:], steps, strict=True)
        ):
            result[-1] = (result[-1][0] * length, *steps)
        else:
            result.append((length, *steps))
    return result
