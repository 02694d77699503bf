"""The runner of a model that every replica has from end to end: microbatch after microbatch, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from math import isfinite, nan

from nnmpi import timeline
from nnmpi.backend.record import Backend
from nnmpi.comm.exchange import Traffic
from nnmpi.comm.group import Group
from nnmpi.compose.evaluation import evaluate_batch
from nnmpi.compose.given import Given, give, label_check
from nnmpi.compose.readings import Readings
from nnmpi.compose.runner import CORRECT, LOSS, Correct, Outcome, SumLoss, Values, check_cuts
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
        classes: where they are shared out over ranks, how many there are; else 0.
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
        classes: int,
        fixed: bool,
        exchanged: bool,
        allreduce: str | Sequence[str],
        bucket_bytes: int | None,
        overlap: bool | None,
    ) -> None:
        self.model, self.world, self.backend, self.seed = model, world, backend, seed
        self.loss, self.evaluation_loss, self._counts = loss, evaluation_loss, counts
        self._correct = correct
        self.readings = Readings(backend)
        self._check, self._classes = label_check(loss, classes), classes
        self.parallel = DataParallel(
            model, replicas, allreduce, bucket_bytes, overlap, backend, exchanged and not fixed, joint=not fixed
        )
        numbers = range(len(model.storage.spans))
        self.fixed = FixedReduction(model, replicas, [numbers], backend) if fixed else None

    def run(self, batch: Batch, step: int, scale: float) -> Outcome:
        """See `Runner.run`."""
        check_cuts(batch, self.fixed is not None)
        given = give(batch, self.model, self.backend)
        self.readings.clear()
        if self.fixed is not None:
            return self._run_fixed(batch, given, step, scale, self.fixed)
        for number, cut in enumerate(batch.cuts):
            loss, logits = self._forward(given, cut, step)
            with timeline.span(f"B{cut.number}", "backward"):
                self.parallel.backward(loss, batch.global_rows, number == len(batch.cuts) - 1, scale)
            self.readings.add(LOSS, loss.data)
            self.readings.add(CORRECT, self._correct(logits, given.rows(slice(cut.start, cut.stop))))
        counted = len(batch.y) if self._counts else 0
        return Outcome(self._sums, counted, self.parallel.traffic)

    def _sums(self, values: Values) -> tuple[float, float]:
        return (values.get(LOSS, 0.0), values.get(CORRECT, 0.0)) if self._counts else (0.0, 0.0)

    def _run_fixed(self, batch: Batch, given: Given, step: int, scale: float, fixed: FixedReduction) -> Outcome:
        fixed.begin(batch.microbatches)
        for cut in batch.cuts:
            fixed.microbatch = cut.number
            loss, logits = self._forward(given, cut, step)
            with timeline.span(f"B{cut.number}", "backward"):
                self.parallel.backward(loss, batch.global_rows, last=False, scale=scale)
            fixed.add(0, cut.number)
            self.readings.add(cut.number, loss.data)
            self.readings.add(CORRECT, self._correct(logits, given.rows(slice(cut.start, cut.stop))))
        begin = time.perf_counter()
        fixed.finish()
        traffic = Traffic(time.perf_counter() - begin, 0.0, fixed.sent_bytes, len(fixed.storage.grads), nan)
        return Outcome(partial(self._sums_fixed, fixed, batch.cuts), len(batch.y), traffic)

    def _sums_fixed(self, fixed: FixedReduction, cuts: Sequence[Cut], values: Values) -> tuple[float, float]:
        total = fixed.sum_numbers({cut.number: values[cut.number] for cut in cuts}, self.world)
        return total if self.world.is_root else 0.0, values.get(CORRECT, 0.0)

    def evaluate(self, batch: Batch, readings: Readings) -> int:
        """See `Runner.evaluate`."""
        mine = readings if self._counts else None  # the others take part, and count nothing
        loss, correct = self.evaluation_loss, self._correct
        rows = evaluate_batch(self.model, loss, correct, self.backend, batch, mine, self._classes)
        return rows if self._counts else 0

    def explain(self, batch: Batch, step: int, value: float) -> Exception:
        """See `Runner.explain`."""
        given = give(batch, self.model, self.backend)
        if self.fixed is not None:
            return explain_gradients(self.world, self.model, step + 1, value, "its microbatches")
        cut = batch.cuts[-1]
        for cut in batch.cuts:  # the first microbatch whose loss is not finite, else the last
            loss, _ = self._forward(given, cut, step)
            if not all(isfinite(value) for value in self.world.sum_floats([loss.item()])):
                break
        again = partial(self._forward, given, cut, step)
        return explain(self.world, self.model, given.x[cut.start : cut.stop], lambda: again()[0], step + 1, value)

    def release(self) -> None:
        """See `Runner.release`."""
        self.parallel.release()
        if self.fixed is not None:
            self.fixed.release()

    def _forward(self, given: Given, cut: Cut, step: int) -> tuple[Tensor, Tensor]:
        part = given.rows(slice(cut.start, cut.stop))
        with timeline.span(f"F{cut.number}", "forward"), training(self.seed, step, cut.first_row):
            logits = self.model(Tensor(part.x))
            self._check(part, cut.start, logits)
            return self.loss(logits, part.y), logits
