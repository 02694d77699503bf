"""Buffers for staging in memory that the ranks of a node share, locked for the device's copies.

Then a sum through shared memory needs no further copies: the device writes into the buffer that the others read.
"""

from __future__ import annotations

from contextlib import suppress
from mmap import PAGESIZE
from types import ModuleType
from typing import TYPE_CHECKING

from nnmpi.backend.array import Array
from nnmpi.comm.device.pinned import Block

if TYPE_CHECKING:
    from nnmpi.comm.sharing.memory import SharedMemory


class SharedBlocks:
    """Hands out blocks that all ranks of a node see. Taking and giving is collective.

    Args:
        memory: of the group.
        xp: the device's array module.
    """

    def __init__(self, memory: SharedMemory, xp: ModuleType) -> None:
        self._memory, self._runtime = memory, xp.cuda.runtime
        self._arrays: dict[int, Array] = {}
        self._locked: set[int] = set()

    def take(self, nbytes: int) -> Block:
        """Return a new block of that many bytes.

        Raises:
            DeviceError: on all ranks, when there is no shared memory.
        """
        length = -(-max(1, nbytes) // PAGESIZE) * PAGESIZE
        array = self._memory.allocate(length + PAGESIZE, "uint8")
        start = (
            -array.ctypes.data % PAGESIZE
        )  # whole pages, as CUDA locks no page twice, and copies from no half of one
        block = Block(array[start : start + length])
        self._arrays[id(block)] = array
        with suppress(RuntimeError):  # CUDA may refuse to lock it: then copies take longer, and wait
            self._runtime.hostRegister(block.bytes.ctypes.data, length, 0)
            self._locked.add(id(block))
        return block

    def give(self, block: Block) -> None:
        """Drop the block."""
        if block.event is not None:
            block.event.synchronize()
        array = self._arrays.pop(id(block))
        if id(block) in self._locked:
            self._locked.discard(id(block))
            self._runtime.hostUnregister(block.bytes.ctypes.data)
        self._memory.drop([array])
