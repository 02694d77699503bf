"""AsynchronousWorker: data-parallel training in which ranks need not be in step.

Gradients and weights go through servers, or every rank trains alone and averages its weights now and then.

    worker = AsynchronousWorker(model, optimizer, group, Sync("ssp", staleness=4))
    for epoch in range(10):
        report = worker.run(loader, epoch, 0, loader.batches_per_epoch, step=..., lr=lambda step: 0.1)
        print(worker.evaluate(test_loader.epoch(0)).accuracy, report.staleness.mean())

Every rank runs the same calls. Between two of them all ranks have the same weights, so that evaluations and checkpoints
are those of any other run; within `run` each goes on as soon as its way of synchronisation lets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from nnmpi import clock
from nnmpi.backend.precision import precision as mode_of
from nnmpi.backend.record import Backend, numpy_backend
from nnmpi.comm.agreement import agreed
from nnmpi.comm.group import Group
from nnmpi.compose.averaging_runner import AveragingRunner
from nnmpi.compose.options import DEFAULT_NUMERICS, Numerics, check_precision, refuse_scaling
from nnmpi.compose.replicas import LocalGradient, evaluate_all
from nnmpi.compose.runner import EvalReport, SumLoss, check_loss, check_optimizer, sum_cross_entropy
from nnmpi.compose.segment import Progress, SegmentReport, Throttle, average_buffers
from nnmpi.compose.server_runner import ParameterServerRunner
from nnmpi.compose.state import model_state, optimizer_state, sharded_optimizer_state
from nnmpi.data.loader import Batch, Loader
from nnmpi.errors import UsageError
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.model_state import ModelState
from nnmpi.parallel.replication import broadcast_state, check_free
from nnmpi.synchrony.sync import Sync

Rate: TypeAlias = Callable[[int], float]
OnProgress: TypeAlias = Callable[[Progress], None]
PollSignal: TypeAlias = Callable[[], int]


class AsynchronousWorker:
    """Trains and evaluates a model on ranks that meet only now and then. Making one is collective.

    Args:
        model: initialized; all ranks begin with rank 0's parameters and buffers.
        optimizer: made over `model.storage`.
        group: all ranks, the dedicated servers too.
        sync: how they go on; see `synchrony.sync`.
        loss: (logits, labels) -> the *sum* of the samples' losses; cross-entropy by default.
        evaluation_loss: the same for `evaluate`; `loss` by default.
        numerics: the precision, and the largest length of the gradient of one worker's part.
        seed: of the run; keys dropout masks.
        backend: where the model lives; NumPy by default.
        throttle: the minimum time of a step, and stragglers.
        synchronous_sends: let no message leave before its receive is posted (for tests).

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
        numerics: Numerics = DEFAULT_NUMERICS,
        seed: int = 0,
        backend: Backend | None = None,
        throttle: Throttle | None = None,
        synchronous_sends: bool = False,
    ) -> None:
        throttle = Throttle() if throttle is None else throttle
        self.model, self.optimizer, self.group, self.sync = model, optimizer, group, sync
        self.loss: SumLoss = sum_cross_entropy(None) if loss is None else loss
        self.evaluation_loss = self.loss if evaluation_loss is None else evaluation_loss
        self.backend = numpy_backend() if backend is None else backend
        self.precision = mode_of() if numerics.precision is None else numerics.precision
        with agreed(group):  # only servers' ranks have hooks in a model
            self._check(throttle)
        self.seed = seed
        broadcast_state(model, group)
        self._gradient = gradient = LocalGradient(
            model, self.loss, self.backend, seed, numerics.clip, self.precision, self.evaluation_loss
        )
        self.runner = (
            ParameterServerRunner(model, optimizer, group, sync, gradient, throttle, self.backend, synchronous_sends)
            if sync.uses_servers
            else AveragingRunner(model, optimizer, group, sync, gradient, throttle, seed)
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
        progress: OnProgress | None = None,
        poll_signal: PollSignal | None = None,
    ) -> SegmentReport:
        """Train on the batches first..stop-1 of an epoch, and meet. Collective.

        Args:
            loader: of the training data. Through servers, any rank's; else this rank's own part.
            step: the number of batches before them in the whole run, which keys dropout and the learning rate.
            lr: the learning rate of a step.
            bsp: whether the workers stay in step this time: a warm-up.
            progress: called on rank 0: for every gradient that a server gets, or for its own steps.
            poll_signal: whether this rank got a signal, and which; then all end after a whole batch.

        Returns:
            What was done; `batches` may be fewer, after a signal.

        Raises:
            DivergenceError: on all ranks, when a loss or gradient was not finite; it was not used.
            UsageError: for a loader of another part than this rank's, where it matters.
        """
        self.group.barrier()  # so that nobody counts as waiting what others still had to do
        begin = clock.now()
        report = self.runner.run(
            loader,
            epoch,
            range(first, stop),
            step,
            lr,
            bsp,
            progress or (lambda _: None),
            poll_signal or (lambda: 0),
            begin,
        )
        average_buffers(self.model, self.group, self.runner.steps_done)
        return report

    def evaluate(self, batches: Iterable[Batch]) -> EvalReport:
        """Return loss and accuracy over this rank's parts of all batches, put together over the ranks; collective."""
        return evaluate_all(self.group, batches, self._gradient.evaluate, self.backend)

    def state(self) -> tuple[ModelState, ModelState]:
        """Return the model's and the optimizer's arrays as those of the whole model; see `Worker.state`."""
        model = model_state(self.model, self.group, None)
        if isinstance(self.runner, ParameterServerRunner):
            return model, sharded_optimizer_state(self.model, self.optimizer, self.group, self.runner.shard)
        return model, optimizer_state(self.model, self.optimizer, self.group, None)

    @property
    def reports_per_batch(self) -> int:
        """How many calls of `progress` there are for each batch."""
        return len(self.sync.worker_ranks(self.group.size)) - self.sync.backup if self.sync.uses_servers else 1

    def release(self) -> None:
        """Take everything off the model again: it is then one that each rank has for itself. Collective."""
        self.runner.release()

    def _check(self, throttle: Throttle) -> None:
        """Refuse what does not go together."""
        check_optimizer(self.model, self.optimizer)
        if not self.sync.asynchronous:
            raise UsageError("a synchronous run without servers is done by nnmpi.Worker; give Sync another mode")
        check_precision(self.precision, self.model, self.backend, self.group)
        refuse_scaling(self.precision, f"with {self.sync.mode}")
        self.sync.check(self.group.size)
        check_free(self.model)
        for loss in (self.loss, self.evaluation_loss):
            check_loss(loss, None)
        throttle.slowdown.check(self.sync.worker_ranks(self.group.size))
