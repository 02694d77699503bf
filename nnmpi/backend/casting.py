"""Conversion between floating dtypes, of which NumPy and CuPy know bfloat16 by name alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.kernels.active import kernels_for
from nnmpi.backend.precision import is_floating, is_low
from nnmpi.backend.recording import perform

FLOAT32: np.dtype[Any] = np.dtype(np.float32)


def cast(xp: Any, x: Array, dtype: np.dtype[Any]) -> Array:
    """Return x in another dtype, rounded to the nearest; x itself where it has that dtype.

    Args:
        xp: the array's module, or a recorder's stand-in for it.
    """
    if x.dtype == dtype:
        return x
    result: Array = xp.empty(x.shape, dtype)
    table = device_kernels(x)
    if table is not None and x.flags.c_contiguous and is_floating(dtype):
        perform(table.cast, x, result)
        return result
    xp.copyto(result, x, casting="unsafe")  # NumPy's rules of safety know nothing of bfloat16
    return result


def widened(xp: Any, x: Array) -> Array:
    """Return x in float32 where it is float16 or bfloat16, else x itself."""
    return cast(xp, x, FLOAT32) if is_low(x.dtype) else x


def device_kernels(array: Array) -> Any:
    """Return the kernels for an array that lives on a device; None for NumPy's, and where kernels are switched off."""
    return None if type(array) is np.ndarray else kernels_for(array)
