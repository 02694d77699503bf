"""Arrays for MPI, wherever they live: those on the host as they are, those on a device as copies in page-locked memory.

hosts = to_hosts([x, y])              what is sent
room = room_like(x, (3, 4))           where something is received
z = from_host(room, namespace(x))     an array of x's library again
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
from numpy.typing import DTypeLike

from nnmpi.backend.array import Array, namespace
from nnmpi.comm.buffers import is_device
from nnmpi.comm.device.lane import lane_of


def to_hosts(arrays: Sequence[Array]) -> list[Array]:
    """Return the values as C-contiguous NumPy arrays, all of one library; the same arrays where they are such already.

    Waits until a device has computed and copied them.
    """
    if not arrays or not is_device(arrays[0]):
        return [array if array.flags.c_contiguous else array.copy(order="C") for array in arrays]
    return lane_of(namespace(arrays[0])).to_host(arrays)


def to_host(array: Array) -> Array:
    """Return the values of one array; see `to_hosts`."""
    return to_hosts([array])[0]


def room_for(xp: ModuleType, shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return host memory from which `put` and `from_host` are quick for arrays of an array module."""
    return np.empty(shape, dtype) if xp is np else lane_of(xp).empty(shape, dtype)


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
        lane_of(namespace(array)).to_device([(array, host)])
    elif host is not array:
        array[...] = host
