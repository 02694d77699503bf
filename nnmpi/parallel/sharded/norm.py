"""Batch and layer normalization of activations that are cut.

batch norm    channels cut      each rank normalizes its own channels, and has their parameters and running
                                statistics; no exchange
              image rows cut    the statistics are those of all rows: summed over the ranks of the tensor group, then
                                over those of data parallelism; parameters and running statistics are replicated
layer norm    features cut      a row's mean, and then its squares, are summed over the ranks: two all-reduces of one
                                number per row forward, one of two numbers backward
              image rows cut    every pixel is whole, so only the parameters' gradients are summed
"""

from math import prod

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.kernels.sums import product_sum, row_sum
from nnmpi.comm.group import Group
from nnmpi.nn.norm import BatchNorm, LayerNorm
from nnmpi.nn.sharding import Sharding
from nnmpi.ops.norm import layer_norm
from nnmpi.parallel.sharded.collectives import all_sum, copy, sum_in_place
from nnmpi.parallel.sharded.context import LayerContext, Placed
from nnmpi.parallel.sharded.parameters import ParameterSharder
from nnmpi.tensor.convert import in_float32
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import may_meet, require_floating
from nnmpi.tensor.placement import Placement
from nnmpi.tensor.tensor import Tensor


class PartBatchNorm(BatchNorm):
    """Some channels of a batch normalization: (..., this rank's channels) -> the same.

    Args:
        layer: the whole layer.
        sharder: cuts its parameters and running statistics.
        placement: how its input lies on the ranks.
    """

    def __init__(self, layer: BatchNorm, sharder: ParameterSharder, placement: Placement) -> None:
        self.momentum, self.eps = layer.momentum, layer.eps
        self.weight = sharder.cut(layer.weight, placement, axis=0)
        self.bias = sharder.cut(layer.bias, placement, axis=0)
        self.running_mean = sharder.cut_buffer(layer.running_mean, placement)
        self.running_variance = sharder.cut_buffer(layer.running_variance, placement)
        self.all_reduce, self.observe = layer.all_reduce, layer.observe

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's channels, normalized."""
        if self.weight.size == 0:  # more ranks than channels
            nothing: Tensor = (x * self.weight + self.bias).astype(x.dtype)
            return nothing
        return super().forward(x)


class RowsBatchNorm(BatchNorm):
    """A batch normalization of some rows of each image: (batch, this rank's rows, w, channels) -> the same.

    Args:
        layer: the whole layer, whose parameters and running statistics this one has.
        group: the ranks that share the rows.
    """

    def __init__(self, layer: BatchNorm, group: Group) -> None:
        self.momentum, self.eps = layer.momentum, layer.eps
        self.weight, self.bias = layer.weight, layer.bias
        self.running_mean, self.running_variance = layer.running_mean, layer.running_variance
        self.all_reduce, self.observe = layer.all_reduce, layer.observe
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's rows, normalized by the statistics of all."""
        return self.normalize(x, copy(self.weight, self._group), copy(self.bias, self._group), self._sum)

    def _sum(self, array: Array) -> Array:
        ours = all_sum(self._group, array)
        return ours if self.all_reduce is None else self.all_reduce(ours)


def place_batch_norm(layer: BatchNorm, context: LayerContext) -> Placed:
    """Return the layer for what lies before it."""
    channels = layer.weight.size
    if context.placement.is_replicated or context.sharding is Sharding.REPLICATED:
        return context.on_replicated(layer, channels)
    if context.placement.has_rows:
        return RowsBatchNorm(layer, context.group), context.placement
    placement = context.placement.resolve(channels)
    return PartBatchNorm(layer, context.sharder, placement), placement


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
        to_scale = product_sum(xp, rows, normal) if self.needs[1] else None
        to_shift = row_sum(xp, rows) if self.needs[2] else None
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
        sharder: cuts its parameters.
        placement: how its input lies on the ranks.
    """

    def __init__(self, layer: LayerNorm, sharder: ParameterSharder, placement: Placement) -> None:
        self.eps = layer.eps
        self._group, self._features = sharder.group, layer.weight.size
        self.weight = sharder.cut(layer.weight, placement, axis=0)
        self.bias = sharder.cut(layer.bias, placement, axis=0)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's features, normalized by the mean and variance of all."""
        may_meet("layer_norm", x, self.weight, self.bias)
        normalize = PartLayerNormalize(self._group, self._features, self.eps)
        return in_float32(normalize, require_floating("layer_norm", x), self.weight, self.bias)


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


def place_layer_norm(layer: LayerNorm, context: LayerContext) -> Placed:
    """Return the layer for what lies before it; over axes that are cut and others, it gets whole activations."""
    shape = layer.weight.shape
    whole = context.placement.is_replicated or context.sharding is Sharding.REPLICATED
    if not whole and context.placement.has_rows and len(shape) < 3:
        return RowsLayerNorm(layer, context.group), context.placement
    if not whole and not context.placement.has_rows and len(shape) == 1:
        placement = context.placement.resolve(shape[0])
        return PartLayerNorm(layer, context.sharder, placement), placement
    return context.on_replicated(layer, shape[0] if len(shape) == 1 else None)
