"""Page-locked host memory, which a device copies from and to by itself, kept by size to be used again.

Locking pages takes milliseconds, so what was used is kept. A block that was given back may still be read by a copy on
its way to the device: it comes with an event, and is handed out again only when the event has passed.
"""

from __future__ import annotations

from collections import deque
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nnmpi.backend.array import Array

LEAST_BYTES = 4096


class Block:
    """Some page-locked bytes.

    Attributes:
        bytes: (a power of two,) uint8.
        event: behind the last copy that reads or writes them; None when there is none under way.
    """

    __slots__ = ("bytes", "event")

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.bytes, self.event = memory, None

    event: Any

    def view(self, elements: int, dtype: Any) -> Array:
        """Return the first bytes as an array, (elements,)."""
        kind = np.dtype(dtype)
        return self.bytes[: elements * kind.itemsize].view(kind)


class PinnedPool:
    """Hands out blocks and takes them back.

    Args:
        xp: the device's array module.
    """

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp
        self._free: dict[int, deque[Block]] = {}
        self.bytes = 0

    def take(self, nbytes: int) -> Block:
        """Return a block of at least so many bytes that no copy uses any more."""
        size = max(LEAST_BYTES, 1 << max(nbytes - 1, 0).bit_length())
        free = self._free.setdefault(size, deque())
        if free and (free[0].event is None or free[0].event.done):
            return free.popleft()
        self.bytes += size
        memory = self._xp.cuda.alloc_pinned_memory(size)
        return Block(np.frombuffer(memory, np.uint8, size))

    def give(self, block: Block) -> None:
        """Take a block back, with the event behind its last copy."""
        self._free[block.bytes.size].append(block)
