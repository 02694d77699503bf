"""The device's memory: NumPy's, counted as CuPy's pool would, with a limit, and freed with the last
array in it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import Counter
from contextlib import contextmanager
from functools import partial

import numpy as np

from cupy import _streams
from cupy._address import bytes_at
from cupy.cuda import runtime

UNIT = 512  # the pool gives memory in pieces of so many bytes


class OutOfMemoryError(MemoryError):
    """The pool's limit or the device's memory does not suffice."""

    def __init__(self, size, total, limit=0):
        words = f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes"
        super().__init__(words + (f", limit set to: {limit:,} bytes)." if limit else ")."))
        self._size, self._total, self._limit = size, total, limit


class MemoryHook:
    """What a thread wants to hear of the pool's memory, inside `with`."""

    name = "MemoryHook"

    def __enter__(self):
        if self.name in _hooks():
            raise KeyError(f"memory hook {self.name} already exists")
        _hooks()[self.name] = self
        return self

    def __exit__(self, *error):
        del _hooks()[self.name]

    def malloc_postprocess(self, **block):
        """Hear of memory that is given."""

    def free_postprocess(self, **block):
        """Hear of memory that is given back."""


def _hooks():
    return vars(_local).setdefault("hooks", {})


def _tell(event, size):
    for hook in list(_hooks().values()):
        getattr(hook, event)(device_id=0, mem_size=size, mem_ptr=0, pmem_id=0)


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

    __slots__ = ("_counted", "_stream")

    def __init__(self, owner):
        self.size = owner.nbytes
        self._counted, self._stream = 0, _streams.current().ptr
        self._counted = POOL._take(self.size, self._stream)
        self._owner = owner
        self.ptr = owner.__array_interface__["data"][0] if self.size else 0
        OWNERS[id(owner)] = self

    def __del__(self):
        if self._counted and _tell is not None:  # None when Python ends
            POOL._keep(self._counted, self._stream)


class Aside(BaseMemory):
    """Memory that no pool counts: of what is not computed on the device.

    Args:
        owner: the NumPy array that has the memory.
    """

    __slots__ = ()

    def __init__(self, owner):
        self.ptr, self.size, self._owner = owner.ctypes.data, owner.nbytes, owner


class PooledMemory(BaseMemory):
    """A piece of memory from a pool, which gets it back with the last array in it.

    Args:
        block: the piece.
        size: how many bytes of it are used.
        pool: where it comes from.
    """

    __slots__ = ("_block", "_pool", "_stream")

    def __init__(self, block, size, pool):
        self.ptr, self.size = block.ptr if size else 0, size
        self._owner = bytes_at(block.ptr, size, block.mem._owner)
        # In its turn: what used this memory before may not have been done yet.
        _streams.submit(partial(self._owner.fill, 0xFF))
        self._block, self._pool = block, weakref.ref(pool)
        self._stream = _streams.current()
        OWNERS[id(self._owner)] = self

    def __del__(self):
        pool = self._pool()
        if pool is not None and _tell is not None:  # None when Python ends
            pool._give_back(self._block, self._stream)


class UnownedMemory(BaseMemory):
    """Memory that somebody else gives and takes back; its owner lives as long as this, as CuPy has
    it.
    """

    __slots__ = ("_given",)

    def __init__(self, ptr, size, owner):
        self.ptr, self.size = ptr, size
        self._owner, self._given = bytes_at(ptr, size, owner), owner
        OWNERS[id(self._owner)] = self


class MemoryPointer:
    """An address in an allocation."""

    __slots__ = ("mem", "ptr")

    def __init__(self, mem, offset):
        self.mem = mem
        self.ptr = mem.ptr + offset

    @property
    def device_id(self):
        """The number of the device."""
        return runtime.getDevice()

    def __add__(self, offset):
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)


# Allocations by the identity of the NumPy array that has the memory.
OWNERS = weakref.WeakValueDictionary()


def owner_of(array):
    """Return the NumPy array that has another one's memory."""
    owner = array
    while (array := getattr(array, "base", None)) is not None:
        # no array, behind strides of one's own
        owner = array if type(array) is np.ndarray else owner
    return owner


def root_of(mem):
    """Return the memory of the device that a pool's piece lies in."""
    while isinstance(mem, PooledMemory):
        mem = mem._block.mem
    return mem


def array_at(pointer, shape, dtype, strides=None, order="C"):
    """Return a NumPy array at an address of the device."""
    owner = pointer.mem._owner
    if not owner.flags.c_contiguous or owner.dtype != np.uint8:
        owner = owner.T if owner.flags.f_contiguous else owner
        owner = owner.reshape(-1).view(np.uint8)
    return np.ndarray(shape, dtype, owner, pointer.ptr - pointer.mem.ptr, strides, order)


def placed(array):
    """Return a result of NumPy as it lies on the device, and its memory: new memory, if it is no
    view of some.
    """
    owner = owner_of(array)
    mem = OWNERS.get(id(owner))
    if mem is not None:
        return array, mem
    if _streams.is_aside():
        return array, Aside(owner)
    if getattr(_local, "allocator", None) is None:
        return array, Memory(owner)
    host, mem = blank(array)
    np.copyto(host, array)
    return host, mem


def blank(array):
    """Return a NumPy array in new memory of the device that lies as another one does, and the
    memory.
    """
    pointer = alloc(array.nbytes)
    strides = np.empty_like(array).strides
    return array_at(pointer, array.shape, array.dtype, strides), pointer.mem


def base_of(ptr, size=1):
    """Return the allocation around some bytes; one that has been unmapped may lie there, too, and
    be shorter.
    """
    for result in OWNERS.valuerefs():  # one step: other threads may make arrays meanwhile
        item = result()
        if item is not None and item.ptr <= ptr and ptr + size <= item.ptr + max(1, item.size):
            return item
    return None


class MemoryPool:
    """Counts memory: what arrays hold, what was freed and is kept, and the limit of both.

    As in CuPy, what was freed serves the stream alone in which it was taken.

    Args:
        allocator: gives memory, which this keeps until `free_all_blocks` and uses again for arrays
            of the same size in the same stream; by default it is the device's.
    """

    def __init__(self, allocator=None):
        self._allocator = allocator
        self._free = {}
        self._kept = Counter()  # bytes of the device's own memory, by stream
        self._used = 0
        self._total = 0
        self._limit = 0
        text = os.environ.get("CUPY_GPU_MEMORY_LIMIT", "")
        if text.endswith("%"):
            self.set_limit(fraction=float(text[:-1]) / 100)
        elif text:
            self.set_limit(size=int(text))

    def _take(self, size, stream):
        """Count memory of the device for an array in a stream; return how much it is."""
        size = -(-size // UNIT) * UNIT
        again = min(size, self._kept[stream])
        limit = self._limit or runtime.settings().memory_bytes
        if self._total + size - again > limit:
            self.free_all_blocks()  # as CuPy does before it gives up
            again = 0
            if self._total + size > limit:
                raise OutOfMemoryError(size, self._total, self._limit)
        self._kept[stream] -= again
        self._total += size - again
        self._used += size
        _tell("malloc_postprocess", size)
        return size

    def _keep(self, size, stream):
        self._used -= size
        self._kept[stream] += size
        _tell("free_postprocess", size)

    def malloc(self, size):
        """Return new memory, full of rubbish."""
        if self._allocator is None:
            return MemoryPointer(Memory(rubbish((size,), np.uint8)), 0)
        whole = -(-size // UNIT) * UNIT
        blocks = self._free.get((_streams.current(), whole))
        if blocks:
            block = blocks.pop()
        else:
            if self._limit and self._total + whole > self._limit:
                self.free_all_blocks()
                if self._total + whole > self._limit:
                    raise OutOfMemoryError(whole, self._total, self._limit)
            block = self._allocator(whole)
            self._total += whole
        self._used += whole
        _tell("malloc_postprocess", whole)
        return MemoryPointer(PooledMemory(block, size, self), 0)

    def _give_back(self, block, stream):
        self._used -= block.mem.size
        _tell("free_postprocess", block.mem.size)
        self._free.setdefault((stream, block.mem.size), []).append(block)

    def used_bytes(self):
        """Return what arrays hold."""
        return self._used

    def free_bytes(self):
        """Return what was freed and is kept."""
        return self._total - self._used

    def total_bytes(self):
        """Return both."""
        return self._total

    def free_all_blocks(self, stream=None):
        """Give back what is kept, or what is kept for a stream."""
        for key in [key for key in self._free if stream in (None, key[0])]:
            del self._free[key]
        for key in [key for key in self._kept if stream is None or stream.ptr == key]:
            del self._kept[key]
        kept = sum(size * len(blocks) for (_, size), blocks in self._free.items())
        self._total = self._used + self._kept.total() + kept

    def set_limit(self, size=None, fraction=None):
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

    def get_limit(self):
        """Return the limit in bytes; 0 means none."""
        return self._limit


_local = threading.local()
POOL = MemoryPool()


def get_allocator():
    """Return what gives this thread memory."""
    return getattr(_local, "allocator", None) or POOL.malloc


def alloc(size):
    """Return new memory from the current allocator."""
    return get_allocator()(size)


@contextmanager
def using_allocator(allocator=None):
    """Let an allocator give this thread its memory inside `with`; by default the device itself."""
    before = getattr(_local, "allocator", None)
    _local.allocator = allocator
    try:
        yield
    finally:
        _local.allocator = before


def rubbish(shape, dtype, order="C"):
    """Return a NumPy array of NaN, or -1: what new memory must be taken for."""
    array = np.empty(shape, dtype, order)
    if array.nbytes and array.dtype.kind != "b":
        ctypes.memset(array.__array_interface__["data"][0], 0xFF, array.nbytes)
    return array
