"""A double of CuPy's bindings of cuBLAS: products of matrices, computed by NumPy from the addresses
that are given.

As there, matrices lie in columns, C is not read if beta is 0, factors are read from the host's
memory, and a matrix lies within one allocation. What else cuBLAS takes and refuses is the
interpreted device's business.
"""

from collections import deque
from typing import Any

import ml_dtypes
import numpy as np
from cupy import _capture
from cupy._address import bytes_at
from cupy.cuda import memory

from cupy_backends.cuda.libs import LOADED

if "cublas" not in LOADED:
    raise ImportError("libcublas.so.13: cannot open shared object file: No such file or directory")

_TYPES = {0: np.dtype("f4"), 1: np.dtype("f8"), 2: np.dtype("f2"), 14: np.dtype(ml_dtypes.bfloat16)}
TF32 = 77
_STACKED = (
    "handle transa transb m n k alpha A Atype lda strideA B Btype ldb strideB beta C Ctype ldc"
    " strideC batchCount computeType algo"
)
_ONE = {"strideA": 0, "strideB": 0, "strideC": 0, "batchCount": 1}
_MODES: dict[int, int] = {}
# The last calls, by name: tests look at them.
CALLS: deque[tuple[str, dict[str, int]]] = deque(maxlen=1000)


def setMathMode(handle: int, mode: int) -> None:
    """Set how a handle adds up."""
    _MODES[handle] = mode


def getMathMode(handle: int) -> int:
    """Return how a handle adds up."""
    return _MODES.get(handle, 0)


def gemmEx(*given: int) -> None:
    """Multiply two matrices."""
    names = [name for name in _STACKED.split() if name not in _ONE]
    _multiply("gemmEx", dict(zip(names, given, strict=True)) | _ONE)


def gemmStridedBatchedEx(*given: int) -> None:
    """Multiply the matrices of two stacks."""
    _multiply("gemmStridedBatchedEx", dict(zip(_STACKED.split(), given, strict=True)))


def _multiply(name: str, g: dict[str, int]) -> None:
    """Compute C = alpha op(A) op(B) + beta C for each matrix of the stacks."""
    CALLS.append((name, g))
    rows_a, columns_a = (g["k"], g["m"]) if g["transa"] else (g["m"], g["k"])
    rows_b, columns_b = (g["n"], g["k"]) if g["transb"] else (g["k"], g["n"])
    if g["lda"] < max(1, rows_a) or g["ldb"] < max(1, rows_b) or g["ldc"] < max(1, g["m"]):
        raise RuntimeError("CUBLAS_STATUS_INVALID_VALUE")
    given, result = _TYPES[g["Atype"]], _TYPES[g["Ctype"]]
    wide = np.dtype("f8" if given.itemsize == 8 else "f4")
    alpha, beta = (bytes_at(g[item], wide.itemsize).view(wide)[0] for item in ("alpha", "beta"))

    def compute() -> None:
        for i in range(g["batchCount"]):
            a = _matrix(g["A"], i * g["strideA"], given, rows_a, columns_a, g["lda"]).astype(wide)
            b = _matrix(g["B"], i * g["strideB"], given, rows_b, columns_b, g["ldb"]).astype(wide)
            c = _matrix(g["C"], i * g["strideC"], result, g["m"], g["n"], g["ldc"])
            if g["computeType"] == TF32:
                a, b = (
                    ((x.view("u4") + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view("f4")
                    for x in (a, b)
                )
            product = alpha * ((a.T if g["transa"] else a) @ (b.T if g["transb"] else b))
            c[...] = product if beta == 0 else product + beta * c.astype(product.dtype)

    _capture.submit(compute, g["A"], g["B"], g["C"])


def _matrix(
    address: int, start: int, dtype: np.dtype[Any], rows: int, columns: int, lead: int
) -> Any:
    """Return a view of a matrix in columns."""
    if rows == 0 or columns == 0:
        return np.empty((rows, columns), dtype)
    address += start * dtype.itemsize
    size = dtype.itemsize * ((columns - 1) * lead + rows)
    if memory.base_of(address, size) is None:
        raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")
    return np.ndarray(
        (rows, columns), dtype, bytes_at(address, size), 0, (dtype.itemsize, lead * dtype.itemsize)
    )
