"""The gradient of one part of a batch, for an asynchronous worker: no message is sent for it."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

from nnmpi.backend.precision import use_precision
from nnmpi.backend.recording import refuse_inside
from nnmpi.compose.losses import DeferredScalars
from nnmpi.compose.passes import Passes
from nnmpi.compose.stats import Totals
from nnmpi.compose.trainer import Trainer
from nnmpi.data.loader import Batch
from nnmpi.errors import UsageError
from nnmpi.optim.clip import coefficient, global_norm, scale
from nnmpi.parallel.divergence import locate_nonfinite, nonfinite_message


@dataclass(frozen=True)
class Gradient:
    """What computing a gradient gave; the gradient itself is in the model's storage.

    Attributes:
        totals: of the part, a step; its times are for the caller to fill in.
        norm: the length of the gradient of the part's mean loss, before clipping; not finite if the loss is not.
    """

    totals: Totals
    norm: float

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are numbers, so that it may be used."""
        return isfinite(self.totals.loss_sum) and isfinite(self.norm)


class LocalGradient:
    """Computes gradients of parts of batches.

    Args:
        trainer: whose model it is, without another strategy; its `clip` is for the gradient of a part's mean loss.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.model, self.backend, self.clip = trainer.model, trainer.backend, trainer.clip
        self._passes = Passes(trainer)
        self._precision = trainer.precision

    def look_after(self, poll: Callable[[], None]) -> None:
        """Call this, too, from now on: many times while a gradient is computed.

        Raises:
            UsageError: when a strategy has the model's hooks already.
        """
        parameters = [span.parameter for span in self.model.storage.spans]
        if any(each.hook is not None or each.guard is not None for each in parameters):
            raise UsageError("the model has a DataParallel (or other hooks) already; call its release() first")
        self._passes.poll = poll
        for parameter in parameters:
            parameter.hook = lambda _: poll()

    def run(self, batch: Batch, step: int) -> Gradient:
        """Compute the gradient of the part's losses, divided by the targets of the whole batch, into `storage.grads`.

        The gradients of all parts of a batch add up to that of its mean loss.

        Args:
            step: the number of the batch in the run, which keys dropout: the masks are those of a synchronous run.
        """
        refuse_inside("a worker's step")
        with use_precision(self._precision):
            return self._run(batch, step)

    def _run(self, batch: Batch, step: int) -> Gradient:
        self.model.storage.zero_grad()
        self._passes.train(batch, step)  # as `DataParallel` divides, but the parts' gradients are added up elsewhere
        self.model.storage.finish_gradients()
        (loss_sum, score_sum, targets), norm = self._passes.sums(), 0.0
        if targets:
            norm = self._clip(batch.global_targets / targets)
        totals = Totals(steps=1, samples=len(batch.y), targets=targets, loss_sum=loss_sum, score_sum=score_sum)
        return Gradient(totals, norm)

    def evaluate(self, batch: Batch, scalars: DeferredScalars) -> bool:
        """See `Passes.evaluate`."""
        with use_precision(self._precision):
            return self._passes.evaluate(batch, scalars)

    def explain(self, gradient: Gradient, batch: Batch, step: int, who: str) -> str:
        """Return the sentence about a gradient that is not finite, after computing it again.

        Args:
            who: whose it is: "rank 2", "worker 2".
        """
        with use_precision(self._precision):
            place = locate_nonfinite(self.model, *self._passes.suspect(batch, step, isfinite))
            return nonfinite_message(step + 1, gradient.totals.loss, place, who)

    def release(self) -> None:
        """Take everything off the model again."""
        if self._passes.poll is not None:
            for span in self.model.storage.spans:
                span.parameter.hook = None

    def _clip(self, ratio: float) -> float:
        """Return the length of the gradient of this part's mean loss, and clip the gradient by it.

        The stored gradient is divided by the whole batch's targets, so its length is multiplied by the batch's
        targets / the part's.
        """
        grads = self.model.storage.grads
        norm = global_norm(grads) * ratio
        if self.clip is not None:
            scale(grads, coefficient(norm, self.clip))
        return norm
