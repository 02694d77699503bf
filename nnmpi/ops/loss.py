"""Losses: cross-entropy from logits, mean squared error, binary cross-entropy from logits.

`reduction` is "mean", "sum" or "none". Parallel training takes sums and divides once by the global count.
"""

from __future__ import annotations

from typing import Any

from nnmpi.backend.array import Array, namespace
from nnmpi.errors import DtypeError, ShapeError, UsageError
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import real
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.variable import Variable

REDUCTIONS = ("mean", "sum", "none")


class CrossEntropy(Function):
    """-log softmax(logits)[label] per row, smoothed and masked; softmax and loss in one operation.

    The gradient is softmax(logits) - target, so the probabilities are all that is saved.
    """

    __slots__ = ("ignore_index", "reduction", "smoothing")

    def __init__(self, reduction: str, ignore_index: int | None, smoothing: float) -> None:
        self.reduction, self.ignore_index, self.smoothing = reduction, ignore_index, smoothing

    def forward(self, logits: Array, labels: Array) -> Array:
        xp = namespace(logits)
        classes = logits.shape[-1]
        rows = logits.reshape(-1, classes)
        kept = None if self.ignore_index is None else labels.reshape(-1) != self.ignore_index
        labels = labels.reshape(-1) if kept is None else xp.where(kept, labels.reshape(-1), 0)
        place = xp.arange(len(rows))
        shifted = rows - rows.max(axis=1, keepdims=True)
        picked = shifted[place, labels]
        mean = shifted.mean(axis=1) if self.smoothing else None
        probabilities = xp.exp(shifted, out=shifted)
        sums = probabilities.sum(axis=1)
        losses = xp.log(sums) - (picked if mean is None else (1 - self.smoothing) * picked + self.smoothing * mean)
        if kept is not None:
            losses = xp.where(kept, losses, 0)  # not a product: what is ignored may be NaN
        count = len(rows) if kept is None else int(kept.sum())
        if self.needs[0]:
            probabilities /= sums[:, None]
            self.saved = (probabilities, labels, place, kept, logits.shape, count)
        return self._reduced(losses, count, logits.shape[:-1])

    def _reduced(self, losses: Array, count: int, shape: tuple[int, ...]) -> Array:
        if self.reduction == "none":
            return losses.reshape(shape)
        total: Array = losses.sum()
        return total / max(count, 1) if self.reduction == "mean" else total

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        probabilities, labels, place, kept, shape, count = self.saved
        result = probabilities.copy()
        result[place, labels] -= 1 - self.smoothing
        if self.smoothing:
            result -= self.smoothing / shape[-1]
        if self.reduction == "mean":
            grad = grad / max(count, 1)
        result *= grad.reshape(-1, 1)
        if kept is not None:
            result[~kept] = 0
        return result.reshape(shape), None


class SquaredError(Function):
    """(x - target)^2, summed or averaged."""

    __slots__ = ("reduction",)

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction

    def forward(self, x: Array, target: Array) -> Array:
        difference = x - target
        self.saved = (difference,)
        return _reduce(difference * difference, self.reduction)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (difference,) = self.saved
        result = difference * (2 * _spread(grad, difference.size, self.reduction))
        return result if self.needs[0] else None, -result if self.needs[1] else None


class BinaryCrossEntropy(Function):
    """log(1 + e^x) - t x, the loss of a sigmoid's logit, in a form that does not overflow."""

    __slots__ = ("reduction",)

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction

    def forward(self, x: Array, target: Array) -> Array:
        xp = namespace(x)
        small = xp.exp(-abs(x))
        self.saved = (xp.where(x >= 0, 1 / (1 + small), small / (1 + small)), target, x)
        return _reduce(xp.maximum(x, 0) - x * target + xp.log1p(small), self.reduction)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        probability, target, x = self.saved
        share = _spread(grad, x.size, self.reduction)
        return (probability - target) * share if self.needs[0] else None, -x * share if self.needs[1] else None


def cross_entropy(
    logits: Tensor, labels: Any, reduction: str = "mean", ignore_index: int | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Return the cross-entropy between softmax(logits) and the labels.

    Args:
        logits: (..., classes), floating point, any finite size.
        labels: (...), integers in 0..classes-1, an array or Tensor.
        reduction: "mean" over the labels that count, "sum", or "none" for one loss per label.
        ignore_index: labels of this value count for nothing. With no label left the mean is 0.
        label_smoothing: the share of each target that is spread evenly over all classes, in [0, 1)
            (Szegedy et al., "Rethinking the Inception architecture", 2016).

    Raises:
        ShapeError: when the shapes do not fit, or a label is out of range (the first such is named).
        DtypeError: when the labels are not integers.
        UsageError: for an unknown reduction or a smoothing outside [0, 1).
    """
    classes = logits.shape[-1] if logits.ndim else 0
    values = checked_labels(logits, labels, classes, reduction, ignore_index, label_smoothing)
    return CrossEntropy(reduction, ignore_index, float(label_smoothing))(real("cross_entropy", logits), values)


def checked_labels(
    logits: Tensor, labels: Any, classes: int, reduction: str, ignore_index: int | None, label_smoothing: float
) -> Array:
    """Return the labels of a cross-entropy as an array, after a look at all its arguments.

    Args:
        logits: (..., any number of the classes).

    Errors are those of `cross_entropy`.
    """
    _check_reduction(reduction)
    if not 0 <= label_smoothing < 1:
        raise UsageError(f"label_smoothing is a share in [0, 1), not {label_smoothing}")
    values: Array = labels.data if isinstance(labels, Variable) else namespace(logits.data).asarray(labels)
    if values.dtype.kind not in "iu":
        raise DtypeError(f"cross_entropy needs integer labels, not {values.dtype}")
    if logits.ndim == 0 or values.shape != logits.shape[:-1] or classes == 0:
        raise ShapeError(
            f"cross_entropy of logits {logits.shape} needs labels of shape {logits.shape[:-1]}, not {values.shape}"
        )
    _check_labels(values, classes, ignore_index)
    return values


def mse(x: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """Return the squared error (x - target)^2: its mean over all elements, its sum, or each one.

    Raises:
        ShapeError: when the shapes differ (they are not broadcast: that hides mistakes).
        DtypeError: when the dtypes differ.
        UsageError: for an unknown reduction.
    """
    _check_reduction(reduction)
    return SquaredError(reduction)(real("mse", x), _target("mse", x, target))


def binary_cross_entropy(logits: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy between sigmoid(logits) and targets in [0, 1], computed from the logits.

    Raises:
        ShapeError: when the shapes differ.
        DtypeError: when the dtypes differ.
        UsageError: for an unknown reduction.
    """
    _check_reduction(reduction)
    target = _target("binary_cross_entropy", logits, target)
    return BinaryCrossEntropy(reduction)(real("binary_cross_entropy", logits), target)


def _check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise UsageError(f"reduction {reduction!r} is unknown; choose one of {', '.join(REDUCTIONS)}")


def _check_labels(labels: Array, classes: int, ignore_index: int | None) -> None:
    wrong = (labels < 0) | (labels >= classes)
    if ignore_index is not None:
        wrong &= labels != ignore_index
    if wrong.any():
        place = int(wrong.reshape(-1).argmax())
        raise ShapeError(f"label {int(labels.reshape(-1)[place])} at row {place} is outside 0..{classes - 1}")


def _target(name: str, x: Tensor, target: Any) -> Any:
    values = target.data if isinstance(target, Variable) else namespace(x.data).asarray(target)
    if values.shape != x.shape:
        raise ShapeError(f"{name} of shapes {x.shape} and {values.shape}: they must be the same")
    if values.dtype != x.dtype:
        raise DtypeError(f"{name} of {x.dtype} and a target of {values.dtype}; convert one with astype")
    return target if isinstance(target, Variable) else values


def _reduce(losses: Array, reduction: str) -> Array:
    if reduction == "none":
        return losses
    total: Array = losses.sum()
    return total / max(losses.size, 1) if reduction == "mean" else total


def _spread(grad: Array, size: int, reduction: str) -> Array:
    return grad / max(size, 1) if reduction == "mean" else grad
