"""The device's memory: NumPy's, counted as CuPy's pool would, with a limit, and freed with the last
array in it.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import numpy as np

from cupy._address import bytes_at
from cupy.cuda import runtime

UNIT = 512  # the pool gives memory in pieces of so many bytes


class OutOfMemoryError(MemoryError):
    """The pool's limit or the device's memory does not suffice."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        words = f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes"
        super().__init__(words + (f", limit set to: {limit:,} bytes)." if limit else ")."))
        self._size, self._total, self._limit = size, total, limit


class BaseMemory:
    """Some memory of the device.

    Attributes:
        ptr: its address, which is 0 where there is nothing.
        size: its bytes.
    """

    __slots__ = ("__weakref__", "_owner", "ptr", "size")


class Memory(BaseMemory):
    """An allocation: it lives as long as an array that lies in it.

    Args:
        owner: the NumPy array that has the memory.
    """

    __slots__ = ("_counted",)

    def __init__(self, owner: Any) -> None:
        self.size = owner.nbytes
        self._counted = 0
        POOL._take(self.size)
        self._counted = -(-self.size // UNIT) * UNIT
        self._owner = owner
        self.ptr = owner.__array_interface__["data"][0] if self.size else 0
        OWNERS[id(owner)] = self

    def __del__(self) -> None:
        if self._counted and POOL is not None:  # None when Python ends
            POOL._used -= self._counted


class UnownedMemory(BaseMemory):
    """Memory that somebody else gives and takes back; its owner lives as long as this, as CuPy has
    it.
    """

    __slots__ = ("_given",)

    def __init__(self, ptr: int, size: int, owner: Any) -> None:
        self.ptr, self.size = ptr, size
        self._owner, self._given = bytes_at(ptr, size), owner
        OWNERS[id(self._owner)] = self  # type: ignore[assignment]


class MemoryPointer:
    """An address in an allocation."""

    __slots__ = ("mem", "ptr")

    def __init__(self, mem: BaseMemory, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset

    @property
    def device_id(self) -> int:
        """The number of the device."""
        return runtime.getDevice()

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)


# Allocations by the identity of the NumPy array that has the memory.
OWNERS: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()


def owner_of(array: Any) -> Any:
    """Return the NumPy array that has another one's memory."""
    owner = array
    while (array := getattr(array, "base", None)) is not None:
        # no array, behind strides of one's own
        owner = array if type(array) is np.ndarray else owner
    return owner


def base_of(ptr: int, size: int = 1) -> BaseMemory | None:
    """Return the allocation around some bytes; one that has been unmapped may lie there, too, and
    be shorter.
    """
    for result in OWNERS.valuerefs():  # one step: other threads may make arrays meanwhile
        item = result()
        if item is not None and item.ptr <= ptr and ptr + size <= item.ptr + max(1, item.size):
            return item
    return None


class MemoryPool:
    """Counts memory: what arrays hold, what was freed and is kept, and the limit of both."""

    def __init__(self, allocator: Any = None) -> None:
        self._used = 0
        self._total = 0
        self._limit = 0
        text = os.environ.get("CUPY_GPU_MEMORY_LIMIT", "")
        if text.endswith("%"):
            self.set_limit(fraction=float(text[:-1]) / 100)
        elif text:
            self.set_limit(size=int(text))

    def _take(self, size: int) -> None:
        size = -(-size // UNIT) * UNIT
        used = self._used + size
        if used > self._total:
            limit = self._limit or runtime.settings().memory_bytes
            if used > limit:
                # what was kept has been given back, as CuPy does before it gives up
                self._total = self._used
                raise OutOfMemoryError(size, self._total, self._limit)
            self._total = used
        self._used = used

    def malloc(self, size: int) -> MemoryPointer:
        """Return new memory, full of rubbish."""
        return MemoryPointer(Memory(rubbish((size,), np.uint8)), 0)

    def used_bytes(self) -> int:
        """Return what arrays hold."""
        return self._used

    def free_bytes(self) -> int:
        """Return what was freed and is kept."""
        return self._total - self._used

    def total_bytes(self) -> int:
        """Return both."""
        return self._total

    def free_all_blocks(self, stream: Any = None) -> None:
        """Give back what is kept."""
        self._total = self._used

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        """Set the limit in bytes, or as a part of the device's memory; 0 means none."""
        if size is not None and fraction is not None:
            raise ValueError("size and fraction cannot be specified at one time")
        if fraction is not None:
            if not 0 <= fraction <= 1:
                raise ValueError(f"memory limit fraction out of range: {fraction}")
            size = int(fraction * runtime.settings().memory_bytes)
        if size is None or size < 0:
            raise ValueError(f"memory limit size out of range: {size}")
        self._limit = size

    def get_limit(self) -> int:
        """Return the limit in bytes; 0 means none."""
        return self._limit


POOL = MemoryPool()


def rubbish(shape: Any, dtype: Any, order: Any = "C") -> Any:
    """Return a NumPy array of NaN, or -1: what new memory must be taken for."""
    array = np.empty(shape, dtype, order)
    if array.nbytes and array.dtype.kind != "b":
        ctypes.memset(array.__array_interface__["data"][0], 0xFF, array.nbytes)
    return array
