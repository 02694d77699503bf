"""The base of all optimizers: storage, learning rate, steps, state, weight decay, blocks.

The state is `steps` and the arrays of `slots()`. Loading a state means writing these arrays and
setting `steps`; the next update then has the bits of a run without interruption. This module works
on plain buffers: parameters, layers and ranks are not its subject.

A subclass is a formula, which knows arrays and numbers alone, and the numbers that it takes. An
update computes it over blocks of the buffers that fit the processor's cache. Adam's, for example,
is twelve array operations. On complete buffers that exceed the cache, each of them reads and writes
main memory; block by block, only the first and the last access does. Views are made once, when the
optimizer is made. `HOST_BLOCK_BYTES` has the measurements.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter, is_
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeAlias
from weakref import WeakSet, ref

import numpy as np

from nnmpi.backend.array import Array, namespace, zeros
from nnmpi.backend.kernels import kernels_of
from nnmpi.backend.recording import active, call, refuse, refuse_inside
from nnmpi.backend.storage import Storage
from nnmpi.backend.trace import is_printable
from nnmpi.base.errors import DtypeError, ShapeError, UsageError, is_own, number
from nnmpi.base.launcher import read_launch
from nnmpi.base.loop import At, Place, Reached, last_read
from nnmpi.base.ownership import claim
from nnmpi.base.settled import Settled
from nnmpi.base.words import answered, raise_missing

__all__ = ["Arrays", "Optimizer"]

ByGroup: TypeAlias = float | Mapping[str, float]
"""A number for all groups of a storage, or a number per group name."""

Part: TypeAlias = tuple[int, slice]
"""A buffer's number, and a slice of its elements."""

EMA = "ema"  # the slot with the weights' average


class Arrays(Storage, read_once="groups known_groups"):
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
        self.known_groups = set(self.groups)
        self.distributed = True  # the caller's own matter


class _Followed:
    """A number that changes between updates: a step that is being recorded cannot use or set it."""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type[Any]) -> Any:
        if optimizer is None:
            return self
        if active() is not None:  # else no text is made, and nothing called: each update asks often
            self._refuse()
        return vars(optimizer)[self._name]

    def __set__(self, optimizer: Any, value: Any) -> None:
        if active() is not None:
            self._refuse()
        vars(optimizer)[self._name] = value

    def _refuse(self) -> None:
        refuse(
            f"optimizer.{self._name}",
            "use it outside of the step, such as in `with nn.training(step=optimizer.steps):`"
            " around the call",
        )


class Optimizer(Settled, read_once="storage rates weight_decay elementwise"):
    """Updates the buffers of a storage in place from their gradients.

    Attributes:
        lr: the learning rate of the next update; schedules set it. The rates of all groups are
            proportional to it.
        rates: per buffer, its rate divided by `lr`.
        steps: the number of updates so far.
        storage: the buffers; the arrays must stay the same objects during the optimizer's life.
        weight_decay: the decay of each buffer, in the storage's order.
        elementwise: whether the class updates each element independently of the others.
        formula: the update of a block, a static function (data, gradient, *state, *numbers) that
            writes to the data and the state in place, as one writes NumPy. Those of nnmpi are row
            formulas (see `PlainKernels.rows`), which compiled kernels print as one loop.
        run_id: of the run whose checkpoints it continues, see `nnmpi.save`; None before the first.
        ema: the decay of the weights' average, see `keep_average`; 0 for none.
    """

    elementwise: ClassVar[bool] = True
    formula: ClassVar[Callable[..., None] | None] = None
    _guard: Array | None = None
    run_id: str | None = None
    _ema = 0.0
    _average_is_due = False  # whether the average is still to begin with the weights as they are
    _average_for: Callable[[], object] | None = None  # the trainer that decided whether to keep it
    _places: Collection[Place] = ()  # of the loaders of the last update's batches
    _unplaced: int = 0  # updates without a batch that a loop of this thread had opened
    _resumed: At | None = None
    lr: Any = _Followed()
    steps: Any = _Followed()
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return raise_missing(self, name, "optimizer")

    def __init__(
        self,
        storage: Storage,
        lr: ByGroup,
        weight_decay: ByGroup = 0.0,
        slots: Sequence[str] = (),
    ) -> None:
        """Allocate the state, and divide buffers and state into blocks.

        Args:
            storage: the buffers and their gradients, or an object with a `storage`, such as
                model.parameters().
            lr: the learning rate; or a number by group name, of which the largest is `lr`.
            weight_decay: one number, or a number by group name.
            slots: the names of the state; each gets one array of zeros per buffer, of its shape.

        Raises:
            UsageError: for a learning rate or weight decay that is negative or not finite, and for
                a group that the storage does not have.
            ShapeError, DtypeError: see `_check`.
        """
        storage = getattr(storage, "storage", storage)
        if not isinstance(storage, Storage):
            raise UsageError(
                "an optimizer works on a model's storage: give model.storage, or"
                " model.parameters(); for groups call model.initialize(group=...) and give"
                " lr={'default': 0.1}"
            )
        _check(storage)
        storage.check_tree()
        claim(storage, "model")
        self.weight_decay = _by_buffer("weight_decay", weight_decay, storage)
        if isinstance(lr, Mapping) and (left := {*storage.groups} - lr.keys()):
            raise UsageError(
                f"lr has no rate for the group {min(left)!r}; give each group one, such as 0.01"
            )
        rates = _by_buffer("lr", lr, storage)
        self.lr = number("lr", max(lr.values(), default=0.0) if isinstance(lr, Mapping) else lr)
        self.rates = tuple(rate / self.lr if self.lr else 1.0 for rate in rates)
        self.steps = 0
        self.storage = storage
        storage.updated_by = ref(self)
        self._slots = {name: list(map(self._zeros_like, storage.data)) for name in slots}
        self._hold_arrays()

    def _hold_arrays(self) -> None:
        """Hold the storage's present arrays, in blocks."""
        self._data, self._grads = tuple(self.storage.data), tuple(self.storage.grads)
        self._moves = self.storage.moves
        self._blocks = self.cut()

    def __repr__(self) -> str:
        """Show the class, the learning rate, and the numbers of parameters and steps."""
        return (
            f"{type(self).__name__}(lr={self.lr:g}, {self.storage.size:,} parameters, after"
            f" {self.steps} steps)"
        )

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "an optimizer cannot be copied or pickled, as it works on its model's arrays; make one"
            " for the copied model's storage and copy the arrays of slots() and steps, or save"
            " both with nnmpi.save"
        )

    def step(self) -> None:
        """Do one update of all buffers with the learning rate `lr`.

        Parameters that need no gradient (`requires_grad = False`) stay unchanged.

        Raises:
            UsageError: when `lr` was set to a negative or non-finite value, the storage's arrays
                were replaced, the model was initialized again, or the parameters are in memory
                shared with other ranks (see `parallel.fused`).
        """
        call(self._step)  # recorded as one call, since `lr` may change between replays

    def _step(self) -> None:
        batches = last_read()
        # one that was left may be another loader's, at whose batches the program has looked before
        self.check_place([(loop, batch) for loop, batch in batches if loop.is_current])
        self.apply()
        self.note_place(batches)

    def apply(self) -> None:
        """Do the update of `step` for a caller that knows its batch; see `note_place`."""
        lr = number("lr", self.lr)
        if self.storage.node_shared:
            raise UsageError(
                "the ranks of a node share the parameters, and each would update them; let the"
                " Worker update them (worker.step), or give it GradientExchange(fused_update=False)"
            )
        if self.storage.unsummed:
            raise UsageError(
                "the gradients are this rank's alone, since the last pass was not the last of its"
                " update: call parallel.backward(loss, samples, last=True) for the last loss of"
                " each update, also of what is left at the end of an epoch"
            )
        if self.steps == 0:
            self._warn_alone()
        self.storage.check_tree()
        self.storage.finish_gradients()
        if self.storage.moves != self._moves:
            self.move()
        self._require_same_arrays()
        self._update_all(lr, self._blocks, self.storage.frozen())
        self.storage.spent = True
        self.storage.finish_update()

    def rule(self, by_group: bool = True) -> list[str]:
        """Return the update rule as text, with the numbers that are equal on all ranks.

        Args:
            by_group: whether decays and rates are included: by group, since uneven shards may lie
                in different numbers of buffers. The stages of a pipeline have different groups.
        """
        numbers = {
            name: item
            for name, item in vars(self).items()
            if name == "betas" or (isinstance(item, int | float) and name[0] != "_")
        }
        if by_group:
            for name in ("weight_decay", "rates"):
                numbers[name] = dict(zip(self.storage.groups, getattr(self, name), strict=True))
        texts = [f"{name.replace('_', ' ')} {value}" for name, value in numbers.items()]
        return [type(self).__name__, *texts]

    def check_place(self, batches: Reached) -> None:
        """Refuse an update on batches that are not those with which the training goes on.

        Raises:
            UsageError: see `EpochLoop.check`; and for a place that a resumed run had passed.
        """
        for loop, batch in batches:
            loop.check(batch)
            if self._resumed is not None and loop.follows and loop.after(batch) <= self._resumed:
                epoch, batch = self._resumed
                raise UsageError(
                    f"`for batch in loader` begins with epoch {loop.epoch} again, but the resumed"
                    f" run goes on with batch {batch} of epoch {epoch}; give the loader to"
                    " nnmpi.save and nnmpi.resume (loader=loader), or loop over loader.epoch(n)"
                )

    def note_place(self, batches: Reached, is_known: bool = False) -> None:
        """Note that an update was made on these batches; see `EpochLoop.train`."""
        places = []
        self._unplaced += not any(loop.is_new for loop, _ in batches)
        for loop, batch in batches:
            loop.train(batch, is_known)
            if loop.follows:
                places.append(loop.place)
        if places:
            self._places, self._resumed = places, None

    def place_besides(self, saved: Collection[Any]) -> At | None:
        """Return the place of a loop of the last update whose loader is not saved; None for none.

        Without an update since `resume_after` it is still that one.
        """
        known = [getattr(item, "_place", None) for item in saved]
        others = [place.trained for place in self._places if place not in known]
        return min(others, default=None) if self._places else self._resumed

    def check_saved(self, saved: Collection[Any]) -> None:
        """Refuse loaders whose batches were opened, but not where the updates were made.

        Raises:
            UsageError: saying how a loader is followed.
        """
        places = [item._place for item in saved if hasattr(item, "_place")]
        if self._unplaced and any(place.opened and not place.updates for place in places):
            raise UsageError(
                "no update is known to have been made on the loader's batches, whose arrays were"
                " taken in another thread or before the updates; take batch.x and batch.y where"
                " you train on them, or give the batch to worker.step"
            )

    def resume_after(self, place: Sequence[int] | None) -> None:
        """Refuse the first loop of a resumed run if it begins before this place; None for none."""
        self._places, self._resumed = (), None if place is None else (place[0], place[1])

    def _warn_alone(self) -> None:
        """Warn, on rank 0, when each rank trains a model of its own, which is rarely intended."""
        launch = read_launch(os.environ)
        if (
            launch is not None
            and launch.size > 1
            and launch.rank == 0
            and not self.storage.distributed
        ):
            warnings.warn(
                f"{launch.size} processes were started, and each trains a model of its own, whose"
                " weights drift apart: give the model to a Worker or DataParallel, and call"
                " parallel.backward(loss, samples); or, if the program itself sums the gradients,"
                " set model.storage.distributed = True",
                stacklevel=6,  # the line that calls `step`
            )

    def update(self, blocks: Iterable[BufferBlock], frozen: Sequence[Part] = ()) -> None:
        """Update these blocks alone.

        For strategies that shard the blocks among ranks, or sum a block's gradient just before its
        update.

        Args:
            blocks: blocks of `cut`; a generator may write a block's `grad` before it yields it.
            frozen: slices of the buffers that stay unchanged, with their state.

        Raises:
            UsageError: when `lr` was set to a negative or non-finite value.
        """
        self._update_all(number("lr", self.lr), blocks, frozen)

    def _update_all(self, lr: float, blocks: Iterable[BufferBlock], frozen: Sequence[Part]) -> None:
        if self.storage.shown is not None:  # a call in each step would cost more
            self.storage.check_weights("an update")
        if self._average_is_due:
            self._begin_average(blocks if isinstance(blocks, tuple) else self._blocks)
        self.steps += 1
        # Blocks span parameters, so a frozen one cannot be excluded. Decay and momentum would move
        # it even without a gradient: save it, and restore it after the update.
        saved: list[tuple[Array, Array]] = []
        for buffer, part in frozen:
            for array in (self._data, *self._slots.values()):
                values = array[buffer].reshape(-1)[part]
                saved.append((values, values.copy()))
        updated: list[BufferBlock] = []

        def noted() -> Iterator[BufferBlock]:  # a generator may use one array for all gradients
            for block in blocks:
                updated.append(block)
                yield block

        self.update_all(lr, noted() if self.ema else blocks)
        for values, before in saved:
            values[...] = before
        if self.ema:
            keep = min(self.ema, (self.steps - 1) / (self.steps + 8))
            every = updated if self.elementwise else self.cut([slice(None)] * len(self._data))
            for block in every:
                block.update(_average, (keep,), self._guard, (block.average, block.data))

    @property
    def ema(self) -> float:
        """The decay of the weights' average; 0 without one."""
        return self._ema

    @property
    def average(self) -> str:
        """The decay of the weights' average, and whether it is still to begin."""
        return f"{self._ema}{' from now on' if self._average_is_due else ''}"

    def keep_average(self, decay: float) -> None:
        """Keep an exponential moving average of the weights from now on, a part of the state.

        It begins with the weights before the next update. Update t keeps `min(decay, (t - 1) /
        (t + 8))` of it, so that the first weights fade early. Weights that are loaded later, by
        `load_state` or a checkpoint, begin it anew; values that are written into `parameter.data`
        are a part of the training, which it follows.

        Args:
            decay: 0 ends it: the state has no average then.

        Raises:
            UsageError: unless 0 <= decay < 1; for an average that begins when a Worker's ranks
                share the optimizer's state already; within `averaged`.
        """
        decay = number(EMA, decay, 1)
        self.storage.check_weights("an average of the weights that begins or ends")
        if decay and EMA not in self._slots:
            if self.storage.node_shared:
                raise UsageError(
                    "the ranks of a node share the optimizer's state already, without an average"
                    " of the weights; call keep_average before the Worker is made, or give it"
                    " Numerics(ema=...)"
                )
            self._slots[EMA] = list(map(self._zeros_like, self.storage.data))
            self._average_is_due = True
            self.storage.averaging = WeakSet([*self.storage.averaging, self])
            self.move()
        elif not decay and EMA in self._slots:
            del self._slots[EMA]
            self._average_is_due = False
            self.storage.averaging = WeakSet({*self.storage.averaging} - {self})
            self.move()
        self._ema, self._average_for = decay, None

    def decide_average(self, trainer: object, decay: float) -> None:
        """Keep the average that a trainer asks for, and end one that another trainer has asked for.

        An average that the program itself keeps, by `keep_average`, goes on.
        """
        if decay or self._average_for is not None:
            self.keep_average(decay)
            self._average_for = ref(trainer)

    def is_decided_by_another(self, trainer: object) -> bool:
        """Return whether a trainer after this one has decided what average is kept."""
        return self._average_for is not None and self._average_for() is not trainer

    def _begin_average(self, blocks: Iterable[BufferBlock] | None = None) -> None:
        """Let the average be the weights as they are.

        Args:
            blocks: of all that this rank updates; by default all arrays.
        """
        if blocks is not None and self.elementwise:
            for block in blocks:
                block.average[...] = block.data  # type: ignore[index]
        else:
            for average, data in zip(self._slots[EMA], self.storage.data, strict=True):
                average[...] = data
        self._average_is_due = False

    def begin_average(self, parts: Iterable[Part] | None = None) -> None:
        """Let the average begin anew, as the weights were set from outside.

        Args:
            parts: of the weights that were set; all of them by default.
        """
        if parts is None:
            self._average_is_due = EMA in self._slots
        elif not self._average_is_due:  # else it begins with all weights, at the next update
            for buffer, part in parts:
                data = self.storage.data[buffer].reshape(-1)
                self._slots[EMA][buffer].reshape(-1)[part] = data[part]

    def has_average(self) -> None:
        """Note that the average was set from outside, with the state: it does not begin anew."""
        self._average_is_due = False

    @contextmanager
    def averaged(self, parts: Sequence[slice] | None = None) -> Iterator[None]:
        """Put the average in the place of the weights within the block. Collective in a Worker or
        a strategy.

            with optimizer.averaged():
                weights = model.state()

        The weights are kept beside meanwhile, so that they come back as they were, also after an
        exception. A block within a block does nothing. What needs the weights is refused: updates,
        checkpoints, values to load, another Worker of the model.

        Args:
            parts: the slice of each buffer that this rank updates; all of it by default.

        Raises:
            UsageError: without an average, or where another optimizer's is in place.
        """
        refuse_inside("an average of the weights")
        if EMA not in self._slots:
            raise UsageError(
                "the optimizer keeps no average of the weights; call"
                " optimizer.keep_average(0.999) before the updates"
            )
        storage = self.storage
        if storage.shown is None:
            storage.shown = _Shown(self, parts or [slice(None)] * len(storage.data))
        shown = storage.shown
        if shown.optimizer is not self:
            raise UsageError(
                "the average of another optimizer is in the place of the weights; leave its block"
                " `with ...averaged():` before"
            )
        shown.blocks += 1
        try:
            shown.put_average()
            yield
        finally:
            shown.blocks -= 1
            if not shown.blocks:
                shown.put_weights()

    @property
    def can_guard(self) -> bool:
        """Whether all updates are kernels of a device that know a guard."""
        is_known = self.elementwise and is_own(type(self)) and is_printable(self.formula)
        return is_known and all(kernels_of(block.data).of_device for block in self._blocks)

    @contextmanager
    def guarded(self, number: Array) -> Iterator[None]:
        """Let updates in this block change nothing if a number is not finite by then.

        Args:
            number: float64, on the device.

        Raises:
            UsageError: when they are no kernels that look at it (see `can_guard`).
        """
        if not self.can_guard:
            raise UsageError(f"updates of {type(self).__name__} here do not look at a guard")
        self._guard = number
        try:
            yield
        finally:
            self._guard = None

    def _zeros_like(self, data: Array) -> Array:
        store = self.storage.state_store
        if store is None:
            return zeros(namespace(data), data.shape, data.dtype)
        return store.zeros(data.size, data.dtype).reshape(data.shape)

    def slots(self) -> dict[str, list[Array]]:
        """Return the live state arrays by name: one per buffer, in the storage's order."""
        if self._average_is_due:
            self._begin_average()
        return self.held_slots()

    def held_slots(self) -> dict[str, list[Array]]:
        """Return `slots` to be counted or moved: a new average may have no values yet."""
        every = {**self._slots, **self.storage.extra_slots}
        return {name: list(arrays) for name, arrays in every.items()}

    @property
    def state_bytes(self) -> int:
        """The bytes of the state in memory; 0 if it is offloaded to a store."""
        if self.storage.state_store is not None:
            return 0
        return sum(array.nbytes for arrays in self.held_slots().values() for array in arrays)

    def move(self, allocate: Callable[[int, Any], Array] | None = None) -> None:
        """Follow the storage to its current arrays, of the same shapes and dtypes as before.

        Args:
            allocate: (elements, dtype) -> a 1-D array for a copy of the state; without it the state
                does not move. If it raises, nothing has changed.

        Raises:
            ShapeError: when the storage's arrays differ from before in number, shape or dtype.
        """
        _check(self.storage)
        before, now = (
            [(x.shape, x.dtype) for x in arrays] for arrays in (self._data, self.storage.data)
        )
        if before != now:
            raise ShapeError(
                f"the storage's arrays have changed from {before}; make a new optimizer"
            )
        if allocate is not None:
            copies = {
                name: [allocate(array.size, array.dtype).reshape(array.shape) for array in arrays]
                for name, arrays in self._slots.items()
            }
            for name, arrays in self._slots.items():
                for copy, array in zip(copies[name], arrays, strict=True):
                    copy[...] = array
            self._slots = copies
        self._hold_arrays()

    @answered
    def zero_grad(self) -> None:
        """Clear all gradients, as the model's `zero_grad` does."""
        self.storage.zero_grad()

    def over(self, storage: Storage) -> Self:
        """Return an optimizer for other arrays of the same shapes that shares settings and state.

        Raises:
            ShapeError: when the arrays differ in number, shape or dtype.
            UsageError, DtypeError: as for a new optimizer.
        """
        other = object.__new__(type(self))
        vars(other).update(vars(self), storage=storage)
        other.move()
        return other

    def update_all(self, lr: float, blocks: Iterable[BufferBlock]) -> None:
        """Update blocks, at the rate of each; `steps` already counts this update."""
        # groupby is lazy: each block is updated as soon as a strategy's generator yields it
        for group, run in groupby(blocks, attrgetter("rate", "decay")):
            rate, decay = group
            formula, numbers = self.formula, self.numbers(lr * rate, decay or False)
            is_rows = is_printable(formula)
            for block in run:
                if formula is None:
                    self.update_block(block, lr * rate)
                elif is_rows:
                    block.update(formula, numbers, self._guard)
                else:
                    formula(block.data, block.grad, *block.slots, *numbers)

    def numbers(self, lr: float, decay: float) -> tuple[float, ...]:
        """Return what the formula takes after the state.

        Args:
            lr: a group's learning rate; `steps` already counts this update.
            decay: its weight decay; False instead of 0, for formulas that then leave it out.
        """
        return lr, decay

    def update_block(self, block: BufferBlock, lr: float) -> None:
        """Write new values into `block.data`, and state into `block.slots`, without a formula.

        Args:
            block: elements of any parameters of one group, with their gradients.
            lr: the group's learning rate. `block.decay` is its weight decay, which this applies.
        """
        raise NotImplementedError(
            f"{type(self).__name__} defines no formula, and no update_block(block, lr)"
        )

    def cut(
        self,
        parts: Sequence[slice] | None = None,
        grads: Sequence[Array] | None = None,
    ) -> tuple[BufferBlock, ...]:
        """Return blocks of the buffers and their state.

        Args:
            parts: a slice of each buffer; all of it by default.
            grads: arrays of the buffers' shapes for the blocks' gradients; the storage's by
                default.
        """
        grads = self._grads if grads is None else grads
        blocks: list[BufferBlock] = []
        for i, (data, grad) in enumerate(zip(self._data, grads, strict=True)):
            full = [data, grad, *(arrays[i] for arrays in self._slots.values())]
            for run in self._runs(i) if parts is None else [parts[i]]:
                for part, gradient, *state in pieces(
                    [array[run] for array in full], block_elements(data)
                ):
                    decay, rate, xp = self.weight_decay[i], self.rates[i], namespace(part)
                    slots = dict(zip(self._slots, state, strict=True))
                    mean = slots.pop(EMA, None)
                    blocks.append(
                        BufferBlock(xp, part, gradient, tuple(slots.values()), decay, rate, mean)
                    )
        return tuple(blocks)

    def _runs(self, buffer: int) -> Iterable[Any]:
        """Return the slices of a buffer that become separate blocks; by default one, all of it."""
        return (...,)

    def _require_same_arrays(self) -> None:
        """Raise if a buffer was replaced: the blocks would silently update the old one."""
        for saved, now in ((self._data, self.storage.data), (self._grads, self.storage.grads)):
            if len(saved) != len(now) or not all(map(is_, saved, now)):
                raise UsageError(
                    "the storage's arrays were replaced; make a new optimizer after changing them"
                )


def _by_buffer(what: str, given: ByGroup, storage: Storage) -> tuple[float, ...]:
    """Return a number for each buffer, by its group; 0 for groups that are left out."""
    if not isinstance(given, Mapping):
        return (number(what, given),) * len(storage.groups)
    for name, value in given.items():
        if name not in storage.known_groups:
            # list the full model's groups: a pipeline stage may have only some of them
            known = ", ".join(sorted(storage.known_groups)) or "none"
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
        # CuPy's flags have no `writeable`: its arrays always are
        is_read_only = not getattr(data.flags, "writeable", True)
        if is_read_only or not (data.flags.c_contiguous and grad.flags.c_contiguous):
            raise UsageError(
                f"buffer {i} is read-only, or it or its gradient is not contiguous; give a copy"
            )


# 64k float32 elements: buffer, gradient, two slots and a scratch array make 1.25 MiB, about a
# core's L2 cache, and the calls of NumPy cost less than a tenth of the arithmetic. Measured for
# Adam (Zen 5, 1 MiB L2, 32 MiB L3, one thread, median of ms):
#
#     parameters             421,642 (fit the L3)    5,000,000    20,000,000
#     blocks of 256 KiB      0.69                    8.6          37
#     blocks of 512 KiB      0.65                    8.5          36
#     one piece              0.64                    12.0         57
#
# Blocks of 128 KiB were slower.
HOST_BLOCK_BYTES = 256 * 1024
# A device launches one kernel per operation and block, and no cache asks for small blocks: they
# only bound the temporary arrays.
DEVICE_BLOCK_BYTES = 16 * 1024 * 1024


@dataclass(eq=False, slots=True)
class BufferBlock:
    """Contiguous views of the same elements of a buffer, its gradient and its state.

    Attributes:
        xp: the library of the arrays.
        slots: views of the state, in the order of the optimizer's slot names.
        decay: the weight decay of the buffer's group.
        rate: its learning rate, divided by the optimizer's.
        average: of the data, if the optimizer keeps it.
        updates: what `PlainKernels.updater` returned, by the formula, the kernels, the numbers'
            types and the settings among them.
    """

    xp: ModuleType
    data: Array
    grad: Array
    slots: tuple[Array, ...]
    decay: float
    rate: float
    average: Array | None = None
    updates: dict[Any, Any] = field(default_factory=dict)

    def update(
        self, formula: Any, numbers: Sequence[float], guard: Array | None, arrays: Any = None
    ) -> None:
        """Compute an own formula of these arrays: an optimizer's, of data, gradient and state."""
        kernels = kernels_of(self.data)
        key = formula, kernels, *[x if type(x) is bool else type(x) for x in numbers]
        if key not in self.updates:
            arrays = arrays or (self.data, self.grad, *self.slots)
            self.updates[key] = kernels.updater(formula, arrays, numbers)
        self.updates[key](numbers, guard)

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, name, value) is not value:  # `block.data -= change` assigns the same array
            raise UsageError(
                f"a block's {name} is a view of the optimizer's arrays; write into it:"
                f" block.{name}[...] = values"
            )
        object.__setattr__(self, name, value)


class _Shown:
    """An optimizer's average in the place of the weights, which are kept here meanwhile.

    Each step may be interrupted, by Ctrl-C, and done again: what is kept are the weights, and the
    average never changes.

    Args:
        optimizer: of the average.
        parts: see `Optimizer.averaged`.

    Attributes:
        blocks: the number of blocks that want the average; they need not end in their order.
    """

    def __init__(self, optimizer: Optimizer, parts: Sequence[slice]) -> None:
        self.optimizer, self.blocks = optimizer, 0
        self._parts, self._weights, self._is_whole = parts, list[Array](), False

    def put_average(self) -> None:
        """Put the average in place, unless it is there."""
        if self._is_whole:
            return
        optimizer, storage = self.optimizer, self.optimizer.storage
        storage.meet()  # another rank may still read the weights
        pairs = zip(storage.data, self._parts, strict=True)
        self._weights = self._weights or [data[part].copy() for data, part in pairs]
        averages: Sequence[Array] = optimizer._slots[EMA]
        if not optimizer._average_is_due:  # else it is the weights
            self._put([average[part] for average, part in zip(averages, self._parts, strict=True)])
        self._is_whole = True
        self._publish()

    def put_weights(self) -> None:
        """Put the weights back."""
        storage = self.optimizer.storage
        try:
            storage.meet()
        finally:
            self._is_whole = False
            try:
                self._put(self._weights)
            except BaseException:  # Ctrl-C comes once
                self._put(self._weights)
                raise
            finally:
                storage.shown = None
        self._publish()

    def _put(self, values: Sequence[Array]) -> None:
        """Write values into this rank's parts of the storage."""
        for data, part, value in zip(
            self.optimizer.storage.data, self._parts, values, strict=False
        ):
            data[part] = value

    def _publish(self) -> None:
        """Let all ranks see the new values."""
        self.optimizer.storage.finish_update()
        self.optimizer.storage.meet()


def _average(average: Array, data: Array, keep: float) -> None:
    average += (1 - keep) * (data - average)  # equal ones stay as they are, bit for bit


def block_elements(array: Array) -> int:
    """Return the number of elements in a block of arrays like this one."""
    limit_bytes = HOST_BLOCK_BYTES if isinstance(array, np.ndarray) else DEVICE_BLOCK_BYTES
    return limit_bytes // array.dtype.itemsize


def pieces(arrays: Sequence[Array], limit: int) -> Iterator[tuple[Array, ...]]:
    """Yield flat views of the arrays, `limit` elements at a time; arrays must be contiguous."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, limit):
        yield tuple(array[start : start + limit] for array in flat)
