"""Device arrays by way of page-locked host memory: any MPI can do it, and any algorithm.

    copy to the host, which waits for what computes  ->  messages of host arrays  ->  copy back

So a sum of device arrays has the bits of the same sum of host arrays.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import DTypeLike

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.device import pinned
from nnmpi.comm.buffers import Buffer, is_device
from nnmpi.comm.execution import Pending
from nnmpi.errors import CommError, UsageError

VARIABLE = "NNMPI_CUDA_AWARE"


@cache
def cuda_aware() -> bool:
    """Return whether the user says, by NNMPI_CUDA_AWARE=1, that MPI takes device pointers: others die of one.

    Raises:
        UsageError: for another word than 0 or 1.
    """
    word = os.environ.get(VARIABLE, "0")
    if word not in ("0", "1"):
        raise UsageError(f"{VARIABLE} is {word!r}; give 1 if MPI is built for CUDA and takes device pointers, else 0")
    return word == "1"


def to_hosts(arrays: Sequence[Array]) -> list[Array]:
    """Return the values as C-contiguous NumPy arrays, all of one library; the same arrays where they are such already.

    Waits until a device has computed and copied them.
    """
    if not arrays or not is_device(arrays[0]):
        return [array if array.flags.c_contiguous else array.copy(order="C") for array in arrays]
    hosts = [room_like(array, array.shape) for array in arrays]
    fetch(list(zip(arrays, hosts, strict=True)))
    return hosts


def to_host(array: Array) -> Array:
    """Return the values of one array; see `to_hosts`."""
    return to_hosts([array])[0]


def fetch(pairs: Sequence[tuple[Array, Array]]) -> None:
    """Copy device arrays into host memory from `room_for`: (array, host), of the same shape. Waits once for all."""
    if not pairs:
        return
    xp = namespace(pairs[0][0])
    stream = xp.cuda.get_current_stream()
    gapless = [(xp.ascontiguousarray(array), host) for array, host in pairs]
    for array, host in gapless:
        if array.size:
            array.get(stream=stream, out=host, blocking=False)
    stream.synchronize()


def put(host: Array, array: Array) -> None:
    """Copy host memory from `room_for` into an array, C-contiguous on a device, and wait until it is there."""
    if is_device(array):
        if array.size:
            stream = namespace(array).cuda.get_current_stream()
            array.set(host, stream=stream)  # type: ignore[attr-defined]
            stream.synchronize()
    elif host is not array:
        array[...] = host


def room_for(xp: ModuleType, shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return host memory to copy a device's arrays through: page-locked, so that copies are quick.

    Args:
        xp: the array module of the arrays, NumPy or a device's.
        shape: of the memory; an int for one dimension.
        dtype: of the memory.
    """
    elements = math.prod((shape,) if isinstance(shape, int) else shape)
    return np.empty(shape, dtype) if xp is np or not elements else pinned(xp.cuda, elements, dtype).reshape(shape)


def room_like(array: Array, shape: int | tuple[int, ...]) -> Array:
    """Return host memory for an array of this one's library and dtype; see `room_for`."""
    return room_for(namespace(array), shape, array.dtype)


def from_host(host: Array, xp: ModuleType) -> Array:
    """Return the values as an array of an array module: with NumPy, `host` itself."""
    if xp is np:
        return host
    array: Array = xp.empty(host.shape, dtype=host.dtype)
    put(host, array)
    return array


class Elsewhere:
    """A collective of one array by way of another, in which it is done; see `execution.Pending` for the methods.

    Args:
        out: copies the array there.
        work: the collective of the other array.
        back: copies the result back.
    """

    def __init__(self, out: Callable[[], None], work: Pending, back: Callable[[], None]) -> None:
        self._out, self._work, self._back = out, work, back
        self._running = False

    def start(self) -> None:
        """Copy, and start it. Leave the array alone until it is finished.

        Raises:
            CommError: when it is running already.
        """
        if self._running:
            raise CommError("the collective is still running; wait for it before the next start")
        self._out()
        self._work.start()
        self._running = True

    def poll(self) -> bool:
        """Go on as far as possible without waiting; return whether it is finished."""
        if self._running and self._work.poll():
            self._end()
        return not self._running

    def wait(self) -> None:
        """Return when it is finished."""
        if self._running:
            self._work.wait()
            self._end()

    def run(self) -> None:
        """Copy, do it, copy back; MPI's blocking calls are quicker than a start and a wait."""
        self._out()
        self._work.run()
        self._back()

    def free(self) -> None:
        """Give back what MPI keeps."""
        self._work.free()

    def _end(self) -> None:
        self._running = False
        self._back()


def staged(array: Array, bind: Callable[[Buffer], Pending], host: Buffer | None = None) -> Elsewhere:
    """Return a collective of a device array, (n,), by the one of a host array that `bind` returns.

    Args:
        host: where it is done; by default page-locked memory.
    """
    room = room_like(array, array.shape) if host is None else host
    return Elsewhere(lambda: fetch([(array, room)]), bind(room), lambda: put(room, array))


def widened(array: Array, bind: Callable[[Buffer], Pending]) -> Elsewhere:
    """Return a sum of an array of 16-bit floating point, (n,), by that of a float32 one, rounded once at the end.

    MPI has no dependable sum of such numbers, and adding them two by two would round at every rank on the way.
    """
    wide: Array = namespace(array).empty(array.shape, dtype=np.float32)

    def widen() -> None:
        wide[...] = array

    def narrow() -> None:
        array[...] = wide

    return Elsewhere(widen, bind(wide), narrow)
