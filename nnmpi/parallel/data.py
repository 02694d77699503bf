"""Bulk-synchronous data parallelism: every rank has the full model and a part of each batch.

    rank 0  batch rows 0..1  forward  backward  |--.            | update
    rank 1  batch rows 2..3  forward  backward  |---> all-reduce| update  the same update everywhere
    rank 2  batch row  4     forward  backward  |--'            | update

Losses are sums, and each rank divides its own by the global number of samples before the backward
pass. So the sum of the gradients over ranks is the gradient of the global mean, whatever the ranks'
shares are. Gradients are summed in buckets while the backward pass still runs (Li et al., "PyTorch
Distributed: experiences on accelerating data parallel training", 2020). Batch normalization takes
its statistics over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, NoReturn, Self

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.recording import active, call, eager_while
from nnmpi.base.errors import CommError, DeviceError, NnmpiError, UsageError, check_int, counted
from nnmpi.base.ownership import claim
from nnmpi.base.settled import Settled
from nnmpi.base.units import format_bytes
from nnmpi.comm.algorithms.registry import AUTO, NATIVE, SHARED, AlgorithmLike
from nnmpi.comm.buffers import is_device
from nnmpi.comm.fit import SHARED_BYTES
from nnmpi.comm.gradients import BucketedAllReduce
from nnmpi.comm.group import Group
from nnmpi.data.loader import Batch
from nnmpi.nn.module import Module
from nnmpi.optim.clip import scale
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.replication import broadcast_state, check_equal, check_free, check_same_model
from nnmpi.parallel.witness import UpdateWitness
from nnmpi.tensor.parameter import FlatStorage, Parameter
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.turns import turns_of


class StatisticsSum:
    """The sum of a layer's statistics over the ranks that share each batch.

    Three small sums per layer and step are the price of results that do not depend on the number of
    ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group, self.turns = group, turns_of(group)

    def __call__(self, array: Array) -> Array:
        total = namespace(array).ascontiguousarray(array)
        self._group.all_reduce(total.reshape(-1), check=False)
        return total


NUMBERS_BYTES = 4 * 8  # loss, correct predictions, targets and the step's check in float64


@dataclass(frozen=True)
class StrategySetting:
    """What a strategy of replicas is chosen by, and made from.

    Attributes:
        model, optimizer: to be trained; the model is this rank's part.
        group: the ranks that share each batch.
        world: all ranks.
        options: a `compose.layout.GradientExchange`, with all its fields.
        layout: a `compose.layout.Layout`.
        is_plain: whether every rank has the full model, and gradients are summed in any order.
        runs_backward: whether the model's hooks report final gradients; otherwise a pass's program
            does.
        on_device: whether the weights are on a device.
    """

    model: Module
    optimizer: Optimizer
    group: Group
    world: Group
    options: Any
    layout: Any
    is_plain: bool
    runs_backward: bool
    on_device: bool


class Replicas(
    Settled,
    read_once="model group storage shares_batches released notice holders keeps_own is_linear"
    " keeps_equal meets_in_passes is_fused acts_alone has_state per_replica unused",
):
    """Replicas of a model on a group's ranks, equal at first: the base of all data parallelism.

    Parameters and buffers become those of rank 0. Batch normalization takes its statistics over all
    ranks. A subclass sums the gradients; here each rank keeps its own. A model has one Replicas at
    a time; `release` detaches it.

    Args:
        model: initialized, the same on all ranks.
        group: the ranks that share each batch.
        runs_backward: whether the caller uses `backward`; otherwise (a pipeline) the caller runs
            the backward passes, and calls `final` and `finish`.

    Attributes:
        keeps_own: whether each rank still has its own gradients, or all sums, after a step.
        is_linear: whether the sum of two gradients' sums is that of the gradients' sum.
        keeps_equal: whether all ranks have the same bits of what they all have of the weights.
        meets_in_passes: whether the ranks meet within each backward pass, not only in the last.
        is_fused: whether the sum is fused with the update, which overwrites the gradients.
        holders: the ranks that share a node's single copy of parameters and optimizer state; 1 if
            each rank has its own.
        shares_batches: whether the ranks share each microbatch, and batch normalization takes its
            statistics over them; otherwise a microbatch belongs to one rank.
        released: whether `release` was called.
        notice: an option that could not be used as given, and why; otherwise empty.
        acts_alone: whether it may change the gradients of a single replica, too.
        has_state: whether `state` may have arrays.
        per_replica: the names in `state` of what differs between the replicas. A checkpoint keeps
            one of it for each replica, and of all other state one for all.
        unused: the beginning of a sentence about a strategy that was asked for and is not meant for
            these ranks; empty if nobody asks for it by name.
        before_sum: called with the number of each final gradient before its sum may begin.
        microbatch: the number of the microbatch that is computed; the caller sets it, first in its
            forward.
    """

    keeps_own: ClassVar[bool] = True
    is_linear: ClassVar[bool] = True
    keeps_equal: ClassVar[bool] = True
    meets_in_passes = False
    is_fused: ClassVar[bool] = False
    holders = 1
    shares_batches = True
    notice = ""
    acts_alone = False
    has_state: ClassVar[bool] = False
    per_replica: Sequence[str] = ()
    unused: ClassVar[str] = ""
    microbatch = 0

    @classmethod
    def why_not(cls, setting: StrategySetting) -> str:
        """Return why this strategy is not meant for a setting; empty if it is. Collective."""
        raise NotImplementedError(f"{cls.__name__} does not say when it is meant")

    @classmethod
    def is_asked(cls, options: Any) -> bool:
        """Return whether options ask for this strategy by name, so that `why_not` is told."""
        return False

    @classmethod
    def made_for(cls, setting: StrategySetting) -> Self:
        """Return this strategy for a setting for which it is meant. Collective."""
        return cls(setting.model, setting.group)

    def __init__(self, model: Module, group: Group, runs_backward: bool = True) -> None:
        claim(model, "model")
        self.model, self.group, self.storage = model, group, model.storage
        # last: whether the running backward pass is the last microbatch's; None between passes
        # summed: whether the gradients are a finished step's sums
        self._now = SimpleNamespace(last=None, summed=False)
        self.released = False
        self.before_sum: Callable[[int], object] = int
        self._start_equal()
        self.storage.replicas, self.storage.strategy = group, self
        self._witness = UpdateWitness(model, group, self.keeps_equal, self.meets_in_passes)
        if group.size > 1 and runs_backward:
            for span in self.storage.spans:  # all of them: a stray pass may reach any parameter
                span.parameter.guard = self._check_pass
        if group.size > 1 and self.shares_batches:
            for _, module in model.named_modules():
                if hasattr(module, "all_reduce"):
                    module.all_reduce = StatisticsSum(group)
        if self.storage.check is not None:
            self.storage.check.tell(self)

    def follow(self) -> None:
        """Refuse a new layer whose statistics are no sums over the ranks; see `TreeCheck`.

        Raises:
            UsageError: naming it. In a loop of one's own it may have computed already.
        """
        if self.released or self.group.size == 1 or not self.shares_batches:
            return
        for name, module in self.model.named_modules():
            if getattr(module, "all_reduce", self) is None:
                raise UsageError(
                    f"{name} ({type(module).__name__}) is new in the model, and its statistics are"
                    " not summed over the ranks; call release() and make a new DataParallel or"
                    " Worker"
                )

    def __call__(self, *_: object) -> NoReturn:
        raise UsageError("a strategy computes nothing; call its model, as before")

    def _start_equal(self) -> None:
        # of one copy that the ranks share nothing is to be sent
        broadcast_state(self.model, self.group, parameters=not self.storage.node_shared)

    def backward(self, loss_sum: Tensor, samples: int, last: bool = True) -> None:
        """Add the gradient of the global mean loss on all ranks. Collective.

        Args:
            loss_sum: the sum of the losses of this rank's samples.
            samples: the denominator of the mean: the number of samples of all ranks and all
                microbatches together; for sequences, the number of tokens to predict
                (`Batch.global_targets`).
            last: whether the step's sum over the ranks begins with this pass; False for all but the
                last of several microbatches, whose gradients only accumulate on this rank.

        Raises:
            UsageError: when the last step's gradients were not cleared: see `Module.zero_grad`; on
                all ranks, when they give different numbers of samples, or each its own.
            CommError: when the last pass ended early, in an exception.
        """
        # The gradient of the mean. Two other places divide by the same count: a Worker's
        # `BatchPass._make_seeds`, and `stats.Totals` for the loss. Float64: rounded to the
        # gradient's dtype only in the backward pass.
        samples = check_int("samples", samples, 0)
        seed = namespace(loss_sum._data).full(loss_sum.shape, 1 / max(samples, 1))
        # recorded, so that a compiled step repeats it each time
        call(self.begin_pass, (last,), ())
        if self.group.size > 1:
            self._compare(loss_sum, samples, last)
        try:
            loss_sum.backward(seed)
            call(self.finish_pass)
        finally:
            call(self.end_pass, writes=())
        if last:
            call(self.finish)

    def _compare(self, loss_sum: Tensor, samples: int, last: bool) -> None:
        """Compare with the other ranks what this pass does, if that is due. Collective then.

        A compiled step is done by Python then: its replays compare nothing.
        """
        witness = self._witness
        eager_while(witness.is_due)
        if witness.is_due():
            if last or self.meets_in_passes:
                call(self.begin_comparison, when="once")
            call(partial(witness.compare, loss_sum, samples, last), when="once")
        elif active() is None:
            witness.note(loss_sum, samples, last)

    def begin_comparison(self) -> None:
        """Meet the ranks before a comparison, where they also meet outside of `backward`."""

    # ---- a Worker's step ----

    def begin_step(self, batch: Batch) -> None:
        """Begin a step; refuse a batch whose shares do not fit these sums.

        Only a fixed order of sums has microbatches of a single rank. Here layers may communicate,
        and would wait for ranks that do not compute the microbatch.
        """
        if len(batch.cuts) != batch.microbatches:
            raise UsageError(
                f"this rank has {len(batch.cuts)} of {batch.microbatches} microbatches;"
                ' Loader(whole_microbatches=True) is for reduction "fixed": leave it out'
            )

    def final(self, numbers: Sequence[int]) -> None:
        """Start the sum of final gradients, by their parameters' numbers in the storage.

        Raises:
            UsageError: after `release`.
        """
        self.check_not_released()

    def progress(self) -> None:
        """Poll the sums in flight."""

    def finish(self) -> None:
        """End a step: return when all gradients are summed. Collective.

        Raises:
            UsageError: after `release`.
        """
        self.check_not_released()
        self.storage.finish_gradients()
        self._now.summed, self.storage.unsummed = True, False
        self._witness.updates += 1

    def meet(
        self, numbers: Sequence[float], group: Group, norm: Callable[[], float]
    ) -> tuple[list[float], float]:
        """Return sums of some numbers over all ranks, and the gradient norm. Collective.

        It is the ranks' only meeting after `finish`.

        Args:
            numbers: at most 7.
            group: all ranks.
            norm: computes the norm.
        """
        with group.collective("numbers"):
            sums = group.sum_floats(numbers)
        result = sums, norm()
        group.count_sum(NUMBERS_BYTES, NATIVE)
        return result

    def update(self, optimizer: Optimizer, factor: float | Array) -> None:
        """Update the weights from the gradients times a factor."""
        scale(self.storage.grads, factor)
        optimizer.apply()

    def averaged(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Put the average of the weights in their place. Collective."""
        return optimizer.averaged()

    # ---- passes ----

    def begin_pass(self, last: bool) -> None:
        """Begin a pass; refuse it if its gradients would be added to another step's."""
        self.check_not_released()
        self.storage.check_tree()
        if self._now.summed and self.storage.has_gradients:
            raise UsageError(
                "the gradients of the last step are still there, summed over the ranks; call"
                " model.zero_grad() before each step (and backward(..., last=False) for all but the"
                " last of a step's losses)"
            )
        self._witness.begin_pass(not self.storage.unsummed)
        self._now.summed, self._now.last = False, last
        self.storage.unsummed, self.storage.spent = not last and self.group.size > 1, False

    def finish_pass(self) -> None:
        """End a complete pass: a hook for subclasses that sum units."""

    def end_pass(self) -> None:
        """End a pass, complete or ended by an exception."""
        self._now.last = None

    def sum_losses(self, losses: Mapping[int, float], group: Group) -> float:
        """Return this rank's part of the sum of all losses, given those of its microbatches.

        Args:
            losses: by microbatch.
            group: the ranks that compute losses.
        """
        return sum(losses.values())

    # ---- its state ----

    def state(self) -> Mapping[str, Mapping[Parameter, Array]]:
        """Return what the next sums depend on: live arrays by name and parameter. Collective.

        Checkpoints keep it, beside the optimizer's; see `per_replica`.
        """
        return MappingProxyType({})

    def loaded(self) -> None:
        """Take note that the arrays of `state` have the values of a checkpoint now."""

    @property
    def keeper(self) -> str:
        """The name of the class whose `state` this is; empty if there is none."""
        return ""

    @property
    def state_bytes(self) -> int:
        """The bytes held for `state`."""
        return 0

    # ---- at any time ----

    def describe(self) -> str:
        """Return how gradients are summed, as text."""
        return "by the caller"

    def check_equal(self) -> None:
        """Compare a hash of the parameters over all ranks, unless ZeRO shards them. Collective.

        Raises:
            CommError: on all ranks, naming a parameter that differs and the ranks.
        """
        if self.storage.is_whole:
            parameters = (
                span.parameter for span in self.storage.spans if not span.parameter.rank_local
            )
            weights = {parameter.name: parameter.data for parameter in parameters}
            check_equal(self.group, weights, "the weights of {} differ between the ranks")

    def release(self) -> None:
        """Detach from the model: remove hooks and statistics, free the communicator. Collective.

        A second call does nothing.

        Raises:
            UsageError: while an average of the weights is in their place.
        """
        self.storage.check_weights("release()")
        object.__setattr__(self, "released", True)
        self.storage.replicas = self.storage.ranks
        self.storage.strategy = None
        for span in self.storage.spans:
            span.parameter.guard = span.parameter.hook = None
        for _, module in self.model.named_modules():
            if getattr(module, "all_reduce", None) is not None:
                turns_of(self.group).close()
                module.all_reduce = None

    def _check_pass(self) -> None:
        """Refuse a backward pass outside of `backward`: its gradients would stay unsummed."""
        if self._now.last is None:
            raise UsageError(
                "this model's gradients must be summed over ranks: call parallel.backward(loss,"
                " samples) instead of loss.backward(), or parallel.release() first; or freeze it by"
                " requires_grad = False while another model's loss passes through it"
            )

    def check_not_released(self) -> None:
        """Refuse to continue after `release`, when each rank would use its own gradients.

        Raises:
            UsageError: after `release`.
        """
        if self.released:
            raise UsageError("this DataParallel (or its worker) was released; make a new one")


class DataParallel(Replicas, read_once="exchange"):
    """Data parallelism: `backward` sums the gradients over the ranks, in buckets. Collective.

    With "shared" or "auto" the gradients move to memory that the ranks of a node share, if
    available; otherwise `notice` says why not.

    Args:
        model, group, runs_backward: see `Replicas`.
        allreduce: the algorithm: a name in `comm.algorithms.registry.NAMES`, such as "auto",
            "native" or "ring"; or a function of your own.
        bucket_bytes: the longest bucket, unless one parameter is longer; None to choose (see
            `comm.gradients`).
        overlap: whether buckets are summed while the backward pass still runs, or all at its end.
            None to choose: overlap pays between nodes and with arrays on a device. On one node it
            does not, since a core that computes has no cycles to copy with (a small MLP's step took
            0.53 ms with overlap and 0.47 without, a large one's 31 and 29).

    Attributes:
        exchange: the buckets and their sums.

    Raises:
        CommError: on all ranks, when their models differ.
        UsageError: for an unknown algorithm or a bucket size below 1; for a model with another
            DataParallel, or with modules that were added after its initialization.

    Example:
        >>> def program(group):
        ...     model = nn.Linear(3, 2).initialize(seed=0)
        ...     parallel = nnmpi.DataParallel(model, group)
        ...     x, y = np.ones((group.rank + 1, 3), "float32"), np.zeros(group.rank + 1, int)
        ...     loss = ops.cross_entropy(model(x), y, reduction="sum")
        ...     parallel.backward(loss, samples=3)  # 1 + 2 rows on the two ranks
        ...     return model.bias.grad.astype(float).round(3).tolist()
        >>> nnmpi.simulate(program, 2)
        [[-0.726, 0.726], [-0.726, 0.726]]
    """

    @classmethod
    def why_not(cls, setting: StrategySetting) -> str:
        """See `Replicas.why_not`; it is meant for all that no other strategy is for."""
        return ""

    @classmethod
    def made_for(cls, setting: StrategySetting) -> Self:
        """See `Replicas.made_for`."""
        options = setting.options
        return cls(
            setting.model,
            setting.group,
            options.allreduce,
            options.bucket_bytes,
            options.overlap,
            runs_backward=setting.runs_backward,
        )

    def __init__(
        self,
        model: Module,
        group: Group,
        allreduce: AlgorithmLike = AUTO,
        bucket_bytes: int | None = None,
        overlap: bool | None = None,
        runs_backward: bool = True,
    ) -> None:
        check_free(model, group)
        storage = model.storage
        check_same_model(group, model)
        self._shared, self.notice = _share_gradients(storage, group, allreduce)
        spans = [  # gradients of one rank's experts are in no bucket
            (-1 if storage.rank_local[s.buffer] else s.buffer, s.start, s.stop)
            for s in storage.spans
        ]
        try:
            self.exchange = BucketedAllReduce(
                group, storage.grads, spans, allreduce, bucket_bytes, overlap
            )
        except NnmpiError:  # on all ranks
            _unshare_gradients(storage, group, self._shared)
            raise
        # Without hooks the tape is faster; they are useful only if sums begin before the pass ends.
        if group.size > 1 and runs_backward and self.exchange.overlap:
            for number, span in enumerate(storage.spans):
                span.parameter.hook = partial(self._final, number)
        super().__init__(model, group, runs_backward)

    def begin_pass(self, last: bool) -> None:
        """See `Replicas.begin_pass`."""
        self.check_not_released()
        if self.exchange.under_way:
            raise CommError(
                "the backward pass before this one ended in an exception while gradients were being"
                " summed; release this DataParallel and make a new one"
            )
        super().begin_pass(last)

    def final(self, numbers: Sequence[int]) -> None:
        """See `Replicas.final`."""
        super().final(numbers)
        for number in numbers:
            parameter = self.storage.spans[number].parameter
            parameter.finish_gradient()  # copy into flat storage if the caller set another array
            if not parameter.rank_local:
                self.exchange.ready(number)

    def progress(self) -> None:
        """See `Replicas.progress`."""
        self.exchange.progress()

    def finish(self) -> None:
        """See `Replicas.finish`."""
        super().finish()
        self.exchange.finish()

    def describe(self) -> str:
        """Return the buckets with their all-reduce algorithms and the reasons."""
        words = [counted(len(self.exchange.buckets), "bucket")]
        choice_of = {choice.algorithm: choice for choice in reversed(self.exchange.choices)}
        words += [f"{name} ({choice.reason})" for name, choice in reversed(choice_of.items())]
        words.append(
            "overlapped with the backward pass"
            if self.exchange.overlap
            else "after the backward pass"
        )
        sent = self.exchange.sent_bytes()
        if sent is not None:
            most, total = (format_bytes(int(item)) for item in sent)
            words.append(f"the busiest rank sends {most} in a step, all together {total}")
        return ", ".join(words)

    def release(self) -> None:
        """See `Replicas.release`."""
        if not self.released:
            super().release()
            self.exchange.free()
            _unshare_gradients(self.storage, self.group, self._shared)

    def _final(self, number: int, _: Parameter) -> None:
        if self._now.last:
            self.before_sum(number)
            self.final([number])


def _share_gradients(
    storage: FlatStorage, group: Group, allreduce: AlgorithmLike
) -> tuple[list[Array], str]:
    """Move gradients to shared memory, if useful; return its arrays, and why there are none.

    "auto" moves them although it may choose another algorithm later: it can choose shared memory
    only if the gradients are there.
    """
    long = any(grad.nbytes >= SHARED_BYTES for grad in storage.grads)
    if (
        any(map(is_device, storage.grads))  # staging allocates its own buffers in shared memory
        or any(storage.rank_local)
        or group.size == 1
        or not (allreduce == SHARED or (allreduce == AUTO and long))
    ):
        return [], ""
    arrays: list[Array] = []
    try:
        memory = group.memory()
        if len(set(memory.node_of)) == group.size:  # one rank per node
            return [], ""
        for grad in storage.grads:
            arrays.append(memory.allocate(grad.size, str(grad.dtype)))
    except DeviceError as error:
        if arrays:
            memory.drop(arrays)
        return [], f"gradients stay in private memory: {error}"
    storage.move(grads=arrays)
    return arrays, ""


def _unshare_gradients(storage: FlatStorage, group: Group, arrays: Sequence[Array]) -> None:
    """Move the gradients back to private memory, and free the shared memory. Collective."""
    if not arrays:
        return
    if any(grad is shared for grad, shared in zip(storage.grads, arrays, strict=True)):
        storage.move(grads=[np.zeros_like(grad) for grad in storage.grads])
    group.memory().drop(arrays)
