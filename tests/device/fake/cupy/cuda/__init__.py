"""The device, its memory, streams and events, as CuPy names them."""

from cupy._capture import Graph
from cupy._streams import Event, Stream, get_current_stream, get_elapsed_time
from cupy.cuda import device, memory, pinned_memory, runtime
from cupy.cuda.device import Device
from cupy.cuda.memory import (
    MemoryHook,
    MemoryPointer,
    MemoryPool,
    UnownedMemory,
    alloc,
    get_allocator,
    using_allocator,
)
from cupy.cuda.pinned_memory import alloc_pinned_memory

__all__ = [
    "Device",
    "Event",
    "Graph",
    "MemoryHook",
    "MemoryPointer",
    "MemoryPool",
    "Stream",
    "UnownedMemory",
    "alloc",
    "alloc_pinned_memory",
    "device",
    "get_allocator",
    "get_current_stream",
    "get_elapsed_time",
    "memory",
    "pinned_memory",
    "runtime",
    "using_allocator",
]
