"""What the rest of nnmpi may ask of an array library and its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, Shape
from nnmpi.backend.memory import MemoryUse, host_memory
from nnmpi.errors import DeviceError


@dataclass(frozen=True)
class Backend:
    """One array library on one device. This class is the host's; a device's is derived from it.

    Attributes:
        name: "numpy" or "cupy".
        xp: the array module.
        device: the device as text, for headers and reports.
        to_host: copies an array into host memory as a NumPy array (a NumPy array is returned as it
            is).
        synchronize: waits until the device has done all work given to it; needed before MPI sees a
            buffer.
        reason: why this backend was taken, where it was chosen automatically; else empty.
    """

    name: str
    xp: ModuleType
    device: str
    to_host: Callable[[Array], Array]
    synchronize: Callable[[], None]
    reason: str = ""

    @property
    def is_device(self) -> bool:
        """Whether arrays live elsewhere than in the host's memory."""
        return self.xp is not np

    @property
    def card(self) -> str:
        """The device's identity, equal for ranks that share it. Empty on the host."""
        return ""

    def asarray(self, values: Any, dtype: Any = None) -> Array:
        """Return the values as an array on this device, without a copy where none is needed."""
        return self.xp.asarray(values, dtype=dtype)

    def zeros(self, shape: int | Shape, dtype: Any) -> Array:
        """Return a new C-contiguous array of zeros on this device."""
        return self.xp.zeros(shape, dtype=dtype)

    def memory(self) -> MemoryUse:
        """Return what is used of the memory, and what may be."""
        return host_memory()

    def release_memory(self) -> None:
        """Give memory that no array uses back to the device."""

    def use(self) -> None:
        """Make this device current in the calling thread, which need not have chosen the
        backend.
        """

    def share(self, ranks: int) -> None:
        """Leave room for the other ranks on this device: `ranks` have it, this one among them."""

    def limit_memory(self, limit_bytes: int) -> None:
        """Let arrays take so much of the device's memory at most; the host's is not limited."""

    def explain(self, error: BaseException) -> DeviceError | None:
        """Return a sentence with a remedy for a device library's error; None for other errors."""
        return None


def numpy_backend() -> Backend:
    """Return the backend that computes with NumPy on the host's processor."""
    return Backend("numpy", np, "CPU", to_host=lambda array: array, synchronize=lambda: None)
