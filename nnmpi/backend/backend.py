"""What the rest of nnmpi may ask of an array library and its device; streams and events.

    stream A   kernel  kernel  [event]                       a stream does its work in order;
    stream B                      wait(event) copy to host   two streams know of one another only by events

The host's processor has done its work when a call returns, so that there a stream is never behind, and an event is the
time at which it was recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, Protocol

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.memory import MemoryUse, host_memory, reset_host_peak
from nnmpi.errors import DeviceError


class Event(Protocol):
    """A mark in a stream."""

    def record(self, stream: Stream | None = None) -> None:
        """Put the mark behind all that was given to the stream so far; by default to the current one."""

    def synchronize(self) -> None:
        """Wait until the device has come to the mark."""


class Stream(Protocol):
    """Work that a device does in order. In a `with` block the stream is this thread's current one.

    Memory is handed out again, to the same stream, as soon as no array is over it: keep the arrays that another
    stream reads until that stream has been synchronized.

    Attributes:
        ptr: the stream's handle, for libraries that want one (NCCL, cuDNN); 0 on the host.
    """

    @property
    def ptr(self) -> int:
        """The stream's handle."""

    def synchronize(self) -> None:
        """Wait until all work given to the stream is done."""

    def wait(self, event: Event) -> None:
        """Let the stream's later work begin after the mark; the host does not wait."""

    def __enter__(self) -> Stream:
        """Make this the current stream."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make the former stream the current one again."""


class HostEvent:
    """A time on the host.

    Attributes:
        time_s: when it was recorded, by `time.perf_counter`; None before.
    """

    def __init__(self) -> None:
        self.time_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Note the time."""
        self.time_s = time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing: the host has done what was asked of it."""


class HostStream:
    """The host's processor, which is never behind."""

    ptr = 0

    def synchronize(self) -> None:
        """Do nothing: the host has done what was asked of it."""

    def wait(self, event: Event) -> None:
        """Do nothing: what comes later begins later."""

    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


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
