"""What the rest of nnmpi may ask of an array library and its device."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.memory import MemoryUse, host_memory, reset_host_peak
from nnmpi.backend.streams import Event, HostEvent, HostStream, Stream
from nnmpi.errors import DeviceError


@dataclass(frozen=True)
class Backend:
    """One array library on one device. This class is the host's; a device's is derived from it.

    Attributes:
        name: "numpy" or "cupy".
        xp: the array module.
        device: the device in words, for headers and reports.
        to_host: copies an array into host memory as a NumPy array (a NumPy array is returned as it is).
        synchronize: waits until the device has done all work given to it; needed before MPI sees a buffer.
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
        """What tells the device from any other of the node: ranks with the same word share it. Empty on the host."""
        return ""

    def asarray(self, values: Any, dtype: Any = None) -> Array:
        """Return the values as an array on this device, without a copy where none is needed."""
        array: Array = self.xp.asarray(values, dtype=dtype)
        return array

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """Return a new C-contiguous array of zeros on this device."""
        array: Array = self.xp.zeros(shape, dtype=dtype)
        return array

    def empty_pinned(self, elements: int, dtype: Any) -> Array:
        """Return a NumPy array of any values, (elements,), in memory that the device copies from and to by itself."""
        return np.empty(elements, dtype)

    def to_host_async(self, array: Array, host: Array, stream: Stream) -> None:
        """Copy an array to the host when the stream comes to it; `host` is filled once the stream is synchronized.

        The stream waits for nothing by itself: let it `wait` for an event recorded behind what computes `array`.

        Args:
            array: one axis, contiguous, on the device; alive until the stream is synchronized.
            host: from `empty_pinned`, of the same length and dtype.
        """
        host[...] = self.to_host(array)

    def from_host_async(self, host: Array, array: Array, stream: Stream) -> None:
        """Copy from the host to an array when the stream comes to it; arguments as for `to_host_async`."""
        array[...] = self.asarray(host)

    def new_stream(self) -> Stream:
        """Return a stream that waits for no other."""
        return HostStream()

    def current_stream(self) -> Stream:
        """Return the stream to which this thread's operations go."""
        return HostStream()

    def new_event(self) -> Event:
        """Return an event that is not recorded yet."""
        return HostEvent()

    def elapsed_s(self, begin: Event, end: Event) -> float:
        """Return the time from one event to another in seconds, as the device saw it; waits for the second.

        Raises:
            DeviceError: when one of them was not recorded.
        """
        assert isinstance(begin, HostEvent) and isinstance(end, HostEvent)
        if begin.time_s is None or end.time_s is None:
            raise DeviceError("the time between two events needs both to be recorded first")
        return end.time_s - begin.time_s

    def memory(self) -> MemoryUse:
        """Return what is used of the memory, and what may be."""
        return host_memory()

    def reset_peak(self) -> None:
        """Measure the peak of the memory from now on."""
        reset_host_peak()

    def release_memory(self) -> None:
        """Give memory that no array uses back to the device."""

    def use(self) -> None:
        """Let the calling thread's operations go to this device; the thread that chose the backend need not."""

    def share(self, ranks: int) -> None:
        """Leave room for the other ranks on this device: `ranks` have it, this one among them."""

    def limit_memory(self, limit_bytes: int) -> None:
        """Let arrays take so much of the device's memory at most; the host's is not limited."""

    def explain(self, error: BaseException) -> DeviceError | None:
        """Return a library's error in a sentence that says what would help; None if it is no error of the device."""
        return None


def numpy_backend() -> Backend:
    """Return the backend that computes with NumPy on the host's processor."""
    return Backend("numpy", np, "CPU", to_host=lambda array: array, synchronize=lambda: None)
