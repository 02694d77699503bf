"""What a Worker leaves to a runner: taking a batch forward and backward, and summing gradients over replicas."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.casting import widened
from nnmpi.comm.exchange import Traffic
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.given import Given
from nnmpi.compose.readings import Readings
from nnmpi.data.loader import Batch
from nnmpi.errors import UsageError
from nnmpi.nn.module import Module
from nnmpi.ops.loss import cross_entropy
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.data import DataParallel
from nnmpi.parallel.pipeline import PassReport
from nnmpi.parallel.sharded.cross_entropy import best_classes
from nnmpi.parallel.sharded.cross_entropy import cross_entropy as sharded_cross_entropy
from nnmpi.tensor.tensor import Tensor

LOSS, CORRECT = "loss", "correct"  # the names of their sums in `Readings`

SumLoss: TypeAlias = Callable[[Tensor, Array], Tensor]
Correct: TypeAlias = Callable[[Tensor, Given], Array | float]
Values: TypeAlias = Mapping[Hashable, float]
Sums: TypeAlias = Callable[[Values], tuple[float, float]]


@dataclass(frozen=True)
class Outcome:
    """What a batch gave on this rank. Of ranks that compute the same, one counts and the others give zeros.

    Attributes:
        sums: returns, of what was read of the runner's `Readings` since, the sum of the losses of the samples that this
            rank counts, and how many of them were right (NaN where there are no class labels). Collective.
        rows: how many samples these are.
        traffic: what was communicated for it.
        report: of the pass through the pipeline; None without one.
        staleness: by how many updates the weights of each microbatch's forward were older than those that its
            gradient changed; empty where there is only one update.
    """

    sums: Sums
    rows: int
    traffic: Traffic = Traffic()
    report: PassReport | None = None
    staleness: tuple[int, ...] = ()


class Runner(Protocol):
    """Takes batches through a model that lies on the ranks in one way or another. Everything is collective.

    Attributes:
        readings: the numbers that are to be known of a step at its end.
        parallel: sums the gradients over the replicas.
        updates: whether weights are updated on the way, and not once by the Worker.
    """

    readings: Readings
    parallel: DataParallel
    updates: bool

    def run(self, batch: Batch, step: int, scale: float) -> Outcome:
        """Compute the gradients of the batch's mean loss, summed over the replicas; on a device, do not wait for them.

        Args:
            step: the number of the update, which keys dropout.
            scale: what the gradients are multiplied by (see `optim.loss_scale`).
        """

    def evaluate(self, batch: Batch, readings: Readings) -> int:
        """Add LOSS and CORRECT of the samples that this rank counts, in evaluation mode; return their number."""

    def explain(self, batch: Batch, step: int, value: float) -> Exception:
        """Return the error that says where a loss or gradient that is not finite came from."""

    def release(self) -> None:
        """Take everything off the model again; a second call does nothing."""


def check_cuts(batch: Batch, fixed: bool) -> None:
    """Refuse a batch that was dealt to the replicas in another way than they sum gradients.

    Raises:
        UsageError: for whole microbatches without a fixed order of sums, as layers that communicate would not meet; and
            for parts of them with one.
    """
    if not fixed and len(batch.cuts) != batch.microbatches:
        raise UsageError(
            f"this rank has {len(batch.cuts)} of {batch.microbatches} microbatches, as Loader(whole=True) deals them "
            'for reduction "fixed"; leave whole out'
        )
    if fixed and len(batch.cuts) == batch.microbatches and len(batch.y) != batch.global_rows:
        raise UsageError(
            f'this rank has a part of each of {batch.microbatches} microbatches, but with reduction "fixed" each is '
            "one replica's alone; give Loader(whole=True)"
        )


def sum_cross_entropy(arrangement: Arrangement | None, label_smoothing: float = 0.0) -> SumLoss:
    """Return the sum of the samples' cross-entropies for logits as an arrangement's model gives them.

    That is of this rank's classes alone, where they are shared out: no rank gathers them.
    """
    options: dict[str, Any] = {"reduction": "sum", "label_smoothing": label_smoothing}
    if arrangement is None or not arrangement.classes:
        return partial(cross_entropy, **options)
    return partial(sharded_cross_entropy, group=arrangement.mesh.tp, classes=arrangement.classes, **options)


def check_optimizer(model: Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that would update other arrays than the model's.

    Raises:
        UsageError: saying what to do.
    """
    if optimizer.storage is not model.storage:
        raise UsageError(
            "the optimizer works on other arrays than the model's; make it over model.storage, after the last "
            "model.initialize()"
        )


def check_loss(loss: SumLoss, arrangement: Arrangement | None) -> None:
    """Refuse a loss that is a mean, or would see this rank's classes alone and take them for all.

    Raises:
        UsageError: naming what to do.
    """
    _refuse_mean(loss)
    if arrangement is None or not arrangement.classes:
        return
    if getattr(loss, "func", None) is not sharded_cross_entropy:
        raise UsageError(
            f"the {arrangement.classes} classes are shared out over tp {arrangement.mesh.tp.size} (Sharding.VOCAB), so "
            "this loss would see a part of them alone; take compose.runner.sum_cross_entropy(arrangement), or "
            "Sharding.COLUMN, after which the logits are whole"
        )


def _refuse_mean(loss: SumLoss) -> None:
    """Refuse a loss that says by its arguments that it is no sum, such as `cross_entropy` as it stands."""
    try:
        reduction = inspect.signature(loss).parameters.get("reduction")
    except (TypeError, ValueError):  # a callable that has no signature
        return
    if reduction is not None and reduction.default != "sum":
        raise UsageError(
            f"the loss has reduction={reduction.default!r}, but a Worker divides the sum of all ranks' losses once: "
            'give it partial(loss, reduction="sum")'
        )


def correct_of(arrangement: Arrangement | None) -> Correct:
    """Return what counts right answers for logits as an arrangement's model gives them."""
    if arrangement is None or not arrangement.classes:
        return count_correct
    group, classes = arrangement.mesh.tp, arrangement.classes

    def count(logits: Tensor, given: Given) -> float:
        labels = Tensor(given.y).numpy() if given.labels is None else given.labels
        return float((best_classes(logits.data, group, classes) == labels).sum())

    return count


def count_correct(logits: Tensor, given: Given) -> Array | float:
    """Return how many rows have their largest logit at their label; NaN where there are no class labels.

    On a device that is an array of one number, for which nobody has waited.
    """
    y = given.y
    if logits.ndim != y.ndim + 1 or y.dtype.kind not in "iu":
        return float("nan")
    values = widened(namespace(logits.data), logits.data)  # of bfloat16 not every library finds the largest
    hits: Array = (values.argmax(axis=-1) == y).sum()
    return hits
