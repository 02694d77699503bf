"""Gradient sums and updates: one interface for a Worker, and a class for each way.

    begin(batch)                    a step begins
    parallel                        the strategy: its passes, and sums of gradients under them
    finish()                        the passes are over: wait for the sums
    meet(numbers) -> sums, norm     the ranks' only meeting: losses, gradient norm
    update(factor)                  new weights, from the gradients times a factor

    ZeroExchange     each rank has a shard of gradients, state and weights  parallel.zero
    FixedExchange    sums in an order that does not depend on the layout    parallel.fixed_reduction
    NodeExchange     sums and updates in memory that a node's ranks share   parallel.fused
    Exchange         all-reduces of buckets, during the backward or after   parallel.data

To add an exchange, write a class here or in a file of its own, and its condition in
`make_exchange`.

No exchange compresses gradients. Compression would break equality with the serial run, and the
planner predicts hardly any gain on the links that were tried.

The gradient norm is that of the full model's gradient, and each rank has a part of it. Every
element counts once:

    replicated over dp      the sum over a replica's ranks is complete
    replicated over tp      only the first rank of the tensor group counts it
    tied over stages        only the first stage counts it
    shards                  each rank counts its own
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from nnmpi.backend.array import namespace
from nnmpi.backend.kernels import kernels_of
from nnmpi.base.errors import DeviceError, NnmpiError, Settled, UsageError
from nnmpi.comm.algorithms.registry import NATIVE, SHARED
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.layout import GradientExchange
from nnmpi.compose.losses import SQUARES, DeferredScalars
from nnmpi.data.loader import Batch
from nnmpi.optim.clip import add_squares, global_norm, scale, sum_of_squares, trusted
from nnmpi.parallel.data import DataParallel, Replicas
from nnmpi.parallel.fixed_reduction import FixedReduction
from nnmpi.parallel.fused import FusedUpdate, fusing_pays
from nnmpi.parallel.replication import check_equal, check_replicas
from nnmpi.parallel.zero.strategy import ShardedDataParallel
from nnmpi.tensor.parameter import FlatStorage

if TYPE_CHECKING:
    from nnmpi.compose.trainer import Trainer

NUMBERS_BYTES = 4 * 8  # loss, correct predictions, targets and the step's check in float64


class Exchange(Settled, fixed="arrangement model optimizer group replicas parallel"):
    """All-reduces buckets of gradients over the replicas. Collective throughout.

    Other exchanges derive from it.

    Args:
        trainer: the owner of the gradients.
        options: how they are summed.

    Attributes:
        parallel: the strategy, as a loop of your own uses it; a full model's backwards are its
            passes.
        keeps_own: whether each rank still has its own gradients after a failed step.
        is_fused: whether the sum is fused with the update, which overwrites the gradients.
        holders: the ranks that share a node's single copy of parameters and optimizer state; 1 if
            each rank has its own.
        notice: an option that could not be used as given, and why; otherwise empty.
        updates_in_passes: whether weights are updated within passes, after every microbatch.
        squares: the sum that `note_squares` noted, once it is read; NaN for none.
    """

    keeps_own: ClassVar[bool] = True
    is_fused: ClassVar[bool] = False
    holders = 1
    _meeting: tuple[int, str] = NUMBERS_BYTES, NATIVE  # of the ranks: its bytes and its all-reduce
    squares = math.nan
    _is_wide = False  # whether a kernel sums them in float64, where no small ones are lost

    def __init__(self, trainer: Trainer, options: GradientExchange) -> None:
        arrangement = self.arrangement = trainer.arrangement
        self.model = trainer.model
        self.optimizer = trainer.optimizer
        self.group = trainer.group
        self.replica_group = arrangement.mesh.replicas
        # a full model, whose hooks report final gradients; otherwise the pass's program does
        self._is_uncut = not arrangement.stages
        self.updates_in_passes = arrangement.layout.asynchronous
        self.strategy = self._start(options)
        self.notice = self.strategy.notice

    def _start(self, options: GradientExchange) -> Replicas:
        args = (options.allreduce, options.bucket_bytes, options.overlap)
        return DataParallel(self.model, self.replica_group, *args, runs_backward=self._is_uncut)

    @property
    def has_norm(self) -> bool:
        """Whether there is a gradient of the whole step."""
        return not self.updates_in_passes

    def begin(self, batch: Batch) -> None:
        """Begin a step; refuse a batch whose shares do not fit this exchange.

        Only a fixed order of sums has microbatches of a single rank. Here layers may communicate,
        and would wait for ranks that do not compute the microbatch.
        """
        if len(batch.cuts) != batch.microbatches:
            raise UsageError(
                f"this rank has {len(batch.cuts)} of {batch.microbatches} microbatches;"
                ' Loader(whole_microbatches=True) is for reduction "fixed": leave it out'
            )

    def finish(self) -> None:
        """Finish the sums, also of parameters tied between stages."""
        self.strategy.finish()
        self._sum_ties()

    def note_squares(self, scalars: DeferredScalars) -> None:
        """Add the squares of a device's gradient to the step's numbers, to be read with them."""
        grads = self.model.storage.grads
        if self.arrangement.is_plain and grads and not isinstance(grads[0], np.ndarray):
            self._is_wide = kernels_of(grads[0]).of_device
            add_squares(grads, scalars.place(SQUARES, namespace(grads[0])))

    def sum_numbers(self, numbers: Sequence[float]) -> tuple[list[float], float]:
        """Return sums of some numbers over all ranks, and the gradient norm.

        The norm is NaN if weights are updated within a pass.
        """
        with self.group.collective("numbers"):
            sums = self.group.sum_floats(numbers)
        if not self.has_norm:
            norm = math.nan
        elif trusted(self.squares) or (self._is_wide and math.isfinite(self.squares)):
            norm = math.sqrt(self.squares)
        else:
            norm = gradient_norm(self.model.storage, self.arrangement)
        self.group.count_sum(*self._meeting)
        return sums, norm

    def update(self, factor: float) -> None:
        """Update the weights from the gradients times a factor."""
        scale(self.model.storage.grads, factor)
        self.optimizer.step()

    def describe(self) -> str:
        """Return how gradients are summed, as text."""
        if self.group.size == 1:
            return "none, one rank has nothing to add"
        if self.replica_group.size == 1:
            return "none of gradients, as there is one replica"
        return ", ".join(filter(None, [self._describe(), self.notice]))

    def _describe(self) -> str:
        return self.strategy.describe()

    def check_equal(self) -> None:
        """Compare hashes of replicated state: replicas, tensor groups, tied stages.

        Raises:
            CommError: on all ranks of the group in question, naming the parameter.
        """
        self.strategy.check_equal()
        arrangement = self.arrangement
        if not self.model.storage.is_whole:
            return
        if arrangement.mesh.tp.size > 1:
            check_replicas(self.model, arrangement.mesh.tp)
        for tie in arrangement.ties:
            problem = "the weights of {} differ between the ranks of the stages that share it"
            check_equal(tie.group, {tie.parameter.name: tie.parameter.data}, problem)

    def release(self) -> None:
        """Detach from the model; a second call does nothing."""
        self.strategy.release()

    def _sum_ties(self) -> None:
        """Sum the gradients of parameters that stages on several ranks share."""
        for tie in self.arrangement.ties:  # in the same order on all ranks of the pipeline
            tie.parameter.finish_gradient()
            grad = tie.parameter.grad
            assert grad is not None
            total = namespace(grad).ascontiguousarray(grad)
            tie.group.all_reduce(total.reshape(-1), check=False)
            grad[...] = total


class NodeExchange(Exchange):
    """Sums gradients and updates weights at once, in memory that the ranks of a node share."""

    is_fused = True

    def _start(self, options: GradientExchange) -> Replicas:
        self._fused = FusedUpdate(self.model.storage, self.optimizer, self.group)
        self.holders = self._fused.memory.size
        # priced as a shared all-reduce, which writes more, and reads as much
        self._meeting = sum(grad.nbytes for grad in self.model.storage.grads), SHARED
        try:
            return Replicas(self.model, self.replica_group)
        except NnmpiError:  # on all ranks
            self._fused.release()
            raise

    def sum_numbers(self, numbers: Sequence[float]) -> tuple[list[float], float]:
        """See `Exchange.sum_numbers`; the numbers are summed with the gradients."""
        with self.group.collective("gradients"):
            norm, sums = self._fused.reduce(numbers)
        self.group.count_sum(*self._meeting)
        return sums, norm

    def update(self, factor: float) -> None:
        """See `Exchange.update`."""
        self._fused.update(factor)
        self.model.storage.zero_grad()  # what is left is no gradient

    def _describe(self) -> str:
        return "fused with the update, through shared memory"

    def release(self) -> None:
        """See `Exchange.release`."""
        if not self.strategy.released:
            super().release()
            self._fused.release()


class ZeroExchange(Exchange):
    """Reduce-scatters gradients: each rank has its shard of gradients, state and weights."""

    keeps_own = False

    def _start(self, options: GradientExchange) -> Replicas:
        return ShardedDataParallel(
            self.model,
            self.replica_group,
            self.arrangement.layout.zero,
            options.algorithm,
            runs_backward=self._is_uncut,
        )

    def finish(self) -> None:
        """See `Exchange.finish`; ties come first, as each rank has another shard afterwards."""
        self._sum_ties()
        self.strategy.finish()


class FixedExchange(Exchange):
    """Sums the microbatches' gradients in one tree, for any number of replicas."""

    keeps_own = False

    def _start(self, options: GradientExchange) -> Replicas:
        # checked once, in the first batch, on all ranks
        self._is_unchecked = self.arrangement.layout.activation_memory is not None
        self._sums = FixedReduction(self.model, self.replica_group)
        return self._sums

    def begin(self, batch: Batch) -> None:
        """See `Exchange.begin`."""
        if len(batch.cuts) == batch.microbatches and len(batch.y) != batch.global_rows:
            raise UsageError(
                f"this rank has a part of each of {batch.microbatches} microbatches, but reduction"
                ' "fixed" needs whole ones; give step the batches of a Loader with rank, world,'
                " microbatches and whole_microbatches=True"
            )
        unchecked, self._is_unchecked = self._is_unchecked, False
        if unchecked and 0 in self.group.gather(len(batch.cuts)):
            raise UsageError(
                "ranks without samples cannot take part in the plan for activations with reduction"
                " fixed; give a larger batch, fewer ranks, or no activation_memory"
            )
        self._sums.begin(batch.microbatches)


def make_exchange(trainer: Trainer, options: GradientExchange) -> Exchange:
    """Return the exchange for a trainer's layout, its options and the memory. Collective."""
    layout, why = trainer.arrangement.layout, _why_separate(trainer)
    fuses = options.fused_update
    if fuses is None:
        fuses = options.leaves_choice and not why and fusing_pays(trainer.model, trainer.group)
    if fuses and not why:
        try:
            return NodeExchange(trainer, options)
        except DeviceError as error:  # on all ranks: a node may have no such memory
            why = f"{error}"
    kind = ZeroExchange if layout.zero else FixedExchange if layout.fixed else Exchange
    result = kind(trainer, options)
    if fuses:
        result.notice = f"the update is not fused: {why}"
    return result


def _why_separate(trainer: Trainer) -> str:
    """Return why sums and updates cannot be fused; empty if they can."""
    reasons = {
        "it needs replicas of a full model, whose sums have no fixed order": (
            not trainer.arrangement.is_plain
        ),
        "the optimizer's state is out of memory": trainer.model.storage.state_store is not None,
        "the weights are on a device, not in a node's shared memory": trainer.backend.is_device,
        f"{type(trainer.optimizer).__name__} updates whole matrices, not a rank's part of them": (
            not trainer.optimizer.elementwise
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def gradient_norm(storage: FlatStorage, arrangement: Arrangement) -> float:
    """Return the Euclidean norm of the global gradient. Collective over the replica's ranks."""
    if arrangement.is_plain:
        return global_norm(storage.grads)
    # with expert parallelism replicas have different shards, and each adds those that it writes;
    # with ZeRO each has parts of its own of everything
    has_experts, has_parts = arrangement.layout.expert_parallel, arrangement.layout.zero > 0
    counts = arrangement.writes_here if has_experts and not has_parts else arrangement.counts_here
    squares = [
        sum_of_squares([grad])
        for span, _, grad in storage.held()
        if grad is not None and counts(span.parameter)
    ]
    total = math.fsum(squares) if all(map(math.isfinite, squares)) else sum(squares)  # rounded once
    mesh = arrangement.mesh
    group = mesh.world if has_parts or has_experts else mesh.model
    with group.collective("norm"):
        return math.sqrt(group.sum_floats([total])[0])
