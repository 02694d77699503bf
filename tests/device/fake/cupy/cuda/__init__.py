"""The device, its memory, streams and events, as CuPy names them."""

from cupy._streams import Event, ExternalStream, Stream, get_current_stream, get_elapsed_time
from cupy.cuda import device, memory, pinned_memory, runtime
from cupy.cuda.device import Device, get_cublas_handle, get_device_id
from cupy.cuda.memory import (
    BaseMemory,
    MemoryHook,
    MemoryPointer,
    MemoryPool,
    UnownedMemory,
    alloc,
    get_allocator,
    set_allocator,
)
from cupy.cuda.pinned_memory import PinnedMemoryPointer, PinnedMemoryPool, alloc_pinned_memory

__all__ = [
    "BaseMemory",
    "Device",
    "Event",
    "ExternalStream",
    "MemoryHook",
    "MemoryPointer",
    "MemoryPool",
    "PinnedMemoryPointer",
    "PinnedMemoryPool",
    "Stream",
    "UnownedMemory",
    "alloc",
    "alloc_pinned_memory",
    "device",
    "get_allocator",
    "get_cublas_handle",
    "get_current_stream",
    "get_device_id",
    "get_elapsed_time",
    "is_available",
    "memory",
    "pinned_memory",
    "runtime",
    "set_allocator",
]


def is_available() -> bool:
    """Return whether there is a device."""
    return runtime.settings().devices > 0 and not runtime.settings().hidden
