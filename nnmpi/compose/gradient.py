"""The gradient of one part of a batch, computed by one rank alone: no message is sent for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import numpy as np

from nnmpi import timeline
from nnmpi.backend.precision import use_precision
from nnmpi.backend.record import Backend
from nnmpi.backend.recording import refuse_inside
from nnmpi.compose.given import Given, give, label_check
from nnmpi.compose.norm import note_squares, read_norm
from nnmpi.compose.readings import Readings
from nnmpi.compose.runner import CORRECT, LOSS, Correct, SumLoss, Values, count_correct
from nnmpi.data.loader import Batch, Cut
from nnmpi.errors import UsageError
from nnmpi.nn.mode import training
from nnmpi.nn.module import Module
from nnmpi.optim.clip import coefficient, global_norm, scale
from nnmpi.parallel.divergence import find_place, tell_place
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.tensor import Tensor


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
        self._readings, self._check = Readings(backend), label_check(loss, 0)
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
        begin = time.perf_counter()
        self.model.storage.zero_grad()
        self._readings.clear()
        given = give(batch, self.model, self.backend)
        for cut in batch.cuts:
            if cut.stop == cut.start:
                continue
            loss, logits = self._forward(given, cut, step)
            self._look_up()
            with timeline.span(f"B{step}", "backward"):
                loss.backward(np.full(loss.shape, 1 / max(batch.global_rows, 1)))
            self._readings.add(LOSS, loss.data)
            self._readings.add(CORRECT, self._correct(logits, given.rows(slice(cut.start, cut.stop))))
        self.model.storage.finish_gradients()
        rows, norm = len(batch.y), 0.0
        if rows and self.backend.is_device:
            note_squares(self._readings, self.model.storage)
        values = self._readings.read()
        if rows:
            norm = self._clip(values, batch.global_rows / rows)
        return Gradient(values.get(LOSS, 0.0), values.get(CORRECT, 0.0), rows, norm, time.perf_counter() - begin)

    def explain(self, gradient: Gradient, batch: Batch, step: int, who: str) -> str:
        """Return the sentence about a gradient that is not finite, after computing it again.

        Args:
            who: whose it is: "rank 2", "worker 2".
        """
        with use_precision(self._precision):
            return self._explain(gradient, batch, step, who)

    def _explain(self, gradient: Gradient, batch: Batch, step: int, who: str) -> str:
        given = give(batch, self.model, self.backend)
        first = next((cut for cut in batch.cuts if not isfinite(self._forward(given, cut, step)[0].item())), None)
        cut = batch.cuts[-1] if first is None else first
        place = find_place(self.model, given.x[cut.start : cut.stop], lambda: self._forward(given, cut, step)[0])
        return tell_place(step + 1, gradient.loss_sum / max(gradient.rows, 1), place, who)

    def _forward(self, given: Given, cut: Cut, step: int) -> tuple[Tensor, Tensor]:
        part = given.rows(slice(cut.start, cut.stop))
        with timeline.span(f"F{step}", "forward"), training(self.seed, step, cut.first_row):
            logits = self.model(Tensor(part.x))
            self._check(part, cut.start, logits)
            return self.loss(logits, part.y), logits

    def release(self) -> None:
        """Take everything off the model again."""
        if self._poll is not None:
            for span in self.model.storage.spans:
                span.parameter.hook = None

    def _clip(self, values: Values, parts: float) -> float:
        """Return the length of the mean loss's gradient, of which the storage has one of so many parts; clip it."""
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
