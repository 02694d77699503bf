"""The store of swapped arrays: a mapped file, or for a device page-locked host memory.

    states, weights     store.zeros(length, dtype)          an array like any other, which lies there for good
    activations         send(arrays) --> fetch(arrays)      copied out and back, one by one, beside what is computed

Of a mapped file the operating system has in memory what there is room for, and reads ahead; it
gives that up before anything else. Kernels of a device reach the host's memory over the bus.

    operations' saved      x [:, 3:]   mask   y        views of arrays, and what else there is
                             |        |     |
    KeptArrays            | memory 0 | memory 1 |      each memory once, as bytes; the operations hold places in them
                                |  send     ^  fetch
    Store
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from mmap import ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import nnmpi.clock as clock
from nnmpi.backend.array import Array, is_array
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.comm.buffers import pinned
from nnmpi.errors import UsageError
from nnmpi.tensor.function import Function
from nnmpi.units import format_bytes

HOST = "host"
ACTIVATIONS = "activations"
ROUNDS = 3
BYTE_S = 1e-9  # what a byte costs where things take no time, or none that may decide about plans
TRIAL_BYTES = 16 << 20  # that are moved to measure how quick that is, at most
LEAST_BYTES = 16  # a single number is not worth an account

Pairs = list[tuple[Any, Any]]  # to what is copied, and from what


class Store:
    """Where swapped arrays go. The file has no name, so it vanishes with the process.

    What is computed on a device and what is moved continue two streams, which wait for one
    another's events.

    Args:
        where: a folder, for a file, for the host; "host", the host's memory, for a device.
        backend: whose arrays go there; NumPy by default.
        what: they are, for messages.

    Raises:
        UsageError: for the other one of the two, and when no file can be made.
    """

    def __init__(
        self, where: str | Path, backend: Backend | None = None, what: str = ACTIVATIONS
    ) -> None:
        self.where, self.what, self._end = where, what, 0
        self._free: dict[int, list[Array]] = {}
        self._backend = backend = numpy_backend() if backend is None else backend
        if backend.is_device != (str(where) == HOST):
            raise UsageError(
                f"{what} on {backend.device} go out to the host's memory, not to {where}; give"
                f" offload {HOST}"
                if backend.is_device
                else (
                    f"{what} are in the host's memory already, so they cannot go out to it; give"
                    " offload a folder"
                )
            )
        if backend.is_device:
            self._stream = backend.xp.cuda.Stream(non_blocking=True)
            return
        try:
            self._file = tempfile.TemporaryFile(dir=where, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UsageError(
                f"no file for {what} can be made in {where} ({error.strerror}); give offload"
                " another folder"
            ) from None
        weakref.finalize(self, self._file.close)
        self._thread = ThreadPoolExecutor(1, "nnmpi-offload")

    def reserve(self, nbytes: int) -> None:
        """Make sure that a file has room for so much at once.

        Raises:
            UsageError: when it has not.
        """
        try:
            if nbytes and not self._backend.is_device:
                os.posix_fallocate(self._file.fileno(), 0, nbytes)
        except OSError as error:
            raise UsageError(
                f"{self.what} need a file of {format_bytes(nbytes)} in {self.where}, and there is"
                " no room for it "
                f"({error.strerror}); make room, give offload another folder, or "
                f"{'a larger activation_memory' if self.what == ACTIVATIONS else 'leave them in memory'}"
            ) from None

    def zeros(self, length: int, dtype: Any) -> Array:
        """Return an array of the backend's that lies here.

        Raises:
            UsageError: when there is no room for it.
        """
        xp, nbytes = self._backend.xp, length * np.dtype(dtype).itemsize
        if not nbytes:
            return xp.zeros(length, dtype)
        place = self._take(nbytes)
        if not self._backend.is_device:
            return place.view(dtype)
        place[...] = 0
        memory = xp.cuda.UnownedMemory(place.ctypes.data, nbytes, place)
        return xp.ndarray((length,), dtype, xp.cuda.MemoryPointer(memory, 0))

    def _take(self, nbytes: int) -> Array:
        """Return new bytes; of a file they are 0."""
        if not nbytes:  # of a rank without samples
            return np.empty(0, "uint8")
        if self._backend.is_device:
            return pinned(self._backend.xp.cuda, nbytes, "uint8")
        room = -(-nbytes // ALLOCATIONGRANULARITY) * ALLOCATIONGRANULARITY
        self.reserve(self._end + room)
        self._end += room
        mapped = mmap(self._file.fileno(), room, offset=self._end - room)
        return np.frombuffer(mapped, np.uint8, nbytes)

    def send(self, memory: Sequence[Array]) -> StoredBytes:
        """Start writing memory, in contiguous pieces that stay unchanged until it ends.

        Raises:
            UsageError: when there is no room for it.
        """
        size = sum(map(len, memory))
        places = self._free.setdefault(size, [])
        return StoredBytes(self, places.pop() if places else self._take(size), memory)

    def give_back(self, place: Array) -> None:
        """Let others have a place; what they write there comes after all that was begun before."""
        self._free[len(place)].append(place)

    def copy(self, pairs: Pairs) -> Callable[[], Any]:
        """Start a copy after all earlier ones; return its wait (on a device, for kernels)."""
        if not self._backend.is_device:
            return self._thread.submit(self.move, pairs).result
        cuda, stream = self._backend.xp.cuda, self._stream
        stream.wait_event(cuda.get_current_stream().record())
        for to, origin in pairs:
            if isinstance(to, np.ndarray):
                origin.get(stream=stream, out=to, blocking=False)
            else:
                to.set(origin, stream=stream)
        over = stream.record()
        return lambda: cuda.get_current_stream().wait_event(over)

    def move(self, pairs: Pairs) -> None:
        """Copy now, and drop the pairs, whose memory the thread may else hold too long."""
        while pairs:
            to, origin = pairs.pop()
            to[...] = origin

    def close(self) -> None:
        """Let go of what was sent; arrays that lie here stay as long as somebody has them."""
        if self._backend.is_device:
            self._stream.synchronize()
        else:
            self._thread.shutdown()
            self._file.close()
        self._free.clear()


class StoredBytes:
    """Some memory that has gone to a store, or is on its way."""

    def __init__(self, store: Store, place: Array, memory: Sequence[Array]) -> None:
        self._store, self._place = store, place
        ends = accumulate(map(len, memory), initial=0)
        self._pieces = [place[start:end] for start, end in pairwise(ends)]
        self.wait = store.copy(list(zip(self._pieces, memory, strict=True)))

    def fetch(self, memory: Sequence[Array]) -> None:
        """Start fetching the bytes into other memory of the same lengths; see `wait`."""
        self.wait = self._store.copy(list(zip(memory, self._pieces, strict=True)))

    def __del__(self) -> None:
        """Give the place back."""
        self._store.give_back(self._place)


def measure_bandwidth(store: Store, backend: Backend, nbytes: int) -> float:
    """Return how many bytes per second go out and come in, measured with so many, or 16 MiB."""
    memory, seconds = [backend.zeros(max(1, min(nbytes, TRIAL_BYTES)), "uint8")], []
    for _ in range(1 + ROUNDS):
        backend.synchronize()
        begin = clock.now()
        stored = store.send(memory)
        stored.wait()
        stored.fetch(memory)
        stored.wait()
        backend.synchronize()
        seconds.append(clock.reproducible(clock.now() - begin))
    moved = 2 * len(memory[0])
    return moved / (median(seconds[1:]) or moved * BYTE_S)


class _Place(NamedTuple):
    """What stands in an operation for an array that is away: in which memory it lies, where there,
    and how.
    """

    memory: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


class _Extent(NamedTuple):
    """The part of an allocation in which arrays lie: from and to which address."""

    owner: Any
    low: int
    high: int


class KeptArrays:
    """The arrays that some operations keep for their backward, to be sent away and to come back.

    Args:
        operations: those of a layer.
        outside: arrays that are there anyway, such as weights, and all that looks into their
            memory.
        backend: whose arrays they are.
    """

    def __init__(
        self, operations: Iterable[Function], outside: Iterable[Array], backend: Backend
    ) -> None:
        self._backend, self._operations = (
            backend,
            [operation for operation in operations if hasattr(operation, "saved")],
        )
        result = {
            key: item
            for key, item in _extents(self._operations, outside).items()
            if _is_whole(item.owner)
        }
        numbers, extents = {key: i for i, key in enumerate(result)}, list(result.values())

        def place(array: Any) -> Any:
            number = numbers.get(owner_id(array))
            if number is None:
                return array
            return _Place(
                number,
                _address(array) - extents[number].low,
                array.shape,
                array.strides,
                array.dtype,
            )

        for entry in self._operations:
            entry.saved = _mapped(entry.saved, place)
        self._lengths = [extent.high - extent.low for extent in extents]
        self._memory = [_as_bytes(extent, backend) for extent in extents]

    @property
    def nbytes(self) -> int:
        """How many bytes go."""
        return sum(self._lengths)

    def watch(self) -> list[weakref.ref[Any]]:
        """Return what tells whether their memory is there yet; of a device's nothing does."""
        return [weakref.ref(_owner(item)) for item in self._memory if isinstance(item, np.ndarray)]

    def send(self, store: Store) -> None:
        """Begin to write them."""
        self._stored = store.send(self._memory)

    def leave(self) -> None:
        """Wait until they are written, and let their memory go."""
        self._stored.wait()
        self._memory.clear()

    def fetch(self) -> None:
        """Take memory, let the operations have their arrays in it, and begin to fill it."""
        xp = self._backend.xp
        self._memory = memory = [xp.empty(length, "uint8") for length in self._lengths]

        def array(place: Any) -> Any:
            return _view(memory[place.memory], place) if isinstance(place, _Place) else place

        for operation in self._operations:
            operation.saved = _mapped(operation.saved, array)
        self._operations.clear()
        self._stored.fetch(memory)

    def arrive(self) -> None:
        """Wait until they are there."""
        self._stored.wait()
        self._memory.clear()
        del self._stored


def saved_memory(operations: Iterable[Function], outside: Iterable[Array] = ()) -> dict[int, int]:
    """Return the bytes that some operations save for their backward, by the owner of each memory.

    Args:
        outside: arrays that are there anyway, such as weights, and all that looks into their
            memory.
    """
    return {owner: item.high - item.low for owner, item in _extents(operations, outside).items()}


def _extents(operations: Iterable[Function], outside: Iterable[Array]) -> dict[int, _Extent]:
    result: dict[int, _Extent] = {}
    known = set(map(owner_id, outside))

    def note(array: Any) -> Any:
        owner = _owner(array)
        if id(owner) not in known:
            low, high = _bounds(array)
            before = result.get(id(owner), _Extent(owner, low, high))
            result[id(owner)] = _Extent(owner, min(low, before.low), max(high, before.high))
        return array

    for operation in operations:
        _mapped(getattr(operation, "saved", None), note)
    return result


def _mapped(value: Any, work: Callable[[Any], Any]) -> Any:
    """Return what an operation saves with something else in place of each array."""
    if isinstance(value, _Place) or (is_array(value) and value.nbytes >= LEAST_BYTES):
        return work(value)
    if isinstance(value, tuple | list):
        items = [_mapped(item, work) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def owner_id(array: Array) -> int:
    """Return what tells one memory from another."""
    return id(_owner(array))


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
    low = high = _address(array)
    for length, stride in zip(array.shape, array.strides, strict=True):
        low, high = low + min(0, (length - 1) * stride), high + max(0, (length - 1) * stride)
    return low, high + array.itemsize


def _as_bytes(extent: _Extent, backend: Backend) -> Array:
    """Return an extent as bytes in a row."""
    owner, low, high = extent
    if isinstance(owner, np.ndarray):
        # in the order of memory
        axes = sorted(range(owner.ndim), key=lambda axis: -owner.strides[axis])
        start = _address(owner)
        return owner.transpose(axes).reshape(-1).view(np.uint8)[low - start : high - start]
    return backend.xp.ndarray(
        (high - low,), "uint8", backend.xp.cuda.MemoryPointer(owner, low - owner.ptr)
    )


def _view(memory: Any, place: _Place) -> Array:
    _, offset, shape, strides, dtype = place
    if isinstance(memory, np.ndarray):
        return np.ndarray(shape, dtype, memory, offset, strides)
    return type(memory)(shape, dtype, memory.data + offset, strides)
