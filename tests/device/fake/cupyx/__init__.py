"""The double of CuPy's extensions: page-locked NumPy arrays."""

import math
from typing import Any

import numpy as np
from cupy import cuda


def empty_pinned(shape: Any, dtype: Any = float, order: str = "C") -> Any:
    """Return a NumPy array in page-locked memory, full of rubbish."""
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    mem = cuda.alloc_pinned_memory(math.prod(shape) * np.dtype(dtype).itemsize)
    return np.ndarray(shape, dtype=dtype, buffer=mem, order=order)  # type: ignore[call-overload]
