"""A batch where the model lives, and the checks of it that a device cannot afford.

A kernel cannot raise an error: a label or index that is out of range would be found only by waiting for the device. So
what goes to a device is looked at on the host, before it goes or while the device works on what comes before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nnmpi.backend.array import Array
from nnmpi.backend.record import Backend
from nnmpi.data.loader import Batch
from nnmpi.errors import ShapeError
from nnmpi.nn.linear import Embedding
from nnmpi.nn.module import Module
from nnmpi.ops.loss import cross_entropy
from nnmpi.parallel.sharded.cross_entropy import cross_entropy as sharded_cross_entropy
from nnmpi.tensor.tensor import Tensor

Check: TypeAlias = Callable[["Given", int, Tensor], None]


@dataclass(frozen=True)
class Given:
    """What a model gets of a batch.

    Attributes:
        x, y: samples and labels where the model lives.
        labels: the labels on the host; None if they are only on a device.
    """

    x: Array
    y: Array
    labels: NDArray[Any] | None

    def rows(self, part: slice) -> Given:
        """Return some of its rows."""
        return Given(self.x[part], self.y[part], None if self.labels is None else self.labels[part])


def give(batch: Batch, model: Module, backend: Backend) -> Given:
    """Return a batch where a backend has its arrays.

    Raises:
        ShapeError: for an index, on its way to a device, that no embedding of the model has a row for.
    """
    if backend.is_device and isinstance(batch.x, np.ndarray) and batch.x.dtype.kind in "iu":
        _check_indices(batch.x, model)
    return Given(backend.asarray(batch.x), backend.asarray(batch.y), batch.labels)


def label_check(loss: Callable[[Tensor, Array], Tensor], classes: int) -> Check:
    """Return what looks at a microbatch's labels on the host, where a loss on a device does not.

    Called with a microbatch, the place of its first row in the batch, and its logits, it raises ShapeError for a label
    that is no class. Of losses that are not nnmpi's own nothing is known, and nothing is checked.

    Args:
        classes: where they are shared out over ranks; else 0, and there are as many as logits in a row.
    """
    function, words = getattr(loss, "func", loss), getattr(loss, "keywords", {})
    known = function in (cross_entropy, sharded_cross_entropy)
    ignored = words.get("ignore_index")

    def check(given: Given, first: int, logits: Tensor) -> None:
        labels = given.labels
        if not known or labels is None or isinstance(given.y, np.ndarray):
            return
        if labels.dtype.kind not in "iu" or not labels.size:
            return
        count = classes or logits.shape[-1]
        if labels.min() >= 0 and labels.max() < count:
            return
        wrong = ((labels < 0) | (labels >= count)) & (labels != ignored if ignored is not None else True)
        if wrong.any():
            place = np.argwhere(wrong)[0]
            raise ShapeError(
                f"label {int(labels[tuple(place)])} in row {first + place[0]} of the batch is outside 0..{count - 1}"
            )

    return check


def _check_indices(indices: NDArray[Any], model: Module) -> None:
    entries = [module.entries for _, module in model.named_modules() if isinstance(module, Embedding)]
    if not entries or not indices.size or (indices.min() >= 0 and indices.max() < max(entries)):
        return
    row, *_ = np.argwhere((indices < 0) | (indices >= max(entries)))[0]
    wrong = indices[row][(indices[row] < 0) | (indices[row] >= max(entries))]
    raise ShapeError(f"index {int(np.ravel(wrong)[0])} in row {row} of the batch is outside 0..{max(entries) - 1}")
