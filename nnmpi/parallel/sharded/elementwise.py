"""Other layers on sharded activations: activations, softmax, flatten, dropout, normalization.

Most layers without parameters work on any part unchanged. Softmax gets full activations; dropout
must drop the same elements as the full layer.

A rank of a batch norm normalizes its own channels, with their parameters and running statistics,
without an exchange. A layer norm gets full activations.
"""

from dataclasses import replace
from math import prod

from nnmpi.nn.activation import Dropout, Flatten
from nnmpi.nn.module import Module
from nnmpi.nn.norm import BatchNorm
from nnmpi.parallel.sharded.context import LayerContext, Placed, part_of
from nnmpi.tensor.placement import REPLICATED
from nnmpi.tensor.tensor import Tensor


def place_elementwise(layer: Module, context: LayerContext) -> Placed:
    """Return the layer unchanged: it computes each element by itself, and so any part.

    Parameters stay full on every rank, and the operation uses the part that its input needs.
    """
    placement, count = context.placement, layer.input_features()
    if not any(layer.named_weights()):
        return layer, placement
    if count is not None and not placement.is_replicated:
        # a rank without any of the channels cannot tell how often they recur
        context = replace(context, placement=placement.resolve(count))
    return context.on_parts(layer)


def place_per_channel(layer: Module, context: LayerContext) -> Placed:
    """Return the layer unchanged: it computes each channel by itself."""
    return layer, context.placement


def place_whole(layer: Module, context: LayerContext) -> Placed:
    """Return the layer on full activations."""
    return context.on_replicated(layer, layer.input_features())


def place_flatten(layer: Flatten, context: LayerContext) -> Placed:
    """Return the layer unchanged; its result is sharded like its input (see `placement`)."""
    if context.placement.is_replicated:
        return layer, REPLICATED
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


def place_batch_norm(layer: BatchNorm, context: LayerContext) -> Placed:
    """Return the layer for its input's placement."""
    if context.placement.is_replicated:
        return layer, REPLICATED
    placement = context.placement.resolve(layer.weight.size)
    names = "weight", "bias", "running_mean", "running_variance"
    arrays = {name: context.sharder.cut(getattr(layer, name), placement, 0) for name in names}
    return part_of(layer, PartBatchNorm, **arrays), placement
