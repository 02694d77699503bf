"""The base of all optimizers: storage, learning rate, steps, state, weight decay, blocks.

The state is `steps` and the arrays of `slots()`. Any rank that loads a state writes into those
arrays and sets `steps`; the next update is then, bit for bit, the one that a run without a break
would have done. Nothing here knows of parameters, layers or ranks.

Cutting buffers into blocks that stay in the processor's cache while an update passes over them many
times.

An Adam update is twelve array operations. Done on whole buffers that do not fit the cache, each of
them goes through main memory; done block by block, only the first and the last touch do. All views
and scratch arrays are made once.
"""

from __future__ import annotations

import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, is_
from types import ModuleType
from typing import Any, ClassVar, NoReturn, Protocol, Self, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.kernels import kernels_for
from nnmpi.backend.recording import perform
from nnmpi.errors import DtypeError, ShapeError, UsageError, shortened
from nnmpi.launcher import read_launch

ByGroup: TypeAlias = float | Mapping[str, float]
"""A number; or one for each group of a storage, by its name."""

Part: TypeAlias = tuple[int, slice]
"""Some elements of a buffer, which is called by its number."""


class Storage(Protocol):
    """Three lists of one length: entry i is a buffer, its gradient, and the name of its group.

    A model's `tensor.parameter.FlatStorage` is one, `Arrays` makes one of plain lists, and a
    strategy that shards the optimizer hands over its own part of the buffers. An optimizer keeps
    views of the buffers, so they must stay the same arrays for as long as it lives; only their
    values may change. A storage that replaces all of them by others of the same shapes counts that
    in `moves`; then optimizers follow.
    """

    data: list[Array]
    grads: list[Array]
    groups: list[str]
    moves: int
    common: bool
    shared: bool
    state_store: Any

    @property
    def known_groups(self) -> Collection[str]:
        """The names of groups that options may name."""

    @property
    def size(self) -> int:
        """The number of elements, without gaps."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def finish_gradients(self) -> None:
        """Complete this step's `grads`, with zeros for parameters without one; before updates."""

    def finish_update(self) -> None:
        """Let everybody see what an update has written to `data`; called after updates."""

    def frozen(self) -> Sequence[Part]:
        """Return the parts of `data` that updates must leave as they are, with their state."""


class Arrays:
    """A storage made of plain lists of arrays.

        optimizer = SGD(Arrays([weight, bias], [weight_grad, bias_grad]), lr=0.1)

    Args:
        data: contiguous arrays of any shape, float32 or float64.
        grads: one per array of `data`, same shape, dtype and library.
        groups: one name per array; "default" for all when left out.
    """

    def __init__(
        self, data: Iterable[Array], grads: Iterable[Array], groups: Iterable[str] | None = None
    ) -> None:
        self.data = list(data)
        self.grads = list(grads)
        self.groups = ["default"] * len(self.data) if groups is None else list(groups)
        self.known_groups: Collection[str] = self.groups
        self.state_store: Any = None
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

    def frozen(self) -> list[Part]:
        """Return nothing: what is given is updated."""
        return []


def number(name: str, value: Any, below: float = math.inf, most: float | None = None) -> float:
    """Return the value as a float of at least 0; an error calls it `name`.

    Args:
        below: what it must be below: 1 for what a decaying average may keep of its past.
        most: or what it must not be above.

    Raises:
        UsageError: for another value, NaN, or what is no number.
    """
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not (0 <= result < below if most is None else 0 <= result <= most):
        end = (
            f"at most {most}"
            if most is not None
            else "finite"
            if below == math.inf
            else f"below {below}"
        )
        raise UsageError(
            f"{name} is {shortened(repr(value))}; give a number of at least 0 that is {end}"
        )
    return result


class Optimizer(ABC):
    """Updates the buffers of a storage in place from their gradients.

    Attributes:
        lr: the learning rate of the next update; schedules set it, and groups with smaller rates
            follow.
        rates: of each buffer, in parts of lr.
        steps: the updates done so far.
        storage: the buffers; they must stay the same arrays while the optimizer lives.
        kept: arrays like the slots', by name, that a strategy saves and loads with them.
        weight_decay: the decay of each buffer, in the storage's order.
        elementwise: of a class, whether an update of some elements needs no others.
        ranks: those with the same storage, among which a strategy lets updates of whole matrices be
            shared out.
    """

    elementwise: ClassVar[bool] = True
    ranks: Any = None

    def __init__(
        self,
        storage: Storage,
        lr: ByGroup,
        weight_decay: ByGroup,
        slots: Sequence[str],
    ) -> None:
        """Allocate the state, and cut everything into blocks.

        Args:
            storage: the buffers and their gradients, or what has them as its `storage`.
            lr: the learning rate; or one for each group, of which `lr` is then the largest, and the
                others a part.
            weight_decay: one number, or one for each group of the storage by name.
            slots: the names of the state; each gets one array of zeros per buffer, like that
                buffer.

        Raises:
            UsageError: for a learning rate or weight decay that is negative or not finite, and for
                a weight decay that names a group the storage has not.
            ShapeError, DtypeError: see `_check`.
        """
        storage = getattr(storage, "storage", storage)  # of all parameters of a model
        if not hasattr(storage, "grads"):
            raise UsageError(
                "an optimizer works on a model's storage: give model.storage, or"
                " model.parameters(); groups of it are made by model.initialize(group=...), their"
                " rates by lr={'default': 0.1}"
            )
        _check(storage)
        self.weight_decay = _by_buffer("weight_decay", weight_decay, storage)
        if isinstance(lr, Mapping) and (left := {*storage.groups} - lr.keys()):
            raise UsageError(
                f"lr names no rate of the group {min(left)!r}; give each group one, such as 0.01"
            )
        rates = _by_buffer("lr", lr, storage)
        self.lr = number("lr", max(lr.values(), default=0.0) if isinstance(lr, Mapping) else lr)
        self.rates = tuple(rate / self.lr if self.lr else 1.0 for rate in rates)
        self.steps = 0
        self.storage = storage
        self._slots = {name: list(map(self._zeros_like, storage.data)) for name in slots}
        self.kept: dict[str, list[Array]] = {}
        self._data, self._grads = tuple(storage.data), tuple(storage.grads)
        self._moves = storage.moves
        self._blocks = self.cut()

    def __repr__(self) -> str:
        """Say which rule it is, with which rate, over how many numbers."""
        return (
            f"{type(self).__name__}(lr={self.lr:g}, {self.storage.size:,} parameters, after"
            f" {self.steps} steps)"
        )

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "an optimizer is not copied or pickled, as it works on its model's arrays; make one of"
            " the copied model's storage and copy the arrays of slots() and steps, or keep both by"
            " nnmpi.save"
        )

    def step(self) -> None:
        """Do one update of all buffers with the learning rate `lr`; nothing is allocated.

        Parameters that need no gradient (`requires_grad = False`) stay as they are.

        Raises:
            UsageError: when `lr` was set to a negative or non-finite value, the storage holds other
                arrays than when the optimizer was made, the model was initialized again, or its
                parameters stand once for several ranks (see `parallel.fused`).
        """
        perform(self._step)  # a compiled step does all of it each time, as `lr` may have changed

    def _step(self) -> None:
        lr = number("lr", self.lr)
        if self.storage.common:
            raise UsageError(
                "the parameters stand once per node, and every rank would update them; let the"
                " Worker update them (worker.step), or give it GradientExchange(fused_update=False)"
            )
        if self.steps == 0:
            self._warn_alone()
        self.storage.finish_gradients()
        if self.storage.moves != self._moves:
            self.move()
        self._require_same_arrays()
        self._go(lr, self._blocks, self.storage.frozen())
        self.storage.finish_update()

    def _warn_alone(self) -> None:
        """Warn, once for all ranks, where each trains a model of its own: that is seldom meant."""
        launch = read_launch(os.environ)
        if launch is not None and launch.size > 1 and launch.rank == 0 and not self.storage.shared:
            warnings.warn(
                f"{launch.size} processes were started, and each trains a model of its own, whose"
                " weights drift apart: give the model to a Worker or DataParallel, and call"
                " parallel.backward(loss, samples); or, where the program adds up the gradients by"
                " itself, which is not seen here, set model.storage.shared = True",
                stacklevel=5,  # the line that calls `step`
            )

    def update(self, blocks: Iterable[BufferBlock], frozen: Sequence[Part] = ()) -> None:
        """Update these blocks alone, by the gradients they hold when their turn comes.

        For strategies that shard the blocks among ranks, or add up a block's gradient just
        before it is used.

        Args:
            blocks: what `cut` gave; a generator may write a block's `grad` before it yields it.
            frozen: parts of the buffers that stay as they are now, with their state.

        Raises:
            UsageError: when `lr` was set to a negative or non-finite value.
        """
        self._go(number("lr", self.lr), blocks, frozen)

    def _go(self, lr: float, blocks: Iterable[BufferBlock], frozen: Sequence[Part]) -> None:
        self.steps += 1
        # Blocks run across parameters, so one that needs no gradient cannot be left out of them: it
        # is put back.
        arrays = (self._data, *self._slots.values()) if frozen else ()
        parts = [array[buffer].reshape(-1)[part] for array in arrays for buffer, part in frozen]
        saved = [part.copy() for part in parts]
        self._update_groups(lr, blocks)
        for part, values in zip(parts, saved, strict=True):
            # decay and momentum move also what has no gradient
            part[...] = values

    def _zeros_like(self, data: Array) -> Array:
        store = self.storage.state_store
        if store is None:
            return namespace(data).zeros(data.shape, data.dtype)
        return store.zeros(data.size, data.dtype).reshape(data.shape)

    def slots(self) -> dict[str, list[Array]]:
        """Return the live state arrays by name: one per buffer, in the storage's order."""
        return {name: list(arrays) for name, arrays in (self._slots | self.kept).items()}

    @property
    def state_bytes(self) -> int:
        """The bytes of memory that the state takes; none where it lies in a store."""
        if self.storage.state_store is not None:
            return 0
        return sum(array.nbytes for arrays in self.slots().values() for array in arrays)

    def move(self, allocate: Callable[[int, Any], Array] | None = None) -> None:
        """Work on the arrays that the storage has now, of the same shapes and dtypes as before.

        Args:
            allocate: (elements, dtype) -> a 1-D array, into which the state is copied; it stays
                where it is without. If it raises, nothing has changed.

        Raises:
            ShapeError: when the storage's arrays are others than before in number, shape or dtype.
        """
        _check(self.storage)
        before, now = (
            [(x.shape, x.dtype) for x in arrays] for arrays in (self._data, self.storage.data)
        )
        if before != now:
            raise ShapeError(
                f"the storage's arrays are other ones than before, {before}; make a new optimizer"
            )
        if allocate is not None:
            places = {
                name: [allocate(array.size, array.dtype).reshape(array.shape) for array in arrays]
                for name, arrays in self._slots.items()
            }
            for name, arrays in self._slots.items():
                for place, array in zip(places[name], arrays, strict=True):
                    place[...] = array
            self._slots = places
        self._data, self._grads = tuple(self.storage.data), tuple(self.storage.grads)
        self._moves = self.storage.moves
        self._blocks = self.cut()

    def zero_grad(self) -> None:
        """Forget all gradients, as the model's `zero_grad` does."""
        self.storage.zero_grad()

    def over(self, storage: Storage) -> Self:
        """Return an optimizer for other arrays of the same shapes that shares settings and state.

        Raises:
            ShapeError: when the arrays are others in number, shape or dtype.
            UsageError, DtypeError: as for a new optimizer.
        """
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.storage = storage
        other.move()
        return other

    def _update_groups(self, lr: float, blocks: Iterable[BufferBlock]) -> None:
        for rate, alike in groupby(blocks, attrgetter("rate")):
            # each block when a strategy has made it
            self._update(lr * rate, alike)

    @abstractmethod
    def _update(self, lr: float, blocks: Iterable[BufferBlock]) -> None:
        """Update every block; `steps` already counts this update."""

    def cut(
        self,
        parts: Sequence[slice] | None = None,
        grads: Sequence[Array] | None = None,
        limit_bytes: int | None = None,
    ) -> tuple[BufferBlock, ...]:
        """Return blocks of the buffers and their state.

        Args:
            parts: the part of each buffer that is meant; all of it by default.
            grads: arrays of the buffers' shapes for the blocks' gradients; the storage's by
                default.
            limit_bytes: the longest block, if not what suits an ordinary update.
        """
        scratch = ScratchArrays(self._grads)
        grads = self._grads if grads is None else grads
        blocks: list[BufferBlock] = []
        for i, (data, grad) in enumerate(zip(self._data, grads, strict=True)):
            full = [data, grad, *(arrays[i] for arrays in self._slots.values())]
            elements = (
                block_elements(data)
                if limit_bytes is None
                else max(1, limit_bytes // data.dtype.itemsize)
            )
            for run in self._runs(i) if parts is None else [parts[i]]:
                for part, gradient, *state in pieces([array[run] for array in full], elements):
                    decay, rate, spare = self.weight_decay[i], self.rates[i], scratch.like(part)
                    blocks.append(
                        BufferBlock(
                            namespace(part), part, gradient, tuple(state), decay, rate, spare
                        )
                    )
        return tuple(blocks)

    def _runs(self, buffer: int) -> Iterable[Any]:
        """Return the parts of a buffer that are updated element by element: all of it."""
        return (...,)

    def _require_same_arrays(self) -> None:
        """Raise if a buffer was replaced: the blocks would still update the old one, and training
        would stand still.
        """
        for saved, now in ((self._data, self.storage.data), (self._grads, self.storage.grads)):
            if len(saved) != len(now) or not all(map(is_, saved, now)):
                raise UsageError(
                    "the storage's arrays were replaced; make a new optimizer after changing them"
                )


def decayed_gradient(block: BufferBlock, decay: float) -> Array:
    """Return gradient + decay * data (L2 regularization), in a scratch array if needed."""
    if not decay:
        return block.grad
    result = block.scratch[0]
    block.xp.multiply(block.data, decay, out=result)
    block.xp.add(result, block.grad, out=result)
    return result


def _by_buffer(what: str, given: ByGroup, storage: Storage) -> tuple[float, ...]:
    """Return a number for each buffer, by its group; 0 for groups that are left out."""
    if not isinstance(given, Mapping):
        return (number(what, given),) * len(storage.groups)
    for name, value in given.items():
        if name not in storage.known_groups:
            # a stage of a pipeline need not have all groups of the model
            known = ", ".join(sorted(set(storage.known_groups))) or "none"
            raise UsageError(
                f"{what} names the group {name!r}, which does not exist; choose from: {known}"
            )
        number(f"{what} of {name!r}", value)
    return tuple(float(given.get(group, 0.0)) for group in storage.groups)


def _check(storage: Storage) -> None:
    """Raise unless every buffer can be updated in place from its gradient.

    Raises:
        UsageError: when the three lists differ in length, or a buffer is read-only or not
            contiguous.
        ShapeError: when a gradient's shape differs from its buffer's.
        DtypeError: when their dtypes or array libraries differ, or the dtype is neither float32 nor
            float64.
    """
    counts = (len(storage.data), len(storage.grads), len(storage.groups))
    if len(set(counts)) > 1:
        raise UsageError(
            "{} buffers, {} gradients and {} groups do not pair up; give one of each".format(
                *counts
            )
        )
    for i, (data, grad) in enumerate(zip(storage.data, storage.grads, strict=True)):
        if data.shape != grad.shape:
            raise ShapeError(
                f"buffer {i} has shape {data.shape} and its gradient {grad.shape}; they must be"
                " equal"
            )
        if data.dtype not in (np.float32, np.float64):
            raise DtypeError(
                f"buffer {i} is {data.dtype}; an optimizer updates float32 and float64"
            )
        ours, theirs = (f"{x.dtype} of {namespace(x).__name__}" for x in (data, grad))
        if ours != theirs:
            raise DtypeError(f"buffer {i} is {ours} and its gradient {theirs}; they must be alike")
        # CuPy's flags have no such entry: its arrays are writable
        fixed = not getattr(data.flags, "writeable", True)
        if fixed or not (data.flags.c_contiguous and grad.flags.c_contiguous):
            raise UsageError(
                f"buffer {i} is read-only, or it or its gradient is not contiguous; give a copy"
            )


# 64k float32 elements: buffer, gradient, two slots and a scratch array make 1.25 MiB, about a
# core's L2 cache, and calling NumPy costs less than a tenth of the arithmetic. Measured (Zen 5, 1
# MiB L2, 32 MiB L3, one thread, median): Adam on 5,000,000 parameters takes 8.6 ms, in one piece
# 12.0; on 20,000,000 37 and 57; on 421,642, which fit the L3, 0.69 and 0.64. Blocks half as large
# were slower, twice as large a little faster (0.65, 8.5 and 36).
HOST_BLOCK_BYTES = 256 * 1024
# A device starts one kernel per operation and block: blocks are there to bound the scratch memory,
# not for a cache.
DEVICE_BLOCK_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, eq=False, slots=True)
class BufferBlock:
    """Views of the same elements of one buffer, its gradient and its state: one run of memory each.

    Attributes:
        xp: the library of the arrays.
        slots: the state arrays' views, in the order in which the optimizer named them.
        decay: the weight decay of the buffer's group.
        rate: its learning rate, in parts of the optimizer's.
        scratch: two arrays, shared by all blocks, whose values mean nothing between two blocks.
        is_spent: whether nobody needs the gradient after the update, so that its memory may be used
            in it.
    """

    xp: ModuleType
    data: Array
    grad: Array
    slots: tuple[Array, ...]
    decay: float
    rate: float
    scratch: tuple[Array, Array]
    is_spent: bool = False


def compiled_update(block: BufferBlock, name: str) -> Any:
    """Return the update of this name that works on this block in one pass, or None."""
    return getattr(kernels_for(block.data, name), name, None)


def block_elements(array: Array) -> int:
    """Return how many elements of this array's kind make a block."""
    limit_bytes = (
        DEVICE_BLOCK_BYTES if hasattr(array, "__cuda_array_interface__") else HOST_BLOCK_BYTES
    )
    return limit_bytes // array.dtype.itemsize


def pieces(arrays: Sequence[Array], limit: int) -> Iterator[tuple[Array, ...]]:
    """Yield flat views of the arrays, `limit` elements at a time; arrays must be contiguous."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, limit):
        yield tuple(array[start : start + limit] for array in flat)


class ScratchArrays:
    """Pairs of scratch arrays, one pair per library and dtype, each of one block's size."""

    def __init__(self, buffers: Sequence[Array]) -> None:
        self._pairs: dict[tuple[str, str], tuple[Array, Array]] = {}
        for buffer in buffers:
            xp, size, pair = (
                namespace(buffer),
                min(buffer.size, block_elements(buffer)),
                self._pairs.get(_kind(buffer)),
            )
            if pair is None or size > pair[0].size:
                self._pairs[_kind(buffer)] = (
                    xp.zeros(size, buffer.dtype),
                    xp.zeros(size, buffer.dtype),
                )

    def like(self, block: Array) -> tuple[Array, Array]:
        """Return two scratch arrays of the block's length and dtype, reused by every block."""
        first, second = self._pairs[_kind(block)]
        return first[: block.size], second[: block.size]


def _kind(array: Array) -> tuple[str, str]:
    return namespace(array).__name__, str(array.dtype)
