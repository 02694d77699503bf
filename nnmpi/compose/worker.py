"""Worker: a model, an optimizer and the parallel strategy put together, with one call per update.

    worker = Worker(model, optimizer, group, allreduce="ring")
    for batch in loader.epoch(0):
        report = worker.step(batch)

Every rank runs the same calls and gets the same reports: global means, not its own share.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite, nan
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.record import Backend, numpy_backend
from nnmpi.comm.algorithms.registry import AUTO, SHARED
from nnmpi.comm.exchange import BUCKET_BYTES, Traffic, predict, predict_traffic
from nnmpi.comm.group import Group
from nnmpi.compose.housing import Housing, fuse
from nnmpi.compose.report import EvalReport, StepReport
from nnmpi.data.loader import Batch
from nnmpi.errors import CheckpointError, UsageError
from nnmpi.nn.mode import evaluation, training
from nnmpi.nn.module import Module
from nnmpi.ops.loss import cross_entropy
from nnmpi.optim.clip import coefficient, global_norm, scale
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.data import DataParallel, check_free
from nnmpi.parallel.divergence import explain
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.tensor import Tensor

SumLoss: TypeAlias = Callable[[Tensor, Array], Tensor]


class Worker:
    """Trains and evaluates a model on the ranks of a group. Making one is collective.

    Args:
        model: initialized.
        optimizer: made over `model.storage`.
        group: all ranks; each batch is shared out over them.
        loss: (logits, labels) -> the *sum* of the samples' losses; cross-entropy by default. It is divided by the
            rows of the global batch, whatever the loss leaves out (`ignore_index`) or sums within a row.
        evaluation_loss: the same for `evaluate`; `loss` by default.
        allreduce, bucket_bytes, overlap: see `parallel.DataParallel`.
        fused_update: whether each rank of a node sums and updates a part of the parameters, which then stand once per
            node (see `parallel.fused`); not where there is no shared memory: `notice` says why.
        check: compare the ranks' weights after every step, by hash.
        clip: the largest length of the gradient, or None.
        seed: of the run; keys dropout masks.
        backend: where the model lives; NumPy by default.

    Attributes:
        fused: the fused update, None where gradients are summed and used one after the other.
        notice: what is not as it was asked for, and why; else empty.

    Raises:
        UsageError: for an optimizer of other arrays than the model's, and a loss with `reduction="mean"`; see also
            `parallel.DataParallel`.
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
    ) -> None:
        if optimizer.storage is not model.storage:
            raise UsageError(
                "the optimizer works on other arrays than the model's; make it over model.storage, after the last "
                "model.initialize()"
            )
        self.model, self.optimizer, self.group = model, optimizer, group
        self.loss: SumLoss = partial(cross_entropy, reduction="sum") if loss is None else loss
        self.evaluation_loss = self.loss if evaluation_loss is None else evaluation_loss
        _refuse_mean(self.loss)
        _refuse_mean(self.evaluation_loss)
        self.check, self.clip, self.seed = check, clip, seed
        self.backend = numpy_backend() if backend is None else backend
        check_free(model)  # before anything is moved
        self._housing: Housing | None = None
        self.notice = ""
        if fused_update:
            self._housing, self.notice = fuse(model, optimizer, group)
        self.fused = None if self._housing is None else self._housing.fused
        exchanged = self.fused is None
        self._gradient_bytes = sum(grad.nbytes for grad in model.storage.grads)
        self.parallel = DataParallel(model, group, allreduce, bucket_bytes, overlap, self.backend, exchanged)
        self.notice = self.notice or self.parallel.notice

    def release(self) -> None:
        """Take everything off the model again: it is then one that each rank has for itself. Collective."""
        self.parallel.release()
        if self._housing is not None:
            self._housing.release(self.model, self.optimizer)
            self._housing = self.fused = None

    def step(self, batch: Batch, lr: float | None = None) -> StepReport:
        """Do one update with this rank's part of a global batch; collective.

        A batch of several microbatches (see `data.Loader`) is one update: their gradients are added up.

        Args:
            lr: the learning rate; the optimizer's own by default.

        Raises:
            DivergenceError: on all ranks, when the loss or the gradient is not finite; the weights are unchanged then
                (running statistics are not).
            CommError: with `check`, on all ranks, when weights differ.
        """
        begin = time.perf_counter()
        if lr is not None:
            self.optimizer.lr = lr
        x, y = self.backend.asarray(batch.x), self.backend.asarray(batch.y)
        self.model.storage.zero_grad()
        loss_sum = correct = 0.0
        for number, cut in enumerate(batch.cuts):
            loss, logits = self._forward(x[cut.start : cut.stop], y[cut.start : cut.stop], cut.first_row)
            self.parallel.backward(loss, batch.global_rows, last=number == len(batch.cuts) - 1)
            loss_sum += loss.item()
            correct += _correct(logits, y[cut.start : cut.stop])
        waited = time.perf_counter()
        loss_sum, correct = self.group.sum_floats([loss_sum, correct])
        spent_s = time.perf_counter() - waited
        traffic = self.parallel.traffic
        if self.group.size > 1:
            traffic = traffic.plus(predict_traffic(self.group, 2 * np.float64().nbytes, spent_s))
        waited = time.perf_counter()
        norm = self._norm()
        if self.fused is not None:
            predicted_s = predict(self.group, SHARED, self._gradient_bytes)  # which writes more, and reads as much
            spent_s = time.perf_counter() - waited
            traffic = traffic.plus(
                Traffic(spent_s, 0.0, self._gradient_bytes, 1, nan if predicted_s is None else predicted_s)
            )
        if not isfinite(loss_sum) or not isfinite(norm):
            raise self._explain(batch, x, y, loss_sum)
        self._update(norm)
        if self.fused is not None:
            traffic = traffic.plus(Traffic(self.fused.waited_s))
        if self.check:
            self.parallel.check_equal()
        count = max(batch.global_rows, 1)
        total_s = time.perf_counter() - begin
        compute_s = total_s - traffic.sync_s
        return StepReport(loss_sum / count, correct / count, batch.global_rows, norm, compute_s, traffic)

    def evaluate(self, batches: Iterable[Batch]) -> EvalReport:
        """Return loss and accuracy over this rank's parts of all batches, put together over the ranks; collective."""
        begin = time.perf_counter()
        loss_sum = correct = samples = 0.0
        for batch in batches:
            x, y = self.backend.asarray(batch.x), self.backend.asarray(batch.y)
            with no_grad(), evaluation():
                logits = self.model(Tensor(x))
                loss_sum += self.evaluation_loss(logits, y).item()
            correct += _correct(logits, y)
            samples += len(batch.y)
        loss_sum, correct, samples = self.group.sum_floats([loss_sum, correct, samples])
        count = max(samples, 1)
        return EvalReport(loss_sum / count, correct / count, int(samples), time.perf_counter() - begin)

    def optimizer_state(self) -> tuple[dict[str, Array], dict[str, int]]:
        """Return the optimizer's arrays by "slot/parameter", as copies in host memory, and its numbers."""
        arrays = {name: np.array(self.backend.to_host(view)) for name, view in self._slots().items()}
        return arrays, {"steps": self.optimizer.steps}

    def load_optimizer_state(self, arrays: Mapping[str, Array], scalars: Mapping[str, Any]) -> None:
        """Put back what `optimizer_state` gave.

        Raises:
            CheckpointError: when names or shapes do not fit this optimizer and model; nothing is changed then.
        """
        slots = self._slots()
        if slots.keys() != arrays.keys() or "steps" not in scalars:
            different = sorted(slots.keys() ^ arrays.keys())[:3]
            raise CheckpointError(
                f"the optimizer's state does not fit: {', '.join(different) or 'steps'} missing or unknown"
            )
        for name, view in slots.items():
            theirs = arrays[name]
            if view.shape != theirs.shape or view.dtype != theirs.dtype:
                raise CheckpointError(
                    f"optimizer state {name} is {theirs.dtype} {theirs.shape}, not {view.dtype} {view.shape}"
                )
        for name, view in slots.items():
            view[...] = self.backend.asarray(arrays[name])
        self.optimizer.steps = int(scalars["steps"])

    def _slots(self) -> dict[str, Array]:
        """Return views of the optimizer's arrays, parameter by parameter."""
        storage = self.model.storage
        return {
            f"{slot}/{name}": view
            for slot, flats in self.optimizer.slots().items()
            for number, flat in enumerate(flats)
            for name, view in storage.split(number, flat).items()
        }

    def _forward(self, x: Array, y: Array, first_row: int) -> tuple[Tensor, Tensor]:
        with training(self.seed, self.optimizer.steps, first_row):
            logits = self.model(Tensor(x))
            return self.loss(logits, y), logits

    def _norm(self) -> float:
        """Return the length of the gradient, which the fused update sums only here."""
        return global_norm(self.model.storage.grads) if self.fused is None else self.fused.reduce()

    def _update(self, norm: float) -> None:
        factor = 1.0 if self.clip is None else coefficient(norm, self.clip)
        if self.fused is not None:
            self.fused.update(factor)
            return
        scale(self.model.storage.grads, factor)
        self.optimizer.step()

    def _explain(self, batch: Batch, x: Array, y: Array, loss_sum: float) -> Exception:
        cut = batch.cuts[-1]
        for cut in batch.cuts:  # the first microbatch whose loss is not finite, else the last
            part = slice(cut.start, cut.stop)
            loss, _ = self._forward(x[part], y[part], cut.first_row)
            if not all(isfinite(value) for value in self.group.sum_floats([loss.item()])):
                break
        part = slice(cut.start, cut.stop)
        mean = loss_sum / max(batch.global_rows, 1)
        again = partial(self._forward, x[part], y[part], cut.first_row)
        return explain(self.group, self.model, x[part], lambda: again()[0], self.optimizer.steps + 1, mean)


def _correct(logits: Tensor, y: Array) -> float:
    """Return how many rows have their largest logit at their label; NaN where there are no class labels."""
    if logits.ndim != y.ndim + 1 or y.dtype.kind not in "iu":
        return float("nan")
    return float((logits.data.argmax(axis=-1) == y).sum())


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
