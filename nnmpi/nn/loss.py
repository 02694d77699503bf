"""Losses as modules, by the names that they have in PyTorch; the operations are in `ops.loss`."""

from typing import Any

from nnmpi.nn.module import Module
from nnmpi.ops.loss import binary_cross_entropy, check_reduction, cross_entropy, huber, mae, mse
from nnmpi.tensor.tensor import Tensor


class CrossEntropyLoss(Module):
    """Called with logits and labels; see `ops.cross_entropy`, also for the arguments."""

    def __init__(self, reduction: str = "mean", ignore_index: int | None = None, label_smoothing: float = 0.0) -> None:
        check_reduction(reduction)
        self.reduction, self.ignore_index, self.label_smoothing = reduction, ignore_index, label_smoothing

    def forward(self, logits: Tensor, labels: Any) -> Tensor:
        """Return the loss."""
        return cross_entropy(logits, labels, self.reduction, self.ignore_index, self.label_smoothing)


class MSELoss(Module):
    """Called with outputs and targets; see `ops.mse`, also for the reduction."""

    def __init__(self, reduction: str = "mean") -> None:
        check_reduction(reduction)
        self.reduction = reduction

    def forward(self, x: Tensor, target: Any) -> Tensor:
        """Return the loss."""
        return mse(x, target, self.reduction)


class L1Loss(MSELoss):
    """Called with outputs and targets; see `ops.mae`."""

    def forward(self, x: Tensor, target: Any) -> Tensor:
        """Return the loss."""
        return mae(x, target, self.reduction)


class BCEWithLogitsLoss(MSELoss):
    """Called with logits and targets in [0, 1]; see `ops.binary_cross_entropy`."""

    def forward(self, x: Tensor, target: Any) -> Tensor:
        """Return the loss."""
        return binary_cross_entropy(x, target, self.reduction)


class HuberLoss(Module):
    """Called with outputs and targets; see `ops.huber`, also for the arguments."""

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        check_reduction(reduction)
        self.reduction, self.delta = reduction, delta

    def forward(self, x: Tensor, target: Any) -> Tensor:
        """Return the loss."""
        return huber(x, target, self.reduction, self.delta)
