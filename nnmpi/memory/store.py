"""The store of offloaded arrays: a mapped file, or for a device page-locked host memory.

    states, weights     store.zeros(length, dtype)     an array as any other, always in the store
    activations         send(arrays), fetch(arrays)    copied out and back, beside computation

The operating system caches a mapped file in free memory, and reads ahead; it evicts that cache
before anything else. A device's kernels access the host's memory over the bus.

    operations' saved      x [:, 3:]   mask   y       views of arrays, and other values
                             |        |     |
    SavedArrays           | memory 0 | memory 1 |     each memory once, as bytes; the operations
                              |  send     ^  fetch    hold locations in them instead
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

import nnmpi.base.clock as clock
from nnmpi.backend.array import Array, Shape, is_array
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.backend.upload import pinned
from nnmpi.base.errors import UsageError
from nnmpi.base.units import format_bytes
from nnmpi.tensor.function import Function, Variable
from nnmpi.tensor.parameter import Parameter

HOST = "host"
ACTIVATIONS = "activations"
ROUNDS = 3
BYTE_S = 1e-9  # the time of a byte if clocks are simulated, or may not decide about plans
TRIAL_BYTES = 16 << 20  # the most bytes moved to measure the bandwidth
LEAST_BYTES = 16  # smaller arrays are not worth the bookkeeping
_NUMBERS = frozenset({bool, int, float, str})

Pairs = list[tuple[Any, Any]]  # (target, source) of copies


class Store:
    """The destination of offloaded arrays. Its file has no name, so it vanishes with the process.

    On a device computation and transfers run in two streams, which wait for each other's events.

    Args:
        target: for NumPy a folder, for a file; for a device "host", the host's memory.
        backend: of the arrays; NumPy by default.
        contents: the name of the arrays, for messages.

    Raises:
        UsageError: for a device with a folder, NumPy with "host", and when no file can be made.

    Example:
        >>> import tempfile
        >>> from nnmpi.memory.store import Store
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store, memory = Store(folder), np.arange(4, dtype="uint8")
        ...     stored = store.send([memory])
        ...     stored.wait()
        ...     memory[:] = 0
        ...     stored.fetch([memory])
        ...     stored.wait()
        ...     store.close()
        >>> memory.tolist()
        [0, 1, 2, 3]
    """

    def __init__(
        self, target: str | Path, backend: Backend | None = None, contents: str = ACTIVATIONS
    ) -> None:
        self.target, self.contents, self._end = target, contents, 0
        self._free: dict[int, list[Array]] = {}
        self._backend = backend = backend or numpy_backend()
        if backend.is_device != (str(target) == HOST):
            raise UsageError(
                f"{contents} on {backend.device} are offloaded to the host's memory, not to"
                f" {target}; give offload {HOST}"
                if backend.is_device
                else (f"{contents} are already in the host's memory; give offload a folder")
            )
        if backend.is_device:
            self._stream = backend.xp.cuda.Stream(non_blocking=True)
            return
        try:
            self._file = tempfile.TemporaryFile(dir=target, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UsageError(
                f"a file for {contents} cannot be created in {target} ({error.strerror}); give"
                " offload another folder"
            ) from None
        weakref.finalize(self, self._file.close)
        self._thread = ThreadPoolExecutor(1, "nnmpi-offload")

    def reserve(self, nbytes: int) -> None:
        """Make sure that a file has room for this many bytes at once.

        Raises:
            UsageError: without that room.
        """
        try:
            if nbytes and not self._backend.is_device:
                os.posix_fallocate(self._file.fileno(), 0, nbytes)
        except OSError as error:
            remedy = (
                "a larger activation_memory"
                if self.contents == ACTIVATIONS
                else "leave them in memory"
            )
            raise UsageError(
                f"{self.contents} need a file of {format_bytes(nbytes)} in {self.target}, but"
                f" there is no room for it ({error.strerror}); make room, give offload another"
                f" folder, or {remedy}"
            ) from None

    def zeros(self, length: int, dtype: Any) -> Array:
        """Return an array of the backend in the store.

        Raises:
            UsageError: without room for it.
        """
        xp, nbytes = self._backend.xp, length * np.dtype(dtype).itemsize
        if not nbytes:
            return xp.zeros(length, dtype)
        room = self._take(nbytes)
        if not self._backend.is_device:
            return room.view(dtype)
        room[...] = 0
        memory = xp.cuda.UnownedMemory(room.ctypes.data, nbytes, room)
        return xp.ndarray((length,), dtype, xp.cuda.MemoryPointer(memory, 0))

    def _take(self, nbytes: int) -> Array:
        """Return new bytes; in a file they are 0."""
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
        """Start writing arrays of bytes, which must not change until it ends.

        Raises:
            UsageError: without room for it.
        """
        size = sum(map(len, memory))
        rooms = self._free.setdefault(size, [])
        return StoredBytes(self, rooms.pop() if rooms else self._take(size), memory)

    def reuse(self, room: Array) -> None:
        """Let later calls reuse bytes; their copies run after all that were started before."""
        self._free.setdefault(len(room), []).append(room)

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
        """Copy now, and drop the pairs: the thread would keep their memory alive longer."""
        while pairs:
            to, origin = pairs.pop()
            to[...] = origin

    def close(self) -> None:
        """Drop sent arrays, and close the file. Arrays of `zeros` stay valid."""
        if self._backend.is_device:
            self._stream.synchronize()
        else:
            self._thread.shutdown()
            self._file.close()
        self._free.clear()


class StoredBytes:
    """Some memory in a store, or on its way."""

    def __init__(self, store: Store, room: Array, memory: Sequence[Array]) -> None:
        self._store, self._room = store, room
        bounds = accumulate(map(len, memory), initial=0)
        self._pieces = [room[start:end] for start, end in pairwise(bounds)]
        self.wait = store.copy(list(zip(self._pieces, memory, strict=True)))

    def fetch(self, memory: Sequence[Array]) -> None:
        """Start fetching the bytes into other memory of the same lengths; see `wait`."""
        self.wait = self._store.copy(list(zip(memory, self._pieces, strict=True)))

    def __del__(self) -> None:
        """Let the store reuse the bytes."""
        self._store.reuse(self._room)


def measure_bandwidth(store: Store, backend: Backend, nbytes: int) -> float:
    """Return the bytes per second out and in, measured with this many bytes, at most 16 MiB."""
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


class _Location(NamedTuple):
    """An offloaded array's location, which replaces it in an operation: its memory's number, and
    its layout there.
    """

    memory: int
    offset: int
    shape: Shape
    strides: Shape
    dtype: Any


class _Extent(NamedTuple):
    """The addresses in an allocation between which its saved arrays lie."""

    owner: Any
    low: int
    high: int


class SavedArrays:
    """The arrays that some operations save for their backward, for sending out and fetching back.

    Args:
        operations: of a layer.
        outside: arrays that stay in memory anyway, such as weights; views of them stay, too.
        backend: of the arrays.
    """

    def __init__(
        self, operations: Iterable[Function], outside: Iterable[Array], backend: Backend
    ) -> None:
        self._backend = backend
        self._operations = [operation for operation in operations if hasattr(operation, "saved")]
        result = {
            key: item
            for key, item in _extents(self._operations, outside).items()
            if _is_whole(item.owner)
        }
        numbers, extents = {key: i for i, key in enumerate(result)}, list(result.values())

        def locate(array: Any) -> Any:
            # two results of one inner graph lead to its operations
            number = None if isinstance(array, _Location) else numbers.get(owner_id(array))
            if number is None:
                return array
            return _Location(
                number,
                _address(array) - extents[number].low,
                array.shape,
                array.strides,
                array.dtype,
            )

        for operation in self._operations:
            operation.saved = _replaced(operation.saved, locate)
        self._lengths = [extent.high - extent.low for extent in extents]
        self._memory = [_as_bytes(extent, backend) for extent in extents]

    @property
    def nbytes(self) -> int:
        """The bytes to send."""
        return sum(self._lengths)

    def watch(self) -> list[weakref.ref[Any]]:
        """Return references that die with their memory; none for a device's."""
        return [weakref.ref(_owner(item)) for item in self._memory if isinstance(item, np.ndarray)]

    def send(self, store: Store) -> None:
        """Start sending them."""
        self._stored = store.send(self._memory)

    def release(self) -> None:
        """Wait until they are sent, and free their memory."""
        self._stored.wait()
        self._memory.clear()

    def fetch(self) -> None:
        """Allocate memory, put views of it into the operations, and start filling it."""
        xp = self._backend.xp
        self._memory = memory = [xp.empty(length, "uint8") for length in self._lengths]

        def array(item: Any) -> Any:
            return _view(memory[item.memory], item) if isinstance(item, _Location) else item

        for operation in self._operations:
            operation.saved = _replaced(operation.saved, array)
        self._operations.clear()
        self._stored.fetch(memory)

    def wait(self) -> None:
        """Wait until they are fetched."""
        self._stored.wait()
        self._memory.clear()
        del self._stored


def saved_memory(operations: Iterable[Function], outside: Iterable[Array] = ()) -> dict[int, int]:
    """Return the bytes that some operations save for their backward, by the owner of each memory.

    Args:
        outside: arrays that stay in memory anyway, such as weights; views of them do not count.
    """
    return {owner: item.high - item.low for owner, item in _extents(operations, outside).items()}


def operations_of(ends: Iterable[Variable]) -> list[Function]:
    """Return the operations on the tapes of some results."""
    tapes = {id(tape): tape for end in ends if end.tape and (tape := end.tape.find())}
    return [node for tape in tapes.values() for node in tape.nodes]


def weights_of(operations: Iterable[Function]) -> list[Array]:
    """Return the parameters' arrays among the inputs of some operations."""
    edges = (edge for operation in operations for edge in operation.edges or ())
    return [item.data for item in edges if isinstance(item, Variable) and item.buffer is not None]


def arrays_of(parameters: Iterable[Parameter]) -> list[Array]:
    """Return the arrays that hold parameters' values, of those that are on this rank now."""
    return [item.stored for item in parameters if item.has_values]


def _extents(operations: Iterable[Function], outside: Iterable[Array]) -> dict[int, _Extent]:
    result: dict[int, _Extent] = {}
    ignored = set(map(owner_id, outside))

    def note(array: Any) -> Any:
        owner = _owner(array)
        if id(owner) not in ignored:
            low, high = _bounds(array)
            before = result.get(id(owner), _Extent(owner, low, high))
            result[id(owner)] = _Extent(owner, min(low, before.low), max(high, before.high))
        return array

    for operation in operations:
        _replaced(getattr(operation, "saved", None), note)
    return result


def _replaced(value: Any, work: Callable[[Any], Any], seen: tuple[Any, ...] = ()) -> Any:
    """Return an operation's saved value with each array replaced, also those of inner graphs."""
    if value is None or type(value) in _NUMBERS:  # most of what is saved beside arrays
        return value
    if isinstance(value, Variable):
        value.data = _replaced(value.data, work)
        tape = None if value.tape is None else value.tape.find()
        for operation in () if tape is None or tape in seen else tape.nodes:
            saved = getattr(operation, "saved", None)
            operation.saved = _replaced(saved, work, (*seen, tape))
        return value
    if isinstance(value, _Location) or (is_array(value) and value.nbytes >= LEAST_BYTES):
        return work(value)
    if isinstance(value, tuple | list):
        items = [_replaced(item, work, seen) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def owner_id(array: Array) -> int:
    """Return the id of an array's memory."""
    return id(_owner(array))


def _owner(array: Any) -> Any:
    """Return the owner of an array's memory: for NumPy an array, on a device an allocation."""
    if not isinstance(array, np.ndarray):
        return array.data.mem
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _is_whole(owner: Any) -> bool:
    """Return whether memory is freed with its last reference; a file's or a window's is not."""
    return bool(owner.flags.owndata) if isinstance(owner, np.ndarray) else True


def _address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def _bounds(array: Any) -> tuple[int, int]:
    low = high = _address(array)
    for length, stride in zip(array.shape, array.strides, strict=True):
        low, high = low + min(0, (length - 1) * stride), high + max(0, (length - 1) * stride)
    return low, high + array.itemsize


def _as_bytes(extent: _Extent, backend: Backend) -> Array:
    """Return an extent as contiguous bytes."""
    owner, low, high = extent
    if isinstance(owner, np.ndarray):
        # axes in the order of memory
        axes = sorted(range(owner.ndim), key=lambda axis: -owner.strides[axis])
        start = _address(owner)
        return owner.transpose(axes).reshape(-1).view(np.uint8)[low - start : high - start]
    return backend.xp.ndarray(
        (high - low,), "uint8", backend.xp.cuda.MemoryPointer(owner, low - owner.ptr)
    )


def _view(memory: Any, location: _Location) -> Array:
    _, offset, shape, strides, dtype = location
    if isinstance(memory, np.ndarray):
        return np.ndarray(shape, dtype, memory, offset, strides)
    return type(memory)(shape, dtype, memory.data + offset, strides)
