"""Layer normalization of activations that lie on several ranks.

features cut      a row's mean, and then its squares, are summed over the ranks: two all-reduces of one number per row
                  forward, one of two numbers backward
image rows cut    every pixel is whole, so only the parameters' gradients are summed
"""

from __future__ import annotations

from math import prod

from nnmpi.backend.array import Array, namespace
from nnmpi.comm.group import Group
from nnmpi.nn.norm import LayerNorm
from nnmpi.nn.sharding import Sharding
from nnmpi.ops.norm import layer_norm
from nnmpi.parallel.sharded.exchange import all_sum, copy, sum_in_place
from nnmpi.parallel.sharded.parts import Parts
from nnmpi.parallel.sharded.placement import Placement
from nnmpi.parallel.sharded.site import Placed, Site
from nnmpi.tensor.convert import widely
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import may_meet, real
from nnmpi.tensor.tensor import Tensor


class PartLayerNormalize(Function):
    """(x - mean) / sqrt(variance + eps) * scale + shift, over a last axis of which every rank has a part."""

    __slots__ = ("eps", "features", "group")

    def __init__(self, group: Group, features: int, eps: float) -> None:
        self.group, self.features, self.eps = group, features, eps

    def forward(self, x: Array, scale: Array, shift: Array) -> Array:
        rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
        mean = sum_in_place(self.group, rows.sum(axis=1)) / self.features
        normal = rows - mean[:, None]
        squares = sum_in_place(self.group, (normal * normal).sum(axis=1)) / self.features
        inverse = 1 / namespace(x).sqrt(squares + self.eps)[:, None]
        normal *= inverse
        self.saved = (normal, inverse, scale)
        y: Array = normal * scale
        y += shift
        return y.reshape(x.shape)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        normal, inverse, scale = self.saved
        xp = namespace(grad)
        rows = grad.reshape(normal.shape)
        to_scale = xp.einsum("ij,ij->j", rows, normal) if self.needs[1] else None
        to_shift = rows.sum(axis=0) if self.needs[2] else None
        if not self.needs[0]:
            return None, to_scale, to_shift
        inner = rows * scale
        sums = all_sum(self.group, xp.stack([inner.sum(axis=1), (inner * normal).sum(axis=1)])) / self.features
        to_x: Array = inner - sums[0][:, None]
        to_x -= normal * sums[1][:, None]
        to_x *= inverse
        return to_x.reshape(grad.shape), to_scale, to_shift


class PartLayerNorm(LayerNorm):
    """Some features of a layer normalization: (..., this rank's features) -> the same.

    Args:
        layer: the whole layer, over one axis.
        parts: cuts its parameters.
        placement: how its input lies on the ranks.
    """

    def __init__(self, layer: LayerNorm, parts: Parts, placement: Placement) -> None:
        self.eps = layer.eps
        self._group, self._features = parts.group, layer.weight.size
        self.weight = parts.cut(layer.weight, placement, axis=0)
        self.bias = parts.cut(layer.bias, placement, axis=0)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's features, normalized by the mean and variance of all."""
        may_meet("layer_norm", x, self.weight, self.bias)
        normalize = PartLayerNormalize(self._group, self._features, self.eps)
        return widely(normalize, real("layer_norm", x), self.weight, self.bias)


class RowsLayerNorm(LayerNorm):
    """A layer normalization of the pixels in some rows of each image.

    Args:
        layer: the whole layer, over the channels, or over columns and channels.
        group: the ranks that share the rows.
    """

    def __init__(self, layer: LayerNorm, group: Group) -> None:
        self.eps, self.weight, self.bias = layer.eps, layer.weight, layer.bias
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's rows, normalized."""
        return layer_norm(x, copy(self.weight, self._group), copy(self.bias, self._group), self.eps)


def place_layer_norm(layer: LayerNorm, site: Site) -> Placed:
    """Return the layer for what lies before it; over axes that are cut and others, it gets whole activations."""
    shape = layer.weight.shape
    whole = site.placement.is_whole or site.sharding is Sharding.REPLICATED
    if not whole and site.placement.has_rows and len(shape) < 3:
        return RowsLayerNorm(layer, site.group), site.placement
    if not whole and not site.placement.has_rows and len(shape) == 1:
        placement = site.placement.resolve(shape[0])
        return PartLayerNorm(layer, site.parts, placement), placement
    return site.on_whole(layer, shape[0] if len(shape) == 1 else None)
