"""What a layer keeps, taken out of memory and brought back: its arrays, wherever they go (see `memory.store`).

operations' saved      x [:, 3:]   mask   y        views of arrays, and what else there is
                         |        |     |
KeptArrays            | memory 0 | memory 1 |      each memory once, as bytes; the operations hold places in them
                            |  send     ^  fetch
a store               a file; or the host's page-locked memory
"""

import weakref
from collections.abc import Iterable
from ctypes import c_uint8
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array, is_array
from nnmpi.backend.backend import Backend
from nnmpi.memory.store import Store, StoredBytes
from nnmpi.tensor.function import Function

LEAST_BYTES = 16  # a single number is not worth an account


class _Place(NamedTuple):
    """What stands in an operation for an array that is away.

    Attributes:
        memory: the number of the memory in which it lies.
        address: where it began, when it was there.
        shape, strides, dtype: its own.
    """

    memory: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


class _Extent:
    """The part of an allocation in which a layer's arrays lie."""

    def __init__(self, number: int, owner: Any, array: Array) -> None:
        self.number, self.owner, self.array = number, owner, array
        self.low, self.high = _bounds(array)

    def add(self, array: Array) -> None:
        """Take another array in."""
        low, high = _bounds(array)
        self.low, self.high = min(self.low, low), max(self.high, high)


class KeptArrays:
    """The arrays that some operations keep for their backward, to be sent away and to come back.

    Args:
        operations: those of a layer.
        outside: arrays that are there anyway, such as weights, and all that looks into their memory.
        backend: whose arrays they are.
    """

    def __init__(self, operations: Iterable[Function], outside: Iterable[Array], backend: Backend) -> None:
        self._backend = backend
        self._stored: StoredBytes | None = None
        self._outside = {id(owner): owner for owner in map(_owner, outside)}
        extents: dict[int, _Extent] = {}
        self._places = [(each, self._taken(each.saved, extents)) for each in operations if hasattr(each, "saved")]
        for operation, saved in self._places:
            operation.saved = saved
        found = list(extents.values())
        self._lows = [each.low for each in found]
        self._memory = [_as_bytes(each, backend) for each in found]
        self._owners = [each.owner for each in found]
        self._lengths = [each.high - each.low for each in found]

    @property
    def nbytes(self) -> int:
        """How many bytes go."""
        return sum(self._lengths)

    def watch(self) -> list[weakref.ref[Any]]:
        """Return what tells whether their memory is there yet; of a device's nothing does."""
        return [weakref.ref(owner) for owner in self._owners if isinstance(owner, np.ndarray)]

    def send(self, store: Store) -> None:
        """Begin to write them."""
        self._stored = store.send(self._memory)

    def leave(self) -> None:
        """Wait until they are written, and let their memory go."""
        self._wait()
        self._memory.clear()  # the store's thread may have the list yet
        self._owners.clear()

    def fetch(self) -> None:
        """Take memory, let the operations have their arrays in it, and begin to fill it."""
        xp = self._backend.xp
        self._memory = [xp.empty(length, "uint8") for length in self._lengths]
        for operation, saved in self._places:
            operation.saved = self._given(saved)
        self._places.clear()
        assert self._stored is not None
        self._stored.fetch(self._memory)

    def arrive(self) -> None:
        """Wait until they are there."""
        self._wait()
        self._memory.clear()
        self._stored = None

    def _wait(self) -> None:
        assert self._stored is not None
        self._stored.wait()

    def _taken(self, value: Any, extents: dict[int, _Extent]) -> Any:
        """Return what an operation keeps, with places for its arrays, which are noted."""
        if is_array(value) and value.nbytes >= LEAST_BYTES:
            owner = _owner(value)
            if id(owner) in self._outside or not _is_whole(owner):
                return value
            extent = extents.setdefault(id(owner), _Extent(len(extents), owner, value))
            extent.add(value)
            return _Place(extent.number, _address(value), value.shape, value.strides, value.dtype)
        if isinstance(value, tuple | list):
            return _like(value, [self._taken(each, extents) for each in value])
        return value

    def _given(self, value: Any) -> Any:
        """Return what an operation keeps, with arrays in the places."""
        if isinstance(value, _Place):
            offset, memory = value.address - self._lows[value.memory], self._memory[value.memory]
            return _view(memory, offset, value.shape, value.strides, value.dtype)
        if isinstance(value, tuple | list):
            return _like(value, [self._given(each) for each in value])
        return value


def saved_memory(operations: Iterable[Function], outside: Iterable[Array] = ()) -> dict[int, int]:
    """Return the bytes that some operations save for their backward, by the owner of each memory.

    Args:
        outside: arrays that are there anyway, such as weights, and all that looks into their memory.
    """
    ends: dict[int, tuple[int, int]] = {}
    known = {owner_id(each) for each in outside}

    def count(value: Any) -> None:
        if is_array(value) and value.nbytes >= LEAST_BYTES:
            owner, bounds = owner_id(value), _bounds(value)
            if owner not in known:
                low, high = ends.get(owner, bounds)
                ends[owner] = min(low, bounds[0]), max(high, bounds[1])
        elif isinstance(value, tuple | list):
            for each in value:
                count(each)

    for each in operations:
        count(getattr(each, "saved", None))
    return {owner: high - low for owner, (low, high) in ends.items()}


def owner_id(array: Array) -> int:
    """Return what tells one memory from another."""
    return id(_owner(array))


def _like(value: Any, items: list[Any]) -> Any:
    """Return a sequence of the same type with other items."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _owner(array: Any) -> Any:
    """Return what has an array's memory: for NumPy an array, on a device an allocation."""
    if not isinstance(array, np.ndarray):
        return array.data.mem
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _is_whole(owner: Any) -> bool:
    """Return whether memory goes when nobody has it any more; a file's or a window's does not."""
    return bool(owner.flags.owndata) if isinstance(owner, np.ndarray) else True


def _address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def _bounds(array: Any) -> tuple[int, int]:
    """Return where an array begins in memory, and where it ends."""
    low = high = _address(array)
    for length, stride in zip(array.shape, array.strides, strict=True):
        low, high = low + min(0, (length - 1) * stride), high + max(0, (length - 1) * stride)
    return low, high + array.itemsize


def _as_bytes(extent: _Extent, backend: Backend) -> Array:
    """Return an extent as bytes in a row; on the host only while its owner is there."""
    length = extent.high - extent.low
    if not backend.is_device:
        there: Any = (c_uint8 * length).from_address(extent.low)
        return np.ctypeslib.as_array(there)
    pointer: Any = extent.array.data
    result: Array = backend.xp.ndarray((length,), "uint8", pointer + (extent.low - _address(extent.array)))
    return result


def _view(memory: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Array:
    if isinstance(memory, np.ndarray):
        return np.ndarray(shape, dtype, memory, offset, strides)
    result: Array = type(memory)(shape, dtype, memory.data + offset, strides)
    return result
