"""Convolutions of which each rank has some output channels or some input channels.

                  column                                     row
    x whole  ->  kernels 0..1 | 2..3  ->  y channels cut  ->  kernels' inputs 0..1 | 2..3  -> add up -> z whole

The exchanges are those of linear layers. With groups only output channels can be cut, and only between groups: a rank
then needs the input channels of its own groups alone, and a depthwise convolution of channels that are cut anyway needs
no exchange at all.
"""

from __future__ import annotations

from nnmpi.backend.precision import is_low
from nnmpi.nn.conv import Conv2d
from nnmpi.nn.sharding import Sharding
from nnmpi.ops.conv import conv2d
from nnmpi.parallel.sharded.exchange import add_up
from nnmpi.parallel.sharded.parts import Parts
from nnmpi.parallel.sharded.placement import WHOLE, Placement, features
from nnmpi.parallel.sharded.rows_conv import place_rows_conv
from nnmpi.parallel.sharded.site import Exchange, Placed, Site
from nnmpi.tensor.tensor import Tensor


class ColumnConv2d(Conv2d):
    """Some output channels of a convolution: whole images -> (batch, out_h, out_w, this rank's outputs).

    With groups it takes images with the input channels of this rank's groups.

    Args:
        layer: the whole layer.
        parts: cuts its parameters.
        enter: gives it the images that it needs.
    """

    def __init__(self, layer: Conv2d, parts: Parts, enter: Exchange) -> None:
        self.stride, self.padding, self.dilation = layer.stride, layer.padding, layer.dilation
        self.result = _outputs(layer)
        own = self.result.width(parts.group.size, parts.group.rank)
        self.groups = layer.groups if layer.groups == 1 else own // self.result.unit
        self.weight = parts.cut(layer.weight, self.result, axis=3)
        self.bias = None if layer.bias is None else parts.cut(layer.bias, self.result, axis=0)
        self._enter = enter

    def enter(self, x: Tensor) -> Tensor:
        """Return images with the input channels that this rank needs."""
        return self._enter(x)


class RowConv2d(Conv2d):
    """Some input channels of a convolution: (batch, h, w, this rank's inputs) -> whole images. The bias is whole.

    Args:
        layer: the whole layer, without groups.
        parts: cuts its parameters.
        cut: how the input lies on the ranks.
        enter: leaves this rank its part of the input.
    """

    def __init__(self, layer: Conv2d, parts: Parts, cut: Placement, enter: Exchange) -> None:
        self.stride, self.padding, self.dilation, self.groups = layer.stride, layer.padding, layer.dilation, 1
        self.weight = parts.cut(layer.weight, cut, axis=2)
        self.bias = layer.bias
        self._group, self._enter = parts.group, enter

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution."""
        y = conv2d(self._enter(x), self.weight, None, self.stride, self.padding, self.dilation)
        whole = y.astype("float32") if is_low(y.dtype) else y
        return add_up(whole, self._group, self.bias, fresh=True).astype(y.dtype)


def place_conv(layer: Conv2d, site: Site) -> Placed:
    """Return the layer as the table wants it."""
    inputs = layer.weight.shape[2] * layer.groups
    if site.sharding is Sharding.ROWS:
        return place_rows_conv(layer, site)
    if site.sharding is Sharding.COLUMN:
        column = ColumnConv2d(layer, site.parts, _enter(layer, site, inputs))
        return column, column.result
    if site.sharding is Sharding.ROW:
        if layer.groups > 1:
            raise site.refuse(
                f"has {layer.groups} groups, whose input channels are not added up over ranks; choose Sharding.COLUMN"
            )
        ready = not site.placement.is_whole and not site.placement.has_rows
        cut = site.placement if ready else features(inputs)
        return RowConv2d(layer, site.parts, cut.resolve(inputs), site.to_parts(cut)), WHOLE
    if site.sharding is Sharding.VOCAB:
        raise site.refuse("is a convolution and has no vocabulary; choose Sharding.COLUMN, ROW, ROWS or REPLICATED")
    return site.on_whole(layer, inputs)


def _outputs(layer: Conv2d) -> Placement:
    """Return how the output channels are dealt out: one by one, or all of a group to one rank."""
    outputs = layer.weight.shape[3]
    return features(outputs) if layer.groups == 1 else features(layer.groups, outputs // layer.groups)


def _enter(layer: Conv2d, site: Site, inputs: int) -> Exchange:
    """Return what gives a rank the input channels that its outputs need."""
    if layer.groups == 1:
        return site.to_each(inputs)
    if layer.groups < site.group.size:
        raise site.refuse(
            f"has {layer.groups} groups, too few to give each of {site.group.size} ranks one; choose Sharding.ROWS or "
            "REPLICATED"
        )
    return site.to_parts(features(layer.groups, inputs // layer.groups))
