"""The array type that the engine works on, and how to find the library behind an array."""

from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# CuPy has no type information and follows NumPy's interface, so NumPy's type stands for both.
Array: TypeAlias = NDArray[Any]


def namespace(array: Array) -> ModuleType:
    """Return the module (numpy or cupy) whose functions work on this array."""
    if type(array) is np.ndarray:
        return np
    found: ModuleType = array.__array_namespace__() if hasattr(array, "__array_namespace__") else np
    return found
