"""Convolutions and poolings of which each rank computes some output channels, some input channels or some image rows.

                  column                                     row
    x whole  ->  kernels 0..1 | 2..3  ->  y channels cut  ->  kernels' inputs 0..1 | 2..3  -> add up -> z whole

    rows     rank 0   | rows 0..3 |--> halo --> conv --> | rows 0..3 |    kernels are replicated; their gradients are
             rank 1   | rows 4..7 |--> halo --> conv --> | rows 4..7 |    summed over the ranks

The exchanges of column and row are those of linear layers. With groups only output channels can be cut, and only
between groups: a rank then needs the input channels of its own groups alone, and a depthwise convolution of channels
that are cut already needs no exchange at all. With rows, the ranks exchange the rows that their windows share (`halo`).
Pooling works on any part of the channels as it is.
"""

from nnmpi.backend.precision import is_low
from nnmpi.backend.windows import Pair, out_size
from nnmpi.comm.group import Group
from nnmpi.errors import ShapeError
from nnmpi.nn.conv import Conv2d, GlobalAvgPool2d, MaxPool2d, Pool2d
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import Sharding
from nnmpi.ops.conv.algorithm import ConvSpec
from nnmpi.ops.conv.conv2d import conv2d, convolve
from nnmpi.ops.pool import AvgPool2dFunction, MaxPool2dFunction, Pool2dFunction, PoolWindows, pooled
from nnmpi.parallel.sharded.collectives import copy, sum_over_ranks
from nnmpi.parallel.sharded.context import LayerContext, Placed, Redistribute
from nnmpi.parallel.sharded.halo import RowWindows, halo
from nnmpi.parallel.sharded.parameters import ParameterSharder
from nnmpi.tensor.operand import read_as, require_floating
from nnmpi.tensor.placement import REPLICATED, Placement, features, rows
from nnmpi.tensor.tensor import Tensor


class ColumnConv2d(Conv2d):
    """Some output channels of a convolution: whole images -> (batch, out_h, out_w, this rank's outputs).

    With groups it takes images with the input channels of this rank's groups.

    Args:
        layer: the whole layer.
        sharder: cuts its parameters.
        enter: gives it the images that it needs.
    """

    def __init__(self, layer: Conv2d, sharder: ParameterSharder, enter: Redistribute) -> None:
        self.stride, self.padding, self.dilation = layer.stride, layer.padding, layer.dilation
        self.result = _outputs(layer)
        own = self.result.width(sharder.group.size, sharder.group.rank)
        self.groups = layer.groups if layer.groups == 1 else own // self.result.unit
        self.weight = sharder.cut(layer.weight, self.result, axis=3)
        self.bias = None if layer.bias is None else sharder.cut(layer.bias, self.result, axis=0)
        self._enter = enter

    def enter(self, x: Tensor) -> Tensor:
        """Return images with the input channels that this rank needs."""
        return self._enter(x)


class RowConv2d(Conv2d):
    """Some input channels of a convolution: (batch, h, w, this rank's inputs) -> whole images. The bias is whole.

    Args:
        layer: the whole layer, without groups.
        sharder: cuts its parameters.
        cut: how the input lies on the ranks.
        enter: leaves this rank its part of the input.
    """

    def __init__(self, layer: Conv2d, sharder: ParameterSharder, cut: Placement, enter: Redistribute) -> None:
        self.stride, self.padding, self.dilation, self.groups = layer.stride, layer.padding, layer.dilation, 1
        self.weight = sharder.cut(layer.weight, cut, axis=2)
        self.bias = layer.bias
        self._group, self._enter = sharder.group, enter

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution."""
        y = conv2d(self._enter(x), self.weight, None, self.stride, self.padding, self.dilation)
        whole = y.astype("float32") if is_low(y.dtype) else y
        return sum_over_ranks(whole, self._group, self.bias).astype(y.dtype)


def place_conv(layer: Conv2d, context: LayerContext) -> Placed:
    """Return the layer as the table wants it."""
    inputs = layer.weight.shape[2] * layer.groups
    if context.sharding is Sharding.ROWS:
        return place_rows_conv(layer, context)
    if context.sharding is Sharding.COLUMN:
        column = ColumnConv2d(layer, context.sharder, _enter(layer, context, inputs))
        return column, column.result
    if context.sharding is Sharding.ROW:
        if layer.groups > 1:
            raise context.refuse(
                f"has {layer.groups} groups, whose input channels are not added up over ranks; choose Sharding.COLUMN"
            )
        ready = not context.placement.is_replicated and not context.placement.has_rows
        cut = context.placement if ready else features(inputs)
        return RowConv2d(layer, context.sharder, cut.resolve(inputs), context.to_parts(cut)), REPLICATED
    if context.sharding is Sharding.VOCAB:
        raise context.refuse("is a convolution and has no vocabulary; choose Sharding.COLUMN, ROW, ROWS or REPLICATED")
    return context.on_replicated(layer, inputs)


def _outputs(layer: Conv2d) -> Placement:
    """Return how the output channels are divided: one by one, or all of a group to one rank."""
    outputs = layer.weight.shape[3]
    return features(outputs) if layer.groups == 1 else features(layer.groups, outputs // layer.groups)


def _enter(layer: Conv2d, context: LayerContext, inputs: int) -> Redistribute:
    """Return what gives a rank the input channels that its outputs need."""
    if layer.groups == 1:
        return context.to_each(inputs)
    if layer.groups < context.group.size:
        raise context.refuse(
            f"has {layer.groups} groups, too few to give each of {context.group.size} ranks one; choose Sharding.ROWS "
            "or REPLICATED"
        )
    return context.to_parts(features(layer.groups, inputs // layer.groups))


class RowsConv2d(Conv2d):
    """Some rows of a convolution: (batch, this rank's rows, w, inputs) -> (batch, this rank's rows, out_w, outputs).

    Args:
        layer: the whole layer, whose parameters this one has.
        group: the ranks that share the rows.
        windows: how they go over the rows of a whole image.
        enter: leaves this rank its rows of the input.
    """

    def __init__(self, layer: Conv2d, group: Group, windows: RowWindows, enter: Redistribute) -> None:
        self.stride, self.padding, self.dilation = layer.stride, layer.padding, layer.dilation
        self.groups, self.weight, self.bias = layer.groups, layer.weight, layer.bias
        self._group, self._rows, self._enter = group, windows, enter

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's rows of the convolution.

        Raises:
            ShapeError: when the images are not those that the model was sharded for.
            DtypeError: when x and the weight differ in dtype.
        """
        x = self._enter(x)
        if x.ndim != 4 or x.shape[3] != self.weight.shape[2] * self.groups:
            raise ShapeError(f"a convolution of images {x.shape} does not fit a weight of {self.weight.shape}")
        read_as("conv2d", x, self.weight, self.bias)
        seen = halo(x, self._group, self._rows)
        weight = copy(self.weight, self._group)
        bias = None if self.bias is None else copy(self.bias, self._group)
        # not `conv2d`, which checks that a window fits: a rank may have no rows
        kernel, border = (weight.shape[0], weight.shape[1]), (0, self.padding[1])  # `halo` has put the rows' border
        return convolve(seen, weight, bias, ConvSpec(kernel, self.stride, border, self.dilation, self.groups))


def place_rows_conv(layer: Conv2d, context: LayerContext) -> Placed:
    """Return the layer for some rows of the images."""
    height, _, _ = context.sample()
    reach = (_reach(layer, 0), _reach(layer, 1))
    windows = _windows(context, reach, layer.stride, layer.padding)
    conv = RowsConv2d(layer, context.group, windows, context.to_parts(rows(height)))
    return conv, rows(windows.outputs)


def _reach(layer: Conv2d, axis: int) -> int:
    """Return how many rows or columns a window sees, from its first to its last."""
    return layer.dilation[axis] * (layer.weight.shape[axis] - 1) + 1


def _windows(context: LayerContext, reach: Pair, stride: Pair, padding: Pair) -> RowWindows:
    """Return how windows go over the rows of the images that come to the layer, whose columns must hold one, too."""
    height, width, _ = context.sample()
    sides = zip((height, width), reach, stride, padding, ("rows", "columns"), strict=True)
    for size, seen, each, border, what in sides:
        if out_size(size, seen, each, border) < 1:
            raise context.refuse(f"has windows of {seen} {what}, which do not fit images of {size} {what}")
    return RowWindows(height, reach[0], stride[0], padding[0])


class RowsPool2d(Module):
    """Some rows of a pooling: (batch, this rank's rows, w, channels) -> (batch, this rank's rows, out_w, channels).

    Args:
        operation: what is made of each window.
        group: the ranks that share the rows.
        windows: how they go over the rows of a whole image.
        over: how they go over one.
        border: the value around the images.
    """

    def __init__(
        self,
        operation: type[Pool2dFunction],
        group: Group,
        windows: RowWindows,
        over: PoolWindows,
        border: float,
    ) -> None:
        self._operation, self._group, self._rows, self._border = operation, group, windows, border
        self._over = over._replace(padding=(0, over.padding[1]))  # `halo` puts the rows' border

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's rows of the result."""
        require_floating("pooling", x)
        return pooled(self._operation, halo(x, self._group, self._rows, self._border), self._over)


class RowsGlobalAvgPool2d(GlobalAvgPool2d):
    """The mean of each channel over images whose rows lie on several ranks: -> whole (batch, channels).

    Args:
        group: the ranks that share the rows.
        height: the rows of a whole image.
    """

    def __init__(self, group: Group, height: int) -> None:
        self._group, self._height = group, height

    def forward(self, x: Tensor) -> Tensor:
        """Return the means."""
        own = x.sum(axis=(1, 2)) * (1 / (self._height * x.shape[2]))
        return sum_over_ranks(own, self._group)


def place_pool(layer: Pool2d, context: LayerContext) -> Placed:
    """Return the layer for what comes to it: as it is if channels are cut, with a halo exchange if rows are."""
    if context.sharding is Sharding.REPLICATED:
        return context.on_replicated(layer)
    if not (context.placement.has_rows or context.sharding is Sharding.ROWS):
        return layer, context.placement
    height, _, _ = context.sample()
    if not context.placement.has_rows:
        raise context.refuse("has no rows before it; give the convolution before it Sharding.ROWS")
    windows = _windows(context, *layer.over)
    is_largest = isinstance(layer, MaxPool2d)
    operation, border = (MaxPool2dFunction, -float("inf")) if is_largest else (AvgPool2dFunction, 0.0)
    return RowsPool2d(operation, context.group, windows, layer.over, border), rows(windows.outputs)


def place_global_pool(layer: GlobalAvgPool2d, context: LayerContext) -> Placed:
    """Return the layer for what comes to it: as it is if channels are cut, with a sum over the ranks if rows are."""
    if context.sharding is Sharding.REPLICATED:
        return context.on_replicated(layer)
    if context.placement.has_rows:
        height, _, _ = context.sample()
        return RowsGlobalAvgPool2d(context.group, height), REPLICATED
    return layer, context.placement
