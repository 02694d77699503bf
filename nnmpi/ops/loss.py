"""Losses: cross-entropy from logits, mean squared error, binary cross-entropy from logits.

`reduction` is "mean", "sum" or "none". Parallel training takes sums and divides once by the global count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.casting import FLOAT32, cast, device_kernels
from nnmpi.backend.constants import ones, steps
from nnmpi.backend.kernels.active import kernels_for
from nnmpi.backend.pick import largest, pick
from nnmpi.backend.precision import is_low
from nnmpi.backend.recording import perform
from nnmpi.errors import DtypeError, ShapeError, UsageError
from nnmpi.tensor.convert import widely
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import mixes, real
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.variable import Variable

if TYPE_CHECKING:
    from nnmpi.backend.kernels.table import Kernels

REDUCTIONS = ("mean", "sum", "none")
FEW_CLASSES = 32
_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


class CrossEntropy(Function):
    """-log softmax(logits)[label] per row, smoothed and masked; softmax and loss in one operation.

    Few classes are laid out class by class, as NumPy is slow on short rows:

        logits      (rows, classes)          powers, up to FEW_CLASSES    (classes, rows)
                                             powers, for more classes     (rows, classes)

    The gradient is softmax(logits) - target, so the powers and their sums are all that is saved.
    """

    __slots__ = ("axis", "ignore_index", "reduction", "smoothing")

    def __init__(self, reduction: str, ignore_index: int | None, smoothing: float) -> None:
        self.reduction, self.ignore_index, self.smoothing = reduction, ignore_index, smoothing

    replayable = True

    def forward(self, logits: Array, labels: Array) -> Array:
        xp, classes, count = self.xp, logits.shape[-1], labels.size
        rows = logits if logits.ndim == 2 else xp.reshape(logits, (count, classes))
        labels, kept = labels if labels.ndim == 1 else xp.reshape(labels, (count,)), None
        if self.ignore_index is not None:
            kept = xp.not_equal(labels, self.ignore_index)
            labels = xp.where(kept, labels, 0)
        shifted, places = self._arranged(rows, labels)
        target = pick(xp, shifted, places)
        if self.smoothing:
            mean = xp.multiply(xp.mean(shifted, axis=self.axis), self.smoothing)
            target = xp.add(xp.multiply(target, 1 - self.smoothing), mean)
        powers = xp.exp(shifted, out=shifted)
        each = ones(xp, classes, powers.dtype)
        sums = xp.dot(powers, each) if self.axis else xp.dot(each, powers)
        losses = xp.subtract(xp.log(sums), target)
        if kept is not None:
            count = xp.maximum(xp.add.reduce(kept, axis=0, dtype=losses.dtype), 1)
            losses = xp.where(kept, losses, 0)  # not a product: what is ignored may be NaN
        self.saved = (powers, sums, places, kept, logits.shape, count)
        return self._reduced(losses, count, logits.shape[:-1])

    def _arranged(self, rows: Array, labels: Array) -> tuple[Array, Array]:
        """Return the logits less the largest of their row, and the places of the labels in that array."""
        xp, (count, classes) = self.xp, rows.shape
        self.axis = 1 if classes > FEW_CLASSES else 0
        if self.axis:
            starts = steps(xp, count, classes)
            shifted = xp.subtract(rows, largest(xp, xp.ascontiguousarray(rows), 1)[:, None])
        else:
            starts = steps(xp, count, 1)
            labels = xp.multiply(labels, count, dtype="int64", casting="unsafe")
            shifted = xp.empty((classes, count), rows.dtype)
            xp.copyto(shifted, rows.T)
            xp.subtract(shifted, largest(xp, shifted, 0), out=shifted)
        return shifted, xp.add(starts, labels, dtype="int64", casting="unsafe")

    def _reduced(self, losses: Array, count: Any, shape: tuple[int, ...]) -> Array:
        if self.reduction == "none":
            return losses.reshape(shape)  # contiguous, so this is a view
        return _averaged(self.xp, self.xp.add.reduce(losses, axis=0), count, self.reduction)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        powers, sums, places, kept, shape, count = self.saved
        xp = self.xp
        grad = _averaged(xp, grad, count, self.reduction)
        share = xp.reshape(grad, (grad.size,)) if grad.ndim else grad[None]  # one for all rows, or one for each
        result: Array = xp.multiply(powers, self._beside(xp.divide(share, sums)))
        hit = share
        if self.smoothing:
            hit = xp.multiply(share, 1 - self.smoothing)
            xp.subtract(result, self._beside(xp.multiply(share, self.smoothing / shape[-1])), out=result)
        xp.put(result, places, xp.subtract(pick(xp, result, places), hit))
        if kept is not None:
            xp.copyto(result, 0, where=self._beside(xp.logical_not(kept)))
        result = result if self.axis else result.T
        return result if len(shape) == 2 else result.reshape(shape), None  # a view in either case

    def _beside(self, values: Array) -> Array:
        """Return one value per row in the shape that stands beside `powers`."""
        return values[:, None] if self.axis else values


class _CompiledCrossEntropy(CrossEntropy):
    """The same by a compiled kernel, losses and their gradients in one pass; all labels count, and none is smoothed."""

    __slots__ = ("kernels",)

    def __init__(self, reduction: str, kernels: Kernels) -> None:
        super().__init__(reduction, None, 0.0)
        self.kernels = kernels

    def forward(self, logits: Array, labels: Array) -> Array:
        xp, count, classes = self.xp, labels.size, logits.shape[-1]
        rows = xp.reshape(xp.ascontiguousarray(logits), (count, classes))
        places = xp.reshape(xp.ascontiguousarray(labels), (count,))
        losses, gradients = xp.empty((count,), rows.dtype), xp.empty((count, classes), rows.dtype)
        self.invoke(self.kernels.softmax_loss, rows, places, losses, gradients)
        self.saved = (gradients, logits.shape, count)
        return self._reduced(losses, count, logits.shape[:-1])

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        gradients, shape, count = self.saved
        grad = _averaged(self.xp, grad, count, self.reduction)
        share = self.xp.reshape(grad, (grad.size, 1))  # one for all rows, or one for each
        return self.xp.multiply(gradients, share).reshape(shape), None


class _DeviceCrossEntropy(CrossEntropy):
    """The same by a device's kernel: losses and their gradients, in float32 or more, in one pass over the logits.

    A label out of range, which nobody on the host sees, makes the loss NaN.
    """

    __slots__ = ("table",)

    def __init__(self, reduction: str, ignore_index: int | None, smoothing: float, table: Any) -> None:
        super().__init__(reduction, ignore_index, smoothing)
        self.table = table

    def forward(self, logits: Array, labels: Array) -> Array:
        xp, count, classes = self.xp, labels.size, logits.shape[-1]
        rows = xp.ascontiguousarray(xp.reshape(logits, (count, classes)))
        places = xp.ascontiguousarray(xp.reshape(labels, (count,)))
        wide = FLOAT32 if is_low(logits.dtype) else logits.dtype
        losses, gradients = xp.empty((count,), wide), xp.empty((count, classes), wide)
        self.invoke(self.table.softmax_loss, rows, places, losses, gradients, self.ignore_index, self.smoothing)
        total: Any = count
        if self.ignore_index is not None:
            kept = xp.not_equal(places, self.ignore_index)
            total = xp.maximum(xp.add.reduce(kept, axis=0, dtype=wide), 1)
        self.saved = (gradients, logits.shape, total, logits.dtype)
        return self._reduced(losses, total, logits.shape[:-1])

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        gradients, shape, count, dtype = self.saved
        xp = self.xp
        grad = _averaged(xp, grad, count, self.reduction)
        share = xp.reshape(grad, (grad.size, 1))  # one for all rows, or one for each
        return cast(xp, xp.multiply(gradients, share), dtype).reshape(shape), None


class SquaredError(Function):
    """(x - target)^2, summed or averaged."""

    __slots__ = ("reduction",)

    replayable = True

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction

    def forward(self, x: Array, target: Array) -> Array:
        xp = self.xp
        difference = xp.subtract(x, target)
        self.saved = (difference,)
        if self.reduction == "none":
            squares: Array = xp.multiply(difference, difference)
            return squares
        flat = difference.reshape(-1)  # a view: the difference is new
        return _averaged(xp, xp.dot(flat, flat), x.size, self.reduction)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (difference,) = self.saved
        xp = self.xp
        result = xp.multiply(difference, xp.multiply(_averaged(xp, grad, difference.size, self.reduction), 2))
        return result if self.needs[0] else None, xp.negative(result) if self.needs[1] else None


class BinaryCrossEntropy(Function):
    """log(1 + e^x) - t x, the loss of a sigmoid's logit, in a form that does not overflow."""

    __slots__ = ("reduction",)

    replayable = True

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction

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

    On a device with its kernels nobody waits for a look at the labels: one that is out of range makes the loss NaN.

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
    classes = logits.shape[-1] if logits.ndim else 0
    values = checked_labels(logits, labels, classes, reduction, ignore_index, label_smoothing)
    table = device_kernels(real("cross_entropy", logits).data)
    if table is not None:
        return _DeviceCrossEntropy(reduction, ignore_index, float(label_smoothing), table)(logits, values)
    compiled = kernels_for(logits.data)
    if compiled is not None and ignore_index is None and label_smoothing == 0 and values.dtype == "int64":
        return _CompiledCrossEntropy(reduction, compiled)(logits, values)
    return widely(CrossEntropy(reduction, ignore_index, float(label_smoothing)), logits, values, narrow=False)


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
    shape = logits.data.shape
    if not shape or values.shape != shape[:-1] or classes == 0:
        raise ShapeError(f"cross_entropy of logits {shape} needs labels of shape {shape[:-1]}, not {values.shape}")
    if device_kernels(logits.data) is None:
        perform(_check_labels, values, classes, ignore_index)
    return values


def mse(x: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """Return the squared error (x - target)^2: its mean over all elements, its sum, or each one.

    Raises:
        ShapeError: when the shapes differ (they are not broadcast: that hides mistakes).
        DtypeError: when the dtypes differ.
        UsageError: for an unknown reduction.
    """
    _check_reduction(reduction)
    return widely(SquaredError(reduction), real("mse", x), _target("mse", x, target), narrow=False)


def binary_cross_entropy(logits: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy between sigmoid(logits) and targets in [0, 1], computed from the logits.

    Raises:
        ShapeError: when the shapes differ.
        DtypeError: when the dtypes differ.
        UsageError: for an unknown reduction.
    """
    _check_reduction(reduction)
    target = _target("binary_cross_entropy", logits, target)
    return widely(BinaryCrossEntropy(reduction), real("binary_cross_entropy", logits), target, narrow=False)


def _check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
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
        raise ShapeError(f"label {int(labels.reshape(-1)[place])} at row {place} is outside 0..{classes - 1}")


def _target(name: str, x: Tensor, target: Any) -> Any:
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
