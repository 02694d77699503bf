"""Cross-entropy of logits whose classes are sharded; the logits are not gathered.

    rank 0 | classes 0..4 |  largest \\                    sum of e^(x - largest) \\
    rank 1 | classes 5..9 |  largest /  all-reduce (max)   the label's logit      /  sum -> loss

So two numbers per row are exchanged (three with smoothing) instead of one per class, and none in
the backward pass (Shoeybi et al., "Megatron-LM", 2019, section 3). Every rank has the loss.
"""

from math import prod
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, Residuals, namespace
from nnmpi.base.errors import ShapeError
from nnmpi.base.shard import part
from nnmpi.comm.buffers import to_host
from nnmpi.comm.group import Group
from nnmpi.ops.collectives import CATEGORY, sum_in_place
from nnmpi.ops.loss import CrossEntropy, checked_labels
from nnmpi.tensor.operand import require_floating
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import OF_RANKS, Traits


class PartSoftmax:
    """The softmax's loss with some of the classes on every rank.

    Args:
        group: the ranks.
        classes: the number of all classes.
    """

    def __init__(self, group: Group, classes: int) -> None:
        self.group, self.classes = group, classes

    def softmax_loss(self, logits: Array, labels: Array, *settings: Any) -> tuple[Array, Residuals]:
        """Return each row's loss, and what is saved: probabilities, and this rank's labels."""
        xp = namespace(logits)
        ignore_index, smoothing = settings
        classes = part(self.classes, self.group.size, self.group.rank)
        labels = labels.astype(xp.int64)
        saved = None if ignore_index is None else labels != ignore_index
        rows = xp.flatnonzero((labels >= classes.start) & (labels < classes.stop))
        columns = labels[rows] - classes.start
        powers = logits - self._largest(logits)[:, None]
        exchanged = xp.zeros((3 if smoothing else 2, len(logits)), logits.dtype)
        exchanged[1][rows] = powers[rows, columns]
        if smoothing:
            exchanged[2] = powers.sum(axis=1)
        xp.exp(powers, out=powers)
        exchanged[0] = powers.sum(axis=1)
        sums, target, *others = sum_in_place(self.group, exchanged)
        if others:
            target = (1 - smoothing) * target + smoothing * others[0] / self.classes
        losses = xp.log(sums) - target
        if saved is not None:
            losses = xp.where(saved, losses, 0)  # not a product: an ignored loss may be NaN
        powers /= sums[:, None]
        return losses, (powers, rows, columns, saved)

    def softmax_loss_grad(self, share: Array, residuals: Residuals, *settings: Any) -> Array:
        """Return the gradient of this rank's logits."""
        _, smoothing = settings
        probabilities, rows, columns, saved = residuals
        result = probabilities.copy()
        result[rows, columns] -= 1 - smoothing
        if smoothing:
            result -= smoothing / self.classes
        result *= share[:, None]
        if saved is not None:
            result[~saved] = 0
        return result

    def _largest(self, rows: Array) -> Array:
        """Return each row's largest logit, over all classes."""
        xp = namespace(rows)
        tops = rows.max(axis=1) if rows.shape[1] else xp.full(len(rows), -float("inf"), rows.dtype)
        tops = xp.ascontiguousarray(tops)
        with self.group.collective("all-reduce (max)", None, CATEGORY, tops.nbytes):
            by_rank = self.group.all_gather_v(tops, [len(tops)] * self.group.size, check=False)
        return xp.stack(by_rank).max(axis=0)


class PartCrossEntropy(CrossEntropy):
    """-log softmax(logits)[label] per row, with some classes of the logits on every rank."""

    __slots__ = ("part",)

    traits = Traits(
        onnx=OF_RANKS,
        tested_in="tests/parallel/sharded/test_cross_entropy.py",
    )

    computes = "float32"
    is_call = True

    def __init__(self, part: PartSoftmax, *settings: Any) -> None:
        super().__init__(*settings)
        self.part = part

    def kernels(self, logits: Array) -> Any:
        """See `CrossEntropy.kernels`."""
        return self.part


def cross_entropy(
    logits: Tensor,
    labels: Any,
    group: Group,
    classes: int,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropy of sharded logits and labels, the same everywhere. Collective.

    Args:
        logits: (..., this rank's classes): its part of `shard.split(classes, size)`; may be empty.
        labels: (...), integers in 0..classes-1, the same on all ranks.
        classes: the number on all ranks.

    The other arguments and the errors as for `ops.cross_entropy`.

    Raises:
        ShapeError: when this rank's number of classes is not its part.
    """
    _check_width(logits.shape, group, classes)
    values = checked_labels(logits, labels, classes, reduction, ignore_index, label_smoothing)
    function = PartCrossEntropy(
        PartSoftmax(group, classes), reduction, ignore_index, float(label_smoothing)
    )
    return function(require_floating("cross_entropy", logits), values)


def best_classes(logits: Array, group: Group, classes: int) -> Array:
    """Return each row's class with the largest logit, the first of ties, int64. Collective.

    Args:
        logits: (..., this rank's classes).
        classes: the number on all ranks.

    Raises:
        ShapeError: when this rank's number of classes is not its part.
    """
    _check_width(logits.shape, group, classes)
    host = to_host(logits)
    rows = host.reshape(prod(host.shape[:-1]), host.shape[-1])
    bests = np.full((2, len(rows)), -np.inf)  # float64 holds every class exactly
    if rows.shape[1]:
        column = rows.argmax(axis=1)
        bests[0] = rows[np.arange(len(rows)), column]
        bests[1] = column + part(classes, group.size, group.rank).start
    parts = group.all_gather_v(bests.reshape(-1), [bests.size] * group.size, check=False)
    # (rank, value or class, row)
    by_rank = np.stack([values.reshape(bests.shape) for values in parts])
    winner = by_rank[:, 0].argmax(axis=0)
    return by_rank[winner, 1, np.arange(len(rows))].astype(np.int64).reshape(host.shape[:-1])


def _check_width(shape: tuple[int, ...], group: Group, classes: int) -> None:
    width = len(part(classes, group.size, group.rank))
    if not shape or shape[-1] != width:
        raise ShapeError(
            f"rank {group.rank} of {group.size} has logits of shape {shape}, but {width} of"
            f" {classes} classes are its part; give the last layer Sharding.VOCAB"
        )
