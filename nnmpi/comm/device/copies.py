"""Arrays between a device and the host: the copies, the page-locked memory that they need, and arrays ready for MPI.

    host arrays for MPI     to_hosts, room_for, from_host, put: what everybody else uses, for arrays wherever they live
    CopyStreams             copies on streams of their own, in order with what computes
    PinnedPool              page-locked host memory, kept to be used again

Copies run beside what computes:

    compute stream   ... kernel  [fork]                                          [join] kernel ...
    out                          wait  copy copy copy                              ^
    in                           wait                     copy copy copy  ---------'
    host                                    MPI  MPI  MPI

MPI must not see a buffer before the copy into it is done, for which the host waits; and what computes must not see a
result before the copy of it is done, for which the device waits and not the host.
"""

import functools
import math
from collections import deque
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nnmpi.backend.array import Array, namespace
from nnmpi.comm.buffers import is_device

# ---- host arrays for MPI ----


def to_hosts(arrays: Sequence[Array]) -> list[Array]:
    """Return the values as C-contiguous NumPy arrays, all of one library; the same arrays where they are such already.

    Waits until a device has computed and copied them.
    """
    if not arrays or not is_device(arrays[0]):
        return [array if array.flags.c_contiguous else array.copy(order="C") for array in arrays]
    return copy_streams_of(namespace(arrays[0])).to_host(arrays)


def to_host(array: Array) -> Array:
    """Return the values of one array; see `to_hosts`."""
    return to_hosts([array])[0]


def room_for(xp: ModuleType, shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return host memory from which `put` and `from_host` are quick: page-locked for a device's arrays.

    Args:
        xp: the array module of the arrays, NumPy or a device's.
        shape: of the memory; an int for one dimension.
        dtype: of the memory.
    """
    return np.empty(shape, dtype) if xp is np else copy_streams_of(xp).empty(shape, dtype)


def room_like(array: Array, shape: int | tuple[int, ...]) -> Array:
    """Return host memory for an array of this one's library and dtype; see `room_for`."""
    return room_for(namespace(array), shape, array.dtype)


def from_host(host: Array, xp: ModuleType) -> Array:
    """Return the values as an array of an array module: with NumPy, `host` itself.

    Args:
        host: from `room_for`, C-contiguous; a device may still read it afterwards, so that nobody may change it.
    """
    if xp is np:
        return host
    array: Array = xp.empty(host.shape, dtype=host.dtype)
    put(host, array)
    return array


def put(host: Array, array: Array) -> None:
    """Copy host memory from `room_for` into an array, C-contiguous on a device; see `from_host`."""
    if is_device(array):
        copy_streams_of(namespace(array)).to_device([(array, host)])
    elif host is not array:
        array[...] = host


# ---- page-locked memory ----

LEAST_BYTES = 4096


class PinnedBlock:
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
    """Hands out blocks of page-locked host memory, which a device copies from and to by itself, and takes them back.

    Locking pages takes milliseconds, so what was used is kept, by size. A block that was given back may still be read
    by a copy on its way to the device: it comes with an event, and is handed out again only when that has passed.

    Args:
        xp: the device's array module.
    """

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp
        self._free: dict[int, deque[PinnedBlock]] = {}
        self.bytes = 0

    def take(self, nbytes: int) -> PinnedBlock:
        """Return a block of at least so many bytes that no copy uses any more."""
        size = max(LEAST_BYTES, 1 << max(nbytes - 1, 0).bit_length())
        free = self._free.setdefault(size, deque())
        if free and (free[0].event is None or free[0].event.done):
            return free.popleft()
        self.bytes += size
        memory = self._xp.cuda.alloc_pinned_memory(size)
        return PinnedBlock(np.frombuffer(memory, np.uint8, size))

    def give(self, block: PinnedBlock) -> None:
        """Take a block back, with the event behind its last copy."""
        self._free[block.bytes.size].append(block)


# ---- copies ----


class CopyStreams:
    """The copies between the host and the current device. One for a process and library: see `copy_streams_of`.

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

    def copy_out(self, pairs: Sequence[tuple[Array, Array]], block: PinnedBlock | None = None) -> Any:
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

    def copy_in(self, pairs: Sequence[tuple[Array, Array]], block: PinnedBlock | None = None) -> Any:
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


def copy_streams_of(xp: ModuleType) -> CopyStreams:
    """Return this process's copy streams of the current device of an array module."""
    return _copy_streams(xp, xp.cuda.runtime.getDevice())


@functools.cache
def _copy_streams(xp: ModuleType, device: int) -> CopyStreams:
    """Return those of a device; the streams are the device's."""
    return CopyStreams(xp)
