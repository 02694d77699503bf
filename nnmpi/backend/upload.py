"""Copies to a device: of an array that stays there, and of batches, each during the step before.

    threads     pack 1 | pack 2 | pack 3 | ...     into page-locked memory
    copies             | 1 |    | 2 |    | 3 |     by a stream of their own
    kernels                | step 1 | step 2 |

A batch's arrays on the device are of the copies' stream: their memory is used again only by later
copies, each of which first waits for the kernels that were launched before it was asked for. So a
batch may be dropped at any time, also while it is on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend

PIECE_BYTES = 2**26
FLYING = 3  # copies that the host may be ahead of the device, so that memory stays bounded


def pinned(cuda: Any, elements: int, dtype: DTypeLike) -> Array:
    """Return an uninitialized NumPy array in page-locked memory, for fast copies: (elements,).

    Args:
        cuda: the device library's `cuda` module.
        elements: at least 1.
        dtype: of the elements.
    """
    kind = np.dtype(dtype)
    result = np.frombuffer(
        cuda.alloc_pinned_memory(elements * kind.itemsize), np.uint8, elements * kind.itemsize
    )
    return result.view(kind)


def resident(device: Backend, array: Array) -> Array:
    """Return a copy of a NumPy array on a device, made piece by piece.

    `xp.asarray` would page-lock as much memory of the host, and keep it.
    """
    result = device.xp.empty(array.shape, array.dtype)
    rows = max(1, PIECE_BYTES * len(array) // max(array.nbytes, 1))
    for start in range(0, len(array), rows):
        result[start : start + rows].set(np.ascontiguousarray(array[start : start + rows]))
    return result


class Uploads:
    """Copies of batches to a device, which neither the host nor the step before waits for.

    Args:
        device: of the batches, and of one thread's current stream.
    """

    def __init__(self, device: Backend) -> None:
        self.device, self._cuda = device, device.xp.cuda
        self._stream = self._cuda.Stream(non_blocking=True)
        # Copies that may be under way: an event after each, and what it reads.
        self._flying: deque[tuple[Any, Any]] = deque()

    def pack(self, *arrays: Array) -> list[Array]:
        """Return copies of NumPy arrays in page-locked memory. For a thread of its own."""
        self.device.use()  # of this thread: memory is page-locked for its device
        return [self._packed(array) for array in arrays]

    def _packed(self, array: Array) -> Array:
        if not array.size:
            return array
        # the pool of such memory reuses pieces of one size: sentences have batches of any
        room = pinned(self._cuda, 1 << (array.nbytes - 1).bit_length(), np.uint8)
        result = room[: array.nbytes].view(array.dtype).reshape(array.shape)
        result[...] = array
        return result

    def send(self, *arrays: Array) -> Callable[[], list[Array]]:
        """Begin to copy packed arrays; return a function that returns them, on the device.

        What is asked of the device after that function has been called waits for the copies.
        """
        if len(self._flying) == FLYING:
            self._flying.popleft()[0].synchronize()
        cuda, stream = self._cuda, self._stream
        stream.wait_event(cuda.get_current_stream().record())
        with stream:  # so that the memory is of this stream
            copies = [self.device.xp.empty(array.shape, array.dtype) for array in arrays]
        for copy, array in zip(copies, arrays, strict=True):
            if array.size:
                copy.set(array, stream=stream)
        arrived = stream.record()
        self._flying.append((arrived, arrays))

        def arrive() -> list[Array]:
            cuda.get_current_stream().wait_event(arrived)
            return copies

        return arrive
