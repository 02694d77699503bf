"""AsynchronousWorker: data-parallel training in which ranks need not be in step.

Gradients and weights go through a parameter server, or every rank trains alone and averages its weights now and then.

    worker = AsynchronousWorker(model, optimizer, group, Sync("ssp", staleness=4))
    for epoch in range(10):
        segment = worker.run(loader, epoch, 0, loader.batches_per_epoch, step=..., lr=lambda step: 0.1)
        print(worker.evaluate(test_loader.epoch(0)).accuracy, segment.staleness.mean())

Every rank runs the same calls. Between two of them all ranks have the same weights, so that evaluations and checkpoints
are those of any other run; within `run` each goes on as soon as its way of synchronization lets it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

import nnmpi.clock as clock
from nnmpi.backend.backend import Backend
from nnmpi.comm.agreement import agreed
from nnmpi.comm.group import Group
from nnmpi.compose.layout import DEFAULT_NUMERICS, Numerics
from nnmpi.compose.losses import SumLoss, check_loss
from nnmpi.compose.passes import evaluate_all
from nnmpi.compose.runners import AveragingRunner, LocalGradient, ParameterServerRunner
from nnmpi.compose.stats import Totals
from nnmpi.compose.trainer import (
    SegmentReport,
    Trainer,
    TrainingSegment,
    check_numerics,
    check_optimizer,
    refuse_scaling,
)
from nnmpi.data.loader import Batch
from nnmpi.errors import DivergenceError, UsageError
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.averaging import average
from nnmpi.parallel.replication import broadcast_state, check_free
from nnmpi.synchrony.consistency import Staleness
from nnmpi.synchrony.slow import NOT_SLOW, Slow
from nnmpi.synchrony.sync import Sync

SHOWN_WORKERS = 16


class AsynchronousWorker(Trainer):
    """Trains and evaluates a model on ranks that meet only now and then. Making one is collective.

    Args:
        model: initialized; all ranks begin with rank 0's parameters and buffers.
        optimizer: made over `model.storage`.
        group: all ranks.
        sync: how they go on; see `synchrony.sync`.
        loss: the name of one, or (logits, labels) -> the *sum* of the samples' losses; cross-entropy by default.
        evaluation_loss: the same for `evaluate`; `loss` by default.
        numerics: the precision, and the largest length of the gradient of one worker's part.
        seed: of the run; keys dropout masks.
        backend: where the model lives; NumPy by default.
        slow: how long steps last at least, and stragglers.

    Batch normalization takes the statistics of a worker's own part; the running ones are averaged when the ranks meet.

    Raises:
        UsageError: for an optimizer of other arrays than the model's, a model that has a strategy already, a loss with
            `reduction="mean"`, and a way of synchronization that this number of ranks cannot have.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        group: Group,
        sync: Sync,
        loss: SumLoss | str | None = None,
        evaluation_loss: SumLoss | None = None,
        numerics: Numerics = DEFAULT_NUMERICS,
        seed: int = 0,
        backend: Backend | None = None,
        slow: Slow = NOT_SLOW,
    ) -> None:
        super().__init__(model, optimizer, group, loss, evaluation_loss, numerics, seed, backend, slow)
        self.sync = sync
        with agreed(group):  # only rank 0 has hooks in a model
            self._check()
        broadcast_state(model, group)
        self._gradient = LocalGradient(self)
        self.runner: ParameterServerRunner | AveragingRunner
        if sync.has_server:
            self.runner = ParameterServerRunner(self, sync, self._gradient)
            self.reporters = group.size
        else:
            self.runner = AveragingRunner(self, sync, self._gradient)
        self._told = SegmentReport()  # of the segments since the last summary

    def _run(self, segment: TrainingSegment) -> SegmentReport:
        self.group.barrier()  # so that nobody counts as waiting what others still had to do
        begin = clock.now()
        report, broken, batches = self.runner.run(segment)
        report = meet(self.group, report, broken, batches, clock.now() - begin)
        average_buffers(self.model, self.group, self.runner.steps_done)
        self._told = self._told.plus(report)
        return report

    def evaluate(self, batches: Iterable[Batch]) -> Totals:
        """See `Trainer.evaluate`."""
        return evaluate_all(self.group, batches, self._gradient.evaluate)

    def summary(self) -> list[str]:
        """Return lines about how stale gradients were, and what was sent, since the last call."""
        told, self._told = self._told, SegmentReport()
        return describe_segments(told)

    def release(self) -> None:
        """See `Trainer.release`."""
        self.runner.release()
        super().release()

    def _check(self) -> None:
        """Refuse what does not go together."""
        check_optimizer(self.model, self.optimizer)
        if not self.sync.asynchronous:
            raise UsageError("a synchronous run is done by nnmpi.Worker; give Sync another mode")
        check_numerics(self)
        refuse_scaling(self.precision, f"with {self.sync.mode}")
        self.sync.check(self.group.size)
        check_free(self.model)
        for loss in (self.loss, self.evaluation_loss):
            check_loss(loss, None)
        self.slow.check(self.group.size)


def meet(group: Group, own: SegmentReport, broken: str, batches: int, seconds: float) -> SegmentReport:
    """Return what all ranks did in a segment. Collective.

    Args:
        own: what this rank did; each of its gradients is a step.
        broken: the sentence about a loss or gradient that was not finite; else empty.
        batches, seconds: of the segment; those of rank 0 count.

    Raises:
        DivergenceError: on all ranks, when one of them found a value that is not finite.
    """
    stale = None if own.staleness is None else own.staleness.to_json()
    values = {**vars(own), "totals": own.totals.to_json(), "staleness": stale}
    gathered = group.gather([values, broken, batches, seconds])
    for _, sentence, *_ in gathered:
        if sentence:
            raise DivergenceError(sentence)
    report = reduce(SegmentReport.plus, [_from_json(values) for values, *_ in gathered])
    _, _, batches, seconds = gathered[0]
    totals = report.totals.mean_over(group.size, batches)
    return replace(report, totals=replace(totals, steps=batches, wall_s=seconds))


def _from_json(values: Mapping[str, Any]) -> SegmentReport:
    stale = values["staleness"]
    parts = {"totals": Totals.from_json(values["totals"]), "staleness": stale and Staleness.from_json(stale)}
    return SegmentReport(**{**values, **parts})


def average_buffers(model: Module, group: Group, steps: int) -> None:
    """Let running statistics be the mean of all ranks', each counted by the steps that it did. Collective.

    A rank's own statistics have seen its own samples alone; where nobody did a step nothing changes.
    """
    total = group.sum_floats([steps])[0]
    if group.size == 1 or not total:
        return
    average((buffer.data for _, buffer in model.named_buffers()), group, steps / total)


def describe_segments(total: SegmentReport) -> list[str]:
    """Say how stale gradients were, how far apart weights and workers, and how much was sent, over some segments."""
    steps = total.batches
    if not steps:
        return []
    sent = f"{total.messages / steps:.3g} messages with {total.bytes / steps / 2**20:.3g} MB per step"
    return [*_stale(total), f"{sent}, over all ranks"]


def _stale(total: SegmentReport) -> list[str]:
    """Return how stale gradients were, and how far apart the ranks' weights."""
    far, stale, lead = total.disagreement, total.staleness, total.lead
    words = []
    if stale is not None:
        counts = [stale.count(worker) for worker in range(len(stale.histograms))]
        shown = ", ".join(map(str, counts[:SHOWN_WORKERS])) + (", ..." if len(counts) > SHOWN_WORKERS else "")
        words = [f"staleness {stale.mean():.2f} on average, at most {stale.largest()}"]
        words += [f"at most {lead} {'step' if lead == 1 else 'steps'} ahead"] if lead else []
        words += [f"steps by worker: {shown}"]
    words += [f"weights differed by {100 * far:.2g} % before they were averaged at the end"] if far else []
    return ["; ".join(words)] if words else []
