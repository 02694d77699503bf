"""What losses have in common, and the loss of logarithms of probabilities, for `ops.loss`."""

from math import prod
from typing import Any

from nnmpi.backend.array import Array
from nnmpi.tensor.function import Function, Grads


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


class NLL(OfLabels):
    """-log p[label] per row of logarithms, with class weights, smoothed and masked.

    The mean is over the labels' weights.
    """

    __slots__ = ()

    computes = returns = "float32"

    @property
    def summands(self) -> tuple[int, ...]:
        """See `Function.summands`."""
        _, _, shape, used = self.saved
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
        self.saved = (targets, total, x.shape, used)
        if self.reduction == "none":
            return losses.reshape(x.shape[:-1])
        return xp.sum(losses) if total is None else xp.sum(losses) / total

    def backward(self, grad: Array) -> Grads:
        targets, total, shape, _ = self.saved
        share = grad if total is None else grad / total
        return (targets * -share.reshape(-1, 1)).reshape(shape), None, None
