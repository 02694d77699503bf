"""Convolution of which each rank does some rows of the images, with the rows that its windows share (see `halo`).

rank 0   | rows 0..3 |--> halo --> conv --> | rows 0..3 |        kernels are whole on every rank; their gradients
rank 1   | rows 4..7 |--> halo --> conv --> | rows 4..7 |        are summed over the ranks
"""

from __future__ import annotations

from nnmpi.comm.group import Group
from nnmpi.errors import ShapeError
from nnmpi.nn.conv import Conv2d
from nnmpi.ops.columns import Frame as Windows
from nnmpi.ops.conv import Conv2d as Convolve
from nnmpi.ops.conv import convolve
from nnmpi.parallel.sharded.exchange import copy
from nnmpi.parallel.sharded.halo import Frame, halo
from nnmpi.parallel.sharded.placement import rows
from nnmpi.parallel.sharded.site import Exchange, Placed, Site
from nnmpi.tensor.operand import read_as
from nnmpi.tensor.tensor import Tensor


class RowsConv2d(Conv2d):
    """Some rows of a convolution: (batch, this rank's rows, w, inputs) -> (batch, this rank's rows, out_w, outputs).

    Args:
        layer: the whole layer, whose parameters this one has.
        group: the ranks that share the rows.
        frame: how the windows go over the rows of a whole image.
        enter: leaves this rank its rows of the input.
    """

    def __init__(self, layer: Conv2d, group: Group, frame: Frame, enter: Exchange) -> None:
        self.stride, self.padding, self.dilation = layer.stride, layer.padding, layer.dilation
        self.groups, self.weight, self.bias = layer.groups, layer.weight, layer.bias
        self._group, self._frame, self._enter = group, frame, enter

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
        seen = halo(x, self._group, self._frame)
        weight = copy(self.weight, self._group)
        bias = None if self.bias is None else copy(self.bias, self._group)
        # the operation itself, without the check that a window fits: a rank may have no rows
        sizes, border = (weight.shape[0], weight.shape[1]), (0, self.padding[1])
        plain = Convolve(self.stride, border, self.dilation, self.groups)
        windows = Windows(sizes, self.stride, border, self.dilation)
        return convolve(plain, seen, weight, bias, windows, self.groups)


def place_rows_conv(layer: Conv2d, site: Site) -> Placed:
    """Return the layer for some rows of the images."""
    height, _, _ = site.sample()
    reach = layer.dilation[0] * (layer.weight.shape[0] - 1) + 1
    frame = Frame(height, reach, layer.stride[0], layer.padding[0])
    if frame.outputs < 1:
        raise site.refuse(f"has windows of {reach} rows, which do not fit images of {height} rows")
    conv = RowsConv2d(layer, site.group, frame, site.to_parts(rows(height)))
    return conv, rows(frame.outputs)
