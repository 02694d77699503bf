"""Matrix products. The arrays' library computes them; `precision` sets the accuracy.

arrays       float32, float64                  float16, bfloat16                     whole numbers
NumPy        its BLAS; MKL, where it is        none: operations compute in float32   its own loops
             installed, for large matrices     (see `tensor.operand.in_float32`)
CuPy         cuBLAS, called by nnmpi           cuBLAS, which adds up in float32      its own kernels
             (see `cublas`)                    and rounds down once
"""

import sys
from functools import lru_cache
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, Shape, empty
from nnmpi.backend.blas import has_small_products, installed_mkl, is_intel
from nnmpi.backend.cublas import products_of
from nnmpi.backend.precision import is_floating, is_low, precision
from nnmpi.backend.recording import record_call
from nnmpi.errors import DtypeError, ShapeError, UsageError

SMALL = 10**6  # multiplications of a product that OpenBLAS computes without copies


def gemm(
    xp: Any, a: Array, b: Array, out: Array | None = None, add: bool = False, dtype: Any = None
) -> Array:
    """Return a @ b, for matrices or stacks of matrices. With NumPy, a may also be a vector.

    Args:
        xp: NumPy, CuPy, or a recorder's stand-in.
        a: (..., n, k), b: (..., k, m), of one dtype. Leading axes are broadcast. Transposed views
            are not copied.
        out: (..., n, m), receives the result. Its dtype is a's; for float16 and bfloat16 it may be
            float32.
        add: add the product to `out` instead of overwriting it.
        dtype: the result's dtype on a device, if `out` is None; by default a's.

    Raises:
        DtypeError: on a device, when a and b differ in dtype, or `out` has a dtype not named above.
        ShapeError: on a device, when the shapes do not fit. (With NumPy, its own ValueError.)
        UsageError: for `add` without `out`.
        DeviceError: when some of the arrays are on the host and others on a device.
    """
    if add and out is None:
        raise UsageError("a product is added to an existing array; give `out`")
    library = xp.__name__
    if library != "numpy" and is_floating(a.dtype):
        shape = product_shape(a.shape, b.shape)
        if out is None:
            out = xp.empty(shape, a.dtype if dtype is None else dtype)
        if a.dtype != b.dtype:
            raise DtypeError(f"{a.dtype} cannot be multiplied by {b.dtype}; convert one of them")
        if out.dtype != a.dtype and not (is_low(a.dtype) and out.dtype == np.float32):
            raise DtypeError(
                f"a product of {a.dtype} arrays cannot be written to {out.dtype}; convert `out`"
            )
        if out.shape != shape:
            raise ShapeError(
                f"the product of shapes {a.shape} and {b.shape} is {shape}, but `out` has"
                f" {out.shape}"
            )
        products = products_of(sys.modules[library])  # xp may be a stand-in for the module
        record_call(products.multiply, a, b, out, add, precision() == "tf32")
        return out
    if a.ndim == b.ndim == 2 and b.dtype == np.float32 == a.dtype and not add:
        rows = b.flags.c_contiguous
        width = _strip_width(*a.shape, b.shape[1], rows) if rows or b.flags.f_contiguous else 0
        if width and a.shape[1] == b.shape[0] and has_small_products():
            if out is None:
                out = xp.empty((a.shape[0], b.shape[1]), a.dtype)
            if out.flags.c_contiguous and out.dtype == a.dtype:
                record_call(_by_strips, a, b, out, width)
                return out
    mkl = installed_mkl()
    if mkl is not None and mkl.takes(a, b, out):
        if out is None:
            out = xp.empty((a.shape[0], b.shape[1]), a.dtype)
        record_call(mkl.multiply, a, b, out, add)
        return out
    # dot, not matmul: it is faster. Also, OpenBLAS computes on garbage in unused vector lanes, and
    # matmul reports their floating-point exceptions as warnings.
    multiply = (
        xp.dot if a.ndim == b.ndim == 2 and (out is None or out.flags.c_contiguous) else xp.matmul
    )
    if add:
        return xp.add(out, multiply(a, b), out=out)
    return multiply(a, b) if out is None else multiply(a, b, out=out)


def _by_strips(a: Array, b: Array, out: Array, width: int) -> None:
    """Write a @ b to `out`, by products with strips of b so narrow that OpenBLAS copies nothing."""
    end = b.shape[1] // width * width
    multiply_strips(a, _strips(b[:, :end], width), out[:, :end])
    if end < b.shape[1]:
        multiply_strips(a, b[None, :, end:], out[:, end:])


def _strips(b: Array, width: int) -> Array:
    """Return a view (n / width, k, width) of b (k, n), row- or column-major."""
    if b.strides[1] == b.itemsize:
        return b.reshape(len(b), b.shape[1] // width, width).swapaxes(0, 1)
    return b.T.reshape(b.shape[1] // width, width, len(b)).swapaxes(1, 2)


def multiply_strips(a: Array, strips: Array, out: Array) -> None:
    """Write the products of a (m, k) with strips (n / width, k, width) side by side to `out`."""
    with np.errstate(all="ignore"):  # matmul warns of unused lanes, see `gemm`
        parts = out.reshape(len(a), len(strips), strips.shape[2]).swapaxes(0, 1)
        np.matmul(a, strips, out=parts)


def copied_strips(b: Array, rows: int) -> Array | None:
    """Return a copy of b (k, n) in strips, for many products; None if whole products are faster.

    On one thread of a Xeon (Granite Rapids) 32 rows times (256, 1024) run at 160 GF/s with strips
    that were copied once, at 130 with strips of the matrix itself, and at 100 without strips.

    Args:
        b: on the host, row-major.
        rows: the most rows of a product.
    """
    fit = [w for w in (64, 32, 16) if b.shape[1] % w == 0 and rows * len(b) * w <= SMALL]
    if type(b) is not np.ndarray or b.dtype != np.float32 or not fit or not has_small_products():
        return None
    strips = _strips(b, fit[0])
    result = empty(np, strips.shape, b.dtype)
    result[...] = strips
    return result


@lru_cache(1024)
def _strip_width(m: int, k: int, n: int, in_rows: bool) -> int:
    """Return the width at which strips are faster than one product; 0 if no width is.

    OpenBLAS's code for AVX-512 copies both matrices before it multiplies, unless a product has at
    most 10^6 multiplications. With few rows the copies take most of the time: one thread of a Zen 4
    core reached 64 GF/s for (32, 256) x (256, 1024), and 105 with strips of 64. On that core these
    rules choose strips for 423 of 543 shapes of up to 256 rows: the median product becomes 1.6
    times as fast, the worst 0.95 times. A Xeon (Emerald Rapids) gains only for a transposed b: 50
    GF/s without strips, 86 with them. For a row-major b it reads strips no faster than it copies
    b: 78 GF/s without strips, 72 with them.

    Args:
        m, k, n: of (m, k) x (k, n).
        in_rows: True for a row-major b, False for a transposed one.
    """
    if m < 2 or m * k * n < 2**20:
        return 0
    widths = [width for width in (64, 32, 16) if width <= n and m * k * width <= SMALL]
    if not in_rows:
        return 16 if 16 in widths and m <= 64 else 0
    if is_intel():
        return 0
    wide = max(widths, default=0)
    return wide if wide == 64 or (wide == 32 and n <= 1024) else 0


@lru_cache(1024)
def product_shape(a: Shape, b: Shape) -> Shape:
    """Return the shape of a @ b.

    Raises:
        ShapeError: when they do not fit.
    """
    if min(len(a), len(b)) < 2 or a[-1] != b[-2]:
        raise ShapeError(
            f"shapes {a} and {b} cannot be multiplied; give (..., n, k) and (..., k, m)"
        )
    try:
        leading = np.broadcast_shapes(a[:-2], b[:-2])
    except ValueError:
        raise ShapeError(
            f"shapes {a} and {b} cannot be multiplied: the leading axes do not broadcast"
        ) from None
    return (*leading, a[-2], b[-1])
