"""What an optimizer works on: buffers and their gradients, whoever owns them.

A model's flat storage is one; `Arrays` makes one of plain lists; a strategy that shards the optimizer hands over its
own part of the buffers. Nothing here knows of parameters, layers or ranks.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.errors import DtypeError, ShapeError, UsageError


class Storage(Protocol):
    """Three sequences of one length: entry i is a buffer, its gradient, and the name of its group.

    An optimizer keeps views of the buffers, so they must stay the same arrays for as long as it lives;
    only their values may change. A storage that replaces all of them by others of the same shapes
    counts that in `moves`; then optimizers follow. See `tensor.flat.FlatStorage` for the attributes.
    """

    @property
    def known_groups(self) -> Collection[str]:
        """The names of groups that options may name."""

    state_keeper: Callable[..., "StateKeeper"] | None
    moves: int
    common: bool
    shared: bool

    @property
    def size(self) -> int:
        """The number of elements, without gaps."""

    @property
    def data(self) -> Sequence[Array]:
        """The buffers that are updated in place, float32 or float64, any shape."""

    @property
    def grads(self) -> Sequence[Array]:
        """The gradients: same shapes and dtypes as `data`; an optimizer only reads them."""

    @property
    def groups(self) -> Sequence[str]:
        """The group of each buffer; weight decay is chosen by group."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def finish_gradients(self) -> None:
        """Let `grads` hold this step's gradients, also of buffers that none was computed for; called before updates."""

    def finish_update(self) -> None:
        """Let everybody see what an update has written to `data`; called after updates."""

    def frozen(self) -> Sequence[Array]:
        """Return the parts of `data` that updates must leave as they are."""


class LoadedPiece(NamedTuple):
    """What is updated at a time of what somebody else keeps: memory in which it is for so long.

    Attributes:
        buffer: its number in the storage.
        part: which elements of it.
        rows: of the buffer itself, if that is not in memory either, and of each slot.
        number: of the piece in its buffer.
    """

    buffer: int
    part: slice
    rows: tuple[Array, ...]
    number: int


class StateKeeper(Protocol):
    """Who keeps an optimizer's state where it is not in memory; made by a storage's `state_keeper`.

    Attributes:
        slots: the state's arrays by name, one for each buffer.
    """

    slots: Mapping[str, Sequence[Any]]

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it takes."""

    def coming(self) -> Iterator[LoadedPiece]:
        """Yield one piece after the other, which cover all buffers, while it is there to be updated."""


class Arrays:
    """A storage made of plain lists of arrays.

        optimizer = SGD(Arrays([weight, bias], [weight_grad, bias_grad]), lr=0.1)

    Args:
        data: arrays of any shape and strides, float32 or float64.
        grads: one per array of `data`, same shape, dtype and library.
        groups: one name per array; "default" for all when left out.
    """

    def __init__(self, data: Iterable[Array], grads: Iterable[Array], groups: Iterable[str] | None = None) -> None:
        self.data = list(data)
        self.grads = list(grads)
        self.groups = ["default"] * len(self.data) if groups is None else list(groups)
        self.known_groups: Collection[str] = self.groups
        self.state_keeper: Callable[..., StateKeeper] | None = None
        self.moves = 0
        self.common, self.shared = False, True

    @property
    def size(self) -> int:
        """The number of elements."""
        return sum(array.size for array in self.data)

    def zero_grad(self) -> None:
        """Set the gradients to 0."""
        for grad in self.grads:
            grad[...] = 0

    def finish_gradients(self) -> None:
        """Do nothing: whoever gave the arrays writes them."""

    def finish_update(self) -> None:
        """Do nothing: whoever gave the arrays sees them."""

    def frozen(self) -> list[Array]:
        """Return nothing: what is given is updated."""
        return []


def check(storage: Storage) -> None:
    """Raise unless every buffer can be updated in place from its gradient.

    Raises:
        UsageError: when the three lists differ in length, or a buffer cannot be written element by
            element.
        ShapeError: when a gradient's shape differs from its buffer's.
        DtypeError: when their dtypes or array libraries differ, or the dtype is neither float32 nor float64.
    """
    counts = (len(storage.data), len(storage.grads), len(storage.groups))
    if len(set(counts)) > 1:
        raise UsageError("{} buffers, {} gradients and {} groups do not pair up; give one of each".format(*counts))
    for i, (data, grad) in enumerate(zip(storage.data, storage.grads, strict=True)):
        _check_pair(i, data, grad)
        _check_writable(i, data)


def _check_pair(i: int, data: Array, grad: Array) -> None:
    if data.shape != grad.shape:
        raise ShapeError(f"buffer {i} has shape {data.shape} and its gradient {grad.shape}; they must be equal")
    if data.dtype not in (np.float32, np.float64):
        raise DtypeError(f"buffer {i} is {data.dtype}; an optimizer updates float32 and float64")
    if data.dtype != grad.dtype:
        raise DtypeError(f"buffer {i} is {data.dtype} and its gradient {grad.dtype}; they must be equal")
    ours, theirs = namespace(data).__name__, namespace(grad).__name__
    if ours != theirs:
        raise DtypeError(f"buffer {i} is a {ours} array and its gradient a {theirs} one; move one to the other")


def _check_writable(i: int, data: Array) -> None:
    if not getattr(data.flags, "writeable", True):  # CuPy's flags have no such entry: its arrays are writable
        raise UsageError(f"buffer {i} is read-only and cannot be updated in place; give a copy of it")
    if any(stride == 0 and length > 1 for stride, length in zip(data.strides, data.shape, strict=True)):
        raise UsageError(f"buffer {i} is broadcast: elements share memory (strides {data.strides}); give a copy")
