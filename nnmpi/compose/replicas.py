"""The runner of a model that every replica has from end to end: microbatch after microbatch, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from math import isfinite, nan

from nnmpi import timeline
from nnmpi.backend.array import Array
from nnmpi.backend.record import Backend
from nnmpi.comm.exchange import Traffic
from nnmpi.comm.group import Group
from nnmpi.compose.evaluation import evaluate_batch
from nnmpi.compose.runner import Correct, Outcome, SumLoss, check_cuts
from nnmpi.data.loader import Batch, Cut
from nnmpi.nn.mode import training
from nnmpi.nn.module import Module
from nnmpi.parallel.data import DataParallel
from nnmpi.parallel.divergence import explain, explain_gradients
from nnmpi.parallel.fixed import FixedReduction
from nnmpi.tensor.tensor import Tensor


class Replicas:
    """Runs a whole model, or this rank's shards of its layers.

    Args:
        model: initialized.
        world: all ranks.
        replicas: the ranks that have the same part of the model and share each batch.
        loss, evaluation_loss: (logits, labels) -> the sum of the samples' losses.
        seed: of the run.
        correct: counts right answers; called on every rank, as it may communicate.
        counts: whether this rank, of those that share layers, is the one that counts.
        fixed: sum gradients in a fixed order.
        exchanged, allreduce, bucket_bytes, overlap: see `parallel.DataParallel`.
    """

    updates = False

    def __init__(
        self,
        model: Module,
        world: Group,
        replicas: Group,
        loss: SumLoss,
        evaluation_loss: SumLoss,
        backend: Backend,
        seed: int,
        correct: Correct,
        counts: bool,
        fixed: bool,
        exchanged: bool,
        allreduce: str | Sequence[str],
        bucket_bytes: int,
        overlap: bool,
    ) -> None:
        self.model, self.world, self.backend, self.seed = model, world, backend, seed
        self.loss, self.evaluation_loss, self._counts = loss, evaluation_loss, counts
        self._correct = correct
        self.parallel = DataParallel(
            model, replicas, allreduce, bucket_bytes, overlap, backend, exchanged and not fixed, joint=not fixed
        )
        numbers = range(len(model.storage.spans))
        self.fixed = FixedReduction(model, replicas, [numbers], backend) if fixed else None

    def run(self, batch: Batch, step: int) -> Outcome:
        """See `Runner.run`."""
        check_cuts(batch, self.fixed is not None)
        x, y = self.backend.asarray(batch.x), self.backend.asarray(batch.y)
        if self.fixed is not None:
            return self._run_fixed(batch, x, y, step, self.fixed)
        loss_sum = correct = 0.0
        for number, cut in enumerate(batch.cuts):
            loss, logits = self._forward(x, y, cut, step)
            with timeline.span(f"B{cut.number}", "backward"):
                self.parallel.backward(loss, batch.global_rows, last=number == len(batch.cuts) - 1)
            loss_sum += loss.item()
            correct += self._correct(logits, y[cut.start : cut.stop])
        counted = (loss_sum, correct, len(batch.y)) if self._counts else (0.0, 0.0, 0)
        return Outcome(*counted, self.parallel.traffic)

    def _run_fixed(self, batch: Batch, x: Array, y: Array, step: int, fixed: FixedReduction) -> Outcome:
        fixed.begin(batch.microbatches)
        losses, correct = {}, 0.0
        for cut in batch.cuts:
            fixed.microbatch = cut.number
            loss, logits = self._forward(x, y, cut, step)
            with timeline.span(f"B{cut.number}", "backward"):
                self.parallel.backward(loss, batch.global_rows, last=False)
            fixed.add(0, cut.number)
            losses[cut.number] = loss.item()
            correct += self._correct(logits, y[cut.start : cut.stop])
        begin = time.perf_counter()
        fixed.finish()
        total = fixed.sum_numbers(losses, self.world)
        traffic = Traffic(time.perf_counter() - begin, 0.0, fixed.sent_bytes, len(fixed.storage.grads), nan)
        return Outcome(total if self.world.is_root else 0.0, correct, len(batch.y), traffic)

    def evaluate(self, batch: Batch) -> tuple[float, float, int]:
        """See `Runner.evaluate`."""
        found = evaluate_batch(self.model, self.evaluation_loss, self._correct, self.backend, batch)
        return found if self._counts else (0.0, 0.0, 0)

    def explain(self, batch: Batch, step: int, value: float) -> Exception:
        """See `Runner.explain`."""
        x, y = self.backend.asarray(batch.x), self.backend.asarray(batch.y)
        if self.fixed is not None:
            return explain_gradients(self.world, self.model, step + 1, value, "its microbatches")
        cut = batch.cuts[-1]
        for cut in batch.cuts:  # the first microbatch whose loss is not finite, else the last
            loss, _ = self._forward(x, y, cut, step)
            if not all(isfinite(value) for value in self.world.sum_floats([loss.item()])):
                break
        again = partial(self._forward, x, y, cut, step)
        return explain(self.world, self.model, x[cut.start : cut.stop], lambda: again()[0], step + 1, value)

    def release(self) -> None:
        """See `Runner.release`."""
        self.parallel.release()
        if self.fixed is not None:
            self.fixed.release()

    def _forward(self, x: Array, y: Array, cut: Cut, step: int) -> tuple[Tensor, Tensor]:
        part = slice(cut.start, cut.stop)
        with timeline.span(f"F{cut.number}", "forward"), training(self.seed, step, cut.first_row):
            logits = self.model(Tensor(x[part]))
            return self.loss(logits, y[part]), logits
