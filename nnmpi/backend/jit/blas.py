"""sgemm of the OpenBLAS that NumPy brings along, for calls from compiled code: no Python between the products.

NumPy's wheels hold OpenBLAS with 64-bit sizes and a prefix before each name. Another NumPy (of a distribution, or with
Apple's Accelerate) has no such function; `available` then says so, and kernels with products in them are not used.
"""

import ctypes
from functools import cache
from typing import Any

from llvmlite import binding
from numba import types
from threadpoolctl import threadpool_info

NAME = "scipy_cblas_sgemm64_"

# cblas's codes
ROWS, PLAIN, TRANSPOSED = 101, 111, 112

# (order, transpose a, transpose b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc), matrices given as addresses
sgemm: Any = types.ExternalFunction(
    NAME,
    types.void(
        *(types.int32,) * 3,
        *(types.int64,) * 3,
        types.float32,
        *(types.intp, types.int64) * 2,
        types.float32,
        *(types.intp, types.int64),
    ),
)


@cache
def available() -> bool:
    """Return whether compiled code can call sgemm here; must be called before any such code is loaded."""
    for library in threadpool_info():
        path = library["filepath"]
        if library["internal_api"] == "openblas" and hasattr(ctypes.CDLL(path), NAME):
            binding.load_library_permanently(path)
            return True
    return False
