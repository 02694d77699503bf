"""Losses: cross-entropy and binary cross-entropy from logits; squared, absolute and Huber's error.

`reduction` is "mean", "sum" or "none". Parallel training takes sums and divides once by the global count.
"""

from typing import Any

import numpy as np

from nnmpi.backend.array import Array, is_array, namespace
from nnmpi.backend.kernels.base import Kernels
from nnmpi.backend.kernels.lookup import kernels_for
from nnmpi.backend.kernels.sums import sum_of_squares
from nnmpi.backend.recording import perform
from nnmpi.errors import DtypeError, ShapeError, UsageError
from nnmpi.tensor.convert import in_float32, with_kernels
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import mixes, refuse_parts, require_floating, whole_values
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.variable import Variable

REDUCTIONS = ("mean", "sum", "none")
_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


class CrossEntropy(Function):
    """-log softmax(logits)[label] per row, smoothed and masked; softmax and loss in one operation.

    Args:
        reduction: one of REDUCTIONS.
        ignore_index: labels of this value count for nothing; None for none.
        smoothing: the share of each target that is spread evenly over all classes.
        kernels: those for the logits.
    """

    __slots__ = ("ignore_index", "kernels", "reduction", "smoothing")

    replayable = True

    def __init__(self, reduction: str, ignore_index: int | None, smoothing: float, kernels: Kernels) -> None:
        self.reduction, self.ignore_index, self.smoothing, self.kernels = reduction, ignore_index, smoothing, kernels

    def forward(self, logits: Array, labels: Array) -> Array:
        xp, classes = self.xp, logits.shape[-1]
        rows = logits if logits.ndim == 2 else xp.reshape(logits, (labels.size, classes))
        labels = labels if labels.ndim == 1 else xp.reshape(labels, (labels.size,))
        losses, residuals = self.kernels.softmax_loss(xp, rows, labels, self.ignore_index, self.smoothing)
        count: Any = labels.size  # of the labels that count
        if self.ignore_index is not None:
            kept = xp.not_equal(labels, self.ignore_index)
            count = xp.maximum(xp.add.reduce(kept, axis=0, dtype=losses.dtype), 1)
        self.saved = (residuals, logits.shape, logits.dtype, count)
        if self.reduction == "none":
            return losses.reshape(logits.shape[:-1])  # contiguous, so this is a view
        return _averaged(xp, xp.add.reduce(losses, axis=0), count, self.reduction)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        residuals, shape, dtype, count = self.saved
        xp = self.xp
        grad = _averaged(xp, grad, count, self.reduction)
        share = xp.reshape(grad, (grad.size,)) if grad.ndim else grad[None]  # one for all rows, or one for each
        to_rows = self.kernels.softmax_loss_grad(xp, share, residuals, self.smoothing, dtype)  # (rows, classes)
        return to_rows if len(shape) == 2 else to_rows.reshape(shape), None  # a view in either case


class _Error(Function):
    """A loss of each element, summed or averaged; `_judge` returns the losses and their slopes in x."""

    __slots__ = ("reduction",)

    replayable = True

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction

    def forward(self, x: Array, target: Array) -> Array:
        losses, slope = self._judge(x, target)
        self.saved = (slope,)
        return losses if self.reduction == "none" else _averaged(self.xp, self.xp.sum(losses), x.size, self.reduction)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (slope,), xp = self.saved, self.xp
        result = xp.multiply(slope, _averaged(xp, grad, slope.size, self.reduction))
        return result if self.needs[0] else None, xp.negative(result) if self.needs[1] else None

    def _judge(self, x: Array, target: Array) -> tuple[Array, Array]:
        raise NotImplementedError


class SquaredError(_Error):
    """(x - target)^2, summed or averaged."""

    def forward(self, x: Array, target: Array) -> Array:
        xp = self.xp
        difference = xp.subtract(x, target)
        self.saved = (difference,)
        if self.reduction == "none":
            squares: Array = xp.multiply(difference, difference)
            return squares
        return _averaged(xp, sum_of_squares(xp, difference), x.size, self.reduction)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (difference,) = self.saved
        xp = self.xp
        result = xp.multiply(difference, xp.multiply(_averaged(xp, grad, difference.size, self.reduction), 2))
        return result if self.needs[0] else None, xp.negative(result) if self.needs[1] else None


class Huber(_Error):
    """Huber's error, with d = x - target and c = d cut to [-delta, delta]: c (d - c / 2)."""

    __slots__ = ("delta",)

    def __init__(self, reduction: str, delta: float) -> None:
        super().__init__(reduction)
        self.delta = delta

    def _judge(self, x: Array, target: Array) -> tuple[Array, Array]:
        xp = self.xp
        difference = xp.subtract(x, target)
        slope = xp.clip(difference, -self.delta, self.delta)
        return xp.multiply(slope, xp.subtract(difference, xp.multiply(slope, 0.5))), slope


class AbsoluteError(_Error):
    """|x - target|, summed or averaged; where both are equal its gradient is 0."""

    def _judge(self, x: Array, target: Array) -> tuple[Array, Array]:
        difference = self.xp.subtract(x, target)
        return self.xp.absolute(difference), self.xp.sign(difference)


class BinaryCrossEntropy(_Error):
    """log(1 + e^x) - t x, the loss of a sigmoid's logit, in a form that does not overflow."""

    def forward(self, x: Array, target: Array) -> Array:
        xp = self.xp
        small = xp.exp(xp.negative(xp.absolute(x)))
        above = xp.divide(1, xp.add(small, 1))
        self.saved = (xp.where(xp.greater_equal(x, 0), above, xp.multiply(small, above)), target, x)
        losses: Array = xp.add(xp.subtract(xp.maximum(x, 0), xp.multiply(x, target)), xp.log1p(small))
        if self.reduction == "none":
            return losses
        return _averaged(xp, xp.sum(losses), x.size, self.reduction)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        probability, target, x = self.saved
        xp = self.xp
        share = _averaged(xp, grad, x.size, self.reduction)
        to_x = xp.multiply(xp.subtract(probability, target), share) if self.needs[0] else None
        return to_x, xp.multiply(xp.negative(x), share) if self.needs[1] else None


def cross_entropy(
    logits: Tensor, labels: Any, reduction: str = "mean", ignore_index: int | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Return the cross-entropy between softmax(logits) and the labels.

    A device's kernels do not check the labels, which would stop it: one out of range makes the loss NaN.

    Args:
        logits: (..., classes), floating point, any finite size. The loss of float16 and bfloat16 is float32.
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
    kernels = kernels_for(require_floating("cross_entropy", logits).data)
    classes = logits.shape[-1] if logits.ndim else 0
    values = checked_labels(logits, labels, classes, reduction, ignore_index, label_smoothing)
    function = CrossEntropy(reduction, ignore_index, float(label_smoothing), kernels)
    return with_kernels(kernels, function, logits, values, narrow=False)


def checked_labels(
    logits: Tensor, labels: Any, classes: int, reduction: str, ignore_index: int | None, label_smoothing: float
) -> Array:
    """Return the labels of a cross-entropy as an array, after a look at all its arguments.

    Args:
        logits: (..., any number of the classes).

    Errors are those of `cross_entropy`.
    """
    check_reduction(reduction)
    if not 0 <= label_smoothing < 1:
        raise UsageError(f"label_smoothing is a share in [0, 1), not {label_smoothing}")
    given = whole_values("cross_entropy", labels)
    values: Array = given if isinstance(labels, Variable) else namespace(logits.data).asarray(given)
    if values.dtype.kind not in "iu":
        raise DtypeError(f"cross_entropy needs integer labels, not {values.dtype}")
    shape = logits.data.shape
    if not shape or values.shape != shape[:-1] or classes == 0:
        refuse_parts("cross_entropy", logits)
        raise ShapeError(f"cross_entropy of logits {shape} needs labels of shape {shape[:-1]}, not {values.shape}")
    # on a device nobody waits to see the labels: a wrong one makes the loss NaN
    if type(logits.data) is np.ndarray or not kernels_for(logits.data).is_device:
        perform(_check_labels, values, classes, ignore_index)
    return values


def mse(x: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """Return the squared error (x - target)^2: its mean over all elements, its sum, or each one.

    Args:
        x: any shape, floating point.
        target: of x's shape and dtype; a tensor, or an array that gets no gradient.
        reduction: "mean" over all elements, "sum", or "none" for one loss for each.

    Raises:
        ShapeError: when the shapes differ (they are not broadcast: that hides mistakes).
        DtypeError: when the dtypes differ.
        UsageError: for an unknown reduction.
    """
    check_reduction(reduction)
    return in_float32(SquaredError(reduction), require_floating("mse", x), _target("mse", x, target), narrow=False)


def mae(x: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """Return the absolute error |x - target|: its mean over all elements, its sum, or each one (PyTorch's l1_loss).

    Args and errors are those of `mse`.
    """
    check_reduction(reduction)
    return in_float32(AbsoluteError(reduction), require_floating("mae", x), _target("mae", x, target), narrow=False)


def huber(x: Tensor, target: Any, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """Return Huber's error: half the square where |x - target| <= delta, else a straight line of slope delta.

    Huber, "Robust estimation of a location parameter", 1964.

    Args:
        x, target, reduction: see `mse`.
        delta: above 0.

    Raises:
        UsageError: for another delta; see also `mse`.
    """
    check_reduction(reduction)
    if not delta > 0:
        raise UsageError(f"delta is {delta}; give a number above 0")
    function = Huber(reduction, float(delta))
    return in_float32(function, require_floating("huber", x), _target("huber", x, target), narrow=False)


def binary_cross_entropy(logits: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy between sigmoid(logits) and targets in [0, 1], computed from the logits.

    Args:
        logits: any shape, floating point.
        target: in [0, 1], of the logits' shape and dtype; a tensor, or an array that gets no gradient.
        reduction: "mean" over all elements, "sum", or "none" for one loss for each.

    Raises:
        ShapeError: when the shapes differ.
        DtypeError: when the dtypes differ.
        UsageError: for an unknown reduction.
    """
    check_reduction(reduction)
    require_floating("binary_cross_entropy", logits)
    target = _target("binary_cross_entropy", logits, target)
    return in_float32(BinaryCrossEntropy(reduction), logits, target, narrow=False)


def check_reduction(reduction: str) -> None:
    """Refuse what is no reduction.

    Raises:
        UsageError: naming those that there are; for an array, what weighs classes.
    """
    if is_array(reduction):
        raise UsageError(
            f"reduction is one of {', '.join(REDUCTIONS)}, and no array; to weigh classes, take reduction='none': "
            "(losses * weight[y]).sum() / weight[y].sum()"
        )
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise UsageError(f"reduction {reduction!r} is unknown; choose one of {', '.join(REDUCTIONS)}")


def _check_labels(labels: Array, classes: int, ignore_index: int | None) -> None:
    # one look suffices in nearly every step: negative numbers are large ones without a sign
    plain = labels.reshape(-1).view(_UNSIGNED[labels.itemsize])
    below = min(classes, 1 << 8 * labels.itemsize - 1)  # where those begin
    if plain.size == 0 or plain[plain.argmax()] < below:
        return
    wrong = (labels < 0) | (labels >= classes)
    if ignore_index is not None:
        wrong &= labels != ignore_index
    if wrong.any():
        place = int(wrong.reshape(-1).argmax())
        label = int(labels.reshape(-1)[place])
        leave = f"; ignore_index={label} leaves such rows out" if label < 0 and ignore_index is None else ""
        raise ShapeError(f"label {label} at row {place} is outside 0..{classes - 1}{leave}")


def _target(name: str, x: Tensor, target: Any) -> Any:
    refuse_parts(name, x, target)
    values = target.data if isinstance(target, Variable) else namespace(x.data).asarray(target)
    if values.shape != x.shape:
        raise ShapeError(f"{name} of shapes {x.shape} and {values.shape}: they must be the same")
    if values.dtype != x.dtype and not mixes(values.dtype, x.dtype):
        raise DtypeError(f"{name} of {x.dtype} and a target of {values.dtype}; convert one with astype")
    return target if isinstance(target, Variable) else values


def _averaged(xp: Any, values: Array, count: Any, reduction: str) -> Array:
    """Return a sum's share of a mean, or a mean's gradient's share of each element; for other reductions the same.

    Args:
        count: of what the mean is over, an int or an array; nothing at all counts as 1.
    """
    if reduction != "mean":
        return values
    result: Array = xp.divide(values, max(count, 1) if isinstance(count, int) else count)
    return result
