"""Layers that make images larger, resize what comes out of them, or drop whole channels."""

import numpy as np

from nnmpi.backend.array import namespace
from nnmpi.backend.windows import Pair, pair
from nnmpi.errors import ShapeError, UsageError, whole
from nnmpi.nn.activation import Dropout
from nnmpi.nn.conv import Conv2d
from nnmpi.nn.module import Module, fan_in
from nnmpi.ops.conv.transposed import conv_transpose2d
from nnmpi.tensor.operand import require_floating
from nnmpi.tensor.parameter import Initializer, Parameter
from nnmpi.tensor.tensor import Tensor


class ConvTranspose2d(Module):
    """A transposed convolution: (batch, h, w, in_channels) -> (batch, H, W, out_channels), as of decoders.

    H is (h - 1) stride - 2 padding + dilation (kernel - 1) + 1 + output_padding. The weight is stored
    (kernel_h, kernel_w, out_channels / groups, in_channels).

    Args:
        in_channels, out_channels: the numbers of channels.
        kernel_size, stride, padding, dilation: one number, or one for rows and one for columns.
        output_padding: extra rows and columns at the end, fewer than stride.
        groups: the channels are cut into this many groups that do not mix.
        bias: whether one number per output channel is added.
        init: draws the weight; by default uniform within 1 / sqrt(out_channels / groups * kernel elements).

    Example:
        >>> layer = nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1).initialize(seed=0)
        >>> layer(numpy.zeros((5, 7, 7, 8), "float32")).shape
        (5, 14, 14, 3)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        output_padding: int | Pair = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | Pair = 1,
        init: Initializer | None = None,
    ) -> None:
        in_channels = whole("ConvTranspose2d's in_channels", in_channels)
        out_channels, groups = whole("ConvTranspose2d's out_channels", out_channels), whole("groups", groups)
        if in_channels % groups or out_channels % groups:
            raise UsageError(f"groups {groups} does not divide {in_channels} and {out_channels} channels")
        rows, columns = pair("kernel_size", kernel_size, 1)
        self.options = stride, padding, output_padding, dilation, groups
        terms = rows * columns * out_channels // groups
        self.weight = Parameter((rows, columns, out_channels // groups, in_channels), init or fan_in(terms))
        self.bias = Parameter((out_channels,), fan_in(terms)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the larger images. See `ops.conv_transpose2d`."""
        return conv_transpose2d(x, self.weight, self.bias, *self.options)


class Conv1d(Conv2d):
    """A convolution over time: (batch, time, in_channels) -> (batch, out_time, out_channels).

    Arguments are those of `Conv2d`, one number each; the weight is stored (1, kernel, in_channels / groups,
    out_channels).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        along = (1, kernel_size), (1, stride), (0, padding), (1, dilation)
        super().__init__(in_channels, out_channels, *along, groups, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution."""
        y = super().forward(x.reshape(len(x), 1, *x.shape[1:]))
        return y.reshape(len(x), *y.shape[2:])


class AdaptiveAvgPool2d(Module):
    """Means over as many windows as are asked for: (batch, h, w, channels) -> (batch, rows, columns, channels).

    Window i of n goes from i h / n, rounded down, to (i + 1) h / n, rounded up: they overlap where n does not divide h.

    Args:
        output_size: rows and columns of the result; one number for both.
    """

    def __init__(self, output_size: int | Pair) -> None:
        self.output_size = pair("output_size", output_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the means."""
        n, h, w, c = _images("AdaptiveAvgPool2d", x)
        require_floating("AdaptiveAvgPool2d", x)
        by_rows, by_columns = (
            Tensor(namespace(x.data).asarray(_windows(size, count), dtype=x.dtype))
            for size, count in zip((h, w), self.output_size, strict=True)
        )
        y = (by_rows @ x.reshape(n, h, w * c)).reshape(n, len(by_rows), w, c)
        return by_columns @ y


def _images(name: str, x: Tensor) -> tuple[int, ...]:
    if x.ndim != 4 or 0 in x.shape[1:3]:
        raise ShapeError(f"{name} needs images (batch, height, width, channels), not {x.shape}")
    return x.shape


def _windows(size: int, count: int) -> np.ndarray:
    """Return the matrix (count, size) that takes the mean over each window."""
    matrix = np.zeros((count, size))
    for i in range(count):
        start, stop = i * size // count, -(-(i + 1) * size // count)
        matrix[i, start:stop] = 1 / (stop - start)
    return matrix


class Upsample(Module):
    """Each pixel again and again: (batch, h, w, channels) -> (batch, h factor, w factor, channels), nearest neighbour.

    Args:
        scale_factor: how often, in rows and columns; one number for both.
    """

    def __init__(self, scale_factor: int | Pair) -> None:
        self.scale_factor = pair("scale_factor", scale_factor, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the larger images."""
        (n, h, w, c), (rows, columns) = _images("Upsample", x), self.scale_factor
        ones = namespace(x.data).ones((rows, 1, columns, 1), x.dtype)
        return (x.reshape(n, h, 1, w, 1, c) * Tensor(ones)).reshape(n, h * rows, w * columns, c)


class Dropout2d(Dropout):
    """Drops whole channels of a sample at random in training: (batch, ..., channels). See `Dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x, or in training x without some channels."""
        if x.ndim < 2:
            raise ShapeError(f"Dropout2d needs (batch, ..., channels), not {x.shape}")
        ones = namespace(x.data).ones((len(x), *(1,) * (x.ndim - 2), x.shape[-1]), x.dtype)
        return x * super().forward(Tensor(ones))
