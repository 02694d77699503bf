"""Losses: cross-entropy and binary cross-entropy from logits; squared, absolute and Huber's error;
losses of probabilities.

`reduction` is "mean", "sum" or "none". Parallel training uses "sum" and divides once by the global
count: a mean of the ranks' means would be wrong for ranks with different numbers of labels.
"""

import warnings
from collections.abc import Callable
from math import prod
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.activations import logistic
from nnmpi.backend.array import Array, is_array, namespace
from nnmpi.backend.kernels import kernels_of
from nnmpi.backend.precision import FLOAT32, is_low
from nnmpi.backend.recording import call, to_library
from nnmpi.base.errors import DtypeError, ShapeError, UsageError, check_int, number
from nnmpi.base.words import answered
from nnmpi.comm.agreement import as_text
from nnmpi.ops.activation import log_softmax
from nnmpi.tensor.dtypes import may_meet
from nnmpi.tensor.function import Function, Grads, Variable, converted
from nnmpi.tensor.operand import refuse_parts, require_floating, values_or_refuse
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import NotExported, Sample, Traits

__all__ = [
    "binary_cross_entropy",
    "binary_nll",
    "cross_entropy",
    "huber",
    "kl_div",
    "mae",
    "mse",
    "nll",
]

REDUCTIONS = ("mean", "sum", "none")
LossFormula: TypeAlias = Callable[..., tuple[Array, ...]]


class Reduced(Function):
    """A loss whose result is all losses' mean, their sum, or each.

    Args:
        reduction: "mean", "sum" or "none".
    """

    __slots__ = ("reduction",)

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction

    @property
    def averages(self) -> bool:
        """See `Function.averages`."""
        return self.reduction == "mean"


class OfLabels(Reduced):
    """A loss of labels.

    Args:
        ignore_index: rows with this label have loss 0 and no gradient; or None.
        smoothing: the share of each target that is distributed evenly over all classes.
    """

    __slots__ = ("ignore_index", "smoothing")

    def __init__(self, reduction: str, ignore_index: int | None, smoothing: float) -> None:
        super().__init__(reduction)
        self.ignore_index, self.smoothing = ignore_index, smoothing

    @property
    def alike(self) -> str:
        """See `Function.alike`."""
        options = f"ignore_index={self.ignore_index}, label_smoothing={self.smoothing}"
        return f"{type(self).__name__}({options})"


class NLL(OfLabels):
    """-log p[label] per row of logarithms, with class weights, smoothed and masked.

    The mean is over the labels' weights.
    """

    __slots__ = ()

    traits = Traits(
        onnx=NotExported(),
        samples=(
            Sample("nll", lambda x, labels: nll(x, labels), ((3, 4),), (np.array([0, 3, 1]),)),
        ),
    )

    computes = returns = "float32"

    @property
    def alike(self) -> str:
        """See `Function.alike`."""
        weight = self.saved[-1]
        return super().alike if weight is None else f"{super().alike} of weights {as_text(weight)}"

    @property
    def summands(self) -> tuple[int, ...]:
        """See `Function.summands`."""
        _, _, shape, used, _ = self.saved
        rows = prod(shape[:-1])
        count = rows if used is None else int(used.sum())
        return () if self.reduction == "none" else (count, shape[0], rows)

    def forward(self, x: Array, labels: Array, weight: Any) -> Array:
        xp, classes, used = self.xp, x.shape[-1], None
        rows, labels = xp.reshape(x, (labels.size, classes)), xp.reshape(labels, (labels.size,))
        hits = labels[:, None] == xp.arange(classes)
        targets = (hits * (1 - self.smoothing) + self.smoothing / classes).astype(x.dtype)
        weights = hits.astype(x.dtype)
        if weight is not None:
            targets, weights = targets * weight, weights * weight
        # NaN without a hit: a device's labels are not checked
        weights = xp.where(xp.any(hits, axis=1), xp.sum(weights, axis=1), xp.nan)
        if self.ignore_index is not None:
            used = labels != self.ignore_index
            targets, weights = xp.where(used[:, None], targets, 0), xp.where(used, weights, 0)
        # not 0 * x, which is NaN where a probability is 0
        losses = -xp.sum(targets * xp.where(targets == 0, 0, rows), axis=1) + weights * 0
        total = xp.sum(weights) if self.reduction == "mean" else None
        if total is not None:
            total = xp.where(total == 0, 1, total)
        self.saved = (targets, total, x.shape, used, weight)
        if self.reduction == "none":
            return losses.reshape(x.shape[:-1])
        return xp.sum(losses) if total is None else xp.sum(losses) / total

    def backward(self, grad: Array) -> Grads:
        targets, total, shape, _, _ = self.saved
        share = grad if total is None else grad / total
        return (targets * -share.reshape(-1, 1)).reshape(shape), None, None


class CrossEntropy(OfLabels):
    """-log softmax(logits)[label] per row, smoothed and masked; softmax and loss in one
    operation.
    """

    __slots__ = ()

    traits = Traits(
        onnx=NotExported(),
        samples=(
            Sample(
                "cross_entropy",
                lambda x, labels: cross_entropy(x, labels),
                ((3, 4),),
                (np.array([0, 3, 1]),),
            ),
        ),
    )

    computes = "kernels"
    returns = "float32"

    @property
    def summands(self) -> tuple[int, ...]:
        """See `Function.summands`."""
        _, shape, _, count = self.saved
        return () if self.reduction == "none" else (int(count), shape[0], prod(shape[:-1]))

    def kernels(self, logits: Array) -> Any:
        """Return what has the softmax's loss and its gradient, see `PlainKernels.softmax_loss`."""
        return kernels_of(logits)

    def forward(self, logits: Array, labels: Array) -> Array:
        classes = logits.shape[-1]
        rows = logits if logits.ndim == 2 else np.reshape(logits, (labels.size, classes))
        labels = labels if labels.ndim == 1 else np.reshape(labels, (labels.size,))
        kernels, settings = self.kernels(logits), (self.ignore_index, self.smoothing)
        losses, residuals = kernels.softmax_loss(rows, labels, *settings)
        count = labels.size  # of labels that are not ignored
        if self.ignore_index is not None:
            used = labels != self.ignore_index
            count = np.maximum(self.xp.add.reduce(used, axis=0, dtype=losses.dtype), 1)
        self.saved = (residuals, logits.shape, kernels, count)
        if self.reduction == "none":
            return losses.reshape(logits.shape[:-1])  # contiguous, so this is a view
        return _averaged(self.xp.add.reduce(losses, axis=0), count, self.reduction)

    def backward(self, grad: Array) -> Grads:
        residuals, shape, kernels, count = self.saved
        grad = _averaged(grad, count, self.reduction)
        # (1,) for all rows, or (rows,)
        share = np.reshape(grad, (grad.size,)) if grad.ndim else grad[None]
        settings = self.ignore_index, self.smoothing
        to_rows = kernels.softmax_loss_grad(share, residuals, *settings)  # (rows, classes)
        return to_rows if len(shape) == 2 else to_rows.reshape(shape), None  # a view in either case


class ElementwiseLoss(Reduced):
    """A loss of each element, summed or averaged.

    Args:
        reduction: one of REDUCTIONS.
        formula: a row formula, (x, target, delta) -> the losses, their derivatives in x, and the
            derivatives in the target, which are left out if they are the negative of those in x.
        delta: of Huber's; of the relative entropy whether the target is logarithms.
    """

    __slots__ = ("delta", "formula")

    traits = Traits(
        onnx=NotExported(),
        samples=(
            Sample("mse", lambda x, t: mse(x, t), ((3, 4), (3, 4))),
            Sample("mae", lambda x, t: mae(x, t), ((3, 4),), (np.full((3, 4), 5.0),)),
            Sample("huber", lambda x, t: huber(x, t), ((3, 4), (3, 4))),
            Sample(
                "binary_cross_entropy", lambda x, t: binary_cross_entropy(x, t), ((3, 4), (3, 4))
            ),
            Sample(
                "binary_nll", lambda x, t: binary_nll(x, t), ((3, 4), (3, 4)), values="probability"
            ),
            Sample("kl_div", lambda x, t: kl_div(x, t), ((3, 4), (3, 4)), values="probability"),
        ),
    )

    computes = returns = "float32"

    def __init__(self, reduction: str, formula: LossFormula, delta: float) -> None:
        super().__init__(reduction)
        self.formula, self.delta = formula, delta

    @property
    def alike(self) -> str:
        """See `Function.alike`."""
        return f"{self.formula.__name__.strip('_')}(delta={self.delta})"

    @property
    def summands(self) -> tuple[int, ...]:
        """See `Function.summands`."""
        shape = self.saved[0].shape
        return (shape[0], shape[0], prod(shape)) if shape and self.reduction != "none" else ()

    def forward(self, x: Array, target: Array) -> Array:
        losses, *slopes = kernels_of(x).rows(self.formula, x, target, self.delta, blocks=False)
        self.saved = tuple(slopes)
        if self.reduction == "none":
            return losses
        return _averaged(np.sum(losses), x.size, self.reduction)

    def backward(self, grad: Array) -> Grads:
        (slope, *of_target), needs = self.saved, self.needs
        grad = _averaged(grad, slope.size, self.reduction)
        to_x: Any = slope * grad if needs[0] or not of_target else None
        if not needs[1]:
            return to_x, None
        return to_x, of_target[0] * grad if of_target else -to_x


def _squared(x: Array, target: Array, _: float) -> tuple[Array, ...]:
    """(x - target)^2"""
    difference = x - target
    return difference * difference, difference * 2


def _absolute(x: Array, target: Array, _: float) -> tuple[Array, ...]:
    """|x - target|, with gradient 0 at equality."""
    difference = x - target
    return abs(difference), np.sign(difference)


def _huber(x: Array, target: Array, delta: float) -> tuple[Array, ...]:
    """Huber's error c (d - c / 2), for d = x - target and c = d clipped to [-delta, delta]."""
    difference = x - target
    slope = np.clip(difference, -delta, delta)
    return slope * (difference - slope * 0.5), slope


def _from_logits(x: Array, target: Array, _: float) -> tuple[Array, ...]:
    """log(1 + e^x) - t x, the loss of a sigmoid's logit, in a form that does not overflow."""
    small = np.exp(-abs(x))
    losses = np.maximum(x, 0) - x * target + np.log1p(small)
    return losses, logistic(x, small) - target, -x


def _from_probabilities(x: Array, target: Array, _: float) -> tuple[Array, ...]:
    """-t log(x) - (1 - t) log(1 - x), with logarithms of at least -100, as PyTorch's."""
    yes, no = (np.where(p == 0, -100, np.log(np.where(p == 0, 1, p))) for p in (x, 1 - x))
    losses = -(target * yes + (1 - target) * no)
    return losses, (x - target) / np.maximum(x * (1 - x), 1e-12), no - yes


def _relative_entropy(x: Array, target: Array, log_target: bool) -> tuple[Array, ...]:
    """t (log(t) - x) of probabilities t, 0 where t is 0; or of the target's logarithms."""
    logs = target if log_target else np.log(np.where(target == 0, 1, target))
    share = np.exp(target) if log_target else target
    losses = share * (logs - x)
    return losses, -share, losses + share if log_target else logs - x + 1


@answered
def cross_entropy(
    logits: Tensor,
    labels: Any,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    weight: Any = None,
) -> Tensor:
    """Return the cross-entropy between softmax(logits) and the labels.

    A device's kernels do not check the labels, since the host would have to wait: a label out of
    range makes the loss NaN.

    Args:
        logits: (..., classes), floating point, any finite values. The loss of float16 and bfloat16
            is float32.
        labels: (...), integers in 0..classes-1, an array or Tensor.
        reduction: "mean" over the labels not ignored, "sum", or "none" for one loss per label.
        ignore_index: labels of this value are ignored. If all are, the mean is 0.
        label_smoothing: the share of each target that is distributed evenly over all classes, in
            [0, 1) (Szegedy et al., "Rethinking the Inception architecture", 2016).
        weight: (classes,), a factor of the losses of each class, or None. The mean is then over the
            weights of the labels, as in PyTorch.

    Raises:
        ShapeError: when the shapes do not fit, or a label is out of range (the first such is
            named).
        DtypeError: when the labels are not integers.
        UsageError: for an unknown reduction or a smoothing outside [0, 1).

    Example:
        >>> logits = nnmpi.Tensor([[2.0, 0.0], [0.0, 0.0]])
        >>> round(ops.cross_entropy(logits, np.array([0, 1])).item(), 4)
        0.41
    """
    if require_floating("cross_entropy", logits).made_by == "softmax":
        warnings.warn(
            "cross_entropy applies the softmax itself, and got the result of one, after which"
            " gradients are small and a loss never comes near 0; give it the logits",
            stacklevel=3,  # the caller of this function as it is `answered`
        )
    classes = logits.shape[-1] if logits.ndim else 0
    if weight is not None:
        if is_low(logits.dtype):
            logits = logits.astype("float32")
        rows = log_softmax(logits)
        return nll(rows, labels, reduction, ignore_index, weight, label_smoothing=label_smoothing)
    values = checked_labels(logits, labels, classes, reduction, ignore_index, label_smoothing)
    function = CrossEntropy(reduction, ignore_index, float(label_smoothing))
    return function(logits, values)


@answered
def nll(
    x: Tensor,
    labels: Any,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    weight: Any = None,
    *,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return minus the labels' log-probabilities: `cross_entropy` of what `log_softmax` returns.

    Args:
        x: (..., classes), logarithms of probabilities.
        labels, reduction, ignore_index, weight, label_smoothing: as for `cross_entropy`.

    Same errors as `cross_entropy`, and a UsageError for the result of a softmax.
    """
    _refuse_softmax("nll", require_floating("nll", x))
    classes = x.shape[-1] if x.ndim else 0
    values = checked_labels(x, labels, classes, reduction, ignore_index, label_smoothing, "nll")
    if weight is not None:
        weight = Tensor(values_or_refuse("nll", weight))._data
        if weight.shape != (classes,):
            raise ShapeError(f"weight has shape {weight.shape}; give one for each of {classes}")
        weight = to_library(namespace(x._data), weight)
        weight = weight.astype("float32" if is_low(x.dtype) else x.dtype)
    function = NLL(reduction, ignore_index, float(label_smoothing))
    return function(x, values, weight)


@answered
def binary_nll(x: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of probabilities and targets in [0, 1] (PyTorch's BCELoss).

    `binary_cross_entropy` of the logits is more accurate. Logarithms are at least -100.

    Args:
        x: probabilities in [0, 1], any shape, floating point.
        target, reduction: as for `binary_cross_entropy`.

    Raises:
        ShapeError: when the shapes differ.
        DtypeError: when the dtypes differ.
        UsageError: for an unknown reduction, and on the host for an x outside [0, 1].
    """
    if isinstance(require_floating("binary_nll", x)._data, np.ndarray):
        call(_check_probabilities, (x._data,), ())
    return _error("binary_nll", _from_probabilities, x, target, reduction)


@answered
def kl_div(x: Tensor, target: Any, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """Return the Kullback-Leibler divergence's terms, target (log(target) - x), from logarithms x.

    Args:
        x: logarithms of probabilities, any shape, floating point.
        target: probabilities of x's shape and dtype; their logarithms with `log_target`.
        reduction: one of REDUCTIONS, or "batchmean", the sum divided by the rows, which alone is
            the mean of the rows' divergences.

    Same errors as `mse`, and a UsageError for the result of a softmax.
    """
    _refuse_softmax("kl_div", require_floating("kl_div", x))
    by_rows = reduction == "batchmean"
    taken = "sum" if by_rows else reduction
    terms = _error("kl_div", _relative_entropy, x, target, taken, bool(log_target))
    return terms / max((1, *x.shape[:1])) if by_rows else terms


def _refuse_softmax(name: str, x: Variable) -> None:
    if x.made_by == "softmax":
        raise UsageError(
            f"{name} takes logarithms of probabilities, and got the result of a softmax; give it"
            " that of a log_softmax"
        )


def _check_probabilities(x: Array) -> None:
    if x.size and not (x.min() >= 0 and x.max() <= 1):
        raise UsageError(
            f"binary_nll needs probabilities in [0, 1], not {x.min()} to {x.max()}; of logits use"
            " binary_cross_entropy (nn.BCEWithLogitsLoss)"
        )


def checked_labels(
    logits: Tensor,
    labels: Any,
    classes: int,
    reduction: str,
    ignore_index: int | None,
    label_smoothing: float,
    name: str = "cross_entropy",
) -> Array:
    """Check the arguments of a cross-entropy; return the labels as an array.

    Args:
        logits: (..., all classes or a shard of them).
        classes: the number of all classes.
        name: of the operation, for errors.

    Same errors as `cross_entropy`.
    """
    check_reduction(reduction)
    number("label_smoothing", label_smoothing, 1)
    if ignore_index is not None:
        check_int("ignore_index", ignore_index, -np.inf)
    given = values_or_refuse(name, labels)
    values = (
        given
        if isinstance(labels, Variable)
        else to_library(namespace(logits._data), Tensor(given)._data)
    )
    shape = logits._data.shape
    if values.dtype.kind not in "iu":
        remedy = (
            "of probabilities y of each class the loss is -(y * ops.log_softmax(x)).sum(-1).mean()"
            if values.shape == shape
            else "for labels 0.0 and 1.0 use the loss bce"
        )
        raise DtypeError(f"{name} needs integer labels, not {values.dtype}; {remedy}")
    if not shape or values.shape != shape[:-1] or classes == 0:
        refuse_parts(name, logits)
        order = (0, *range(2, len(shape)), 1)
        is_second = values.shape == shape[:1] + shape[2:]  # as in PyTorch
        remedy = f"; its classes are the last axis: give logits.transpose{order}"
        raise ShapeError(
            f"{name} of logits {shape} needs labels of shape {shape[:-1]}, not {values.shape}"
            f"{remedy if is_second else ''}"
        )
    kernels_of(logits._data).check(_check_labels, values, classes, ignore_index)
    return values


@answered
def mse(x: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """Return the squared error (x - target)^2: its mean over all elements, its sum, or each one.

    Args:
        x: any shape, floating point.
        target: of x's shape and dtype; a tensor, or an array that gets no gradient.
        reduction: "mean" over all elements, "sum", or "none" for one loss per element.

    Raises:
        ShapeError: when the shapes differ; broadcasting would hide mistakes.
        DtypeError: when the dtypes differ.
        UsageError: for an unknown reduction.
    """
    return _error("mse", _squared, x, target, reduction)


@answered
def mae(x: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """Return the absolute error |x - target|: mean, sum, or each (PyTorch's l1_loss).

    Same arguments and errors as `mse`.
    """
    return _error("mae", _absolute, x, target, reduction)


@answered
def huber(x: Tensor, target: Any, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """Return Huber's loss: quadratic for |x - target| <= delta, then linear with slope delta.

    Huber, "Robust estimation of a location parameter", 1964.

    Args:
        x, target, reduction: see `mse`.
        delta: above 0.

    Raises:
        UsageError: for another delta; see also `mse`.
    """
    if not (isinstance(delta, Real) and delta > 0):
        raise UsageError(f"delta is {delta!r}; give a number above 0")
    return _error("huber", _huber, x, target, reduction, float(delta))


@answered
def binary_cross_entropy(logits: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of sigmoid(logits) and targets in [0, 1], from the logits.

    Args:
        logits: any shape, floating point.
        target: in [0, 1], of the logits' shape and dtype; a tensor, or an array that gets no
            gradient.
        reduction: "mean" over all elements, "sum", or "none" for one loss per element.

    Raises:
        ShapeError: when the shapes differ.
        DtypeError: when the dtypes differ.
        UsageError: for an unknown reduction, and for logits that are a sigmoid's result, as
            PyTorch's function of this name takes them.
    """
    if isinstance(logits, Tensor) and logits.made_by == "sigmoid":
        raise UsageError(
            "binary_cross_entropy applies the sigmoid itself; give it the logits, without a sigmoid"
            " before it, or use binary_nll (nn.BCELoss)"
        )
    return _error("binary_cross_entropy", _from_logits, logits, target, reduction)


def check_reduction(reduction: str) -> None:
    """Refuse an unknown reduction.

    Raises:
        UsageError: naming the reductions; for an array, the argument of class weights.
    """
    if is_array(reduction):
        raise UsageError(
            f"reduction is one of {', '.join(REDUCTIONS)}, not an array; class weights are an"
            " argument of their own: weight=..."
        )
    if reduction not in REDUCTIONS:
        raise UsageError(
            f"reduction {reduction!r} is unknown; choose one of {', '.join(REDUCTIONS)}"
        )


def _check_labels(labels: Array, classes: int, ignore_index: int | None) -> None:
    # A single comparison suffices in nearly every step: as unsigned numbers, negative labels are
    # large ones, from half of the range on.
    unsigned = labels.reshape(-1).view(f"u{labels.itemsize}")
    limit = min(classes, 1 << 8 * labels.itemsize - 1)
    if unsigned.size == 0 or unsigned[unsigned.argmax()] < limit:
        return
    wrong = (labels < 0) | (labels >= classes)
    if ignore_index is not None:
        wrong &= labels != ignore_index
    if wrong.any():
        row = int(wrong.argmax())
        label = int(labels.reshape(-1)[row])
        leave = (
            f"; ignore_index={label} leaves such rows out"
            if label < 0 and ignore_index is None
            else ""
        )
        raise ShapeError(f"label {label} at row {row} is outside 0..{classes - 1}{leave}")


def _error(
    name: str,
    formula: LossFormula,
    x: Tensor,
    target: Any,
    reduction: str,
    delta: float = 0.0,
) -> Tensor:
    check_reduction(reduction)
    require_floating(name, x)
    refuse_parts(name, x, target)
    if not isinstance(target, Variable):
        target = to_library(namespace(x._data), target)
    if target.shape != x.shape:
        raise ShapeError(f"{name} of shapes {x.shape} and {target.shape}: they must be the same")
    may_meet(name, x, target)
    if x.dtype != target.dtype:
        x, target = converted(x, FLOAT32), converted(target, FLOAT32)
    return ElementwiseLoss(reduction, formula, delta)(x, target)


def _averaged(values: Array, count: Any, reduction: str) -> Array:
    """Divide by the count for reduction "mean": a sum in forward, a gradient in backward.

    Args:
        count: the number of averaged losses, an int or an array; 0 counts as 1.
    """
    if reduction != "mean":
        return values
    return values / (max(count, 1) if isinstance(count, int) else count)
