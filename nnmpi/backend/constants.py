"""Arrays that are made once and read for ever after: zero to compare with, ones to add up with, numbers in steps."""

from functools import lru_cache
from typing import Any

import numpy as np

from nnmpi.backend.array import Array

KEPT = 64  # of each kind; a run has as many as it has batch sizes


def ones(xp: Any, count: int, dtype: Any) -> Array:
    """Return ones, which nobody may write to.

    Args:
        xp: the array library, or a recorder's stand-in for it.
        count: how many.
        dtype: of the result, (count,).
    """
    if xp is np or xp.__name__ == "numpy":
        return _ones(count, dtype)
    result: Array = xp.ones(count, dtype)
    return result


def steps(xp: Any, count: int, step: int) -> Array:
    """Return 0, step, 2 step ... , (count,), int64, which nobody may write to.

    Args:
        xp: the array library, or a recorder's stand-in for it.
        count: how many.
        step: from one number to the next.
    """
    if xp is np or xp.__name__ == "numpy":
        return _steps(count, step)
    result: Array = xp.multiply(xp.arange(count, dtype="int64"), step)
    return result


def zero(xp: Any, dtype: Any) -> Array | int:
    """Return 0 for a universal function's operand; `xp` as above.

    NumPy takes 0.4 us to make an array of a number of Python's, in each call.
    """
    return _zero(dtype) if xp is np or xp.__name__ == "numpy" else 0


@lru_cache(KEPT)
def _zero(dtype: Any) -> Array:
    return _constant(np.zeros((), dtype))


@lru_cache(KEPT)
def _ones(count: int, dtype: Any) -> Array:
    return _constant(np.ones(count, dtype))


@lru_cache(KEPT)
def _steps(count: int, step: int) -> Array:
    return _constant(np.arange(count, dtype="int64") * step)


def _constant(array: Array) -> Array:
    array.flags.writeable = False
    return array
