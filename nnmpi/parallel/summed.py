"""Gradients summed by a class of the user's own, or of `compressed`: the public seam.

    class Signs(GradientSum):                        GradientExchange(sum=Signs)
        def sum(self, gradients): ...                nnmpi train --sum signs.py:Signs

    rank 0  backward  gradients --.                                  .-- sums, update
    rank 1  backward  gradients ----> sum(gradients), over `group` ----- sums, update
    rank 2  backward  gradients --'   what is not sent stays in      '-- sums, update
                                      `state`, for the next step

`sum` is called once per step, when all gradients of a replica's ranks are final. What its group
sends is counted in the step's report. Its state is saved in checkpoints; a step whose gradients are
not used, since they were not finite, leaves the state as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np

from nnmpi.backend.array import Array, Shape, namespace
from nnmpi.base.custom import name_of
from nnmpi.base.errors import UsageError, expect
from nnmpi.comm.agreement import agreed
from nnmpi.comm.algorithms.registry import NATIVE, AlgorithmLike
from nnmpi.comm.buffers import CommBuffer, is_device
from nnmpi.comm.group import COLLECTIVE, Group
from nnmpi.data.loader import Batch
from nnmpi.nn.module import Module
from nnmpi.parallel.data import Replicas, StrategySetting
from nnmpi.parallel.replication import check_equal, check_free, check_same_model
from nnmpi.tensor.parameter import Parameter

GRADIENTS = "gradients"  # the category of such exchanges in a timeline


class CountingGroup(Group):
    """A group whose collectives are all counted, as `Group` counts its all-reduces.

    Counted are the bytes of the arrays that this rank gives to others.
    """

    def _counted(self, name: str, nbytes: int) -> AbstractContextManager[None]:
        if self.size == 1:
            return nullcontext()
        return self.collective(name, category=GRADIENTS, nbytes=nbytes)

    def reduce_scatter(
        self, array: CommBuffer, algorithm: AlgorithmLike = NATIVE, check: bool = True
    ) -> None:
        """See `Group.reduce_scatter`."""
        with self._counted("reduce-scatter", array.nbytes):
            super().reduce_scatter(array, algorithm, check)

    def all_gather(
        self, array: CommBuffer, algorithm: AlgorithmLike = NATIVE, check: bool = True
    ) -> None:
        """See `Group.all_gather`; a rank gives its chunk."""
        with self._counted("all-gather", array.nbytes // self.size):
            super().all_gather(array, algorithm, check)

    def all_gather_v(
        self, local: CommBuffer, counts: Sequence[int], check: bool = True
    ) -> list[CommBuffer]:
        """See `Group.all_gather_v`."""
        with self._counted("all-gather", local.nbytes):
            return super().all_gather_v(local, counts, check)

    def reduce_scatter_v(
        self, parts: CommBuffer, counts: Sequence[int], check: bool = True
    ) -> CommBuffer:
        """See `Group.reduce_scatter_v`."""
        with self._counted("reduce-scatter", parts.nbytes):
            return super().reduce_scatter_v(parts, counts, check)

    def all_to_all_v(
        self,
        parts: Sequence[CommBuffer],
        shapes: Sequence[Shape],
        name: str = "all-to-all",
        category: str = COLLECTIVE,
        check: bool = True,
    ) -> list[CommBuffer]:
        """See `Group.all_to_all_v`."""
        category = GRADIENTS if category == COLLECTIVE else category
        return super().all_to_all_v(parts, shapes, name, category, check)

    def broadcast(self, array: CommBuffer, root: int = 0, check: bool = True) -> None:
        """See `Group.broadcast`; the root alone gives its array."""
        with self._counted("broadcast", array.nbytes if self.rank == root else 0):
            super().broadcast(array, root, check)


class GradientSum:
    """How the replicas of a model sum their gradients: derive a class, and define `sum`.

    It is made as `NAME(group, gradients)`, on all replicas.

    Args:
        group: the replicas. All its collectives are counted in the step's report.
        gradients: this replica's by their parameters' names, of the parameters' shapes (under
            tensor parallelism, of this rank's parts); here also of frozen parameters, which `sum`
            does not get.

    Attributes:
        group: as given.
        state: arrays that the next sums depend on, as {name: {parameter's name: array}}; empty at
            first. They are saved in checkpoints, so make them in `__init__`, and change them in
            place; no other attribute is saved. An array of its
            gradient's shape is resumed under any layout; one of another shape only if no rank has
            just a part of the parameter.
        per_replica: the names in `state` of what differs between the replicas. A checkpoint keeps
            it for each. A run that is resumed on another number of replicas gives each an equal
            part of its sum over the former ones, so nothing of a residual is lost.
        acts_alone: whether `sum` may change the gradients of a single replica.

    Example:
        >>> class Plain(nnmpi.parallel.GradientSum):
        ...     def sum(self, gradients):
        ...         for grad in gradients.values():
        ...             grad[...] = sum(self.gather(grad))
        >>> def program(group):
        ...     model = models.mlp((4,), 3, hidden=[5]).initialize(seed=0)
        ...     exchange = nnmpi.GradientExchange(sum=Plain)
        ...     sgd = optim.SGD(model.storage, lr=0.1)
        ...     worker = nnmpi.Worker(model, sgd, group, exchange=exchange)
        ...     return worker.step(np.ones((2, 4)), np.zeros(2, int)).comm_bytes
        >>> nnmpi.simulate(program, ranks=2)  # 43 parameters, 32 bytes of losses and counts
        [204, 204]
    """

    per_replica: ClassVar[Collection[str]] = ()
    acts_alone: ClassVar[bool] = True

    def __init__(self, group: Group, gradients: Mapping[str, Array]) -> None:
        self.group = group
        self.state: dict[str, dict[str, Array]] = {}

    def sum(self, gradients: Mapping[str, Array]) -> None:
        """Replace this replica's gradients by their sums, in place; the same bits on all replicas.

        Collective. On one replica, too, it is called.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no sum(gradients)")

    def gather(self, array: Array) -> list[Array]:
        """Return the arrays of all replicas in the order of ranks, each of this shape and dtype.

        Collective.
        """
        xp, shape = namespace(array), array.shape
        local = xp.ascontiguousarray(array).reshape(-1)
        parts = self.group.all_gather_v(local, [local.size] * self.group.size, check=False)
        return [part.reshape(shape) for part in parts]

    def describe(self, gradients: Mapping[str, Array]) -> str:
        """Return how these gradients are summed, as text, for the head of a run."""
        return f"by {type(self).__name__}, a way of your own"


class SummedReplicas(Replicas, read_once="sums"):
    """Data parallelism whose gradients a `GradientSum` adds, after the backward pass. Collective.

    Args:
        model, group, runs_backward: see `Replicas`.
        kind: (group, gradients) -> a `GradientSum`, such as its class.

    Attributes:
        sums: the `GradientSum`.

    Raises:
        UsageError: on all ranks, if `kind` returns something else, or a state that cannot be kept;
            and see `DataParallel`.
        CommError: on all ranks, when their models differ.
    """

    has_state: ClassVar[bool] = True
    is_linear: ClassVar[bool] = False  # it may be anything

    @classmethod
    def why_not(cls, setting: StrategySetting) -> str:
        """See `Replicas.why_not`."""
        return "" if setting.options.summing else "options name no way to sum"

    @classmethod
    def made_for(cls, setting: StrategySetting) -> Self:
        """See `Replicas.made_for`."""
        kind = setting.options.summing
        return cls(setting.model, setting.group, kind, runs_backward=setting.runs_backward)

    def __init__(self, model: Module, group: Group, kind: Any, runs_backward: bool = True) -> None:
        check_free(model, group)
        check_same_model(group, model)
        self.storage = model.storage
        self._shared = [  # one rank's experts are summed by nobody
            span.parameter for span in self.storage.spans if not span.parameter.rank_local
        ]
        own = CountingGroup(group.comm)
        own.fit = group.fit
        with agreed(group):
            self.sums = kind(own, self._gradients(self._shared))
            expect(f"GradientExchange(sum={name_of(kind)})", (self.sums, GradientSum))
            self._check_state()
        self.per_replica, self.acts_alone = tuple(self.sums.per_replica), self.sums.acts_alone
        self._own = own
        # the arrays of the state with copies from before the last sum, and the updates by then
        self._before: list[tuple[Array, Array]] = []
        self._updates = 0
        super().__init__(model, group, runs_backward)

    def begin_step(self, batch: Batch) -> None:
        """See `Replicas.begin_step`."""
        self._settle()
        super().begin_step(batch)

    def begin_pass(self, last: bool) -> None:
        """See `Replicas.begin_pass`."""
        self._settle()
        super().begin_pass(last)

    def finish(self) -> None:
        """See `Replicas.finish`."""
        super().finish()
        optimizer = self._optimizer()
        self._updates = 0 if optimizer is None else optimizer.steps
        self._before = [(array, array.copy()) for array in self._arrays()]
        returned = self.sums.sum(self._trained())
        name, kept = type(self.sums).__name__, self._arrays()
        if returned is not None:
            raise UsageError(
                f"{name}.sum returned a {type(returned).__name__}; change the gradients in place,"
                " and return nothing"
            )
        if [*map(id, kept)] != [id(array) for array, _ in self._before]:
            raise UsageError(
                f"{name}.sum put other arrays into self.state; make them in __init__, and change"
                " them in place, as checkpoints and steps that are refused do"
            )

    def state(self) -> Mapping[str, Mapping[Parameter, Array]]:
        """See `Replicas.state`."""
        self._settle()
        equal = {
            f"{slot} of {name}": array
            for slot, arrays in self.sums.state.items()
            if slot not in self.per_replica
            for name, array in arrays.items()
        }
        if equal:
            kind = type(self.sums).__name__
            problem = (
                f"the state {{}} of {kind} differs between the replicas; name it in per_replica"
            )
            check_equal(self.group, equal, problem)
        by_name = {parameter.name: parameter for parameter in self._shared}
        return {
            slot: {by_name[name]: array for name, array in arrays.items()}
            for slot, arrays in self.sums.state.items()
        }

    def loaded(self) -> None:
        """See `Replicas.loaded`."""
        self._before = []

    @property
    def keeper(self) -> str:
        """See `Replicas.keeper`."""
        return type(self.sums).__name__ if self.sums.state else ""

    @property
    def state_bytes(self) -> int:
        """See `Replicas.state_bytes`; with the copies that a step keeps which may not be used."""
        copies = [copy for _, copy in self._before]
        return sum(array.nbytes for array in [*self._arrays(), *copies])

    def describe(self) -> str:
        """See `Replicas.describe`."""
        return f"{self.sums.describe(self._trained())}, after the backward pass"

    def release(self) -> None:
        """See `Replicas.release`."""
        if not self.released:
            super().release()
            self._own.free()

    def _check_state(self) -> None:
        """Refuse a state that a checkpoint could not keep.

        Raises:
            UsageError: for names and values that `GradientSum` does not allow.
        """
        sums, names = self.sums, self._gradients(self._shared)
        kind = type(sums).__name__
        for slot in sums.per_replica:
            if slot not in sums.state:
                raise UsageError(
                    f"{kind}.per_replica names {slot}, which is not in self.state; make its arrays"
                    " in __init__"
                )
        for slot, arrays in sums.state.items():
            if not str(slot).isidentifier():  # the names of replicas and parameters come behind it
                raise UsageError(f"{kind}.state has the name {slot!r}; give it letters and digits")
            is_kept = isinstance(arrays, Mapping) and all(
                name in names and (isinstance(array, np.ndarray) or is_device(array))
                for name, array in arrays.items()
            )
            if not is_kept:
                raise UsageError(
                    f"{kind}.state[{slot!r}] must have an array for each name of a gradient, or for"
                    " some of them"
                )

    def _trained(self) -> Mapping[str, Array]:
        return self._gradients(item for item in self._shared if item.requires_grad)

    @staticmethod
    def _gradients(parameters: Iterable[Parameter]) -> Mapping[str, Array]:
        # read-only: an array put in another's place would not reach the optimizer
        return MappingProxyType(
            {item.name: item.buffer for item in parameters if item.buffer is not None}
        )

    def _arrays(self) -> list[Array]:
        return [array for arrays in self.sums.state.values() for array in arrays.values()]

    def _optimizer(self) -> Any:
        made = self.storage.updated_by
        return None if made is None else made()

    def _settle(self) -> None:
        """Undo what the last sum has done to the state, if no update has used its gradients."""
        optimizer, before = self._optimizer(), self._before
        self._before = []
        if optimizer is not None and optimizer.steps == self._updates:
            for array, value in before:
                array[...] = value
