"""Dropout with a mask that depends on a key and the sample's global index: equal in any layout."""

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.kernels import kernels_of
from nnmpi.backend.random import place_of
from nnmpi.backend.recording import call, to_library
from nnmpi.base.errors import UsageError, number
from nnmpi.base.shard import Region
from nnmpi.base.words import answered
from nnmpi.tensor.function import Function, Grads
from nnmpi.tensor.operand import require_floating
from nnmpi.tensor.placement import Placement, placement_if_uncut
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import NotExported, Sample, Traits

__all__ = ["dropout"]

StreamKey: TypeAlias = tuple[int, int]
MaskKey: TypeAlias = tuple[StreamKey, int]  # the key, and the first row's index in the global batch


class DropoutFunction(Function):
    """x with elements set to 0 at random and the others scaled up to preserve the mean.

    Args:
        rate: the probability of 0.
        mask_key: returns the key and the first row; called in every forward pass.

    Attributes:
        columns: (elements of a row,) uint32, their numbers in a full row; None for 0, 1 ...
    """

    __slots__ = ("columns", "mask_key", "rate")

    traits = Traits(
        onnx=NotExported(),
        samples=(Sample("dropout", lambda x: dropout(x, 0.3, (1, 2), 3)),),
    )

    computes = "kernels"
    is_call = True  # each pass needs a new mask
    captured = True  # its key then lies in the device's memory

    def __init__(self, rate: float, mask_key: Callable[[], MaskKey]) -> None:
        self.rate, self.mask_key = rate, mask_key
        self.columns: Array | None = None

    @property
    def alike(self) -> str:
        """See `Function.alike`. The layers know the keys of their masks: see `nn.mode`."""
        return f"dropout of {self.rate}"

    def placed(self, *inputs: Any) -> Placement:
        """Return the input's placement; number this shard's columns as in the full row."""
        (x,) = inputs
        shard, row = x.shard, x.shape[1:]
        placement_if_uncut(self, x, (0,), "needs whole rows")
        local = shard.placement.region(row, shard.axis - 1, shard.group.size, shard.group.rank)
        self.columns = (
            _numbers(local)
            if self.columns is None
            else local.take(self.columns.reshape(row)).reshape(-1)
        )
        return shard.placement

    def forward(self, x: Array) -> Array:
        xp = namespace(x)
        columns = None if self.columns is None else to_library(xp, self.columns)
        key, kernels = call(self._place, when="before"), kernels_of(x)
        y, saved = kernels.dropout(x, self.rate, key, columns)
        self.saved = (saved, kernels)
        return y

    def _place(self) -> Any:
        return place_of(*self.mask_key())

    def backward(self, grad: Array) -> Grads:
        saved, kernels = self.saved
        return (kernels.dropout_grad(grad, saved),)


@lru_cache(maxsize=16)  # computing the numbers takes longer than drawing the mask
def _numbers(part: Region) -> Array:
    """Return the numbers of a shard's elements in the full row."""
    full = np.arange(prod(part.shape), dtype=np.uint32).reshape(part.shape)
    return part.take(full).reshape(-1)


@answered
def dropout(
    x: Tensor,
    p: float = 0.5,
    key: StreamKey | Callable[[], MaskKey] | None = None,
    first_row: int = 0,
) -> Tensor:
    """Return x with each element dropped with probability `p`, the others divided by 1 - p.

    Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", 2014.

    Args:
        x: (rows, ...); a row is a sample.
        key: two 32-bit numbers (`backend.random.key_pair`), different for every step and layer. Or
            a function that returns them and the first row; it is called in every pass, also in
            replays of a compiled step. `nn.Dropout` passes one.
        first_row: the index in the global batch of x's first row.

    Raises:
        UsageError: for p outside [0, 1), or a missing key.
    """
    require_floating("dropout", x)
    number("dropout's p", p, 1)
    if not callable(key) and not isinstance(key, tuple):
        raise UsageError(
            f"dropout needs a key, from which the mask is drawn, not {key}; a layer brings its own:"
            f" self.drop = nn.Dropout({p}) in __init__, self.drop(x) in forward"
        )
    if p == 0:
        return x
    mask_key = key if callable(key) else lambda: (key, first_row)
    return DropoutFunction(float(p), mask_key)(x)
