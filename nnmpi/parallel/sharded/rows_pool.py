"""Pooling of which each rank does some rows of the images, with the rows that its windows share (see `halo`)."""

from __future__ import annotations

from collections.abc import Callable

from nnmpi.backend.windows import Pair
from nnmpi.comm.group import Group
from nnmpi.nn.conv import AvgPool2d, GlobalAvgPool2d, MaxPool2d
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import Sharding
from nnmpi.ops.conv import pair
from nnmpi.ops.pool import average, largest
from nnmpi.parallel.sharded.exchange import add_up
from nnmpi.parallel.sharded.halo import Frame, halo
from nnmpi.parallel.sharded.placement import WHOLE, rows
from nnmpi.parallel.sharded.site import Placed, Site
from nnmpi.tensor.operand import real
from nnmpi.tensor.tensor import Tensor


class RowsPool2d(Module):
    """Some rows of a pooling: (batch, this rank's rows, w, channels) -> (batch, this rank's rows, out_w, channels).

    Args:
        operation: the pooling of bordered images.
        group: the ranks that share the rows.
        frame: how the windows go over the rows of a whole image.
        kernel, stride, padding: the windows.
        border: the value around the images.
    """

    def __init__(
        self,
        operation: Callable[[Tensor, Pair, Pair, Pair], Tensor],
        group: Group,
        frame: Frame,
        kernel: Pair,
        stride: Pair,
        padding: Pair,
        border: float,
    ) -> None:
        self._operation, self._group, self._frame, self._border = operation, group, frame, border
        self._windows = (kernel, stride, (0, padding[1]))

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's rows of the result."""
        real("pooling", x)
        return self._operation(halo(x, self._group, self._frame, self._border), *self._windows)


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
        return add_up(own, self._group, fresh=True)


def place_pool(layer: MaxPool2d | AvgPool2d, site: Site) -> Placed:
    """Return the layer for what lies before it: channels are pooled alone, rows with their neighbours'."""
    if site.sharding is Sharding.REPLICATED:
        return site.on_whole(layer)
    if not (site.placement.has_rows or site.sharding is Sharding.ROWS):
        return layer, site.placement
    height, _, _ = site.sample()
    if not site.placement.has_rows:
        raise site.refuse("has no rows before it; give the convolution before it Sharding.ROWS")
    kernel, padding = pair("kernel", layer.kernel, 1), pair("padding", layer.padding, 0)
    stride = kernel if layer.stride is None else pair("stride", layer.stride, 1)
    frame = Frame(height, kernel[0], stride[0], padding[0])
    if frame.outputs < 1:
        raise site.refuse(f"has windows of {kernel[0]} rows, which do not fit images of {height} rows")
    operation, border = (largest, -float("inf")) if isinstance(layer, MaxPool2d) else (average, 0.0)
    return RowsPool2d(operation, site.group, frame, kernel, stride, padding, border), rows(frame.outputs)


def place_global_pool(layer: GlobalAvgPool2d, site: Site) -> Placed:
    """Return the layer for what lies before it."""
    if site.sharding is Sharding.REPLICATED:
        return site.on_whole(layer)
    if site.placement.has_rows:
        height, _, _ = site.sample()
        return RowsGlobalAvgPool2d(site.group, height), WHOLE
    return layer, site.placement
