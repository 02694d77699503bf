"""Worker: a model, an optimizer and the parallel strategies put together, with one call per update.

    worker = Worker(model, optimizer, group, allreduce="ring")
    for batch in loader.epoch(0):
        report = worker.step(batch)

Every rank runs the same calls and gets the same reports: global means, not its own share. With an `arrangement` the
model may be cut and sharded (see `compose.arrange`); without one, every rank has all of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite, nan
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from nnmpi import timeline
from nnmpi.backend.array import Array
from nnmpi.backend.record import Backend, numpy_backend
from nnmpi.comm.algorithms.registry import AUTO, SHARED
from nnmpi.comm.exchange import BUCKET_BYTES, Traffic, predict, predict_traffic
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.equal import check_equal
from nnmpi.compose.evaluation import evaluate_all
from nnmpi.compose.housing import Housing, fuse
from nnmpi.compose.meter import Meter
from nnmpi.compose.norm import gradient_norm
from nnmpi.compose.pipelined import Pipelined
from nnmpi.compose.replicas import Replicas
from nnmpi.compose.report import EvalReport, StepReport
from nnmpi.compose.runner import Outcome, Runner, SumLoss, check_loss, check_optimizer, correct_of, sum_cross_entropy
from nnmpi.compose.state import model_state, optimizer_state, slots
from nnmpi.data.loader import Batch
from nnmpi.errors import CheckpointError, UsageError
from nnmpi.nn.chain import Part
from nnmpi.nn.module import Module
from nnmpi.optim.clip import coefficient, global_norm, scale
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.data import check_free
from nnmpi.parallel.state import LayoutState


class Worker:
    """Trains and evaluates a model on the ranks of a group. Making one is collective.

    Args:
        model: initialized; `arrangement.model` where there is an arrangement.
        optimizer: made over `model.storage`.
        group: all ranks; each batch is shared out over them, or over the replicas of the arrangement.
        loss: (logits, labels) -> the *sum* of the samples' losses; cross-entropy by default. It is divided by the
            rows of the global batch, whatever the loss leaves out (`ignore_index`) or sums within a row. Where
            `arrangement.classes` are shared out, it must be `compose.runner.sum_cross_entropy(arrangement)`.
        evaluation_loss: the same for `evaluate`; `loss` by default.
        allreduce, bucket_bytes, overlap: see `parallel.DataParallel`.
        fused_update: whether each rank of a node sums and updates a part of the parameters, which then stand once per
            node (see `parallel.fused`); not where there is no shared memory: `notice` says why.
        check: compare the ranks' weights after every step, by hash.
        clip: the largest length of the gradient, or None.
        seed: of the run; keys dropout masks.
        backend: where the model lives; NumPy by default.
        arrangement: how the model lies on the ranks; None for all of it on each.
        synchronous: let no message of a pipeline leave before its receive is posted (for tests).

    Attributes:
        fused: the fused update, None where gradients are summed and used one after the other.
        notice: what is not as it was asked for, and why; else empty.

    Raises:
        UsageError: for an optimizer of other arrays than the model's, a loss with `reduction="mean"`, and options that
            do not go together; see also `parallel.DataParallel`.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        group: Group,
        loss: SumLoss | None = None,
        evaluation_loss: SumLoss | None = None,
        allreduce: str | Sequence[str] = AUTO,
        bucket_bytes: int = BUCKET_BYTES,
        overlap: bool = True,
        fused_update: bool = False,
        check: bool = False,
        clip: float | None = None,
        seed: int = 0,
        backend: Backend | None = None,
        arrangement: Arrangement | None = None,
        synchronous: bool = False,
    ) -> None:
        check_optimizer(model, optimizer)
        self.model, self.optimizer, self.group = model, optimizer, group
        self.loss: SumLoss = sum_cross_entropy(arrangement) if loss is None else loss
        self.evaluation_loss = self.loss if evaluation_loss is None else evaluation_loss
        for each in (self.loss, self.evaluation_loss):
            check_loss(each, arrangement)
        self.check, self.clip, self.seed = check, clip, seed
        self.backend = numpy_backend() if backend is None else backend
        self.arrangement = arrangement
        self._one_thread = arrangement is not None and arrangement.layout.fixed
        self._meter = Meter(arrangement is not None and arrangement.mesh.tp.size > 1)
        _check_pairs(model, arrangement, fused_update, clip)
        check_free(model)  # before anything is moved
        self._housing: Housing | None = None
        self.notice = ""
        if fused_update:
            self._housing, self.notice = fuse(model, optimizer, group)
        self.fused = None if self._housing is None else self._housing.fused
        self._gradient_bytes = sum(grad.nbytes for grad in model.storage.grads)
        self.runner = self._make_runner(allreduce, bucket_bytes, overlap, synchronous)
        self.parallel = self.runner.parallel
        self.notice = self.notice or self.parallel.notice

    def _make_runner(
        self, allreduce: str | Sequence[str], bucket_bytes: int, overlap: bool, synchronous: bool
    ) -> Runner:
        where, losses = self.arrangement, (self.loss, self.evaluation_loss)
        if where is not None and where.stages:
            return Pipelined(
                where,
                self.optimizer,
                *losses,
                self.backend,
                self.seed,
                allreduce=allreduce,
                bucket_bytes=bucket_bytes,
                overlap=overlap,
                synchronous=synchronous,
            )
        return Replicas(
            self.model,
            self.group,
            self.group if where is None else where.mesh.dp,
            *losses,
            self.backend,
            self.seed,
            correct=correct_of(where),
            counts=where is None or where.mesh.place.t == 0,
            fixed=where is not None and where.layout.fixed,
            exchanged=self.fused is None,
            allreduce=allreduce,
            bucket_bytes=bucket_bytes,
            overlap=overlap,
        )

    def release(self) -> None:
        """Take everything off the model again: it is then one that each rank has for itself. Collective."""
        self.runner.release()
        if self._housing is not None:
            self._housing.release(self.model, self.optimizer)
            self._housing = self.fused = None

    def step(self, batch: Batch, lr: float | None = None) -> StepReport:
        """Do one update with this rank's part of a global batch; collective.

        A batch of several microbatches (see `data.Loader`) is one update: their gradients are added up. (With schedule
        pipedream each microbatch is one; the gradient's length is then not known, and reported as NaN.)

        Args:
            lr: the learning rate; the optimizer's own by default.

        Raises:
            DivergenceError: on all ranks, when the loss or the gradient is not finite; the weights are unchanged then
                (running statistics are not, and with pipedream the weights are not either).
            CommError: with `check`, on all ranks, when weights differ.
            UsageError: for a batch that was not shared out over the replicas as this worker needs it.
        """
        begin = time.perf_counter()
        if lr is not None:
            self.optimizer.lr = lr
        self.model.storage.zero_grad()
        step = self.optimizer.steps
        with self._threads(), self._meter.running():
            outcome = self.runner.run(batch, step)
        traffic = outcome.traffic.plus(self._meter.traffic)
        if outcome.report is not None and outcome.report.messages:
            sent = outcome.report
            traffic = traffic.plus(Traffic(sent.transfer_s, 0.0, sent.sent_bytes, sent.messages, nan))
        waited = time.perf_counter()
        with timeline.span("other ranks", "waiting", timeline.WAITING):
            loss_sum, correct, rows = self.group.sum_floats([outcome.loss_sum, outcome.correct, outcome.rows])
        spent_s = time.perf_counter() - waited
        if self.group.size > 1:
            traffic = traffic.plus(predict_traffic(self.group, 3 * np.float64().nbytes, spent_s))
        if rows != batch.global_rows:
            raise UsageError(
                f"the ranks' parts of this batch have {rows:.0f} rows together, but the global batch "
                f"{batch.global_rows}; give Loader the rank and world of the replica ({self._replica()})"
            )
        waited = time.perf_counter()
        with self._threads():
            norm = nan if self.runner.updates else self._norm()
        if self.fused is not None:
            predicted_s = predict(self.group, SHARED, self._gradient_bytes)  # which writes more, and reads as much
            spent_s = time.perf_counter() - waited
            traffic = traffic.plus(
                Traffic(spent_s, 0.0, self._gradient_bytes, 1, nan if predicted_s is None else predicted_s)
            )
        if not isfinite(loss_sum) or not (self.runner.updates or isfinite(norm)):
            raise self.runner.explain(batch, step, loss_sum / max(batch.global_rows, 1))
        if not self.runner.updates:
            self._update(norm)
        if self.fused is not None:
            traffic = traffic.plus(Traffic(self.fused.waited_s))
        if self.check:
            self._check_equal()
        return self._report(batch, outcome, loss_sum, correct, norm, traffic, time.perf_counter() - begin)

    def _report(
        self,
        batch: Batch,
        outcome: Outcome,
        loss_sum: float,
        correct: float,
        norm: float,
        traffic: Traffic,
        total_s: float,
    ) -> StepReport:
        count = max(batch.global_rows, 1)
        wait_s = 0.0 if outcome.report is None else outcome.report.wait_s
        return StepReport(
            loss_sum / count,
            correct / count,
            batch.global_rows,
            norm,
            total_s - traffic.sync_s - wait_s,
            traffic,
            wait_s,
            outcome.report,
            outcome.staleness,
        )

    def evaluate(self, batches: Iterable[Batch]) -> EvalReport:
        """Return loss and accuracy over this rank's parts of all batches, put together over the ranks; collective."""
        return evaluate_all(self.group, batches, self.runner.evaluate)

    def state(self) -> tuple[LayoutState, LayoutState]:
        """Return the model's and the optimizer's arrays as those of the whole model, over all ranks.

        The optimizer's are called "slot/parameter"; its number of updates is `optimizer.steps`.
        """
        return model_state(self.model, self.group, self.arrangement), optimizer_state(
            self.model, self.optimizer, self.group, self.arrangement
        )

    def optimizer_state(self) -> tuple[dict[str, Array], dict[str, int]]:
        """Return this rank's arrays of the optimizer by "slot/parameter", copied to the host, and its numbers."""
        arrays = {name: np.array(self.backend.to_host(view)) for name, view in self._slots().items()}
        return arrays, {"steps": self.optimizer.steps}

    def load_optimizer_state(self, arrays: Mapping[str, Array], scalars: Mapping[str, Any]) -> None:
        """Put back what `optimizer_state` gave.

        Raises:
            CheckpointError: when names or shapes do not fit this optimizer and model; nothing is changed then.
        """
        own = self._slots()
        if own.keys() != arrays.keys() or "steps" not in scalars:
            different = sorted(own.keys() ^ arrays.keys())[:3]
            raise CheckpointError(
                f"the optimizer's state does not fit: {', '.join(different) or 'steps'} missing or unknown"
            )
        for name, view in own.items():
            theirs = arrays[name]
            if view.shape != theirs.shape or view.dtype != theirs.dtype:
                raise CheckpointError(
                    f"optimizer state {name} is {theirs.dtype} {theirs.shape}, not {view.dtype} {view.shape}"
                )
        for name, view in own.items():
            view[...] = self.backend.asarray(arrays[name])
        self.optimizer.steps = int(scalars["steps"])

    def _slots(self) -> dict[str, Array]:
        return slots(self.model.storage, self.optimizer)

    def _threads(self) -> AbstractContextManager[object]:
        """Return a context in which BLAS has one thread, where bits count.

        Those of a product or a sum of squares may depend on how many there are: the fewer, the more ranks a node has.
        """
        return threadpool_limits(1, "blas") if self._one_thread else nullcontext()

    def _norm(self) -> float:
        """Return the length of the gradient, which the fused update sums only here."""
        if self.fused is not None:
            return self.fused.reduce()
        if self.arrangement is not None:
            return gradient_norm(self.model.storage, self.arrangement)
        return global_norm(self.model.storage.grads)

    def _update(self, norm: float) -> None:
        factor = 1.0 if self.clip is None else coefficient(norm, self.clip)
        with timeline.span("update", "update"):
            if self.fused is not None:
                self.fused.update(factor)
                return
            scale(self.model.storage.grads, factor)
            self.optimizer.step()

    def _replica(self) -> str:
        """Return where a Loader's arguments are to be found."""
        if self.arrangement is None:
            return "group.rank and group.size"
        return "arrangement.data_rank and arrangement.data_ranks"

    def _check_equal(self) -> None:
        self.parallel.check_equal()
        if self.arrangement is not None:
            check_equal(self.model, self.arrangement, self.backend)


def _check_pairs(model: Module, arrangement: Arrangement | None, fused_update: bool, clip: float | None) -> None:
    """Refuse options that do not go together."""
    if arrangement is None:
        if isinstance(model, Part) or any(parameter.region is not None for parameter in model.parameters()):
            raise UsageError(
                "this rank has a part of the model alone, which the other ranks do not share; give the Worker the "
                "arrangement that made it: arrangement=where"
            )
        return
    layout, mesh = arrangement.layout, arrangement.mesh.mesh
    if model is not arrangement.model:
        raise UsageError("the model is not the arrangement's; initialize and use arrangement.model")
    if fused_update and (mesh.pp > 1 or mesh.tp > 1 or layout.fixed):
        raise UsageError(
            f"the fused update is for replicas of a whole model, summed as they come, not for {mesh} with reduction "
            f"{layout.reduction}; leave it out"
        )
    if layout.asynchronous and mesh.pp > 1 and clip is not None:
        raise UsageError(
            "clipping needs the gradient of all stages at once, but with pipedream each stage updates when its own is "
            "there; leave one of them out"
        )
