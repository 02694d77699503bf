"""The interface to an array library and its device, and its implementation for the host."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, Shape, zeros
from nnmpi.backend.memory import HostMeter, MemoryUse, Meter, host_memory
from nnmpi.base.errors import DeviceError


@dataclass(frozen=True)
class Backend:
    """An array library on a device. This class is the host's; `DeviceBackend` is derived from it.

    Attributes:
        name: "numpy" or "cupy".
        xp: the array module.
        device: the device as text, for headers and reports.
        reason: the reason for an automatic choice of this backend; else empty.
    """

    name: str
    xp: ModuleType
    device: str
    reason: str = ""

    @property
    def is_device(self) -> bool:
        """Whether arrays are in a device's memory instead of the host's."""
        return self.xp is not np

    @property
    def card(self) -> str:
        """The device's identity, by which ranks detect that they share one. Empty on the host."""
        return ""

    def asarray(self, values: Any, dtype: Any = None) -> Array:
        """Return the values as an array on this device, without a copy if possible."""
        return self.xp.asarray(values, dtype)

    def to_host(self, array: Array) -> Array:
        """Return an array as a NumPy array in host memory; itself if it is one."""
        return array

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work, as before MPI reads a buffer."""

    def zeros(self, shape: int | Shape, dtype: Any) -> Array:
        """Return a new C-contiguous array of zeros on this device."""
        return zeros(self.xp, shape, dtype)

    def memory(self) -> MemoryUse:
        """Return the memory in use and its limit."""
        return host_memory()

    def meter(self) -> Meter:
        """Return a meter of the memory that this thread's arrays take."""
        return HostMeter()

    def room_bytes(self) -> int:
        """Return the bytes that new arrays may take on a device; 0 on the host: nobody asks."""
        return 0

    def release_memory(self) -> None:
        """Give memory that no array uses back to the device."""

    def use(self) -> None:
        """Make this device current in the calling thread; CUDA's current device is per thread."""

    def divide_memory(self, ranks: int) -> None:
        """Leave room for the other ranks on this device; `ranks` includes this one."""

    def limit_memory(self, limit_bytes: int) -> None:
        """Limit the arrays' share of a device's memory; the host's is not limited."""

    def explain(self, error: BaseException) -> DeviceError | None:
        """Return a sentence with a remedy for a device library's error; None for other errors."""
        return None


def numpy_backend() -> Backend:
    """Return the backend that computes with NumPy on the host's processor."""
    return Backend("numpy", np, "CPU")
