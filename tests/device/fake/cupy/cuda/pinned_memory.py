"""Page-locked memory of the host: NumPy's, remembered, because copies to and from it go on by
themselves.
"""

import weakref

import numpy as np

_RANGES = {}  # first address: bytes


class PinnedMemory:
    """An allocation."""

    def __init__(self, size, flags=0):
        self._owner = np.full(max(1, size), 0xFF, np.uint8)
        self.ptr = self._owner.ctypes.data
        self.size = size
        _RANGES[self.ptr] = max(1, size)
        weakref.finalize(self._owner, _RANGES.pop, self.ptr, None)


class PinnedMemoryPointer(np.ndarray):  # so that it has the interface of buffers
    """An address in page-locked memory."""

    mem: PinnedMemory
    ptr: int


class PinnedMemoryPool:
    """Gives page-locked memory."""

    def malloc(self, size):
        """Return new memory."""
        mem = PinnedMemory(size)
        pointer = mem._owner[:size].view(PinnedMemoryPointer)
        pointer.mem, pointer.ptr = mem, mem.ptr
        return pointer

    def free_all_blocks(self):
        """Give back what is kept: nothing is."""


POOL = PinnedMemoryPool()


def alloc_pinned_memory(size):
    """Return new page-locked memory."""
    return POOL.malloc(size)


def is_pinned(array):
    """Return whether a NumPy array lies in page-locked memory."""
    address = array.ctypes.data
    return any(
        first <= address and address + array.nbytes <= first + size
        for first, size in _RANGES.copy().items()
    )  # a list could begin a collection of garbage, which may free some
