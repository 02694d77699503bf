"""Matrix products. The arrays' library computes them; `precision` sets the accuracy.

arrays       float32, float64                  float16, bfloat16                     whole numbers
NumPy        its BLAS; oneDNN, where it is     none: operations compute in float32   its own loops
             faster (see `onednn.takes`)       (see `Function.computes`)
CuPy         cuBLAS, called by nnmpi           cuBLAS, which adds up in float32      its own kernels
             (see `cublas`)                    and rounds down once

In bf16 operands of NumPy's float32 products are rounded; oneDNN multiplies them, or NumPy.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np

from nnmpi.backend import onednn
from nnmpi.backend.array import Array, Dtype, Matrices, Shape, empty, namespace
from nnmpi.backend.blas import (
    blas_pool,
    has_small_products,
    is_intel,
    loaded_pools,
    name_blas,
)
from nnmpi.backend.cublas import products_of
from nnmpi.backend.precision import (
    FLOAT32,
    is_floating,
    is_low,
    precision,
    round_to_bfloat16,
)
from nnmpi.backend.recording import call
from nnmpi.base.errors import DtypeError, ShapeError, UsageError

SMALL = 10**6  # multiplications of a product that OpenBLAS computes without copies
LOW = 2**17  # multiplications from which on oneDNN takes less time than NumPy, which rounds slowly
BITS: Dtype = np.dtype(np.uint16)  # as which bfloat16 is kept on the host
_ROUNDED = frozenset((FLOAT32, BITS))  # the dtypes of operands that are rounded, or are already
STRIPED = 64  # the most rows for strips of a transposed matrix
# Elements of a result on a device whose rows are aligned; of a smaller one the product takes little
# time anyway, and contiguous arrays have more kernels. Not measured.
ALIGNED = 2**20


def gemm(
    a: Array,
    b: Array,
    out: Any = None,
    add: bool = False,
    dtype: Any = None,
    rounds: bool = False,
) -> Array:
    """Return a @ b, for matrices or stacks of matrices. With NumPy, a may also be a vector.

    Args:
        a: (..., n, k), b: (..., k, m), of one dtype. Leading axes are broadcast. Transposed views
            are not copied.
        out: (..., n, m), receives the result. Its dtype is a's; for float16 and bfloat16 it may be
            float32.
        add: add the product to `out` instead of overwriting it.
        dtype: the result's dtype on a device, if `out` is None; by default a's.
        rounds: on the host, round the elements of float32 operands to bfloat16. Operands may come
            from `rounded_once`.

    Raises:
        DtypeError: on a device, when a and b differ in dtype, or `out` has a dtype not named above.
        ShapeError: on a device, when the shapes do not fit. (With NumPy, its own ValueError.)
        UsageError: for `add` without `out`.
        DeviceError: when some of the arrays are on the host and others on a device.
    """
    if add and out is None:
        raise UsageError("a product is added to an existing array; give `out`")
    on_host = isinstance(a, np.ndarray)
    if not (on_host and isinstance(b, np.ndarray)) and is_floating(a.dtype):
        xp = namespace(b if on_host else a)
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
        products = products_of(xp)
        # In bf16 and fp16, too: operands could be rounded to these, which have no more bits. Only
        # operations that compute in float32 inside (LSTM, GRU) multiply float32 arrays there.
        call(products.multiply, (a, b), (out, add, precision() != "float32"))
        return out
    if rounds and {a.dtype, b.dtype} <= _ROUNDED:
        return _rounded_product(a, b, out, add)
    # a row times a matrix reads the matrix once, which NumPy's BLAS does faster
    if len(a) > 1 and onednn.for_float32() is not None and onednn.takes(a, b, out):
        if out is None:
            out = np.empty((a.shape[0], b.shape[1]), FLOAT32, like=a)
        call(onednn.multiply_exactly, (a, b), (out, add))
        return out
    single = b.dtype == np.float32 == a.dtype and a.ndim == b.ndim == 2
    if single and a.size * b.shape[1] > SMALL and a.shape[1] == b.shape[0]:
        shape = a.shape[0], b.shape[1]
        width = _strip_width(*a.shape, b.shape[1], _in_rows(a), _in_rows(b))
        fits = out is None or (out.shape, out.dtype) == (shape, a.dtype) and _in_rows(out)
        if width and fits and has_small_products():
            if add:
                out += gemm(a, b)
                return out
            if out is None:
                out = np.empty(shape, a.dtype, like=a)
            call(_by_strips, (a, b), (out, width))
            return out
    # dot, not matmul: it is faster. Also, OpenBLAS computes on garbage in unused vector lanes, and
    # matmul reports their floating-point exceptions as warnings.
    is_plain = a.ndim == b.ndim == 2 and (out is None or out.flags.c_contiguous)
    multiply = np.dot if is_plain else namespace(a).matmul
    if add:
        out += multiply(a, b)
        return out
    return multiply(a, b) if out is None else multiply(a, b, out=out)


def name_products() -> str:
    """Return what computes products and activations in float32, as text: its bits are theirs."""
    blas, other = name_blas(blas_pool(loaded_pools().info())), onednn.find().library
    if other is None:
        return blas
    work = "activations" if onednn.for_float32() is None else "large products and activations"
    return f"{blas}, oneDNN {other.version} for {work}"


def _rounded_product(a: Array, b: Array, out: Any, add: bool) -> Array:
    """Return the product of operands that are rounded to bfloat16, see `gemm`."""
    is_given = BITS in (a.dtype, b.dtype)
    if not is_given and (min(a.ndim, b.ndim) < 2 or not _is_by_onednn(a.size * b.shape[-1])):
        return gemm(round_to_bfloat16(a), round_to_bfloat16(b), out, add)
    if out is None:
        out = np.empty(product_shape(a.shape, b.shape), FLOAT32, like=a)
    call(onednn.multiply, (a, b), (out, add))
    return out


def rounded_once(x: Array, multiplications: int) -> Array:
    """Return an operand for several products by `gemm` with `rounds`, so that it is rounded once.

    Args:
        x: of the host, any shape and strides.
        multiplications: of each of the products.

    Returns:
        A contiguous array of x's shape: the bfloat16 as whole numbers of 16 bits, if oneDNN
        computes such products; else x itself, which `gemm` rounds.
    """
    if x.dtype != FLOAT32 or x.ndim < 2 or not _is_by_onednn(multiplications):
        return x
    out = np.empty(x.shape, BITS, like=x)
    call(onednn.lower, (x,), (out,))
    return out


def _is_by_onednn(multiplications: int) -> bool:
    """Whether oneDNN computes a product of rounded operands."""
    return multiplications >= LOW and onednn.installed() is not None


def empty_rows(xp: Any, rows: int, columns: int, dtype: Any) -> Array:
    """Return an uninitialized matrix on a device; a large one's rows are at multiples of 16 bytes.

    cuBLAS has no fast kernel for others: on an H100 the three products with GPT-2's table of 50,257
    words, and 8192 rows in bfloat16, took 16.4 of a step's 48 ms.
    """
    pack = 16 // np.dtype(dtype).itemsize
    if columns % pack == 0 or rows * columns < ALIGNED:
        return xp.empty((rows, columns), dtype)
    return xp.empty((rows, columns + -columns % pack), dtype)[:, :columns]


def in_rows(x: Array) -> Array:
    """Return a matrix itself if it is row-major, with any distance of its rows; else a copy."""
    if x.flags.c_contiguous:
        return x
    form = Matrices.of(x).form
    return np.ascontiguousarray(x, like=x) if form is None or form[0] else x


def _by_strips(a: Array, b: Array, out: Array, width: int) -> None:
    """Write a @ b to `out`, by products with strips of b."""
    end = b.shape[1] // width * width
    _multiply_strips(a, _strips(b[:, :end], width), out[:, :end])
    if end < b.shape[1]:
        _multiply_strips(a, b[None, :, end:], out[:, end:])


def _in_rows(x: Array) -> bool | None:
    """True for a row-major matrix or stack, False for a column-major matrix, None for others."""
    rows, columns = x.strides[-2:]
    n, m = x.shape[-2:]
    if columns == x.itemsize and rows >= m * x.itemsize:
        return True
    return False if x.ndim == 2 and rows == x.itemsize and columns >= n * x.itemsize else None


def _strips(b: Array, width: int) -> Array:
    """Return a view (n / width, k, width) of b (k, n), row- or column-major."""
    if b.strides[1] == b.itemsize:
        return b.reshape(len(b), b.shape[1] // width, width).swapaxes(0, 1)
    return b.T.reshape(b.shape[1] // width, width, len(b)).swapaxes(1, 2)


def _multiply_strips(a: Array, strips: Array, out: Array) -> None:
    """Write the products of a (m, k) with strips (n / width, k, width) side by side to `out`."""
    (m, k), (count, _, width) = a.shape, strips.shape
    most = SMALL // (k * width)
    with np.errstate(all="ignore"):  # matmul warns of unused lanes, see `gemm`
        if m <= most:
            np.matmul(a, strips, out=out.reshape(m, count, width).swapaxes(0, 1))
            return
        rows = max(most // 8 * 8, min(most, 4))
        end = m // rows * rows
        blocks = a[:end].reshape(-1, rows, k)
        parts = out[:end].reshape(-1, rows, count, width).transpose(2, 0, 1, 3)
        np.matmul(blocks, strips[:, None], out=parts, order="C")  # each strip is read once
    if end < m:
        _multiply_strips(a[end:], strips, out[end:])


def multiplier(b: Array, rounds: bool = False) -> Callable[..., Any]:
    """Return a function of a, `out` and `add`, as `gemm` has them, that writes a @ b.

    It is for many a of few rows.

    Strips of b are copied once if they are faster. On one thread of a Xeon (Granite Rapids) 32 rows
    times (256, 1024) run at 160 GF/s with strips that were copied once, at 130 with strips of the
    matrix itself, and at 100 without strips; 32 rows times (2048, 512), in blocks of 4 rows, at 127
    and at 68.

    Args:
        b: (k, n).
        rounds: as `gemm` has it.
    """
    if rounds and b.dtype == FLOAT32:
        return _rounding_multiplier(b)
    fit = [w for w in (64, 32, 16) if b.shape[1] % w == 0 and 4 * len(b) * w <= SMALL]
    if (
        not isinstance(b, np.ndarray)
        or b.dtype != np.float32
        or not fit
        or not has_small_products()
    ):
        return lambda a, out, add=False: gemm(a, b, out, add)
    strips = _strips(b, fit[0])
    copy = empty(np, strips.shape, b.dtype)
    # 8 columns at a time of a transposed matrix: its copy takes a fourth of the time
    step = fit[0] if b.strides[1] == b.itemsize else 8
    for j in range(0, fit[0], step):
        copy[..., j : j + step] = strips[..., j : j + step]

    def times(a: Array, out: Array, add: bool = False) -> None:
        target = empty(np, out.shape, out.dtype) if add else out
        _multiply_strips(a, copy, target)
        if add:
            np.add(out, target, out=out)

    return times


def _rounding_multiplier(b: Array) -> Callable[..., Any]:
    """Return the `multiplier` of rounded operands. It rounds b once, for each way that is taken."""
    low = None if onednn.installed() is None else onednn.rounded(b)

    @cache
    def small() -> Callable[..., Any]:
        return multiplier(round_to_bfloat16(b))

    def times(a: Array, out: Array, add: bool = False) -> None:
        if low is not None and a.size * b.shape[1] >= LOW:
            call(onednn.multiply, (a, low), (out, add))
        else:
            small()(round_to_bfloat16(a), out, add)

    return times


@lru_cache(1024)
def _strip_width(m: int, k: int, n: int, a_rows: bool | None, b_rows: bool | None) -> int:
    """Return the width of the strips of b that a product takes; 0 for a product at once.

    OpenBLAS's code for AVX-512 copies both matrices before it multiplies, unless a product has at
    most 10^6 multiplications. Where the copies take much of the time, as for few rows of a, small
    products are faster.

    One thread of a Zen 4 core reached 64 GF/s for (32, 256) x (256, 1024), and 105 with strips of
    64. On that core the rules choose strips for 423 of 543 shapes of up to 256 rows: the median
    product becomes 1.6 times as fast, the worst 0.95 times. A Xeon (Emerald Rapids) gains only for
    a transposed b: 50 GF/s without strips, 86 with them. For a row-major b it reads strips no
    faster than it copies b: 78 GF/s without strips, 72 with them.

    Args:
        m, k, n: of (m, k) x (k, n).
        a_rows, b_rows: the matrices' order, see `_in_rows`.
    """
    if m * k * n <= SMALL or m < 2 or a_rows is None or b_rows is None:
        return 0
    widths = [width for width in (64, 32, 16) if width <= n and m * k * width <= SMALL]
    if not b_rows:
        return 16 if 16 in widths and m <= STRIPED else 0
    wide = 0 if is_intel() else max(widths, default=0)
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
