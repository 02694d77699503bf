"""Views with strides of one's own."""

from typing import Any

import numpy as np

from cupy import _functions
from cupy._array import ndarray, view


def as_strided(x: ndarray, shape: Any = None, strides: Any = None) -> ndarray:
    """Return a view; NumPy's has no base that says whose memory it is."""
    return view(np.lib.stride_tricks.as_strided(x._host, shape, strides), x)


def __getattr__(name: str) -> Any:
    return _functions.find("cupy.lib.stride_tricks", name, np.lib.stride_tricks)
