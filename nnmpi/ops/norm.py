"""Normalization: over the batch (per channel), and over the features (per row).

Batch statistics can be taken over several ranks: `all_reduce` adds a float64 array up over them, twice in the forward
pass (counts and sums; then squared deviations from the mean that these give, so that nothing cancels) and once in the
backward pass (the two sums of the derivative). A rank's squares move to the common mean as Chan, Golub and LeVeque have
it ("Updating formulae and a pairwise algorithm for computing sample variances", 1979).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TypeAlias

from nnmpi.backend.array import Array, namespace
from nnmpi.errors import ShapeError
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import real, same_dtype
from nnmpi.tensor.tensor import Tensor

AllReduce: TypeAlias = Callable[[Array], Array]


class BatchNorm(Function):
    """(x - mean) / sqrt(variance + eps) * scale + shift, the statistics being those of the batch.

    After `forward`, `statistics` holds (mean, variance with divisor n, n) of the global batch.
    """

    __slots__ = ("all_reduce", "eps", "statistics")

    def __init__(self, eps: float, all_reduce: AllReduce | None) -> None:
        self.eps, self.all_reduce = eps, all_reduce

    def _moments(self, rows: Array) -> tuple[Array, Array, float]:
        """Return the mean and variance of each channel and the number of rows, over all ranks."""
        xp = namespace(rows)
        n, channels = rows.shape
        mean = rows.mean(axis=0) if n else xp.zeros(channels, dtype=rows.dtype)
        centred = rows - mean
        squares = xp.einsum("ij,ij->j", centred, centred)
        if self.all_reduce is None:
            return mean, squares / max(n, 1), n
        ours = mean.astype(xp.float64)
        total = self.all_reduce(xp.concatenate([xp.full(1, n, dtype=xp.float64), n * ours]))
        count = float(total[0])
        wide = total[1:] / max(count, 1.0)
        variance = self.all_reduce(squares + n * (ours - wide) ** 2) / max(count, 1.0)
        return wide.astype(rows.dtype), variance.astype(rows.dtype), count

    def forward(self, x: Array, scale: Array, shift: Array) -> Array:
        xp = namespace(x)
        rows = x.reshape(-1, x.shape[-1])
        mean, variance, count = self._moments(rows)
        self.statistics = (mean, variance, count)
        inverse = 1 / xp.sqrt(variance + self.eps)
        normal = (rows - mean) * inverse
        self.saved = (normal, inverse, scale, max(count, 1))
        y: Array = normal * scale
        y += shift
        return y.reshape(x.shape)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        normal, inverse, scale, count = self.saved
        xp = namespace(grad)
        rows = grad.reshape(normal.shape)
        to_shift = xp.sum(rows, axis=0, out=self.into(2))
        to_scale = xp.einsum("ij,ij->j", rows, normal)
        to_x = None
        if self.needs[0]:
            sums = xp.concatenate([to_shift, to_scale])
            if self.all_reduce is not None:
                sums = self.all_reduce(sums.astype(xp.float64)).astype(rows.dtype)
            sums /= count
            channels = normal.shape[1]
            to_x = (rows - sums[:channels] - normal * sums[channels:]) * (scale * inverse)
            to_x = to_x.reshape(grad.shape)
        return to_x, to_scale if self.needs[1] else None, to_shift if self.needs[2] else None


class LayerNorm(Function):
    """(x - mean) / sqrt(variance + eps) * scale + shift, over the last axes of each row."""

    __slots__ = ("eps",)

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def forward(self, x: Array, scale: Array, shift: Array) -> Array:
        rows = x.reshape(-1, scale.size)
        normal = rows - rows.mean(axis=1, keepdims=True)
        inverse = 1 / namespace(x).sqrt((normal * normal).mean(axis=1, keepdims=True) + self.eps)
        normal *= inverse
        self.saved = (normal, inverse, scale)
        y: Array = normal * scale.reshape(-1)
        y += shift.reshape(-1)
        return y.reshape(x.shape)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        normal, inverse, scale = self.saved
        xp = namespace(grad)
        rows = grad.reshape(normal.shape)
        to_scale = xp.einsum("ij,ij->j", rows, normal).reshape(scale.shape) if self.needs[1] else None
        to_shift = rows.sum(axis=0).reshape(scale.shape) if self.needs[2] else None
        to_x = None
        if self.needs[0]:
            inner = rows * scale.reshape(-1)
            to_x = inner - inner.mean(axis=1, keepdims=True)
            to_x -= normal * (inner * normal).mean(axis=1, keepdims=True)
            to_x *= inverse
            to_x = to_x.reshape(grad.shape)
        return to_x, to_scale, to_shift


def batch_norm(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-5, all_reduce: AllReduce | None = None
) -> tuple[Tensor, Array, Array, float]:
    """Normalize each channel by the batch's statistics (Ioffe and Szegedy, 2015).

    Args:
        x: (..., channels); the statistics run over all other axes, and with `all_reduce` over all ranks.
        scale, shift: (channels,).
        all_reduce: adds a float64 array up over the ranks and returns the sum; every rank must call it, even with
            no rows of its own. Called twice here and, where x needs a gradient, once in backward.

    Returns:
        The result, and the batch's mean, variance (divisor n) and number of elements n per channel.

    Raises:
        ShapeError: when scale or shift do not fit x.
        DtypeError: when x, scale and shift differ in dtype.
    """
    _check("batch_norm", x, scale, shift, x.shape[-1:])
    function = BatchNorm(float(eps), all_reduce)
    y = function(real("batch_norm", x), scale, shift)
    return y, *function.statistics


def layer_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-5) -> Tensor:
    """Normalize each row over its last axes (Ba, Kiros and Hinton, 2016).

    Args:
        x: (..., *features).
        scale, shift: (*features); they say over which axes.

    Raises:
        ShapeError: when scale or shift do not fit the last axes of x.
        DtypeError: when x, scale and shift differ in dtype.
    """
    _check("layer_norm", x, scale, shift, x.shape[x.ndim - scale.ndim :])
    return LayerNorm(float(eps))(real("layer_norm", x), scale, shift)


def _check(name: str, x: Tensor, scale: Tensor, shift: Tensor, wanted: tuple[int, ...]) -> None:
    if x.ndim < 1 or not wanted or prod(wanted) == 0 or scale.shape != wanted or shift.shape != wanted:
        raise ShapeError(f"{name} of shape {x.shape} does not fit scale {scale.shape} and shift {shift.shape}")
    same_dtype(name, x, scale, shift)
