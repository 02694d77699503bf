"""The array type that the engine works on, and how to find the library behind an array."""

import sys
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
    if hasattr(array, "__array_namespace__"):
        found: ModuleType = array.__array_namespace__()
        return found
    return sys.modules[type(array).__module__.partition(".")[0]]  # CuPy's arrays do not name their namespace


def is_array(x: Any) -> bool:
    """Return whether x is an array of any library, rather than a number or a list."""
    return isinstance(x, np.ndarray) or hasattr(x, "__array_namespace__") or hasattr(x, "__cuda_array_interface__")
