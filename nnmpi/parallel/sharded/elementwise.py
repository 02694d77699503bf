"""Other layers on sharded activations: activations, softmax, flatten, dropout, normalization.

Most layers without parameters work on any part unchanged. Softmax gets full activations; dropout
must drop the same elements as the full layer.

batch norm    channels sharded     each rank normalizes its own channels, with their parameters and
                                   running statistics; no exchange
              image rows sharded   the statistics of all rows: summed over the tensor group, then
                                   over data parallelism; parameters and running statistics are
                                   replicated
layer norm    features sharded     gets full activations, by an exchange before it
              image rows sharded   every pixel is complete, so only the parameters' gradients are
                                   summed
"""

from dataclasses import replace
from math import prod

from nnmpi.backend.array import Array
from nnmpi.comm.group import Group
from nnmpi.nn.activation import Dropout, Flatten
from nnmpi.nn.module import Module
from nnmpi.nn.norm import BatchNorm, LayerNorm
from nnmpi.ops.collectives import all_sum, copy
from nnmpi.parallel.sharded.context import LayerContext, Placed, part_of
from nnmpi.tensor.placement import FEATURES, REPLICATED, Placement
from nnmpi.tensor.tensor import Tensor


def place_elementwise(layer: Module, context: LayerContext) -> Placed:
    """Return the layer unchanged: it computes each element by itself, and so any part.

    Parameters stay full on every rank, and the operation uses the part that its input needs.
    """
    placement, count = context.placement, layer.input_features()
    if not any(layer.named_weights()):
        return layer, placement
    if count is not None and not (placement.is_replicated or placement.has_rows):
        # a rank without any of the channels cannot tell how often they recur
        context = replace(context, placement=placement.resolve(count))
    return context.on_parts(layer)


def place_per_channel(layer: Module, context: LayerContext) -> Placed:
    """Return the layer for sharded channels as for sharded elements; on full activations for image
    rows.
    """
    if context.placement.has_rows:
        return place_whole(layer, context)
    return place_elementwise(layer, context)


def place_whole(layer: Module, context: LayerContext) -> Placed:
    """Return the layer on full activations."""
    return context.on_replicated(layer, layer.input_features())


def place_flatten(layer: Flatten, context: LayerContext) -> Placed:
    """Return the layer unchanged; its result is sharded like its input (see `placement`)."""
    if context.placement.is_replicated:
        return layer, REPLICATED
    if context.placement.has_rows:
        _, width, channels = context.sample()
        return layer, Placement(context.placement.units, width * channels, axis=FEATURES)
    if context.shape is None:
        return layer, replace(context.placement, repeats=None)
    return layer, replace(context.placement, repeats=prod(context.shape) // context.placement.once)


def place_dropout(layer: Dropout, context: LayerContext) -> Placed:
    """Return the dropout of a shard, which drops the same elements as the full layer."""
    return context.on_parts(layer)


class PartBatchNorm(BatchNorm):
    """Some channels of a batch normalization: (..., this rank's channels) -> the same."""

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's channels, normalized."""
        if self.weight.size == 0:  # more ranks than channels
            return (x * self.weight + self.bias).astype(x.dtype)
        return super().forward(x)


class RowsBatchNorm(BatchNorm):
    """Batch normalization of images sharded by rows: (batch, own rows, w, channels)."""

    group: Group

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's rows, normalized by the statistics of all rows."""
        return self.normalize(
            x, copy(self.weight, self.group), copy(self.bias, self.group), self._sum
        )

    def _sum(self, array: Array) -> Array:
        ours = all_sum(self.group, array)
        return ours if self.all_reduce is None else self.all_reduce(ours)


def place_batch_norm(layer: BatchNorm, context: LayerContext) -> Placed:
    """Return the layer for its input's placement."""
    if context.placement.is_replicated:
        return layer, REPLICATED
    if context.placement.has_rows:
        return part_of(layer, RowsBatchNorm, group=context.group), context.placement
    placement = context.placement.resolve(layer.weight.size)
    names = "weight", "bias", "running_mean", "running_variance"
    arrays = {name: context.sharder.cut(getattr(layer, name), placement, 0) for name in names}
    return part_of(layer, PartBatchNorm, **arrays), placement


def place_layer_norm(layer: LayerNorm, context: LayerContext) -> Placed:
    """Return the layer norm for its input, gathered if it normalizes a sharded axis."""
    shape = layer.weight.shape
    if context.placement.has_rows and len(shape) < 3:
        return context.on_parts(layer)
    return place_whole(layer, context)
