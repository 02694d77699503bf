"""Losses of numbers that are predicted, and how good outputs are beside their loss: their score.

    mse, mae, huber     quantities      score: minus the squared error, from which RMSE and R2 come
    bce                 yes or no       score: how many outputs are on the right side of 0
    cross-entropy       classes         score: how many labels have the largest logit (see `compose.runner`)

A score is a sum over targets, the higher the better; `stats.Totals` reads their mean. A target is a sample here,
with all its elements: its loss and its score are means over them, so that the mean over samples is the mean over all
elements of the global batch.
"""

from math import exp, inf, log, nan, prod, sqrt
from sys import float_info

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.kernels import to_float32
from nnmpi.errors import ShapeError, counted
from nnmpi.ops.loss import binary_cross_entropy, huber, mae, mse
from nnmpi.tensor.tensor import Tensor

YES_OR_NO = "bce"
ERRORS = {"mse": mse, YES_OR_NO: binary_cross_entropy, "mae": mae, "huber": huber}


class SumError:
    """The sum over samples of each one's mean error. Called with outputs and targets, which are floats.

    Args:
        name: one of ERRORS; of bce the outputs are logits.

    Raises:
        ShapeError: when called, for outputs that are not as many as the targets.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._function = ERRORS[name]

    def __repr__(self) -> str:
        return self.name

    def __call__(self, outputs: Tensor, targets: Array) -> Tensor:
        each = prod(targets.shape[1:])
        if not _fits(outputs, targets):
            wanted = counted(each, "output")
            raise ShapeError(
                f"the model's outputs have shape {outputs.shape} and the targets {targets.shape}; let it give {wanted} "
                "for each sample"
            )
        alike = outputs if outputs.shape == targets.shape else outputs.reshape(targets.shape)
        total = self._function(alike, targets, reduction="sum")
        return total if each == 1 else total / each

    def score(self, outputs: Tensor, targets: Array) -> Array | float:
        """Return the sum of the samples' scores; on a device an array of one number, for which nobody has waited."""
        if self.name != YES_OR_NO:
            return squared_errors(outputs, targets)
        xp = namespace(outputs.data)
        values = to_float32(xp, outputs.data).reshape(targets.shape)
        hits: Array = xp.equal(values > 0, targets > 0.5).sum()
        return hits / prod(targets.shape[1:])


def squared_errors(outputs: Tensor, targets: Array) -> Array | float:
    """Return minus the sum over samples of each one's mean squared error; NaN for outputs of other sizes."""
    if not _fits(outputs, targets):
        return nan
    xp = namespace(outputs.data)
    difference = to_float32(xp, outputs.data).reshape(targets.shape) - targets
    total: Array = -(difference * difference).sum() / max(prod(targets.shape[1:]), 1)
    return total


def rmse(score: float) -> float:
    """Return the root of the mean squared error whose score this is, a mean over samples."""
    return sqrt(-score) if score <= 0 else nan


def perplexity(loss: float) -> float:
    """Return e to a mean loss; inf where that is too large a number."""
    return exp(loss) if loss < log(float_info.max) else inf


def r2(score: float, variance: float) -> float:
    """Return the share of the targets' variance that is explained, 1 - mse / variance; NaN where they do not vary.

    Args:
        score: a mean over samples.
        variance: of the targets; see `Dataset.variance`.
    """
    return 1 + score / variance if variance > 0 else nan


def _fits(outputs: Tensor, targets: Array) -> bool:
    return bool(outputs.shape[:1] == targets.shape[:1] and outputs.data.size == targets.size)
