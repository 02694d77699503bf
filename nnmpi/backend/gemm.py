"""Products of matrices, in the mode of `precision` and with the library that is there for the arrays.

arrays          float32, float64                  float16, bfloat16
NumPy           its BLAS; MKL, where it is        rounded up to float32, its BLAS, and down once
                installed, for large matrices
CuPy            cuBLAS, called by nnmpi           cuBLAS, which adds up in float32 and rounds down once
                (see `cublas`)
"""

import sys
from typing import Any

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.cublas import multiply_plainly, products_of
from nnmpi.backend.matrices import HALF_BYTES, check_operands, product_shape
from nnmpi.backend.mkl import installed_mkl
from nnmpi.backend.precision import precision
from nnmpi.backend.recording import perform
from nnmpi.errors import UsageError


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
    mkl = installed_mkl()
    if mkl is not None and mkl.takes(a, b, out):
        if out is None:
            out = xp.empty((a.shape[0], b.shape[1]), a.dtype)
        perform(mkl.multiply, a, b, out, add)
        return out
    multiply = xp.dot if a.ndim == b.ndim == 2 and (out is None or out.flags.c_contiguous) else xp.matmul
    if out is None:
        product = multiply(a, b)
    elif add:
        product = xp.add(out, multiply(a, b), out=out)
    else:
        product = multiply(a, b, out=out)
    return product
