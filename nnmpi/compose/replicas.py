"""Forward, backward and evaluation of a model that this rank has from end to end (or its shards of every layer).

Replicas            the runner of a Worker: gradients are summed over the replicas while backward goes on
LocalGradient       the gradient of one part of a batch for an asynchronous worker: no message is sent for it
evaluate_batch      one batch in evaluation mode; evaluate_all: all of them, and the means over the ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, nan

import numpy as np

from nnmpi import clock, timeline
from nnmpi.backend.precision import use_precision
from nnmpi.backend.record import Backend
from nnmpi.backend.recording import refuse_inside
from nnmpi.comm.gradients import Traffic
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.norm import note_squares, read_norm
from nnmpi.compose.options import GradientExchange
from nnmpi.compose.runner import (
    CORRECT,
    LOSS,
    Check,
    Correct,
    DeferredScalars,
    DeviceBatch,
    EvalReport,
    Outcome,
    SumLoss,
    Values,
    check_cuts,
    correct_of,
    count_correct,
    label_check,
    to_device,
)
from nnmpi.data.loader import Batch, Cut
from nnmpi.errors import UsageError
from nnmpi.nn.mode import evaluation, training
from nnmpi.nn.module import Module
from nnmpi.optim.clip import coefficient, global_norm, scale
from nnmpi.parallel.data import DataParallel
from nnmpi.parallel.divergence import explain, explain_gradients, locate_nonfinite, nonfinite_message
from nnmpi.parallel.fixed_reduction import FixedReduction
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.tensor import Tensor


def evaluate_batch(
    model: Module,
    loss: SumLoss,
    correct: Correct,
    backend: Backend,
    batch: Batch,
    scalars: DeferredScalars | None,
    classes: int = 0,
) -> int:
    """Add loss and right answers of a part of a batch, for a model that this rank has end to end; return its rows.

    Args:
        scalars: where they are added; None on a rank that computes them only because others do.
        classes: where they are shared out over ranks, how many there are; else 0.
    """
    device_batch = to_device(batch, model, backend)
    with no_grad(), evaluation():
        logits = model(Tensor(device_batch.x))
        label_check(loss, classes)(device_batch, 0, logits)
        loss_sum, hits = loss(logits, device_batch.y).data, correct(logits, device_batch)
    if scalars is not None:
        scalars.add(LOSS, loss_sum)
        scalars.add(CORRECT, hits)
    return len(batch.y)


def evaluate_all(
    group: Group, batches: Iterable[Batch], evaluate: Callable[[Batch, DeferredScalars], int], backend: Backend
) -> EvalReport:
    """Return loss and accuracy over this rank's parts of all batches, put together over the ranks; collective.

    On a device the sums are read once, at the end.

    Args:
        evaluate: adds loss and right answers to what is to be read, and returns the samples that this rank counts.
    """
    begin = clock.now()
    scalars, rows = DeferredScalars(backend), 0
    for batch in batches:
        rows += evaluate(batch, scalars)
    values = scalars.read()
    loss_sum, correct, samples = group.sum_floats([values.get(LOSS, 0.0), values.get(CORRECT, 0.0), rows])
    count = max(samples, 1)
    return EvalReport(loss_sum / count, correct / count, int(samples), clock.now() - begin)


@dataclass(frozen=True)
class Gradient:
    """What computing a gradient gave; the gradient itself is in the model's storage.

    Attributes:
        loss_sum, correct, rows: over the samples of the part.
        norm: the length of the gradient of the part's mean loss, before clipping; not finite if the loss is not.
        compute_s: seconds.
    """

    loss_sum: float
    correct: float
    rows: int
    norm: float
    compute_s: float

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are numbers, so that it may be used."""
        return isfinite(self.loss_sum) and isfinite(self.norm)


class LocalGradient:
    """Computes gradients of parts of batches.

    Args:
        model: initialized, without another strategy.
        loss: (logits, labels) -> the sum of the samples' losses.
        backend: where the model lives.
        seed: of the run; keys dropout masks.
        clip: the largest length of the gradient of a part's mean loss, or None.
        correct: counts right answers.
        precision: of products, see `backend.precision`.
    """

    def __init__(
        self,
        model: Module,
        loss: SumLoss,
        backend: Backend,
        seed: int,
        clip: float | None = None,
        correct: Correct = count_correct,
        precision: str = "float32",
    ) -> None:
        self.model, self.loss, self.backend, self.seed, self.clip = model, loss, backend, seed, clip
        self._correct, self._precision = correct, precision
        self._scalars, self._check = DeferredScalars(backend), label_check(loss, 0)
        self._poll: Callable[[], None] | None = None

    def look_after(self, poll: Callable[[], None]) -> None:
        """Call this many times from now on while a gradient is computed, for a rank that has something else to do.

        Raises:
            UsageError: when a strategy has the model's hooks already.
        """
        parameters = [span.parameter for span in self.model.storage.spans]
        if any(each.hook is not None or each.guard is not None for each in parameters):
            raise UsageError("the model has a DataParallel (or other hooks) already; call its release() first")
        self._poll = poll
        for span in self.model.storage.spans:
            span.parameter.hook = self._final

    def run(self, batch: Batch, step: int) -> Gradient:
        """Compute the gradient of the part's losses, divided by the rows of the whole batch, into `storage.grads`.

        The gradients of all parts of a batch add up to that of its mean loss.

        Args:
            step: the number of the batch in the run, which keys dropout: the masks are those of a synchronous run.
        """
        refuse_inside("a worker's step")
        with use_precision(self._precision):
            return self._run(batch, step)

    def _run(self, batch: Batch, step: int) -> Gradient:
        begin = clock.now()
        self.model.storage.zero_grad()
        self._scalars.clear()
        device_batch = to_device(batch, self.model, self.backend)
        for cut in batch.cuts:
            if cut.stop == cut.start:
                continue
            loss, logits = self._forward(device_batch, cut, step)
            self._look_up()
            with timeline.span(f"B{step}", "backward"):
                # as `DataParallel.backward` divides, but the parts' gradients are added up elsewhere
                loss.backward(np.full(loss.shape, 1 / max(batch.global_rows, 1)))
            self._scalars.add(LOSS, loss.data)
            self._scalars.add(CORRECT, self._correct(logits, device_batch.rows(slice(cut.start, cut.stop))))
        self.model.storage.finish_gradients()
        rows, norm = len(batch.y), 0.0
        if rows and self.backend.is_device:
            note_squares(self._scalars, self.model.storage)
        values = self._scalars.read()
        if rows:
            norm = self._clip(values, batch.global_rows / rows)
        return Gradient(values.get(LOSS, 0.0), values.get(CORRECT, 0.0), rows, norm, clock.now() - begin)

    def explain(self, gradient: Gradient, batch: Batch, step: int, who: str) -> str:
        """Return the sentence about a gradient that is not finite, after computing it again.

        Args:
            who: whose it is: "rank 2", "worker 2".
        """
        with use_precision(self._precision):
            return self._explain(gradient, batch, step, who)

    def _explain(self, gradient: Gradient, batch: Batch, step: int, who: str) -> str:
        device_batch = to_device(batch, self.model, self.backend)
        first = next(
            (cut for cut in batch.cuts if not isfinite(self._forward(device_batch, cut, step)[0].item())), None
        )
        cut = batch.cuts[-1] if first is None else first
        place = locate_nonfinite(
            self.model, device_batch.x[cut.start : cut.stop], lambda: self._forward(device_batch, cut, step)[0]
        )
        return nonfinite_message(step + 1, gradient.loss_sum / max(gradient.rows, 1), place, who)

    def _forward(self, device_batch: DeviceBatch, cut: Cut, step: int) -> tuple[Tensor, Tensor]:
        with timeline.span(f"F{step}", "forward"), training(self.seed, step, cut.first_row):
            return _forward(self.model, self.loss, self._check, device_batch, cut)

    def release(self) -> None:
        """Take everything off the model again."""
        if self._poll is not None:
            for span in self.model.storage.spans:
                span.parameter.hook = None

    def _clip(self, values: Values, parts: float) -> float:
        """Return the length of the gradient of this part's mean loss, and clip the gradient by it.

        The stored gradient is divided by the whole batch's rows, so its length is multiplied by `parts`, the batch's
        rows / the part's.
        """
        grads = self.model.storage.grads
        norm = (read_norm(values, self.model.storage) if self.backend.is_device else global_norm(grads)) * parts
        if self.clip is not None:
            scale(grads, coefficient(norm, self.clip))
        return norm

    def _final(self, parameter: Parameter) -> None:
        self._look_up()

    def _look_up(self) -> None:
        if self._poll is not None:
            self._poll()


class Replicas:
    """Runs a whole model, or this rank's shards of its layers.

    Args:
        model: initialized.
        world: all ranks.
        arrangement: how the model lies on the ranks, without a pipeline; None for all of it on each.
        loss, evaluation_loss: (logits, labels) -> the sum of the samples' losses.
        backend: where the model lives.
        seed: of the run; keys dropout masks.
        exchange: how gradients are summed over the replicas.
        is_summed: whether this runner sums them; a fused update does it otherwise.
    """

    updates = False

    def __init__(
        self,
        model: Module,
        world: Group,
        arrangement: Arrangement | None,
        loss: SumLoss,
        evaluation_loss: SumLoss,
        backend: Backend,
        seed: int,
        exchange: GradientExchange,
        is_summed: bool,
    ) -> None:
        where = arrangement
        self.model, self.world, self.backend, self.seed = model, world, backend, seed
        self.loss, self.evaluation_loss = loss, evaluation_loss
        # Of ranks that share layers, all compute the same loss; the first one counts it.
        self._counts = where is None or where.mesh.place.t == 0
        # It is called on every rank, since it may communicate where the classes are shared out.
        self._correct = correct_of(where)
        self._classes = 0 if where is None else where.classes
        self._check = label_check(loss, self._classes)
        self.scalars = DeferredScalars(backend)
        replicas = world if where is None else where.mesh.dp
        fixed = where is not None and where.layout.fixed
        self.parallel = DataParallel(
            model,
            replicas,
            exchange.allreduce,
            exchange.bucket_bytes,
            exchange.overlap,
            backend,
            is_summed and not fixed,
            shares_batches=not fixed,
        )
        numbers = range(len(model.storage.spans))
        self.fixed = FixedReduction(model, replicas, [numbers], backend) if fixed else None

    def run(self, batch: Batch, step: int, scale: float) -> Outcome:
        """See `Runner.run`."""
        check_cuts(batch, self.fixed is not None)
        device_batch = to_device(batch, self.model, self.backend)
        self.scalars.clear()
        if self.fixed is not None:
            return self._run_fixed(batch, device_batch, step, scale, self.fixed)
        for number, cut in enumerate(batch.cuts):
            loss, logits = self._forward(device_batch, cut, step)
            with timeline.span(f"B{cut.number}", "backward"):
                self.parallel.backward(loss, batch.global_rows, number == len(batch.cuts) - 1, scale)
            self.scalars.add(LOSS, loss.data)
            self.scalars.add(CORRECT, self._correct(logits, device_batch.rows(slice(cut.start, cut.stop))))
        counted = len(batch.y) if self._counts else 0
        return Outcome(self._sums, counted, self.parallel.traffic)

    def _sums(self, values: Values) -> tuple[float, float]:
        return (values.get(LOSS, 0.0), values.get(CORRECT, 0.0)) if self._counts else (0.0, 0.0)

    def _run_fixed(
        self, batch: Batch, device_batch: DeviceBatch, step: int, scale: float, fixed: FixedReduction
    ) -> Outcome:
        fixed.begin(batch.microbatches)
        for cut in batch.cuts:
            fixed.microbatch = cut.number
            loss, logits = self._forward(device_batch, cut, step)
            with timeline.span(f"B{cut.number}", "backward"):
                self.parallel.backward(loss, batch.global_rows, last=False, scale=scale)
            fixed.add(0, cut.number)
            self.scalars.add(cut.number, loss.data)
            self.scalars.add(CORRECT, self._correct(logits, device_batch.rows(slice(cut.start, cut.stop))))
        begin = clock.now()
        fixed.finish()
        traffic = Traffic(clock.now() - begin, 0.0, fixed.sent_bytes, len(fixed.storage.grads), nan)
        return Outcome(partial(self._sums_fixed, fixed, batch.cuts), len(batch.y), traffic)

    def _sums_fixed(self, fixed: FixedReduction, cuts: Sequence[Cut], values: Values) -> tuple[float, float]:
        total = fixed.sum_numbers({cut.number: values[cut.number] for cut in cuts}, self.world)
        return total if self.world.is_root else 0.0, values.get(CORRECT, 0.0)

    def evaluate(self, batch: Batch, scalars: DeferredScalars) -> int:
        """See `Runner.evaluate`."""
        mine = scalars if self._counts else None  # the others take part, and count nothing
        loss, correct = self.evaluation_loss, self._correct
        rows = evaluate_batch(self.model, loss, correct, self.backend, batch, mine, self._classes)
        return rows if self._counts else 0

    def explain(self, batch: Batch, step: int, value: float) -> Exception:
        """See `Runner.explain`."""
        device_batch = to_device(batch, self.model, self.backend)
        if self.fixed is not None:
            return explain_gradients(self.world, self.model, step + 1, value, "its microbatches")
        cut = batch.cuts[-1]
        for cut in batch.cuts:  # the first microbatch whose loss is not finite, else the last
            loss, _ = self._forward(device_batch, cut, step)
            if not all(isfinite(value) for value in self.world.sum_floats([loss.item()])):
                break
        again = partial(self._forward, device_batch, cut, step)
        return explain(
            self.world, self.model, device_batch.x[cut.start : cut.stop], lambda: again()[0], step + 1, value
        )

    def release(self) -> None:
        """See `Runner.release`."""
        self.parallel.release()
        if self.fixed is not None:
            self.fixed.release()

    def _forward(self, device_batch: DeviceBatch, cut: Cut, step: int) -> tuple[Tensor, Tensor]:
        with timeline.span(f"F{cut.number}", "forward"), training(self.seed, step, cut.first_row):
            return _forward(self.model, self.loss, self._check, device_batch, cut)


def _forward(model: Module, loss: SumLoss, check: Check, device_batch: DeviceBatch, cut: Cut) -> tuple[Tensor, Tensor]:
    """Return the loss of a microbatch and its logits."""
    part = device_batch.rows(slice(cut.start, cut.stop))
    logits = model(Tensor(part.x))
    check(part, cut.start, logits)  # before the loss, which on a device would read out of range silently
    return loss(logits, part.y), logits
