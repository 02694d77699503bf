"""Layers on images (batch, height, width, channels): convolution, pooling, resizing; and on
volumes.
"""

from math import prod
from typing import Any, ClassVar, Literal

from nnmpi.backend.array import Shape
from nnmpi.backend.windows import PairLike, Triple, pair, triple
from nnmpi.base.errors import ShapeError, UsageError, check_int
from nnmpi.nn.module import Module, fan_in
from nnmpi.nn.sharding import Reach
from nnmpi.ops.conv.algorithm import ConvSpec
from nnmpi.ops.conv.convolution import conv2d, conv3d, conv_transpose2d
from nnmpi.ops.pool import (
    AvgPool2dFunction,
    MaxPool2dFunction,
    Pool2dFunction,
    PoolWindows,
    pool_volumes,
    pool_windows,
    pooled,
    pooled3d,
    upsample,
    window_means,
)
from nnmpi.tensor.operand import require_floating
from nnmpi.tensor.parameter import Initializer, Parameter
from nnmpi.tensor.tensor import Tensor, concatenate

__all__ = [
    "AdaptiveAvgPool2d",
    "AdaptiveMaxPool2d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose2d",
    "GlobalAvgPool2d",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Upsample",
]


class Conv2d(Module, read_once="extra_padding"):
    """2-D convolution: (batch, h, w, in_channels) -> (batch, out_h, out_w, out_channels).

    The weight is stored (kernel_h, kernel_w, in_channels / groups, out_channels).

    Args:
        in_channels, out_channels: the numbers of channels.
        kernel_size, stride, padding, dilation: one number, or one for rows and one for columns;
            padding may be "same", for an output of the input's size; of an even kernel, one row or
            column more of zeros is at the end, as in PyTorch.
        groups: the number of groups of channels; groups do not mix.
        bias: whether one number per output channel is added.
        init: draws the weight; by default uniform within 1 / sqrt(terms in an output's sum). The
            bias is drawn by the default in any case.

    Attributes:
        extra_padding: the rows and columns of zeros at the end beyond `padding`.

    Example:
        >>> layer = nn.Conv2d(3, 8, kernel_size=3, padding=1).initialize(seed=0)
        >>> layer(np.zeros((2, 28, 28, 3), "float32")).shape
        (2, 28, 28, 8)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: PairLike,
        stride: PairLike = 1,
        padding: PairLike | Literal["same"] = 0,
        dilation: PairLike = 1,
        groups: int = 1,
        bias: bool = True,
        init: Initializer | None = None,
    ) -> None:
        self.stride = pair("stride", stride, 1)
        self.dilation = pair("dilation", dilation, 1)
        self.groups = groups
        rows, columns = pair("kernel_size", kernel_size, 1)
        self.extra_padding = 0, 0
        if padding == "same":
            if self.stride != (1, 1):
                raise UsageError(
                    f'padding="same" needs a stride of 1, not {stride}; give padding as numbers'
                )
            borders = (rows - 1) * self.dilation[0], (columns - 1) * self.dilation[1]
            padding = borders[0] // 2, borders[1] // 2
            self.extra_padding = borders[0] % 2, borders[1] % 2
        self.padding = pair("padding", padding, 0)
        channels = in_channels, out_channels, groups
        self.weight, self.bias = _parameters("Conv2d", (rows, columns), channels, bias, init)

    def shape_after(self, shape: Shape) -> Shape | None:
        """See `Module.shape_after`; None if the sample is no image."""
        if len(shape) != 3:
            return None
        rows, columns, _, channels = self.weight.shape
        spec = ConvSpec((rows, columns), self.stride, self.padding, self.dilation)
        more_rows, more_columns = self.extra_padding
        return (*spec.pooled_size(shape[0] + more_rows, shape[1] + more_columns), channels)

    def bordered(self, x: Tensor) -> Tensor:
        """Return images with their extra padding."""
        rows, columns = self.extra_padding
        return x.pad(((0, 0), (0, rows), (0, columns), (0, 0))) if rows or columns else x

    def operands(self, x: Tensor) -> tuple[Tensor, Any, Any, Any, Any, Any, int]:
        """Return the arguments of `ops.conv2d`."""
        settings = self.stride, self.padding, self.dilation, self.groups
        return self.bordered(self.product_input(x)), self.weight, self.bias, *settings

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution. See `ops.conv2d`."""
        return conv2d(*self.operands(x))


class _OverTime:
    """A layer of images, over (batch, time, channels)."""

    def shape_after(self, shape: Shape) -> Shape | None:
        """See `Module.shape_after`."""
        after = super().shape_after((1, *shape)) if len(shape) == 2 else None  # type: ignore[misc]
        return None if after is None else after[1:]

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, out_time, channels)."""
        if x.ndim != 3:
            raise ShapeError(
                f"{type(self).__name__} needs (batch, time, channels), not {x.shape}; one sample is"
                " x[None]"
            )
        y = super().forward(x.reshape(len(x), 1, *x.shape[1:]))  # type: ignore[misc]
        return y.reshape(len(x), *y.shape[2:])


class Conv1d(_OverTime, Conv2d):
    """A convolution over time: (batch, time, in_channels) -> (batch, out_time, out_channels).

    Same arguments as `Conv2d`, one number each, or padding="same"; the weight is stored (1, kernel,
    in_channels / groups, out_channels).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int | Literal["same"] = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        kernel, steps, gaps = (1, kernel_size), (1, stride), (1, dilation)
        border: Any = padding if padding == "same" else (0, padding)
        super().__init__(in_channels, out_channels, kernel, steps, border, gaps, groups, bias)


class Conv3d(Module):
    """3-D convolution: (batch, d, h, w, in_channels) -> (batch, out_d, out_h, out_w, out_channels).

    It copies x once for each plane of the kernel. The weight is stored (kernel_d, kernel_h,
    kernel_w, in_channels / groups, out_channels).

    Args:
        in_channels, out_channels, groups, bias: as for `Conv2d`.
        kernel_size, stride, padding, dilation: one number, or one each for depth, rows and columns.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Triple,
        stride: Triple = 1,
        padding: Triple = 0,
        dilation: Triple = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        kernel = triple("kernel_size", kernel_size, 1)
        self.options = (
            triple("stride", stride, 1),
            triple("padding", padding, 0),
            triple("dilation", dilation, 1),
            groups,
        )
        channels = in_channels, out_channels, groups
        self.weight, self.bias = _parameters("Conv3d", kernel, channels, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution. See `ops.conv3d`."""
        return conv3d(x, self.weight, self.bias, *self.options)


class ConvTranspose2d(Module):
    """Transposed convolution: (batch, h, w, in_channels) -> (batch, H, W, out_channels).

    H is (h - 1) stride - 2 padding + dilation (kernel - 1) + 1 + output_padding. The weight is
    stored (kernel_h, kernel_w, out_channels / groups, in_channels).

    Args:
        in_channels, out_channels: the numbers of channels.
        kernel_size, stride, padding, dilation: one number, or one for rows and one for columns.
        output_padding: extra rows and columns at the end, fewer than stride.
        groups: the number of groups of channels; groups do not mix.
        bias: whether one number per output channel is added.
        init: draws the weight; by default uniform within 1 / sqrt(out_channels / groups * kernel
            elements).

    Example:
        >>> layer = nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1).initialize(seed=0)
        >>> layer(np.zeros((5, 7, 7, 8), "float32")).shape
        (5, 14, 14, 3)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: PairLike,
        stride: PairLike = 1,
        padding: PairLike = 0,
        output_padding: PairLike = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: PairLike = 1,
        init: Initializer | None = None,
    ) -> None:
        kernel, channels = pair("kernel_size", kernel_size, 1), (in_channels, out_channels, groups)
        self.options = stride, padding, output_padding, dilation, groups
        self.weight, self.bias = _parameters("ConvTranspose2d", kernel, channels, bias, init, True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the larger images. See `ops.conv_transpose2d`."""
        return conv_transpose2d(x, self.weight, self.bias, *self.options)


def _parameters(
    name: str,
    kernel: Shape,
    channels: tuple[int, int, int],
    bias: bool,
    init: Initializer | None = None,
    turned: bool = False,
) -> tuple[Parameter, Parameter | None]:
    """Return a convolution's weight and bias, which begin alike unless init is given.

    Args:
        name: of the layer, for errors.
        kernel: the lengths of its sides.
        channels: the numbers of channels in and out, and of groups.
        turned: whether the weight's last axis is that of the channels in.
    """
    names = "in_channels", "out_channels", "groups"
    inputs, outputs, groups = (
        check_int(f"{name}'s {what}", n) for what, n in zip(names, channels, strict=True)
    )
    if inputs % groups or outputs % groups:
        raise UsageError(
            f"a convolution of {inputs} to {outputs} channels cannot have {groups}"
            " groups; groups must divide both numbers of channels"
        )
    shape = *kernel, *((outputs // groups, inputs) if turned else (inputs // groups, outputs))
    draw = fan_in(prod(shape[:-1]))
    return Parameter(shape, init or draw), Parameter((outputs,), draw) if bias else None


class Pool2d(Module, read_once="over"):
    """Pooling: (batch, height, width, channels) -> (batch, out_h, out_w, channels).

    Args:
        kernel_size: the window's height and width; one number for both.
        stride: the distance between windows; the window's size by default, so that windows do not
            overlap.
        padding: pixels around the image.

    Attributes:
        over: the windows' geometry.
    """

    def __init__(
        self, kernel_size: PairLike, stride: PairLike | None = None, padding: PairLike = 0
    ) -> None:
        self.over = pool_windows(kernel_size, stride, padding)

    def shape_after(self, shape: Shape) -> Shape | None:
        """See `Module.shape_after`; None if the sample is no image."""
        return (*self.over.out(*shape[:2]), shape[2]) if len(shape) == 3 else None


class MaxPool2d(Pool2d):
    """Max-pooling; padding is never the maximum. Arguments as for `Pool2d`."""

    reach = Reach.CHANNEL

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, out_h, out_w, channels)."""
        return pooled(MaxPool2dFunction, x, self.over)


class AvgPool2d(Pool2d):
    """Average pooling; zeros of the padding count in the mean. Arguments as for `Pool2d`."""

    reach = Reach.CHANNEL

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, out_h, out_w, channels)."""
        return pooled(AvgPool2dFunction, x, self.over)


class Pool1d(_OverTime, Pool2d):
    """Pooling over time: (batch, time, channels) -> (batch, out_time, channels).

    Arguments as for `Pool2d`, one number each.
    """

    def __init__(self, kernel_size: int, stride: int | None = None, padding: int = 0) -> None:
        super().__init__((1, kernel_size), None if stride is None else (1, stride), (0, padding))


class MaxPool1d(Pool1d, MaxPool2d):
    """Max-pooling over time. Arguments as for `Pool1d`."""


class AvgPool1d(Pool1d, AvgPool2d):
    """Average pooling over time. Arguments as for `Pool1d`."""


class Pool3d(Module, read_once="in_plane in_depth"):
    """Pooling of volumes: (batch, depth, height, width, c) -> (batch, out_d, out_h, out_w, c).

    Args:
        kernel_size, stride, padding: as for `Pool2d`; one number, or one each for depth, rows and
            columns.

    Attributes:
        in_plane, in_depth: the windows' geometry, within a plane and over the planes.
    """

    kind: ClassVar[type[Pool2dFunction]]

    def __init__(
        self, kernel_size: Triple, stride: Triple | None = None, padding: Triple = 0
    ) -> None:
        self.in_plane, self.in_depth = pool_volumes(kernel_size, stride, padding)

    def shape_after(self, shape: Shape) -> Shape | None:
        """See `Module.shape_after`; None if the sample is no volume."""
        if len(shape) != 4:
            return None
        depth, h, w, channels = shape
        return self.in_depth.out(depth, 1)[0], *self.in_plane.out(h, w), channels

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, out_d, out_h, out_w, channels)."""
        return pooled3d(self.kind, x, self.in_plane, self.in_depth)


class MaxPool3d(Pool3d):
    """Max-pooling of volumes; padding is never the maximum. Arguments as for `Pool3d`."""

    reach, kind = Reach.CHANNEL, MaxPool2dFunction


class AvgPool3d(Pool3d):
    """Average pooling of volumes; zeros of the padding count. Arguments as for `Pool3d`."""

    reach, kind = Reach.CHANNEL, AvgPool2dFunction


class GlobalAvgPool2d(Module):
    """Mean of each channel over the image: (batch, h, w, channels) -> (batch, channels)."""

    reach = Reach.CHANNEL

    def shape_after(self, shape: Shape) -> Shape:
        """See `Module.shape_after`."""
        return shape[-1:]

    def forward(self, x: Tensor) -> Tensor:
        """Return the means."""
        if x.ndim != 4 or not x.size:
            return x.mean(axis=(1, 2))
        n, h, w, c = x.shape
        return window_means(x, (h, w)).reshape(n, c)


class _AdaptivePool2d(Module):
    """Pooling to a given size: (batch, h, w, c) -> (batch, rows, columns, c).

    Window i of n goes from i h / n, rounded down, to (i + 1) h / n, rounded up: windows overlap if
    n does not divide h.

    Args:
        output_size: rows and columns of the result; one number for both.
    """

    kind: ClassVar[type[Pool2dFunction]]

    def __init__(self, output_size: PairLike) -> None:
        self.output_size = pair("output_size", output_size, 1)

    def shape_after(self, shape: Shape) -> Shape:
        """See `Module.shape_after`."""
        return (*self.output_size, shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, rows, columns, c)."""
        name = type(self).__name__
        _images(name, x)
        require_floating(name, x)
        (h, w), (rows, columns) = x.shape[1:3], self.output_size
        if h % rows == w % columns == 0:
            window = h // rows, w // columns
            return self.kind(PoolWindows(window, window, (0, 0)))(x)
        x = self._along(x, 2, columns)  # before the rows, so that the first of ties is PyTorch's
        return self._along(x, 1, rows)

    def _along(self, x: Tensor, axis: int, count: int) -> Tensor:
        """Return images with each window of an axis as one pixel."""
        size, every = x.shape[axis], (slice(None),) * axis
        bounds = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
        parts = []
        for start, stop in bounds:
            kernel = (stop - start, 1) if axis == 1 else (1, stop - start)
            window = x[(*every, slice(start, stop))]
            parts.append(self.kind(PoolWindows(kernel, kernel, (0, 0)))(window))
        return concatenate(parts, axis)


class AdaptiveAvgPool2d(_AdaptivePool2d):
    """Average pooling to a given size: (batch, h, w, c) -> (batch, rows, columns, c).

    Window i of n goes from i h / n, rounded down, to (i + 1) h / n, rounded up: windows overlap if
    n does not divide h.

    Args:
        output_size: rows and columns of the result; one number for both.
    """

    reach, kind = Reach.CHANNEL, AvgPool2dFunction


class AdaptiveMaxPool2d(_AdaptivePool2d):
    """Max-pooling to a given size; see `AdaptiveAvgPool2d`."""

    reach, kind = Reach.CHANNEL, MaxPool2dFunction


class Upsample(Module):
    """Nearest-neighbour upsampling: (batch, h, w, c) -> (batch, h factor, w factor, c).

    Args:
        scale_factor: for rows and columns, integers; one number for both.
    """

    reach = Reach.CHANNEL

    def __init__(self, scale_factor: PairLike) -> None:
        self.scale_factor = pair("scale_factor", scale_factor, 1)

    def shape_after(self, shape: Shape) -> Shape | None:
        """See `Module.shape_after`; None if the sample is no image."""
        if len(shape) != 3:
            return None
        (h, w, channels), (rows, columns) = shape, self.scale_factor
        return h * rows, w * columns, channels

    def forward(self, x: Tensor) -> Tensor:
        """Return the larger images."""
        _images("Upsample", x)
        return upsample(x, self.scale_factor)


def _images(name: str, x: Tensor) -> Shape:
    if x.ndim != 4 or 0 in x.shape[1:3]:
        raise ShapeError(f"{name} needs images (batch, height, width, channels), not {x.shape}")
    return x.shape
