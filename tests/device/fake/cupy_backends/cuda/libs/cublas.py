"""A double of CuPy's bindings of cuBLAS: products of matrices, computed by NumPy from the addresses that are given.

It takes what cuBLAS takes and refuses what it refuses: leads that are too short, combinations of types that are not in
its table, addresses outside of the allocations that the device's arrays have. As there, matrices lie in columns, C is
not read if beta is 0, factors are read from the host's memory, and the work is done in CuPy's current stream.
"""

import re
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any

import ml_dtypes
import numpy as np
from cupy import _streams
from cupy._address import bytes_at
from cupy.cuda import memory

from cupy_backends.cuda.libs import LOADED

if "cublas" not in LOADED:
    raise ImportError("libcublas.so.13: cannot open shared object file: No such file or directory")

CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_OP_C = 0, 1, 2
CUBLAS_DEFAULT_MATH = 0
CUBLAS_COMPUTE_16F, CUBLAS_COMPUTE_16F_PEDANTIC = 64, 65
CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_PEDANTIC = 68, 69
CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_64F_PEDANTIC = 70, 71
CUBLAS_COMPUTE_32I, CUBLAS_COMPUTE_32I_PEDANTIC = 72, 73
CUBLAS_COMPUTE_32F_FAST_16F, CUBLAS_COMPUTE_32F_FAST_16BF, CUBLAS_COMPUTE_32F_FAST_TF32 = 74, 75, 77

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_TYPES = {0: np.dtype("f4"), 1: np.dtype("f8"), 2: np.dtype("f2"), 14: _BFLOAT16}
_STATUS = {7: "CUBLAS_STATUS_INVALID_VALUE", 13: "CUBLAS_STATUS_EXECUTION_FAILED", 15: "CUBLAS_STATUS_NOT_SUPPORTED"}
_INVALID_VALUE, _FAILED, _NOT_SUPPORTED = _STATUS
_TF32_MATH = 3

# cuBLAS's table without whole and complex numbers: how is added up -> (type of A and B, type of C), type of factors.
_FULL = {(14, 14), (2, 2), (14, 0), (2, 0), (0, 0)}
_TABLE: dict[int, tuple[set[tuple[int, int]], str]] = {
    CUBLAS_COMPUTE_16F: ({(2, 2)}, "f2"),
    CUBLAS_COMPUTE_16F_PEDANTIC: ({(2, 2)}, "f2"),
    CUBLAS_COMPUTE_32F: (_FULL, "f4"),
    CUBLAS_COMPUTE_32F_PEDANTIC: (_FULL, "f4"),
    CUBLAS_COMPUTE_32F_FAST_16F: ({(0, 0)}, "f4"),
    CUBLAS_COMPUTE_32F_FAST_16BF: ({(0, 0)}, "f4"),
    CUBLAS_COMPUTE_32F_FAST_TF32: ({(0, 0)}, "f4"),
    CUBLAS_COMPUTE_64F: ({(1, 1)}, "f8"),
    CUBLAS_COMPUTE_64F_PEDANTIC: ({(1, 1)}, "f8"),
}
_MODES: dict[int, dict[str, int]] = {}
# The last calls, by name: tests look at them.
CALLS: deque[tuple[str, dict[str, int]]] = deque(maxlen=1000)


class CUBLASError(RuntimeError):
    """A call of cuBLAS failed."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_STATUS[status])


def _typed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function take whole numbers of the widths that its first line of documentation names, as Cython's do."""
    parameters = re.findall(r"([a-z_ ]+) (\w+)[,)]", (function.__doc__ or "").splitlines()[0].partition("(")[2])
    names = [name for _, name in parameters]
    widths = {name: 31 if kind.strip() == "int" else 63 for kind, name in parameters}

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(names):
            raise TypeError(
                f"{function.__name__}() takes exactly {len(names)} positional arguments ({len(args)} given)"
            )
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.keys() != set(names):
            raise TypeError(f"{function.__name__}() takes exactly {', '.join(names)}")
        for name, value in given.items():
            if not isinstance(value, int | np.integer):
                raise TypeError("an integer is required")
            if not -(2 ** widths[name]) <= value < 2 ** widths[name]:
                raise OverflowError("value too large to convert to int")
        CALLS.append((function.__name__, given))
        return function(**given)

    return call


@_typed
def setMathMode(handle: int, mode: int) -> None:
    """setMathMode(intptr_t handle, int mode)"""
    _mode(handle)["math"] = mode


@_typed
def getMathMode(handle: int) -> int:
    """getMathMode(intptr_t handle) -> int"""
    return _mode(handle).get("math", CUBLAS_DEFAULT_MATH)


@_typed
def gemmEx(handle: int, **given: int) -> None:
    """gemmEx(intptr_t handle, int transa, int transb, int m, int n, int k, size_t alpha, size_t A, int Atype, int lda, size_t B, int Btype, int ldb, size_t beta, size_t C, int Ctype, int ldc, int computeType, int algo)"""  # noqa: E501
    _multiply(handle, strideA=0, strideB=0, strideC=0, batchCount=1, **given)


@_typed
def gemmStridedBatchedEx(handle: int, **given: int) -> None:
    """gemmStridedBatchedEx(intptr_t handle, int transa, int transb, int m, int n, int k, size_t alpha, size_t A, int Atype, int lda, long long strideA, size_t B, int Btype, int ldb, long long strideB, size_t beta, size_t C, int Ctype, int ldc, long long strideC, int batchCount, int computeType, int algo)"""  # noqa: E501
    _multiply(handle, **given)


def _mode(handle: int) -> dict[str, int]:
    if not handle:
        raise CUBLASError(_INVALID_VALUE)
    return _MODES.setdefault(handle, {})


def _multiply(handle: int, **g: int) -> None:
    """Compute C = alpha op(A) op(B) + beta C for each matrix of the stacks."""
    mode = _mode(handle)
    if g["transa"] not in (0, 1, 2) or g["transb"] not in (0, 1, 2) or min(g["m"], g["n"], g["k"], g["batchCount"]) < 0:
        raise CUBLASError(_INVALID_VALUE)
    rows_a, columns_a = (g["k"], g["m"]) if g["transa"] else (g["m"], g["k"])
    rows_b, columns_b = (g["n"], g["k"]) if g["transb"] else (g["k"], g["n"])
    if g["lda"] < max(1, rows_a) or g["ldb"] < max(1, rows_b) or g["ldc"] < max(1, g["m"]):
        raise CUBLASError(_INVALID_VALUE)
    allowed, factor_type = _TABLE.get(g["computeType"], (set(), "f4"))
    if g["Atype"] != g["Btype"] or (g["Atype"], g["Ctype"]) not in allowed or g["algo"] not in (-1, 99):
        raise CUBLASError(_NOT_SUPPORTED)
    alpha, beta = (_factor(g[name], factor_type) for name in ("alpha", "beta"))
    _streams.settle()
    given, result = _TYPES[g["Atype"]], _TYPES[g["Ctype"]]
    for i in range(g["batchCount"]):
        a = _matrix(g["A"], i * g["strideA"], given, rows_a, columns_a, g["lda"])
        b = _matrix(g["B"], i * g["strideB"], given, rows_b, columns_b, g["ldb"])
        c = _matrix(g["C"], i * g["strideC"], result, g["m"], g["n"], g["ldc"])
        a, b = (_read(each, g["computeType"], mode) for each in (a, b))
        product = alpha * ((a.T if g["transa"] else a) @ (b.T if g["transb"] else b))
        c[...] = product if beta == 0 else product + beta * c.astype(product.dtype)


def _factor(address: int, kind: str) -> Any:
    if isinstance(memory.base_of(address), memory.Memory):  # an unowned one may have been unmapped
        raise CUBLASError(_FAILED)
    dtype = np.dtype(kind)
    return bytes_at(address, dtype.itemsize).view(dtype)[0]


def _matrix(address: int, start: int, dtype: np.dtype[Any], rows: int, columns: int, lead: int) -> Any:
    """Return a view of a matrix in columns.

    Raises:
        CUBLASError: when it does not lie within one allocation.
    """
    if rows == 0 or columns == 0:
        return np.empty((rows, columns), dtype)
    address += start * dtype.itemsize
    size = dtype.itemsize * ((columns - 1) * lead + rows)
    if memory.base_of(address, size) is None:
        raise CUBLASError(_FAILED)
    return np.ndarray((rows, columns), dtype, bytes_at(address, size), 0, (dtype.itemsize, lead * dtype.itemsize))


def _read(matrix: Any, compute: int, mode: dict[str, int]) -> Any:
    """Return a matrix as it is multiplied: in float32 or float64, and rounded to TF32 where that is allowed."""
    if matrix.dtype == np.float64:
        return matrix
    matrix = matrix.astype(np.float32)
    if compute == CUBLAS_COMPUTE_32F_FAST_TF32 or (
        compute == CUBLAS_COMPUTE_32F and mode.get("math", CUBLAS_DEFAULT_MATH) == _TF32_MATH
    ):
        matrix = ((matrix.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return matrix
