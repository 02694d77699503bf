"""A Worker's gradients: a strategy sums them, and the arrangement says whose they are.

    begin(batch)                    a step begins
    strategy                        its hooks and sums, during and after backward passes
    finish()                        the passes are over: wait for the sums
    meet(numbers) -> sums, norm     the ranks' only meeting: losses, gradient norm
    update(factor)                  new weights, from the gradients times a factor

    SummedReplicas       sums by a class of the user's, or compressed       parallel.summed
    ShardedDataParallel  each rank has shards of gradients, state, weights  parallel.zero
    FixedReduction       sums in an order independent of the layout         parallel.fixed_reduction
    FusedReplicas        sums, updates in memory that a node's ranks share  parallel.fused
    DataParallel         all-reduces of buckets, in the backward or after   parallel.data

To add a strategy, derive a class from `parallel.data.Replicas`, in a file of its own, and name it
in STRATEGIES. It says itself for which options and layouts it is meant, and owns its state.

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
from typing import TYPE_CHECKING

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.kernels import kernels_of
from nnmpi.base.errors import DeviceError
from nnmpi.base.settled import Settled
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.layout import GradientExchange
from nnmpi.compose.scalars import SQUARES, DeferredScalars
from nnmpi.data.loader import Batch
from nnmpi.optim.clip import add_squares, global_norm, sum_of_squares, trusted
from nnmpi.parallel.data import DataParallel, Replicas, StrategySetting
from nnmpi.parallel.fixed_reduction import FixedReduction
from nnmpi.parallel.fused import FusedReplicas
from nnmpi.parallel.replication import check_equal, check_replicas
from nnmpi.parallel.summed import SummedReplicas
from nnmpi.parallel.zero.strategy import ShardedDataParallel
from nnmpi.tensor.parameter import FlatStorage

if TYPE_CHECKING:
    from nnmpi.compose.trainer import Trainer


# In the order in which they are asked. The last one is meant for all that the others are not for.
STRATEGIES: tuple[type[Replicas], ...] = (
    SummedReplicas,
    FusedReplicas,
    ShardedDataParallel,
    FixedReduction,
    DataParallel,
)


class Exchange(Settled, read_once="arrangement model optimizer group strategy"):
    """Sums gradients by a strategy, and those of tied parameters. Collective throughout.

    Args:
        trainer: the owner of the gradients.
        strategy: sums them over the replicas.
        notice: an option that could not be used as given, and why; otherwise empty.

    Attributes:
        strategy: as a loop of your own uses it; a full model's backwards are its passes.
        updates_in_passes: whether weights are updated within passes, after every microbatch.
        squares: the sum that `note_squares` noted, once it is read; NaN for none.
    """

    squares = math.nan
    _is_wide = False  # whether a kernel sums them in float64, where no small ones are lost

    def __init__(self, trainer: Trainer, strategy: Replicas, notice: str = "") -> None:
        self.arrangement, self.model = trainer.arrangement, trainer.model
        self.optimizer, self.group, self.strategy = trainer.optimizer, trainer.group, strategy
        self.updates_in_passes = self.arrangement.layout.asynchronous
        self.notice = notice or strategy.notice

    def begin(self, batch: Batch) -> None:
        """Begin a step; refuse a batch whose shares do not fit the strategy."""
        self.strategy.begin_step(batch)

    def finish(self) -> None:
        """Finish the sums, also of parameters tied between stages."""
        # with shards each rank has another part afterwards; a sum that is not linear must be given
        # the same on all ranks of a tie, as what it leaves out and keeps is one state of them all
        ties_first = not (self.strategy.keeps_own and self.strategy.is_linear)
        if ties_first:
            self._sum_ties()
        self.strategy.finish()
        if not ties_first:
            self._sum_ties()

    def note_squares(self, scalars: DeferredScalars) -> None:
        """Add the squares of a device's gradient to the step's numbers, to be read with them."""
        grads = self.model.storage.grads
        if self.arrangement.is_plain and grads and not isinstance(grads[0], np.ndarray):
            self._is_wide = kernels_of(grads[0]).of_device
            add_squares(grads, scalars.place(SQUARES, namespace(grads[0])))

    def meet(self, numbers: Sequence[float]) -> tuple[list[float], float]:
        """Return sums of some numbers over all ranks, and the gradient norm.

        The norm is NaN if weights are updated within a pass.
        """
        return self.strategy.meet(numbers, self.group, self._norm)

    def _norm(self) -> float:
        if self.updates_in_passes:  # there is no gradient of the whole step
            return math.nan
        if trusted(self.squares) or (self._is_wide and math.isfinite(self.squares)):
            return math.sqrt(self.squares)
        return gradient_norm(self.model.storage, self.arrangement)

    def update(self, factor: float | Array) -> None:
        """Update the weights from the gradients times a factor."""
        self.strategy.update(self.optimizer, factor)

    def describe(self) -> str:
        """Return how gradients are summed, as text."""
        if self.strategy.group.size == 1 and not self.strategy.acts_alone:
            if self.group.size == 1:
                return "none, one rank has nothing to add"
            return "none of gradients, as there is one replica"
        return ", ".join(filter(None, [self.strategy.describe(), self.notice]))

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


def make_exchange(trainer: Trainer, options: GradientExchange) -> Exchange:
    """Return the exchange for a trainer's layout, its options and the memory. Collective.

    The strategies are asked in their order; the first one that is meant for the setting is made.
    """
    arrangement = trainer.arrangement
    setting = StrategySetting(
        model=trainer.model,
        optimizer=trainer.optimizer,
        group=arrangement.mesh.replicas,
        world=trainer.group,
        options=options,
        layout=arrangement.layout,
        is_plain=arrangement.is_plain,
        runs_backward=not arrangement.stages,
        on_device=trainer.backend.is_device,
    )
    notice = ""
    for kind in STRATEGIES:
        why, is_told = kind.why_not(setting), kind.is_asked(options)
        if not why:
            try:
                return Exchange(trainer, kind.made_for(setting), notice)
            except DeviceError as error:  # on all ranks
                if not kind.unused:
                    raise
                why, is_told = f"{error}", True
        if is_told:
            notice = f"{kind.unused}: {why}"
    raise AssertionError("the last strategy is meant for all settings")


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
