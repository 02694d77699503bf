"""An optimizer's state, and weights, that lie in a store: pieces of them come to an update, and go again.

    m of a buffer    | piece 0 | piece 1 | piece 2 | ..        each by itself in the store; so are those of v

    window A     in 0 | update 0 | out 0, in 2 | update 2 | ..       a piece of each array at a time
    window B          | in 1     | update 1    | out 1, in 3 ..      the next ones come, and the last ones go, meanwhile

So a rank has two windows of them in memory, whatever they are in all. An update is done block by block with the same
blocks as in memory: it gives the same bits. What asks for one of these arrays by its values, as a checkpoint does
parameter by parameter, gets a copy of that part alone.
This is the optimizer of ZeRO-Infinity (Rajbhandari et al., "ZeRO-Infinity: breaking the GPU memory wall for extreme
scale deep learning", 2021), for any storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import prod
from types import EllipsisType, ModuleType
from typing import Any

from nnmpi.backend.array import Array, namespace
from nnmpi.comm.buffers import is_device
from nnmpi.memory.store import Store, StoredBytes
from nnmpi.optim.blocks import DEVICE_BLOCK_BYTES
from nnmpi.optim.optimizer import LoadedPiece
from nnmpi.tensor.parameter import FlatStorage

HOST_PIECE_BYTES = 1 << 20  # of each array: a file moves shorter ones more slowly; 4 blocks of an update
DEVICE_PIECE_BYTES = DEVICE_BLOCK_BYTES


class StoredArray:
    """A flat array of zeros that lies in a store, cut into pieces.

    Args:
        store: where it lies.
        length: its elements.
        like: an array of the same library and dtype.

    Attributes:
        step: the elements of a piece; the last one may be shorter.
        shape, dtype, size, strides, flags, nbytes: as an array has them; nothing of it is in memory.
    """

    nbytes = 0
    flags = None

    def __init__(self, store: Store, length: int, like: Array) -> None:
        self.store, self.shape, self.size, self.dtype = store, (length,), length, like.dtype
        self._xp, self.strides = namespace(like), (self.dtype.itemsize,)
        self.step = (DEVICE_PIECE_BYTES if is_device(like) else HOST_PIECE_BYTES) // like.dtype.itemsize
        zeros = self._xp.zeros(min(self.step, length), self.dtype)
        self._stored: list[StoredBytes | None] = [store.send([_bytes(zeros[: len(each)])]) for each in self.pieces()]
        self.arrive()

    def __array_namespace__(self) -> ModuleType:
        """Return the library of its copies."""
        return self._xp

    def pieces(self) -> list[range]:
        """Return which elements each piece has."""
        return [range(start, min(start + self.step, self.size)) for start in range(0, self.size, self.step)]

    def fetch(self, number: int, memory: Array) -> None:
        """Begin to bring a piece to some memory of its length."""
        stored = self._stored[number]
        assert stored is not None
        stored.wait()  # it went long ago; what became of that is told here
        stored.fetch([_bytes(memory)])

    def wait(self, number: int) -> None:
        """Return when the last transfer of a piece is over (on a device: let what is computed next wait)."""
        stored = self._stored[number]
        assert stored is not None
        stored.wait()

    def send(self, number: int, memory: Array) -> None:
        """Begin to write a piece from some memory, which stays as it is until that is over."""
        self._stored[number] = None  # its place in the store is the new one's
        self._stored[number] = self.store.send([_bytes(memory)])

    def bring(self, memory: Array) -> None:
        """Begin to bring all of it to some memory."""
        for number, piece in enumerate(self.pieces()):
            self.fetch(number, memory[piece.start : piece.stop])

    def arrive(self) -> None:
        """Return when all of it has come."""
        for number in range(len(self._stored)):
            self.wait(number)

    def __getitem__(self, key: slice | EllipsisType) -> StoredPart:
        return StoredPart(self, range(self.size), self.shape)[key]

    def __setitem__(self, key: slice | EllipsisType, values: Any) -> None:
        self[key].write(values)


@dataclass(frozen=True, eq=False)
class StoredPart:
    """Some elements of an array in a store, in a row, seen in a shape.

    Attributes:
        array: whose they are.
        place: which ones.
        shape: theirs.
    """

    array: StoredArray
    place: range
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        """The elements' dtype."""
        return self.array.dtype

    @property
    def size(self) -> int:
        """How many elements they are."""
        return len(self.place)

    def __array_namespace__(self) -> ModuleType:
        """Return the library of its copies."""
        return self.array.__array_namespace__()

    def __getitem__(self, key: slice | EllipsisType) -> StoredPart:
        if isinstance(key, EllipsisType):
            return self
        place = self.place[key]
        return StoredPart(self.array, place, (len(place),))

    def __setitem__(self, key: EllipsisType, values: Any) -> None:
        self[key].write(values)

    def reshape(self, shape: int | tuple[int, ...]) -> StoredPart:
        """Return the same elements in another shape."""
        wanted = (self.size,) if isinstance(shape, int) else shape
        assert prod(wanted) == self.size
        return StoredPart(self.array, self.place, wanted)

    def copy(self) -> Array:
        """Return the values, in memory."""
        found: Array = self.__array_namespace__().empty(self.size, self.dtype)
        for number, inside, outside in self._overlaps():
            found[outside] = self._piece(number)[inside]
        return found.reshape(self.shape)

    def write(self, values: Any) -> None:
        """Give it other values."""
        flat = self.__array_namespace__().broadcast_to(values, self.shape).reshape(-1)
        for number, inside, outside in self._overlaps():
            piece = self._piece(number)
            piece[inside] = flat[outside]
            self.array.send(number, piece)
            self.array.wait(number)

    def _piece(self, number: int) -> Array:
        """Return a piece, in memory."""
        piece: Array = self.__array_namespace__().empty(len(self.array.pieces()[number]), self.dtype)
        self.array.fetch(number, piece)
        self.array.wait(number)
        return piece

    def _overlaps(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield each piece that has some of the elements: its number, where in it they are, and where among these."""
        for number, piece in enumerate(self.array.pieces()):
            first, last = max(piece.start, self.place.start), min(piece.stop, self.place.stop)
            if first < last:
                start = self.place.start
                yield number, slice(first - piece.start, last - piece.start), slice(first - start, last - start)


class StoredState:
    """An optimizer's state in a store, and how it comes to updates.

    Args:
        store: where it is to lie.
        data: the buffers that are updated, flat; those that lie in the store come along.
        grads: their gradients.
        slots: the names of the state's arrays.

    Attributes:
        slots: one array for each buffer by name.
    """

    def __init__(self, store: Store, data: Sequence[Any], grads: Sequence[Array], slots: Sequence[str]) -> None:
        make = partial(StoredArray, store)
        self.slots = {name: [make(grad.size, grad) for grad in grads] for name in slots}
        self._arrays = [
            [*([each] if isinstance(each, StoredArray) else []), *(arrays[i] for arrays in self.slots.values())]
            for i, each in enumerate(data)
        ]
        pieces = [
            (i, number, piece)
            for i, arrays in enumerate(self._arrays)
            for number, piece in enumerate(arrays[0].pieces() if arrays else [range(grads[i].size)])
        ]
        longest = max((len(piece) for _, _, piece in pieces), default=0)
        rows = [grads[0]] * len(self._arrays[0]) if grads else []
        self._windows = [[namespace(each).empty(longest, each.dtype) for each in rows] for _ in pieces[:2]]
        self._loaded = [
            LoadedPiece(
                i, slice(piece.start, piece.stop), tuple(row[: len(piece)] for row in self._windows[count % 2]), number
            )
            for count, (i, number, piece) in enumerate(pieces)
        ]

    @property
    def nbytes(self) -> int:
        """The bytes that it has in memory."""
        return sum(row.nbytes for window in self._windows for row in window)

    def coming(self) -> Iterator[LoadedPiece]:
        """Yield each piece while it is in its rows, from which they go again afterwards."""
        for piece, following in zip_longest(self._loaded, self._loaded[1:]):
            if piece is self._loaded[0]:
                self._each(piece, StoredArray.fetch)
            if following is not None:  # behind what goes out of that window
                self._each(following, StoredArray.fetch)
            self._each(piece, lambda array, number, _: array.wait(number))
            yield piece
            self._each(piece, StoredArray.send)

    def _each(self, piece: LoadedPiece, call: Callable[[StoredArray, int, Array], None]) -> None:
        for array, row in zip(self._arrays[piece.buffer], piece.rows, strict=True):
            call(array, piece.number, row)


def in_memory(array: Any) -> Array:
    """Return an array; of one that lies in a store a copy."""
    found: Array = array.copy() if isinstance(array, StoredPart) else array
    return found


def keep_state(storage: FlatStorage, store: Store) -> FlatStorage:
    """Let the state of optimizers that are made over a model's storage from now on lie in a store; return the storage.

    model.initialize(seed=0)
    optimizer = optim.Adam(keep_state(model.storage, FileStore(Path("/tmp"), "the optimizer's state")))
    """
    storage.state_keeper = partial(StoredState, store)
    return storage


def window_bytes(lengths: Sequence[int], rows: int, itemsize: int, piece_bytes: int = HOST_PIECE_BYTES) -> int:
    """Return what `StoredState` has in memory for buffers of these lengths.

    Args:
        lengths: elements of each.
        rows: arrays of each buffer's length that lie in the store.
        itemsize: bytes of an element.
        piece_bytes: bytes of a piece.
    """
    step = piece_bytes // itemsize
    pieces = sum(-(-length // step) for length in lengths)
    return min(2, pieces) * rows * min(step, max(lengths, default=0)) * itemsize


def _bytes(array: Array) -> Array:
    return array.view("uint8")
