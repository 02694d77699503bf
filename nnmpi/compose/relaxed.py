"""RelaxedWorker: data-parallel training in which ranks need not be in step: through servers, locally, or by gossip.

    worker = RelaxedWorker(model, optimizer, group, Sync("ssp", staleness=4))
    for epoch in range(10):
        report = worker.run(loader, epoch, 0, loader.batches_per_epoch, step=..., lr=lambda step: 0.1)
        print(worker.evaluate(test_loader.epoch(0)).accuracy, report.staleness.mean())

Every rank runs the same calls. Between two of them all ranks have the same weights, so that evaluations and checkpoints
are those of any other run; within `run` each goes on as soon as its way of synchronisation lets it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

from nnmpi.backend.precision import precision as mode_of
from nnmpi.backend.precision import use_precision
from nnmpi.backend.record import Backend, numpy_backend
from nnmpi.comm.agree import agreed
from nnmpi.comm.group import Group
from nnmpi.compose.evaluation import evaluate_all, evaluate_batch
from nnmpi.compose.gradient import LocalGradient
from nnmpi.compose.meeting import average_buffers
from nnmpi.compose.pace import Pace
from nnmpi.compose.pairs import check_precision, refuse_scaling
from nnmpi.compose.report import EvalReport
from nnmpi.compose.runner import SumLoss, check_loss, check_optimizer, count_correct, sum_cross_entropy
from nnmpi.compose.segment import Progress, SegmentReport
from nnmpi.compose.served import Served
from nnmpi.compose.state import model_state, optimizer_state, served_state
from nnmpi.compose.unserved import Unserved
from nnmpi.data.loader import Batch, Loader
from nnmpi.errors import UsageError
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.data import check_free, share_state
from nnmpi.parallel.state import LayoutState
from nnmpi.synchrony.sync import Sync

Rate: TypeAlias = Callable[[int], float]
Tell: TypeAlias = Callable[[Progress], None]
Asked: TypeAlias = Callable[[], int]


class RelaxedWorker:
    """Trains and evaluates a model on ranks that meet only now and then. Making one is collective.

    Args:
        model: initialized; all ranks begin with rank 0's parameters and buffers.
        optimizer: made over `model.storage`.
        group: all ranks, the dedicated servers too.
        sync: how they go on; see `synchrony.sync`.
        loss: (logits, labels) -> the *sum* of the samples' losses; cross-entropy by default.
        evaluation_loss: the same for `evaluate`; `loss` by default.
        clip: the largest length of the gradient of one worker's part, or None. (A synchronous run without servers clips
            the gradient of the whole batch.)
        seed: of the run; keys dropout masks.
        backend: where the model lives; NumPy by default.
        pace: the least time of a step, and stragglers.
        synchronous: let no message leave before its receive is posted (for tests).
        precision: of products, see `backend.precision`; by default that of the context. fp16 is for synchronous runs.

    Batch normalization takes the statistics of a worker's own part; the running ones are averaged when the ranks meet.

    Raises:
        UsageError: for an optimizer of other arrays than the model's, a model that has a strategy already, a loss with
            `reduction="mean"`, and a way of synchronisation that this number of ranks cannot have.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        group: Group,
        sync: Sync,
        loss: SumLoss | None = None,
        evaluation_loss: SumLoss | None = None,
        clip: float | None = None,
        seed: int = 0,
        backend: Backend | None = None,
        pace: Pace | None = None,
        synchronous: bool = False,
        precision: str | None = None,
    ) -> None:
        pace = Pace() if pace is None else pace
        self.model, self.optimizer, self.group, self.sync = model, optimizer, group, sync
        self.loss: SumLoss = sum_cross_entropy(None) if loss is None else loss
        self.evaluation_loss = self.loss if evaluation_loss is None else evaluation_loss
        self.backend = numpy_backend() if backend is None else backend
        self.precision = mode_of() if precision is None else precision
        with agreed(group):  # only servers' ranks have hooks in a model
            self._check(pace)
        self.seed = seed
        share_state(model, group)
        gradient = LocalGradient(model, self.loss, self.backend, seed, clip, precision=self.precision)
        self.runner = (
            Served(model, optimizer, group, sync, gradient, pace, self.backend, synchronous)
            if sync.served
            else Unserved(model, optimizer, group, sync, gradient, pace, seed)
        )

    def run(
        self,
        loader: Loader,
        epoch: int,
        first: int,
        stop: int,
        step: int,
        lr: Rate,
        bsp: bool = False,
        progress: Tell | None = None,
        asked: Asked | None = None,
    ) -> SegmentReport:
        """Train on the batches first..stop-1 of an epoch, and meet. Collective.

        Args:
            loader: of the training data. Through servers, any rank's; else this rank's own part.
            step: the number of batches before them in the whole run, which keys dropout and the learning rate.
            lr: the learning rate of a step.
            bsp: whether the workers stay in step this time: a warm-up.
            progress: called on rank 0: for every gradient that a server gets, or for its own steps.
            asked: whether this rank got a signal, and which; then all end after a whole batch.

        Returns:
            What was done; `batches` may be fewer, after a signal.

        Raises:
            DivergenceError: on all ranks, when a loss or gradient was not finite; it was not used.
            UsageError: for a loader of another part than this rank's, where it matters.
        """
        self.group.barrier()  # so that nobody counts as waiting what others still had to do
        begin = time.perf_counter()
        report = self.runner.run(
            loader, epoch, range(first, stop), step, lr, bsp, progress or (lambda _: None), asked or (lambda: 0), begin
        )
        average_buffers(self.model, self.group, self.runner.steps_done)
        return report

    def evaluate(self, batches: Iterable[Batch]) -> EvalReport:
        """Return loss and accuracy over this rank's parts of all batches, put together over the ranks; collective."""
        one = partial(evaluate_batch, self.model, self.evaluation_loss, count_correct, self.backend)
        with use_precision(self.precision):
            return evaluate_all(self.group, batches, one, self.backend)

    def state(self) -> tuple[LayoutState, LayoutState]:
        """Return the model's and the optimizer's arrays as those of the whole model; see `Worker.state`."""
        model = model_state(self.model, self.group, None)
        if isinstance(self.runner, Served):
            return model, served_state(self.model, self.optimizer, self.group, self.runner.shard)
        return model, optimizer_state(self.model, self.optimizer, self.group, None)

    @property
    def told(self) -> int:
        """How many calls of `progress` there are for each batch."""
        return len(self.sync.worker_ranks(self.group.size)) - self.sync.backup if self.sync.served else 1

    def release(self) -> None:
        """Take everything off the model again: it is then one that each rank has for itself. Collective."""
        self.runner.release()

    def _check(self, pace: Pace) -> None:
        """Refuse what does not go together."""
        check_optimizer(self.model, self.optimizer)
        if not self.sync.relaxed:
            raise UsageError("a synchronous run without servers is done by nnmpi.Worker; give Sync another mode")
        check_precision(self.precision, self.model, self.backend, self.group)
        refuse_scaling(self.precision, f"with {self.sync.mode}")
        self.sync.check(self.group.size)
        check_free(self.model)
        for loss in (self.loss, self.evaluation_loss):
            check_loss(loss, None)
        pace.slowdown.check(self.sync.worker_ranks(self.group.size))
