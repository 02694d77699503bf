"""Where arrays go that leave memory: a file, by a thread of its own; or, from a device, the host's page-locked memory.

    send(arrays)  -->  a handle  -->  fetch(arrays), any number of times         the handle goes, and its place is free

Transfers go one by one, in the order in which they were begun. Nobody waits for one but in `StoredBytes.wait`.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from nnmpi import clock
from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.backend.device import pinned
from nnmpi.errors import DataError, UsageError
from nnmpi.units import format_bytes

HOST = "host"
ACTIVATIONS = "activations"
ROUNDS = 3
BYTE_S = 1e-9  # what a byte costs where things take no time, or none that may decide about plans
TRIAL_BYTES = 16 << 20  # that are moved to measure how quick that is, at most


class StoredBytes(Protocol):
    """Some memory that has gone to a store, or is on its way."""

    def fetch(self, memory: Sequence[Array]) -> None:
        """Begin to bring the bytes back, into other memory of the same lengths."""

    def wait(self) -> None:
        """Return when the last transfer that was begun is over (on a device: let what is computed next wait)."""


class Store(Protocol):
    """Where arrays go."""

    def reserve(self, nbytes: int) -> None:
        """Make sure that there is room for so much at once."""

    def send(self, memory: Sequence[Array]) -> StoredBytes:
        """Begin to write some memory, each piece of it bytes in a row, which stays as it is until that is over."""

    def close(self) -> None:
        """Forget everything."""


class FileStore:
    """A file without a name, which goes when it is closed or the process ends, however that happens.

    Args:
        folder: where it is made.
        what: goes there, for messages.

    Raises:
        UsageError: when it cannot be.
    """

    def __init__(self, folder: Path, what: str = ACTIVATIONS) -> None:
        self.folder, self.what = folder, what
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UsageError(
                f"no file for {what} can be made in {folder} ({error.strerror}); give offload another folder"
            ) from None
        weakref.finalize(self, self._file.close)
        self._thread = ThreadPoolExecutor(1, "nnmpi-offload")
        self._free: dict[int, list[int]] = {}  # places in the file by their size
        self._end = self._reserved = 0

    def reserve(self, nbytes: int) -> None:
        """Make sure that there is room for so much at once.

        Raises:
            UsageError: when there is not.
        """
        try:
            if nbytes:
                os.posix_fallocate(self._file.fileno(), 0, nbytes)
                self._reserved = max(self._reserved, nbytes)
        except OSError as error:
            raise UsageError(
                f"{self.what} need a file of {format_bytes(nbytes)} in {self.folder}, and there is no room for it "
                f"({error.strerror}); make room, give offload another folder, or "
                f"{'a larger activation_memory' if self.what == ACTIVATIONS else 'leave them in memory'}"
            ) from None

    def send(self, memory: Sequence[Array]) -> BytesInFile:
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
        return BytesInFile(self, places.pop(), memory)

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
            # What somebody has cut off reads as zeros once something is written behind it.
            reserved = self._reserved  # read first: the file may grow meanwhile
            is_whole = os.fstat(self._file.fileno()).st_size >= reserved
            while is_whole and len(part) and (done := call(self._file.fileno(), part, place)):
                part, place = part[done:], place + done
        except OSError as error:
            problem = str(error.strerror)
        if len(part):
            raise DataError(
                f"the file of {self.what} in {self.folder} cannot be {what}: {problem}; the run ends with the last "
                "checkpoint; look after that disk, or give offload another folder"
            )


class BytesInFile:
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
        self.cuda, self.stream = backend.xp.cuda, backend.xp.cuda.Stream(non_blocking=True)
        self._free: dict[int, list[Array]] = {}

    def reserve(self, nbytes: int) -> None:
        """Do nothing: memory is taken when it is needed, and then kept."""

    def send(self, memory: Sequence[Array]) -> BytesOnHost:
        """Begin to copy some memory to the host."""
        size = sum(map(len, memory))
        places = self._free.setdefault(size, [])
        place = places.pop() if places else pinned(self.cuda, size, "uint8")
        return BytesOnHost(self, place, memory)

    def give_back(self, place: Array) -> None:
        """Let later transfers have a place."""
        self._free.setdefault(len(place), []).append(place)

    def close(self) -> None:
        """Let the memory go."""
        self.stream.synchronize()
        self._free.clear()


class BytesOnHost:
    """Some memory's bytes on the host."""

    def __init__(self, store: HostStore, place: Array, memory: Sequence[Array]) -> None:
        self._store, self._place = store, place
        self._done = self._move(memory, is_back=False)

    def fetch(self, memory: Sequence[Array]) -> None:
        """Begin to copy the bytes back."""
        self._done = self._move(memory, is_back=True)

    def _move(self, memory: Sequence[Any], is_back: bool) -> Any:
        """Let the stream copy behind all that was given to be computed; return the event behind that."""
        stream, start = self._store.stream, 0
        stream.wait_event(self._store.cuda.get_current_stream().record())
        for each in memory:
            host = self._place[start : start + len(each)]
            if is_back:
                each.set(host, stream=stream)
            else:
                each.get(stream=stream, out=host, blocking=False)
            start += len(each)
        return stream.record()

    def wait(self) -> None:
        """Let what is computed next wait for the last transfer."""
        self._store.cuda.get_current_stream().wait_event(self._done)

    def __del__(self) -> None:
        """Give the place back."""
        self._store.give_back(self._place)


def make_store(where: str | Path, backend: Backend, what: str = ACTIVATIONS) -> Store:
    """Return where a backend's arrays go.

    Args:
        where: "host", the host's memory, for a device; or a folder, for a file, for the host.
        backend: whose arrays go there.
        what: they are, for messages.

    Raises:
        UsageError: for the other one of the two, and when no file can be made in a folder.
    """
    if str(where) == HOST and not backend.is_device:
        raise UsageError(f"{what} are in the host's memory already, so they cannot go out to it; give offload a folder")
    if str(where) != HOST and backend.is_device:
        raise UsageError(f"{what} on {backend.device} go out to the host's memory, not to {where}; give offload {HOST}")
    return HostStore(backend) if backend.is_device else FileStore(Path(where), what)


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
