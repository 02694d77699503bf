"""Batch normalization of activations that lie on several ranks.

channels cut      each rank normalizes its own channels, and has their parameters and running statistics
image rows cut    the statistics are those of all rows: their sums are taken over the ranks of the tensor group, then
                  over those of data parallelism; parameters and running statistics are whole
"""

from __future__ import annotations

from nnmpi.backend.array import Array
from nnmpi.comm.group import Group
from nnmpi.nn.norm import BatchNorm
from nnmpi.nn.sharding import Sharding
from nnmpi.parallel.sharded.exchange import all_sum, copy
from nnmpi.parallel.sharded.parts import Parts
from nnmpi.parallel.sharded.placement import Placement
from nnmpi.parallel.sharded.site import Placed, Site
from nnmpi.tensor.tensor import Tensor


class PartBatchNorm(BatchNorm):
    """Some channels of a batch normalization: (..., this rank's channels) -> the same.

    Args:
        layer: the whole layer.
        parts: cuts its parameters and running statistics.
        placement: how its input lies on the ranks.
    """

    def __init__(self, layer: BatchNorm, parts: Parts, placement: Placement) -> None:
        self.momentum, self.eps = layer.momentum, layer.eps
        self.weight = parts.cut(layer.weight, placement, axis=0)
        self.bias = parts.cut(layer.bias, placement, axis=0)
        self.running_mean = parts.cut_buffer(layer.running_mean, placement)
        self.running_variance = parts.cut_buffer(layer.running_variance, placement)
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


def place_batch_norm(layer: BatchNorm, site: Site) -> Placed:
    """Return the layer for what lies before it."""
    channels = layer.weight.size
    if site.placement.is_whole or site.sharding is Sharding.REPLICATED:
        return site.on_whole(layer, channels)
    if site.placement.has_rows:
        return RowsBatchNorm(layer, site.group), site.placement
    placement = site.placement.resolve(channels)
    return PartBatchNorm(layer, site.parts, placement), placement
