"""What a link keeps, taken out of memory and brought back: its arrays, and where they go meanwhile.

    operations' saved      x [:, 3:]   mask   y        views of arrays, and what else there is
                             |        |     |
    KeptArrays            | memory 0 | memory 1 |      each memory once, as bytes; the operations hold places in them
                                |  send     ^  fetch
    a store               a file, by a thread of its own; or the host's page-locked memory, by a stream of its own

Transfers go one by one, in the order in which they were begun. Nobody waits for one but in `Parcel.wait`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import c_uint8
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np

from nnmpi import clock
from nnmpi.backend.allocations import LEAST_BYTES
from nnmpi.backend.array import Array, is_array
from nnmpi.backend.record import Backend
from nnmpi.backend.streams import Event
from nnmpi.comm.units import format_bytes
from nnmpi.errors import DataError, UsageError
from nnmpi.tensor.function import Function

HOST = "host"
ROUNDS = 3
BYTE_S = 1e-9  # what a byte costs where things take no time, or none that may decide about plans
TRIAL_BYTES = 16 << 20  # that are moved to measure how quick that is, at most


class Parcel(Protocol):
    """Some memory that has gone to a store, or is on its way."""

    def fetch(self, memory: Sequence[Array]) -> None:
        """Begin to bring the bytes back, into other memory of the same lengths."""

    def wait(self) -> None:
        """Return when the last transfer that was begun is over (on a device: let what is computed next wait)."""


class Store(Protocol):
    """Where activations go."""

    def reserve(self, nbytes: int) -> None:
        """Make sure that there is room for so much at once."""

    def send(self, memory: Sequence[Array]) -> Parcel:
        """Begin to write some memory, each piece of it bytes in a row, which stays as it is until that is over."""

    def close(self) -> None:
        """Forget everything."""


class FileStore:
    """A file without a name, which goes when it is closed or the process ends, however that happens.

    Args:
        folder: where it is made.

    Raises:
        UsageError: when it cannot be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UsageError(
                f"no file for activations can be made in {folder} ({error.strerror}); give offload another folder"
            ) from None
        self._thread = ThreadPoolExecutor(1, "nnmpi-offload")
        self._free: dict[int, list[int]] = {}  # places in the file by their size
        self._end = 0

    def reserve(self, nbytes: int) -> None:
        """Make sure that there is room for so much at once.

        Raises:
            UsageError: when there is not.
        """
        try:
            if nbytes:
                os.posix_fallocate(self._file.fileno(), 0, nbytes)
        except OSError as error:
            raise UsageError(
                f"activations need a file of {format_bytes(nbytes)} in {self.folder}, and there is no room for it "
                f"({error.strerror}); make room, give offload another folder, or a larger activation_memory"
            ) from None

    def send(self, memory: Sequence[Array]) -> FileParcel:
        """Begin to write some memory to the file.

        Raises:
            UsageError: when the file would have to grow, and cannot.
        """
        size = sum(map(len, memory))
        places = self._free.setdefault(size, [])
        if not places:
            self.reserve(self._end + size)
            places.append(self._end)
            self._end += size
        return FileParcel(self, places.pop(), memory)

    def close(self) -> None:
        """Let the file go."""
        self._thread.shutdown()
        self._file.close()

    def submit(self, work: Callable[..., None], *args: Any) -> Future[None]:
        """Let the thread do something after all that it was given before."""
        return self._thread.submit(work, *args)

    def give_back(self, place: int, size: int) -> None:
        """Let others have a place."""
        self._free[size].append(place)

    def write(self, place: int, memory: Sequence[Array]) -> None:
        """Write memory from a place of the file on.

        Raises:
            DataError: naming the file's folder.
        """
        for each in memory:
            self._move(os.pwrite, each.data, place, "written")
            place += len(each)

    def read(self, place: int, memory: Sequence[Array]) -> None:
        """Read memory from a place of the file on.

        Raises:
            DataError: naming the file's folder.
        """
        for each in memory:
            self._move(lambda file, into, start: os.preadv(file, [into], start), each.data, place, "read back")
            place += len(each)

    def _move(self, call: Callable[[int, memoryview, int], int], part: memoryview, place: int, what: str) -> None:
        problem = "it ends too early"
        try:
            while len(part) and (done := call(self._file.fileno(), part, place)):
                part, place = part[done:], place + done
        except OSError as error:
            problem = str(error.strerror)
        if len(part):
            raise DataError(
                f"the file of activations in {self.folder} cannot be {what}: {problem}; the run ends with the last "
                "checkpoint; look after that disk, or give offload another folder"
            )


class FileParcel:
    """Some memory's bytes in a place of a file."""

    def __init__(self, store: FileStore, place: int, memory: Sequence[Array]) -> None:
        self._store, self._place, self._size = store, place, sum(map(len, memory))
        self._job = store.submit(store.write, place, memory)

    def fetch(self, memory: Sequence[Array]) -> None:
        """Begin to read the bytes."""
        self._job = self._store.submit(self._store.read, self._place, memory)

    def wait(self) -> None:
        """Return when the last transfer is over."""
        self._job.result()

    def __del__(self) -> None:
        """Give the place back; what others write there comes after all that was begun before."""
        self._store.give_back(self._place, self._size)


class HostStore:
    """The host's page-locked memory, for a device's arrays.

    What is computed and what is moved go on two streams, which wait for one another's events; the processor waits for
    neither. Memory that has come back is used again for transfers alone, as those are in order.

    Args:
        backend: the device's.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend, self.stream = backend, backend.new_stream()
        self._free: dict[int, list[Array]] = {}

    def reserve(self, nbytes: int) -> None:
        """Do nothing: memory is taken when it is needed, and then kept."""

    def send(self, memory: Sequence[Array]) -> HostParcel:
        """Begin to copy some memory to the host."""
        size = sum(map(len, memory))
        places = self._free.setdefault(size, [])
        place = places.pop() if places else self.backend.empty_pinned(size, "uint8")
        return HostParcel(self, place, memory)

    def give_back(self, place: Array) -> None:
        """Let later transfers have a place."""
        self._free[len(place)].append(place)

    def close(self) -> None:
        """Let the memory go."""
        self.stream.synchronize()
        self._free.clear()


class HostParcel:
    """Some memory's bytes on the host."""

    def __init__(self, store: HostStore, place: Array, memory: Sequence[Array]) -> None:
        self._store, self._place = store, place
        self._done = self._move(store.backend.to_host_async, memory, False)

    def fetch(self, memory: Sequence[Array]) -> None:
        """Begin to copy the bytes back."""
        self._done = self._move(self._store.backend.from_host_async, memory, True)

    def _move(self, copy: Callable[..., None], memory: Sequence[Array], is_back: bool) -> Event:
        """Let the stream copy behind all that was given to be computed; return the mark behind that."""
        backend, stream, start = self._store.backend, self._store.stream, 0
        ready, done = backend.new_event(), backend.new_event()
        ready.record(backend.current_stream())
        stream.wait(ready)
        for each in memory:
            host = self._place[start : start + len(each)]
            copy(*((host, each) if is_back else (each, host)), stream)
            start += len(each)
        done.record(stream)
        return done

    def wait(self) -> None:
        """Let what is computed next wait for the last transfer."""
        self._store.backend.current_stream().wait(self._done)

    def __del__(self) -> None:
        """Give the place back."""
        self._store.give_back(self._place)


def make_store(where: str | Path, backend: Backend) -> Store:
    """Return where activations of a backend go.

    Args:
        where: "host", the host's memory, for a device; or a folder, for a file, for the host.
        backend: whose arrays go there.

    Raises:
        UsageError: for the other one of the two, and when no file can be made in a folder.
    """
    if str(where) == HOST and not backend.is_device:
        raise UsageError(
            "activations are in the host's memory already, so they cannot go out to it; give offload a folder"
        )
    if str(where) != HOST and backend.is_device:
        raise UsageError(
            f"activations on {backend.device} go out to the host's memory, not to {where}; give offload {HOST}"
        )
    return HostStore(backend) if backend.is_device else FileStore(Path(where))


def measure_bandwidth(store: Store, backend: Backend, nbytes: int) -> float:
    """Return how many bytes per second go out and come in, measured with so many, or 16 MiB."""
    memory, seconds = [backend.zeros(max(1, min(nbytes, TRIAL_BYTES)), "uint8")], []
    for _ in range(1 + ROUNDS):
        backend.synchronize()
        begin = clock.now()
        parcel = store.send(memory)
        parcel.wait()
        parcel.fetch(memory)
        parcel.wait()
        backend.synchronize()
        seconds.append(clock.reproducible(clock.now() - begin))
    moved = 2 * len(memory[0])
    return moved / (median(seconds[1:]) or moved * BYTE_S)


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
    """The part of an allocation in which a link's arrays lie."""

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
        operations: those of a link.
        outside: arrays that are there anyway, such as weights, and all that looks into their memory.
        backend: whose arrays they are.
    """

    def __init__(self, operations: Iterable[Function], outside: Iterable[Array], backend: Backend) -> None:
        self._backend = backend
        self._parcel: Parcel | None = None
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

    def send(self, store: Store) -> None:
        """Begin to write them."""
        self._parcel = store.send(self._memory)

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
        assert self._parcel is not None
        self._parcel.fetch(self._memory)

    def arrive(self) -> None:
        """Wait until they are there."""
        self._wait()
        self._memory.clear()
        self._parcel = None

    def _wait(self) -> None:
        assert self._parcel is not None
        self._parcel.wait()

    def _taken(self, value: Any, extents: dict[int, _Extent]) -> Any:
        """Return what an operation keeps, with places for its arrays, which are noted."""
        if is_array(value):
            owner = _owner(value)
            if id(owner) in self._outside or not _is_whole(owner) or value.nbytes < LEAST_BYTES:
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
