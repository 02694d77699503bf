"""ShardedDataParallel: data parallelism over sharded storage, unit by unit. See `zero`.

On one node no message is sent: see `ShardedStorage.connect`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, Self

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.recording import refuse_inside
from nnmpi.base.errors import CommError, NnmpiError, UsageError, counted
from nnmpi.comm.algorithms.registry import AUTO
from nnmpi.comm.group import Group
from nnmpi.nn.chain import KnownLayers, ModelPart, Stashed, run_layers
from nnmpi.nn.container import check_empty
from nnmpi.nn.module import Module
from nnmpi.parallel.data import Replicas, StrategySetting
from nnmpi.parallel.model_state import ShardedArray
from nnmpi.parallel.replication import broadcast_state, check_free, check_same_model
from nnmpi.parallel.zero.storage import COMMON, NO_GATHER, ShardedStorage, sharded
from nnmpi.tensor.function import Elementwise
from nnmpi.tensor.parameter import FlatStorage
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import OF_RANKS, Traits

NO_PASS = -2  # no backward pass is running


class UnitEnd(Elementwise):
    """The end of a unit: the identity; its backward reports that the pass reaches the unit."""

    __slots__ = ("_reached",)

    traits = Traits(onnx=OF_RANKS, tested_in="tests/parallel/test_zero.py")

    is_call = True

    def __init__(self, reached: Callable[[], None]) -> None:
        self._reached = reached

    def forward(self, x: Array) -> Array:
        return x

    def backward(self, grad: Array) -> tuple[Array]:
        self._reached()
        return (grad,)


class ShardedDataParallel(Replicas, read_once="stage"):
    """ZeRO: data parallelism whose ranks shard the training state. Collective.

        parallel = nnmpi.ShardedDataParallel(model, group, stage=3)
        optimizer = optim.Adam(model.storage)    # made afterwards: state of this rank's parts alone
        model.zero_grad()
        parallel.backward(ops.cross_entropy(model(x), y, reduction="sum"), samples)
        optimizer.step()

    A model initialized with sharded storage (`sharded`) is never complete on any rank. Any other
    model gets rank 0's values, and is sharded here. Use a `Sequential`: any other module is a
    single unit, which saves nothing in stage 3. A loss may use the model several times; its
    parameters beside the model's forward, as for a penalty, in stage 1 alone.

    Args:
        model: initialized, the same on all ranks.
        group: the ranks that share each batch, and the model.
        stage: 1, 2 or 3; ignored if the storage is sharded already.
        algorithm: of sums and gathers: "native" (MPI's own, and "auto"), "ring" or "tree".
        unit_bytes: see `ShardedStorage`.
        runs_backward: see `Replicas`.

    Attributes:
        storage: the model's.
        stage: the stage.

    Raises:
        CommError, UsageError: see `DataParallel`.

    Example:
        >>> def program(group):
        ...     model = models.mlp([6], 3, [8]).initialize(seed=0)
        ...     parallel = nnmpi.ShardedDataParallel(model, group, stage=1)
        ...     optimizer = optim.Adam(model.storage, lr=0.01)
        ...     x, y = np.ones((2, 6), "float32"), np.array([0, 1])
        ...     model.zero_grad()
        ...     parallel.backward(ops.cross_entropy(model(x), y, reduction="sum"), samples=4)
        ...     optimizer.step()
        ...     return optimizer.state_bytes
        >>> nnmpi.simulate(program, 2)  # halves of Adam's 896 bytes
        [448, 448]
    """

    keeps_own = False
    storage: ShardedStorage
    _known: KnownLayers | None = None  # those of the units, if passes go from unit to unit

    @classmethod
    def why_not(cls, setting: StrategySetting) -> str:
        """See `Replicas.why_not`."""
        return "" if setting.layout.zero else "the layout's zero is 0"

    @classmethod
    def made_for(cls, setting: StrategySetting) -> Self:
        """See `Replicas.made_for`."""
        return cls(
            setting.model,
            setting.group,
            setting.layout.zero,
            str(setting.options.allreduce),  # `check_layout` refuses functions
            runs_backward=setting.runs_backward,
        )

    def __init__(
        self,
        model: Module,
        group: Group,
        stage: int = 3,
        algorithm: str = AUTO,
        unit_bytes: int | None = None,
        runs_backward: bool = True,
    ) -> None:
        check_free(model, group, zero=True)
        check_same_model(group, model)
        old = model.storage
        values = {}
        if not isinstance(old, ShardedStorage):
            broadcast_state(model, group)
            values = {span.parameter.name: span.parameter.data for span in old.spans}
            model.storage = _rebuild(old, values, sharded(model, group, stage, unit_bytes))
            model.storage.known_groups |= old.known_groups
        assert isinstance(model.storage, ShardedStorage)
        self.stage = model.storage.stage
        self.meets_in_passes = runs_backward and self.stage > 1
        super().__init__(model, group, runs_backward)
        self._at = NO_PASS  # the unit of the running backward pass
        own = group.duplicate()
        try:
            self.notice = self.storage.connect(own, algorithm)
        except NnmpiError:  # on all ranks
            super().release()
            own.free()
            if values:
                _return_base(model.storage)
                model.storage = _rebuild(old, values, FlatStorage)
            raise
        self._in_units = self.meets_in_passes
        self._forward_model = model.forward  # for a model that is no chain, thus one unit
        # a rank's stages compute nothing alone
        self._gathers = self.stage > 1 and (runs_backward or not isinstance(model, ModelPart))
        if self._gathers:
            model.forward = self._forward  # type: ignore[method-assign]
        if self._in_units:
            layers = [layer for unit in self.storage.units for layer in unit.layers]
            is_chain = bool(layers) and layers[0].module is not model
            self._known = KnownLayers(model, layers if is_chain else ())
        if self._in_units and group.size > 1:
            self.storage.hide()
            for span in self.storage.spans:
                unit = self.storage.unit_of(span)
                span.parameter.guard = partial(self._check_unit, unit, span.parameter.name)

    def _start_equal(self) -> None:
        broadcast_state(self.model, self.group, parameters=self.storage.is_whole)

    def follow(self) -> None:
        """Refuse a model that is not as it was cut into units; see `Replicas.follow`."""
        super().follow()
        if self._known is not None and not self.released:
            self._known.check("call gather_model() and make a new ShardedDataParallel")

    # ---- forward ----

    def _forward(self, *inputs: Any, **named: Any) -> Any:
        """Compute the model, each unit with its parameters gathered meanwhile."""
        self.storage.check_tree()
        if self.storage.in_program:
            return self._forward_model(*inputs, **named)
        refuse_inside("a model that ranks shard")
        storage, units = self.storage, self.storage.units
        storage.acquire(COMMON)
        if units and units[0].layers[0].module is self.model:  # no chain, thus one unit
            storage.acquire(0)
            result = self._forward_model(*inputs, **named)
            storage.release(0)
        else:
            result = self._forward_chain(*inputs, **named)
        storage.release(COMMON)
        return result

    def _forward_chain(self, x: Any) -> Any:
        storage, units = self.storage, self.storage.units
        stashed: Stashed = {}
        for number, unit in enumerate(units):
            storage.acquire(number, number + 1 if number + 1 < len(units) else None)
            x = run_layers(unit.layers, x, stashed)
            if isinstance(x, Tensor):
                x = UnitEnd(partial(self._reach, number))(x)
            storage.release(number)
        check_empty(stashed)
        return x

    # ---- backward ----

    def begin_pass(self, last: bool) -> None:
        """See `Replicas.begin_pass`."""
        super().begin_pass(last)
        if self._at != NO_PASS:
            raise CommError(
                "the backward pass before this one ended in an exception halfway; release this"
                " ShardedDataParallel and make a new one"
            )
        self._begin_units()

    def _begin_units(self) -> None:
        self._at = len(self.storage.units) - 1
        if self._in_units:
            self.storage.acquire(COMMON)
            self._acquire(self._at)

    def _acquire(self, number: int) -> None:
        """Gather a unit, and begin with the one that a backward pass reaches next."""
        self.storage.acquire(number, number - 1 if number > 0 else None)

    def _reach(self, number: int) -> None:
        if self._now.last is None and not any(p.requires_grad for p in self.model.parameters()):
            # the pass of another model's strategy, whose loss goes through this one
            self.storage.acquire(COMMON)
            self._acquire(number)
            return
        self._check_pass()
        if number > self._at:  # of an earlier forward: its gradients add to what was summed
            self._finish_units(COMMON)
            self._begin_again(True)
        self._finish_units(number)

    def _check_unit(self, number: int, name: str) -> None:
        """Refuse the gradient of a unit's parameter outside of the unit's backward."""
        self._check_pass()
        if number not in (COMMON, self._at):
            raise UsageError(
                f"a loss uses {name} outside of the model's forward, where ZeRO {self.stage} has no"
                " room for its gradient; use it there, or give ShardedDataParallel stage=1"
            )

    def _begin_again(self, wanted: bool) -> bool:
        """Begin with the last unit again if some rank's graph has another forward. Collective."""
        again, last = self.group.sum_floats([wanted, bool(self._now.last)])
        if last not in (0, self.group.size):
            raise UsageError(
                "for some ranks this backward pass is the last one of an update, for others it is"
                " not; call backward equally often on all ranks"
            )
        if again:
            self._begin_units()
        return again > 0

    def _finish_units(self, number: int) -> None:
        """Sum and release all units above this one, which the backward pass is past on this rank.

        All ranks gather and sum the same units, also those whose graphs differ.
        """
        while self._at > number:
            self.storage.reduce(self._at)
            self.storage.release(self._at)
            self._at -= 1
            if self._at >= 0:
                self._acquire(self._at)

    def begin_comparison(self) -> None:
        """See `Replicas.begin_comparison`: another rank may be in `optimizer.step()`."""
        self.storage.transport.meet(3)

    def finish_pass(self) -> None:
        """Sum the remaining units, and end the pass; see `Replicas.finish_pass`."""
        if self._in_units:
            self._finish_units(COMMON)
            while self._begin_again(False):
                self._finish_units(COMMON)
            self.storage.reduce(COMMON)
            self.storage.release(COMMON)
        self._at = NO_PASS

    def finish(self) -> None:
        """End a step: return when this rank has its part of all sums. Collective.

        Raises:
            UsageError: after `release`.
        """
        super().finish()
        if not self._in_units:
            # in a pipeline, stages 2 and 3 have summed each microbatch's units already
            units = range(len(self.storage.units) if self.stage == 1 else 0)
            self.storage.reduce(*reversed(units), COMMON)

    # ---- the model ----

    def describe(self) -> str:
        """Return how gradients are summed, as text."""
        units = len(self.storage.units)
        return (
            f"none, but reduce-scatter and all-gather in {counted(units, 'unit')} (ZeRO"
            f" {self.stage})"
        )

    def gather_model(self) -> None:
        """Give every rank the full model again, in private storage, and release it. Collective.

        Optimizers over the parts are of no use afterwards.
        """
        storage = self.storage
        views = {span.parameter.name: storage.weights(span) for span in storage.spans}
        values = {
            name: view.gather() if isinstance(view, ShardedArray) else view
            for name, view in views.items()
        }
        self.release()
        _return_base(storage)
        vars(self.model).pop("forward", None)
        self.model.storage = _rebuild(storage, values, FlatStorage)

    def release(self) -> None:
        """Detach from the model. Collective.

        In stage 3 each rank is left with its parts, and the model refuses to compute;
        `gather_model` gives every rank all of it. A second call does nothing.
        """
        if self.released:
            return
        super().release()
        self.storage.disconnect()
        if self._gathers:
            del self.model.forward
        if not self.storage.is_whole:
            self.model.forward = self._refuse  # type: ignore[method-assign]

    def _refuse(self, *_: Any) -> NoReturn:
        raise UsageError(NO_GATHER)


def _return_base(storage: ShardedStorage) -> None:
    """Give each rank all of a base again. Collective."""
    for base in storage.bases:
        base.give_back()


def _rebuild(
    old: FlatStorage, values: Mapping[str, Array], make: Callable[..., FlatStorage]
) -> FlatStorage:
    """Return storage of these values, with the old one's parameters and groups."""
    labels = {span.parameter.name: old.groups[span.buffer] for span in old.spans}
    xp = namespace(old.data[0]) if old.data else np
    parameters = {span.parameter.name: span.parameter for span in old.spans}
    return make(parameters, values, xp.zeros, lambda name, _: labels[name])
