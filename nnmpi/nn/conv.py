"""Layers on images (batch, height, width, channels): convolution and pooling."""

from typing import Literal

from nnmpi.backend.windows import Pair, pair
from nnmpi.errors import UsageError, whole
from nnmpi.nn.module import Module, fan_in
from nnmpi.ops.conv.conv2d import conv2d
from nnmpi.ops.pool import avg_pool2d, max_pool2d, pool_windows
from nnmpi.tensor.parameter import Initializer, Parameter
from nnmpi.tensor.tensor import Tensor


class Conv2d(Module):
    """A two-dimensional convolution: (batch, h, w, in_channels) -> (batch, out_h, out_w, out_channels).

    The weight is stored (kernel_h, kernel_w, in_channels / groups, out_channels).

    Args:
        in_channels, out_channels: the numbers of channels.
        kernel_size, stride, padding, dilation: one number, or one for rows and one for columns;
            padding may be "same", for images as large as they were.
        groups: the channels are cut into this many groups that do not mix.
        bias: whether one number per output channel is added.
        init: draws the weight; by default uniform within 1 / sqrt(terms that an output sums), and so is the bias.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair | Literal["same"] = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        bias: bool = True,
        init: Initializer | None = None,
    ) -> None:
        in_channels = whole("Conv2d's in_channels", in_channels)
        out_channels = whole("Conv2d's out_channels", out_channels)
        groups = whole("Conv2d's groups", groups)
        if in_channels % groups or out_channels % groups:
            raise UsageError(
                f"a convolution of {in_channels} to {out_channels} channels in {groups} groups does not work; "
                "groups must divide both numbers of channels"
            )
        self.stride, self.dilation, self.groups = pair("stride", stride, 1), pair("dilation", dilation, 1), groups
        rows, columns = pair("kernel_size", kernel_size, 1)
        if padding == "same":
            if not rows % 2 or not columns % 2 or self.stride != (1, 1):
                raise UsageError(
                    f'padding="same" needs an odd kernel_size and a stride of 1, '
                    f"not {kernel_size} and {stride}; give numbers"
                )
            padding = (rows // 2 * self.dilation[0], columns // 2 * self.dilation[1])
        self.padding = pair("padding", padding, 0)
        terms = rows * columns * in_channels // groups
        self.weight = Parameter((rows, columns, in_channels // groups, out_channels), init or fan_in(terms))
        self.bias = Parameter((out_channels,), fan_in(terms)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution. See `ops.conv2d`."""
        return conv2d(self.enter(x), self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Pool2d(Module):
    """One number for each window: (batch, height, width, channels) -> (batch, out_h, out_w, channels).

    Args:
        kernel_size: the window's height and width; one number for both.
        stride: from one window to the next; the window's size by default, so that windows do not overlap.
        padding: pixels around the image.

    Attributes:
        over: how windows go over images.
    """

    def __init__(self, kernel_size: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0) -> None:
        self.over = pool_windows(kernel_size, stride, padding)


class MaxPool2d(Pool2d):
    """The largest element of each window; the border is never the largest. Arguments are those of `Pool2d`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, out_h, out_w, channels)."""
        return max_pool2d(x, *self.over)


class AvgPool2d(Pool2d):
    """The mean of each window; the border's zeros count in it. Arguments are those of `Pool2d`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, out_h, out_w, channels)."""
        return avg_pool2d(x, *self.over)


class GlobalAvgPool2d(Module):
    """The mean of each channel over the whole image: (batch, h, w, channels) -> (batch, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the means."""
        return x.mean(axis=(1, 2))
