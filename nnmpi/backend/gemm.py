"""Products of matrices, in the mode of `precision` and with the library that is there for the
arrays.

arrays          float32, float64                  float16, bfloat16                     whole numbers
NumPy           its BLAS; MKL, where it is        none: operations compute in float32   its own loops
                installed, for large matrices     (see `tensor.operand.in_float32`)
CuPy            cuBLAS, called by nnmpi           cuBLAS, which adds up in float32      its own kernels
                (see `cublas`)                    and rounds down once
"""

import sys
from functools import lru_cache
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, Shape
from nnmpi.backend.blas import has_small_products, installed_mkl
from nnmpi.backend.cublas import products_of
from nnmpi.backend.precision import is_floating, is_low, precision
from nnmpi.backend.recording import perform
from nnmpi.errors import DtypeError, ShapeError, UsageError

SMALL = 10**6  # multiplications


def gemm(
    xp: Any, a: Array, b: Array, out: Array | None = None, add: bool = False, dtype: Any = None
) -> Array:
    """Return a @ b for matrices, or for stacks of as many matrices; also for a vector a of NumPy's.

    Args:
        xp: the module whose functions are called, or a recorder's stand-in for it.
        a: (..., n, k), b: (..., k, m): of one dtype. Transposed views are read as they lie. Leading
            axes are matched as NumPy does: an axis of length 1 serves all.
        out: (..., n, m), where the result goes; of a's dtype, or float32 for float16 and bfloat16.
        add: whether the product is added to what `out` holds.
        dtype: of the result without `out`; by default a's.

    Raises:
        DtypeError: for two dtypes of a device's arrays, or a result that these cannot have.
        ShapeError: where a device's arrays do not fit one another. (NumPy says so itself of its
            own.)
        UsageError: for `add` without `out`.
        DeviceError: for arrays of the host among those of a device.
    """
    if add and out is None:
        raise UsageError("a product can only be added to something: give `out`")
    library = xp.__name__
    if library != "numpy" and is_floating(a.dtype):
        shape = product_shape(a.shape, b.shape)
        if out is None:
            out = xp.empty(shape, a.dtype if dtype is None else dtype)
        if a.dtype != b.dtype:
            raise DtypeError(f"no product of {a.dtype} and {b.dtype}: convert one of them")
        if out.dtype != a.dtype and not (is_low(a.dtype) and out.dtype == np.float32):
            raise DtypeError(f"the product of {a.dtype} arrays cannot be written to {out.dtype}")
        if out.shape != shape:
            raise ShapeError(
                f"the product of shapes {a.shape} and {b.shape} is {shape}, but the place for it"
                f" {out.shape}"
            )
        products = products_of(sys.modules[library])  # xp may be a stand-in for the module
        perform(products.multiply, a, b, out, add, precision() == "tf32")
        return out
    mkl = installed_mkl()
    if mkl is not None and mkl.takes(a, b, out):
        if out is None:
            out = xp.empty((a.shape[0], b.shape[1]), a.dtype)
        perform(mkl.multiply, a, b, out, add)
        return out
    # NumPy's dot is quicker than its matmul, which also warns of what OpenBLAS computes in lanes
    # that nobody reads.
    multiply = (
        xp.dot if a.ndim == b.ndim == 2 and (out is None or out.flags.c_contiguous) else xp.matmul
    )
    if add:
        return xp.add(out, multiply(a, b), out=out)
    return multiply(a, b) if out is None else multiply(a, b, out=out)


def strips(xp: Any, matrix: Array, rows: int) -> Array | None:
    """Return a (k, m) matrix as strips (m / w, k, w), by which `gemm` multiplies a few rows faster.

    For 32 rows OpenBLAS's code for AVX-512 reaches 64 GF/s, and 112 where a product is so small
    (`SMALL`) that it copies neither matrix first; code for AVX2 has no such path. One BLAS thread
    is faster by strips, two threads are equally fast, and more would idle. The strips are worth
    making for a matrix that multiplies many times, as that of a recurrence.

    Returns:
        Strips of the transposed matrix are views; others are copies. None where one product is
        as fast: `gemm(xp, x, matrix)`.
    """
    k, m = matrix.shape
    width = next((w for w in (64, 32, 16) if m % w == 0 and rows * k * w <= SMALL), 0)
    if not width or rows < 2 or xp.__name__ != "numpy" or matrix.dtype != np.float32:
        return None
    if installed_mkl() is not None or not has_small_products():
        return None
    if not matrix.flags.c_contiguous:
        turned: Array = matrix.T.reshape(m // width, width, k).swapaxes(1, 2)
        return turned
    return xp.ascontiguousarray(matrix.reshape(k, m // width, width).swapaxes(0, 1))


def by_strips(xp: Any, x: Array, strips: Array, out: Array) -> None:
    """Write x (n, k) @ matrix to `out` (n, m), which lies in rows, by the matrix' `strips`."""
    gemm(xp, x, strips, out=out.reshape(len(out), len(strips), -1).swapaxes(0, 1))


@lru_cache(1024)
def product_shape(a: Shape, b: Shape) -> Shape:
    """Return the shape of a @ b.

    Raises:
        ShapeError: when they do not fit.
    """
    if min(len(a), len(b)) < 2 or a[-1] != b[-2]:
        raise ShapeError(
            f"no product of arrays of shapes {a} and {b}: it needs (..., n, k) and (..., k, m)"
        )
    try:
        leading = np.broadcast_shapes(a[:-2], b[:-2])
    except ValueError:
        raise ShapeError(
            f"no product of arrays of shapes {a} and {b}: the leading axes do not fit"
        ) from None
    return (*leading, a[-2], b[-1])
