"""Batch and layer normalization of activations that are cut.

batch norm    channels cut      each rank normalizes its own channels, and has their parameters and running
                                statistics; no exchange
              image rows cut    the statistics are those of all rows: summed over the ranks of the tensor group, then
                                over those of data parallelism; parameters and running statistics are replicated
layer norm    features cut      gets whole activations, by an exchange before it
              image rows cut    every pixel is whole, so only the parameters' gradients are summed
"""

from nnmpi.backend.array import Array
from nnmpi.comm.group import Group
from nnmpi.nn.norm import BatchNorm, LayerNorm
from nnmpi.nn.sharding import Sharding
from nnmpi.ops.norm import layer_norm
from nnmpi.parallel.sharded.collectives import all_sum, copy
from nnmpi.parallel.sharded.context import LayerContext, Placed
from nnmpi.parallel.sharded.parameters import ParameterSharder
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
    return context.on_replicated(layer, shape[0] if len(shape) == 1 else None)
