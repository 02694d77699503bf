"""The way between a device and the host: copies on streams of their own, in order with what computes.

    compute stream   ... kernel  [fork]                                          [join] kernel ...
    out                          wait  copy copy copy                              ^
    in                           wait                     copy copy copy  ---------'
    host                                    MPI  MPI  MPI

MPI must not see a buffer before the copy into it is done, for which the host waits; and what computes must not see a
result before the copy of it is done, for which the device waits and not the host.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.comm.device.pinned import Block, PinnedPool


class Lane:
    """The copies between the host and the current device. One for a process and library: see `lane_of`.

    Args:
        xp: the device's array module.

    Attributes:
        pool: the host's end.
    """

    def __init__(self, xp: ModuleType) -> None:
        self._cuda = xp.cuda
        # Streams that do not wait for the default one: order is made by events, where it is needed.
        self._out, self._in = xp.cuda.Stream(non_blocking=True), xp.cuda.Stream(non_blocking=True)
        self.pool = PinnedPool(xp)
        self._arriving: deque[tuple[Any, list[Array]]] = deque()  # host arrays on their way to the device, and when

    def event(self) -> Any:
        """Return an event that is not recorded yet."""
        return self._cuda.Event(disable_timing=True)

    def fork(self) -> None:
        """Let copies of both directions wait for what was computed so far.

        Those to the device too: they may write where a kernel still reads, or into memory that such a kernel had.
        """
        event = self.event()
        event.record(self._cuda.get_current_stream())
        self._out.wait_event(event)
        self._in.wait_event(event)

    def join(self, event: Any) -> None:
        """Let what is computed from now on wait for an event; the host does not wait."""
        self._cuda.get_current_stream().wait_event(event)

    def copy_out(self, pairs: Sequence[tuple[Array, Array]], block: Block | None = None) -> Any:
        """Copy device arrays into page-locked host memory; return the event behind.

        Args:
            pairs: (device array, host array): 1-D, contiguous, alike. They must stay alive until the event.
            block: the host arrays lie in it, so that the copies wait for its last ones.
        """
        if block is not None and block.event is not None:
            self._out.wait_event(block.event)
        for array, host in pairs:
            if array.size:
                array.get(stream=self._out, out=host, blocking=False)  # type: ignore[attr-defined]
        event = self.event()
        event.record(self._out)
        if block is not None:
            block.event = event
        return event

    def copy_in(self, pairs: Sequence[tuple[Array, Array]], block: Block | None = None) -> Any:
        """Copy page-locked host memory into device arrays; return the event behind. Arguments as in `copy_out`."""
        for array, host in pairs:
            if array.size:
                array.set(host, stream=self._in)  # type: ignore[attr-defined]
        event = self.event()
        event.record(self._in)
        if block is not None:
            block.event = event
        return event

    # ---- arrays of one message ----

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """Return page-locked host memory for one array; it goes back to CuPy's pool with the last view of it."""
        lengths = (shape,) if isinstance(shape, int) else shape
        elements, kind = math.prod(lengths), np.dtype(dtype)
        if not elements:
            return np.empty(lengths, kind)
        memory = self._cuda.alloc_pinned_memory(elements * kind.itemsize)
        host: Array = np.frombuffer(memory, np.uint8, elements * kind.itemsize).view(kind).reshape(lengths)
        return host

    def to_host(self, arrays: Sequence[Array]) -> list[Array]:
        """Return copies in host memory, C-contiguous, of the arrays' shapes; waits until they are there."""
        flats = [namespace(array).ascontiguousarray(array).reshape(-1) for array in arrays]
        hosts = [self.empty(array.shape, array.dtype) for array in arrays]
        self.fork()
        self.copy_out([(flat, host.reshape(-1)) for flat, host in zip(flats, hosts, strict=True)]).synchronize()
        return hosts

    def to_device(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Copy host arrays from `empty` into device arrays: what is computed later waits for it, the host does not.

        Args:
            pairs: (device array, C-contiguous; host array of its shape and dtype, to be left alone from now on).
        """
        while self._arriving and self._arriving[0][0].done:
            self._arriving.popleft()
        self.fork()
        event = self.copy_in([(array.reshape(-1), host.reshape(-1)) for array, host in pairs])
        self.join(event)
        self._arriving.append((event, [host for _, host in pairs]))


def lane_of(xp: ModuleType) -> Lane:
    """Return this process's lane to the current device of an array module."""
    return _lane(xp, xp.cuda.runtime.getDevice())


@functools.cache
def _lane(xp: ModuleType, device: int) -> Lane:
    """Return a device's lane; its streams are the device's."""
    return Lane(xp)
