"""Products of matrices, in the mode of `precision` and with the library that is quickest for the arrays.

arrays          float32, float64                  float16, bfloat16
NumPy           its BLAS, or inside               rounded up to float32, its BLAS, and down once
                `with use_blas("mkl")` MKL; with
                "avx2" OpenBLAS's code for AVX2
CuPy            cuBLAS, called by nnmpi           cuBLAS, which adds up in float32 and rounds down once
                (see `cublas`), or cupy.matmul where the former fails its test
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final, Literal, TypeAlias

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.blas import avx2_code
from nnmpi.backend.cublas import multiply_plainly, products_of
from nnmpi.backend.matrices import HALF_BYTES, check_operands, product_shape
from nnmpi.backend.mkl import Mkl, installed_mkl
from nnmpi.backend.precision import precision
from nnmpi.backend.recording import perform
from nnmpi.errors import UsageError

BlasName: TypeAlias = Literal["numpy", "avx2", "mkl"]
NUMPY: Final = "numpy"
AVX2: Final = "avx2"
MKL: Final = "mkl"
BLAS_NAMES: Final = (NUMPY, AVX2, MKL)

_other: ContextVar[Mkl | None] = ContextVar("nnmpi_blas", default=None)  # than NumPy's


@contextmanager
def use_blas(name: BlasName = MKL) -> Iterator[None]:
    """Multiply NumPy's matrices by another BLAS than NumPy's inside the block: "mkl", or "numpy" for its own again.

    With "avx2" NumPy's own, an OpenBLAS, runs its code for AVX2, which is the faster one for large matrices on
    processors whose AVX-512 is no wider inside (Zen 4). It does so in the whole process: see `backend.blas.avx2_code`.

    Results differ in the last bits. Small products, and kernels that numba has compiled with products in them, stay
    with NumPy's.

    Raises:
        UsageError: for another name, where MKL is not installed, and where OpenBLAS cannot choose its code.
    """
    if name not in BLAS_NAMES:
        raise UsageError(f"BLAS {name!r} is unknown; choose {', '.join(BLAS_NAMES[:-1])} or {BLAS_NAMES[-1]}")
    with avx2_code() if name == AVX2 else nullcontext():
        token = _other.set(installed_mkl() if name == MKL else None)
        try:
            yield
        finally:
            _other.reset(token)


def other_blas() -> Mkl | None:
    """Return what multiplies in NumPy's place in this context, by which a recorded step is told from another."""
    return _other.get()


def gemm(xp: Any, a: Array, b: Array, out: Array | None = None, add: bool = False, dtype: Any = None) -> Array:
    """Return a @ b for matrices, or for stacks of as many matrices.

    Args:
        xp: the module whose functions are called, or a recorder's stand-in for it.
        a: (..., n, k), b: (..., k, m): of one dtype. Transposed views are read as they lie. Leading axes are matched
            as NumPy does: an axis of length 1 serves all.
        out: (..., n, m), where the result goes; of a's dtype, or float32 for float16 and bfloat16.
        add: whether the product is added to what `out` holds.
        dtype: of the result without `out`; by default a's.

    Raises:
        DtypeError: for two dtypes, or a result that these cannot have.
        ShapeError: where half-precision or device arrays do not fit one another. (NumPy says so itself of its own.)
        UsageError: for `add` without `out`.
        DeviceError: for arrays of the host among those of a device.
    """
    if add and out is None:
        raise UsageError("a product can only be added to something: give `out`")
    library = xp.__name__
    if library != "numpy" or a.dtype.itemsize == HALF_BYTES:
        if out is None:
            out = xp.empty(product_shape(a.shape, b.shape), a.dtype if dtype is None else dtype)
        if library == "cupy":
            products = products_of(sys.modules[library])  # xp may be a stand-in for the module
            perform(products.multiply, a, b, out, add, precision() == "tf32")
        else:
            check_operands(a, b, out)
            perform(multiply_plainly, namespace(out), a, b, out, add)
        return out
    product: Array | None
    other = _other.get()
    if other is not None and (product := other.multiply(xp, a, b, out, add)) is not None:
        return product
    multiply = xp.dot if a.ndim == b.ndim == 2 and (out is None or out.flags.c_contiguous) else xp.matmul
    if out is None:
        product = multiply(a, b)
    elif add:
        product = xp.add(out, multiply(a, b), out=out)
    else:
        product = multiply(a, b, out=out)
    return product


def gemm_notice(xp: Any, mode: str) -> str | None:
    """Return a sentence on the products that are computed more slowly than they could be, None if there are none.

    On a device this tests, once per process, whether nnmpi's calls of cuBLAS do what they should.

    Args:
        xp: the module of the arrays.
        mode: of `precision`.
    """
    return products_of(xp).notice(mode) if xp.__name__ == "cupy" else None
