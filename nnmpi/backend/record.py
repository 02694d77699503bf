"""What the rest of nnmpi may ask of an array library and its device."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from nnmpi.backend.array import Array


@dataclass(frozen=True)
class Backend:
    """One array library on one device.

    Attributes:
        name: "numpy" or "cupy".
        xp: the array module.
        device: the device in words, for headers and reports.
        to_host: copies an array into host memory as a NumPy array (a NumPy array is returned as it is).
        synchronize: waits until the device has done all work given to it; needed before MPI sees a buffer.
    """

    name: str
    xp: ModuleType
    device: str
    to_host: Callable[[Array], Array]
    synchronize: Callable[[], None]

    def asarray(self, values: Any, dtype: Any = None) -> Array:
        """Return the values as an array on this device, without a copy where none is needed."""
        array: Array = self.xp.asarray(values, dtype=dtype)
        return array

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """Return a new C-contiguous array of zeros on this device."""
        array: Array = self.xp.zeros(shape, dtype=dtype)
        return array


def numpy_backend() -> Backend:
    """Return the backend that computes with NumPy on the host's processor."""
    return Backend("numpy", np, "CPU", to_host=lambda array: array, synchronize=lambda: None)
