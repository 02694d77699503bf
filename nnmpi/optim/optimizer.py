"""What all optimizers share: learning rate, step count, state arrays, weight decay by group, blocks, checks of options.

The state is `steps` and the arrays of `slots()`. Whoever loads a state writes into those arrays and sets `steps`;
the next update is then, bit for bit, the one that a run without a break would have done.
"""

import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from operator import is_
from typing import Any, Self

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.recording import perform
from nnmpi.errors import ShapeError, UsageError, shortened
from nnmpi.launcher import read_launch
from nnmpi.optim.blocks import BufferBlock, ScratchArrays, block_elements, pieces
from nnmpi.optim.storage import StateKeeper, Storage, check


def non_negative(name: str, value: float) -> float:
    """Return the value as a float that is finite and at least 0.

    Raises:
        UsageError: for a negative or infinite value, NaN, or what is no number.
    """
    number = _number(name, value, "a finite number of at least 0")
    if not 0 <= number < math.inf:  # false for NaN too
        raise UsageError(f"{name} is {number}; give a finite number of at least 0")
    return number


def below_one(name: str, value: float) -> float:
    """Return the value as a float in [0, 1): what a decaying average may keep of its past.

    Raises:
        UsageError: for a value outside [0, 1), NaN, or what is no number.
    """
    number = _number(name, value, "a number of at least 0 and below 1")
    if not 0 <= number < 1:
        raise UsageError(f"{name} is {number}; give a number of at least 0 and below 1")
    return number


def at_most_one(name: str, value: float) -> float:
    """Return the value as a float in [0, 1].

    Raises:
        UsageError: for a value outside [0, 1], NaN, or what is no number.
    """
    number = _number(name, value, "a number from 0 to 1")
    if not 0 <= number <= 1:
        raise UsageError(f"{name} is {number}; give a number from 0 to 1")
    return number


def at_least(name: str, value: int, least: int) -> int:
    """Return the value if it is not below `least`; an error calls it `name`.

    Raises:
        UsageError: for a smaller value, or what is no number.
    """
    try:
        too_small = value < least
    except TypeError:
        raise _no_number(name, value, f"at least {least}") from None
    if too_small:
        raise UsageError(f"{name} is {value}; give at least {least}")
    return value


def _number(name: str, value: Any, wanted: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _no_number(name, value, wanted) from None


def _no_number(name: str, value: Any, wanted: str) -> UsageError:
    """Return the error for a value that no number can be made of."""
    return UsageError(f"{name} is {shortened(repr(value))}; give {wanted}")


class Optimizer(ABC):
    """Updates the buffers of a storage in place from their gradients.

    Attributes:
        lr: the learning rate of the next update; schedules set it.
        steps: the updates done so far.
        storage: the buffers; they must stay the same arrays while the optimizer lives.
        weight_decay: the decay of each buffer, in the storage's order.
    """

    def __init__(
        self, storage: Storage, lr: float, weight_decay: float | Mapping[str, float], slots: Sequence[str]
    ) -> None:
        """Allocate the state, and cut everything into blocks.

        Args:
            storage: the buffers and their gradients, or what has them as its `storage`.
            lr: the learning rate.
            weight_decay: one number, or one for each group of the storage by name.
            slots: the names of the state; each gets one array of zeros per buffer, like that buffer.

        Raises:
            UsageError: for a learning rate or weight decay that is negative or not finite, and for a weight decay
                that names a group the storage has not.
            ShapeError, DtypeError: see `storage.check`.
        """
        storage = getattr(storage, "storage", storage)  # of all parameters of a model
        if not hasattr(storage, "grads"):
            raise UsageError(
                "an optimizer works on a model's storage: give model.storage, or model.parameters(); "
                "groups of it are made by model.initialize(group=...), and decay by weight_decay={'default': 0.1}"
            )
        check(storage)
        self.lr = non_negative("lr", lr)
        self.steps = 0
        self.storage = storage
        self.weight_decay = _decay_by_buffer(weight_decay, storage.groups, storage.known_groups)
        keeper = storage.state_keeper
        self._keeper: StateKeeper | None = None if keeper is None else keeper(storage.data, storage.grads, slots)
        self._slots = (
            {name: [_zeros_like(data) for data in storage.data] for name in slots}
            if self._keeper is None
            else self._keeper.slots
        )
        self._data, self._grads = tuple(storage.data), tuple(storage.grads)
        self._moves = storage.moves
        self._blocks = self.cut() if self._keeper is None else ()

    def __repr__(self) -> str:
        """Say which rule it is, with which rate, over how many numbers."""
        return f"{type(self).__name__}(lr={self.lr:g}, {self.storage.size:,} parameters, after {self.steps} steps)"

    def step(self) -> None:
        """Do one update of all buffers with the learning rate `lr`; nothing is allocated.

        Parameters that need no gradient (`requires_grad = False`) stay as they are.

        Raises:
            UsageError: when `lr` was set to a negative or non-finite value, the storage holds other arrays than
                when the optimizer was made, the model was initialized again, or its parameters stand once for several
                ranks (see `parallel.fused`).
        """
        perform(self._step)  # a compiled step does all of it each time, as `lr` may have changed

    def _step(self) -> None:
        lr = non_negative("lr", self.lr)
        if self.storage.common:
            raise UsageError(
                "the parameters stand once per node, and every rank would update them; let the Worker update them "
                "(worker.step), or give it GradientExchange(fused_update=False)"
            )
        if self.steps == 0:
            self._warn_alone()
        self.storage.finish_gradients()
        if self.storage.moves != self._moves:
            self.move()
        self._require_same_arrays()
        self._go(lr, self._blocks if self._keeper is None else self._coming(), self.storage.frozen())
        self.storage.finish_update()

    def _warn_alone(self) -> None:
        """Warn, once for all ranks, where each trains a model of its own: that is seldom meant."""
        launch = read_launch(os.environ)
        if launch is not None and launch.size > 1 and launch.rank == 0 and not self.storage.shared:
            warnings.warn(
                f"{launch.size} processes were started, and each trains a model of its own, whose weights drift apart: "
                "give the model to a Worker or DataParallel, and call parallel.backward(loss, samples); or, where the "
                "program adds up the gradients by itself, which is not seen here, set model.storage.shared = True",
                stacklevel=5,  # the line that calls `step`
            )

    def update(self, blocks: Iterable[BufferBlock], frozen: Sequence[Array] = ()) -> None:
        """Do one update of these blocks alone, with the gradients that are in them when their turn comes.

        For strategies that share out the blocks among ranks, or add up a block's gradient just before it is used.

        Args:
            blocks: what `cut` gave; a generator may write a block's `grad` before it yields it.
            frozen: arrays that are put back as they are now.

        Raises:
            UsageError: when `lr` was set to a negative or non-finite value.
        """
        self._go(non_negative("lr", self.lr), blocks, frozen)

    def _go(self, lr: float, blocks: Iterable[BufferBlock], frozen: Sequence[Array]) -> None:
        self.steps += 1
        # Blocks run across parameters, so one that needs no gradient cannot be left out of them: it is put back.
        kept = [(part, part.copy()) for part in frozen] if frozen else ()
        self._update(lr, blocks)
        for part, values in kept:  # decay and momentum move also what has no gradient
            part[...] = values

    def slots(self) -> dict[str, list[Array]]:
        """Return the live state arrays by name: one per buffer, of its shape and dtype, in the storage's order.

        Those that somebody else keeps (see `StateKeeper`) can be sliced, reshaped, copied and written to.
        """
        return {name: list(arrays) for name, arrays in self._slots.items()}

    @property
    def state_bytes(self) -> int:
        """The bytes of memory that the state takes; fewer than its arrays have where these lie elsewhere."""
        if self._keeper is not None:
            return self._keeper.nbytes
        return sum(array.nbytes for arrays in self._slots.values() for array in arrays)

    def move(self, allocate: Callable[[int, Any], Array] | None = None) -> None:
        """Work on the arrays that the storage has now, of the same shapes and dtypes as before.

        Args:
            allocate: (elements, dtype) -> a 1-D array, into which the state is copied; it stays where it is without.
                If it raises, nothing has changed.

        Raises:
            ShapeError: when the storage's arrays are others than before in number, shape or dtype.
        """
        check(self.storage)
        shapes = [[(array.shape, array.dtype) for array in arrays] for arrays in (self._data, self.storage.data)]
        if shapes[0] != shapes[1]:
            raise ShapeError("the storage's arrays have other shapes than before; make a new optimizer")
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
        self._blocks = self.cut() if self._keeper is None else ()

    def zero_grad(self) -> None:
        """Forget all gradients, as the model's `zero_grad` does."""
        self.storage.zero_grad()

    def over(self, storage: Storage, parts: Sequence[slice]) -> Self:
        """Return one with the same settings for other arrays, which are as long as parts of this one's buffers.

        Its state *is* that part of this one's, seen through views, as long as this one's state does not move. Learning
        rate and steps are copied.

        Args:
            storage: the other arrays, one per buffer of this one's.
            parts: of each buffer, along its first axis.

        Raises:
            ShapeError: when the arrays' shapes, dtypes or number are not those of the parts.
            UsageError, DtypeError: see `storage.check`.
        """
        check(storage)
        wanted = [
            (array.shape, array.dtype) for array in (data[part] for data, part in zip(self._data, parts, strict=False))
        ]
        found = [(array.shape, array.dtype) for array in storage.data]
        if len(parts) != len(self._data) or wanted != found:
            raise ShapeError(f"arrays of {_outline(found)} are not the parts of this optimizer's, {_outline(wanted)}")
        other = copy(self)
        other.storage = storage
        other._slots = {
            name: [array[part] for array, part in zip(arrays, parts, strict=True)]
            for name, arrays in self._slots.items()
        }
        other._data, other._grads = tuple(storage.data), tuple(storage.grads)
        other._moves = storage.moves
        other._blocks = other.cut()
        return other

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
            grads: arrays of the buffers' shapes for the blocks' gradients; the storage's by default.
            limit_bytes: the longest block, if not what suits an ordinary update.

        Raises:
            UsageError: where somebody else keeps the state.
        """
        if self._keeper is not None:
            raise UsageError(
                "the optimizer's state lies out of memory and comes to its own updates alone; leave it in memory where "
                "a fused update or servers share the update out"
            )
        scratch = ScratchArrays(self._grads)
        grads = self._grads if grads is None else grads
        blocks: list[BufferBlock] = []
        for i, (data, grad) in enumerate(zip(self._data, grads, strict=True)):
            whole = [data, grad, *(arrays[i] for arrays in self._slots.values())]
            arrays = whole if parts is None else [array[parts[i]] for array in whole]
            elements = block_elements(data) if limit_bytes is None else max(1, limit_bytes // data.dtype.itemsize)
            blocks += self._blocks_of(i, arrays, elements, scratch)
        return tuple(blocks)

    def _blocks_of(
        self, buffer: int, arrays: Sequence[Array], elements: int, scratch: ScratchArrays
    ) -> Iterator[BufferBlock]:
        """Yield blocks of the same part of a buffer, its gradient and its state."""
        for part, grad, *state in pieces(arrays, elements):
            decay = self.weight_decay[buffer]
            yield BufferBlock(namespace(part), part, grad, tuple(state), decay, scratch.like(part))

    def _coming(self) -> Iterator[BufferBlock]:
        """Yield the blocks of a state that somebody else keeps, while they are here."""
        assert self._keeper is not None
        scratch = ScratchArrays(self._grads)
        for piece in self._keeper.coming():
            i, grad = piece.buffer, self._grads[piece.buffer][piece.part]
            here = piece.rows if len(piece.rows) > len(self._slots) else (self._data[i][piece.part], *piece.rows)
            yield from self._blocks_of(i, (here[0], grad, *here[1:]), block_elements(grad), scratch)

    def _require_same_arrays(self) -> None:
        """Raise if a buffer was replaced: the blocks would still update the old one, and training would stand still."""
        for kept, now in ((self._data, self.storage.data), (self._grads, self.storage.grads)):
            if len(kept) != len(now) or not all(map(is_, kept, now)):
                raise UsageError("the storage's arrays were replaced; make a new optimizer after changing them")


def decayed_gradient(block: BufferBlock) -> Array:
    """Return gradient + decay * data (L2 regularization), in the block's first scratch array if there is decay."""
    if block.decay == 0:
        return block.grad
    result = block.scratch[0]
    block.xp.multiply(block.data, block.decay, out=result)
    block.xp.add(result, block.grad, out=result)
    return result


def factor(block: BufferBlock, value: float) -> Array | float:
    """Return a number for a block to be multiplied by: an array, if that is quicker for its library.

    NumPy takes 0.3 us to multiply a short array by another, and 0.8 us by a number of Python's.
    """
    return np.array(value, block.data.dtype) if block.xp is np else value


def _outline(found: Sequence[tuple[tuple[int, ...], Any]]) -> str:
    """Return shapes and dtypes in words."""
    return ", ".join(f"{shape} {dtype}" for shape, dtype in found) or "nothing"


def _zeros_like(data: Array) -> Array:
    zeros: Array = namespace(data).zeros(data.shape, data.dtype)
    return zeros


def _decay_by_buffer(
    weight_decay: float | Mapping[str, float], groups: Sequence[str], known_groups: Collection[str]
) -> tuple[float, ...]:
    if not isinstance(weight_decay, Mapping):
        return (non_negative("weight_decay", weight_decay),) * len(groups)
    for name, value in weight_decay.items():
        if name not in known_groups:  # a stage of a pipeline need not have all groups of the model
            known = ", ".join(sorted(set(known_groups))) or "none"
            raise UsageError(f"weight_decay names the group {name!r}, which does not exist; choose from: {known}")
        non_negative(f"weight_decay of {name!r}", value)
    return tuple(float(weight_decay.get(group, 0.0)) for group in groups)
