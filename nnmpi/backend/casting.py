"""Conversion between floating dtypes, of which NumPy and CuPy know bfloat16 by name alone."""

from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.kernels.lookup import kernels_for
from nnmpi.backend.precision import is_low

FLOAT32: np.dtype[Any] = np.dtype(np.float32)


def cast(xp: Any, x: Array, dtype: np.dtype[Any]) -> Array:
    """Return x in another dtype, rounded to the nearest; x itself where it has that dtype.

    Args:
        xp: the array's module, or a recorder's stand-in for it.
    """
    return x if x.dtype == dtype else kernels_for(x).cast(xp, x, dtype)


def to_float32(xp: Any, x: Array) -> Array:
    """Return x in float32 where it is float16 or bfloat16, else x itself."""
    return cast(xp, x, FLOAT32) if is_low(x.dtype) else x
