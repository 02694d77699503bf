"""Layers on images (batch, height, width, channels): convolution and pooling."""

from typing import Literal

from nnmpi.aliases import also
from nnmpi.backend.windows import Pair, pair
from nnmpi.errors import UsageError, whole
from nnmpi.nn.init import fan_in
from nnmpi.nn.module import Module
from nnmpi.ops.conv.conv2d import conv2d
from nnmpi.ops.pool import avg_pool2d, max_pool2d, pool_windows
from nnmpi.tensor.parameter import Initializer, Parameter
from nnmpi.tensor.tensor import Tensor


class Conv2d(Module):
    """A two-dimensional convolution: (batch, h, w, inputs) -> (batch, out_h, out_w, outputs).

    The weight is stored (kernel_h, kernel_w, inputs / groups, outputs).

    Args:
        inputs, outputs: the numbers of channels.
        kernel, stride, padding, dilation: one number, or one for rows and one for columns; padding may be "same", for
            images as large as they were.
        groups: the channels are cut into this many groups that do not mix.
        bias: whether one number per output channel is added.
        init: draws the weight; by default uniform within 1 / sqrt(terms that an output sums), and so is the bias.
    """

    @also(in_channels="inputs", out_channels="outputs", kernel_size="kernel")
    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair | Literal["same"] = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        bias: bool = True,
        init: Initializer | None = None,
    ) -> None:
        inputs, outputs = whole("Conv2d's inputs", inputs), whole("Conv2d's outputs", outputs)
        groups = whole("Conv2d's groups", groups)
        if inputs % groups or outputs % groups:
            raise UsageError(
                f"a convolution of {inputs} to {outputs} channels in {groups} groups does not work; "
                "groups must divide both numbers of channels"
            )
        self.stride, self.dilation, self.groups = pair("stride", stride, 1), pair("dilation", dilation, 1), groups
        rows, columns = pair("kernel", kernel, 1)
        if padding == "same":
            if not rows % 2 or not columns % 2 or self.stride != (1, 1):
                raise UsageError(
                    f'padding="same" needs an odd kernel and a stride of 1, not {kernel} and {stride}; give numbers'
                )
            padding = (rows // 2 * self.dilation[0], columns // 2 * self.dilation[1])
        self.padding = pair("padding", padding, 0)
        terms = rows * columns * inputs // groups
        self.weight = Parameter((rows, columns, inputs // groups, outputs), init or fan_in(terms))
        self.bias = Parameter((outputs,), fan_in(terms)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution. See `ops.conv2d`."""
        return conv2d(self.enter(x), self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def enter(self, x: Tensor) -> Tensor:
        """Return the images as the convolution wants them: where ranks share the layer, an exchange comes first."""
        return x


class Pool2d(Module):
    """One number for each window: (batch, height, width, channels) -> (batch, out_h, out_w, channels).

    Args:
        kernel: the window's height and width; one number for both.
        stride: from one window to the next; the kernel by default, so that windows do not overlap.
        padding: pixels around the image.

    Attributes:
        over: how windows go over images.
    """

    @also(kernel_size="kernel")
    def __init__(self, kernel: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0) -> None:
        self.over = pool_windows(kernel, stride, padding)


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
