"""Pooling of channels-last images: the maximum or the mean of each window; volumes are pooled in
their planes, and then over them.

    x            (n, h, w, c), with a border
    positions    (kernel_h, kernel_w, n, out_h, out_w, c), a view
    y            (n, out_h, out_w, c)

NumPy's max-pooling copies the windows of a few images at a time into planes, one per position in
the window, and then computes on long contiguous arrays (see `backend.planes`). Its mean
(`PlainKernels.avg_pool`) sums strided views ("taps") without copies; a tap is one position of all
windows. Windows may overlap. Large windows that do not are summed by products with ones.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from nnmpi.backend.array import Array, Shape
from nnmpi.backend.kernels import kernels_of
from nnmpi.backend.windows import (
    PairLike,
    RowsAndColumns,
    Triple,
    corners,
    out_size,
    pair,
    triple,
    windows,
)
from nnmpi.base.errors import ShapeError, UsageError
from nnmpi.base.words import answered
from nnmpi.tensor.function import Function, Grads
from nnmpi.tensor.operand import require_floating
from nnmpi.tensor.placement import Placement, placement_if_uncut
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import WRITTEN, Channels, Sample, Traits

__all__ = ["avg_pool2d", "avg_pool3d", "max_pool2d", "max_pool3d"]


class PoolWindows(NamedTuple):
    """The geometry of pooling windows; each pair is rows and columns, in pixels."""

    kernel: RowsAndColumns
    stride: RowsAndColumns
    padding: RowsAndColumns

    def out(self, h: int, w: int) -> RowsAndColumns:
        """Return the result's rows and columns for images of h x w; 0 if too small."""
        rows, columns = (max(0, out_size(*axis)) for axis in zip((h, w), *self, strict=True))
        return rows, columns

    @property
    def overlap(self) -> bool:
        """Whether windows share pixels."""
        return self.kernel[0] > self.stride[0] or self.kernel[1] > self.stride[1]

    def tiles(self, h: int, w: int) -> bool:
        """Return whether the windows cover images of h x w, each pixel once."""
        fits = h % self.kernel[0] == w % self.kernel[1] == 0
        return fits and self.kernel == self.stride and self.padding == (0, 0)

    def positions(self, x: Array) -> Array:
        """Return padded images as a view (kernel_h, kernel_w, n, out_h, out_w, c)."""
        if self.kernel == self.stride:
            return corners(x, self.kernel)
        return windows(x, self.kernel, self.stride).transpose(3, 4, 0, 1, 2, 5)

    def taps(self, x: Array) -> list[Array]:
        """Return, per position in the window, a view (n, out_h, out_w, c) of padded images."""
        view = self.positions(x)
        return [view[position] for position in np.ndindex(*self.kernel)]

    def firsts(self, out: RowsAndColumns) -> Array:
        """Return each window's first position that is not the border's, (out_h, out_w, 1)."""
        rows, columns = (
            np.maximum(border - step * np.arange(n), 0)
            for border, step, n in zip(self.padding, self.stride, out, strict=True)
        )
        return (rows[:, None] * self.kernel[1] + columns)[..., None]

    def padded(self, shape: Shape) -> Shape:
        """Return the shape of images (n, h, w, c) with their border."""
        (n, h, w, c), (top, left) = shape, self.padding
        return n, h + 2 * top, w + 2 * left, c

    def inside(self, x: Array) -> Array:
        """Return a view of images without their border."""
        (top, left), (h, w) = self.padding, x.shape[1:3]
        return x[:, top : h - top, left : w - left]


class Pool2dFunction(Function):
    """One number per window, image and channel."""

    __slots__ = ("over",)

    computes = "kernels"
    name: ClassVar[str] = ""  # of the function, for its errors

    def __init__(self, over: PoolWindows) -> None:
        self.over = over

    def placed(self, *inputs: Any) -> Placement:
        """Return the input's placement; sharded rows or columns of pixels are refused."""
        return placement_if_uncut(self, inputs[0], (1, 2), "looks at neighbouring pixels")


class MaxPool2dFunction(Pool2dFunction):
    """The largest element of each window; the first one of ties gets the gradient."""

    __slots__ = ()

    traits = Traits(
        onnx=WRITTEN,
        channels=Channels.FIRST,
        samples=(
            Sample("max_pool2d", lambda x: max_pool2d(x, 2), ((2, 4, 6, 3),), values="distinct"),
            Sample(
                "max_pool2d overlap",
                lambda x: max_pool2d(x, 3, 2, 1),
                ((2, 5, 4, 2),),
                values="distinct",
            ),
            Sample("max_pool3d", lambda x: max_pool3d(x, 2), ((2, 4, 2, 5, 2),), values="distinct"),
            Sample(
                "max_pool3d overlap",
                lambda x: max_pool3d(x, (2, 3, 2), (1, 2, 1), (1, 1, 0)),
                ((2, 3, 4, 3, 1),),
                values="distinct",
            ),
        ),
    )

    name = "max_pool2d"

    def forward(self, x: Array) -> Array:
        kernels = kernels_of(x)
        y, winner = kernels.max_pool(x, self.over, self.needs[0])
        self.saved = (winner, x.shape, kernels)
        return y

    def backward(self, grad: Array) -> Grads:
        winner, shape, kernels = self.saved
        return (kernels.max_pool_grad(grad, winner, shape, self.over),)


class AvgPool2dFunction(Pool2dFunction):
    """The mean of each window, including the border's zeros."""

    __slots__ = ()

    traits = Traits(
        onnx=WRITTEN,
        channels=Channels.FIRST,
        samples=(
            Sample("avg_pool2d", lambda x: avg_pool2d(x, 2), ((2, 4, 6, 3),), values="distinct"),
            Sample(
                "avg_pool2d overlap",
                lambda x: avg_pool2d(x, 3, 2, 1),
                ((2, 5, 4, 2),),
                values="distinct",
            ),
            Sample("avg_pool3d", lambda x: avg_pool3d(x, 2, 1, 1), ((2, 3, 2, 3, 2),)),
        ),
    )

    name = "avg_pool2d"

    def forward(self, x: Array) -> Array:
        kernels, over = kernels_of(x), self.over
        self.saved = (x.shape, kernels)
        return kernels.avg_pool(x, over, 1 / prod(over.kernel))

    def backward(self, grad: Array) -> Grads:
        (shape, kernels), over = self.saved, self.over
        return (kernels.avg_pool_grad(grad, shape, over, 1 / prod(over.kernel)),)


def _resize(function: Any, y: Any, x: Any) -> Any:
    """Return the node of ONNX's operator that copies each pixel."""
    return x.images(
        "Resize",
        None,
        np.array([1, 1, *function.over.kernel], np.float32),
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )


class Upsample2dFunction(Pool2dFunction):
    """Each pixel as a window of copies."""

    __slots__ = ()

    traits = Traits(
        onnx=_resize,
        channels=Channels.FIRST,
        samples=(Sample("upsample", lambda x: upsample(x, (2, 3)), ((2, 3, 2, 2),)),),
    )

    def forward(self, x: Array) -> Array:
        (n, h, w, c), (rows, columns) = x.shape, self.over.kernel
        kernels = kernels_of(x)
        self.saved = (kernels,)
        shape = n, h * rows, w * columns, c
        return self.xp.ascontiguousarray(kernels.avg_pool_grad(x, shape, self.over, 1))

    def backward(self, grad: Array) -> Grads:
        return (self.saved[0].avg_pool(grad, self.over, 1),)


def window_means(x: Tensor, kernel: RowsAndColumns) -> Tensor:
    """Return the means of windows side by side.

    Args:
        x: images.
        kernel: the size of the windows.
    """
    return AvgPool2dFunction(PoolWindows(kernel, kernel, (0, 0)))(x)


def upsample(x: Tensor, factor: RowsAndColumns) -> Tensor:
    """Return images with each pixel as a window of this size."""
    return Upsample2dFunction(PoolWindows(factor, factor, (0, 0)))(x)


@answered
def max_pool2d(
    x: Tensor,
    kernel_size: PairLike,
    stride: PairLike | None = None,
    padding: PairLike = 0,
) -> Tensor:
    """Return the largest element of each window, (batch, out_height, out_width, channels).

    Args:
        x: images, (batch, height, width, channels).
        kernel_size, stride, padding: one number, or one for rows and one for columns; the stride is
            the kernel_size by default. The border is never the maximum. Rows and columns beyond
            the last window are ignored.

    Raises:
        ShapeError: when x is no batch of images, or the window does not fit.
        UsageError: for a kernel_size or stride below 1, or a padding of more than half of the
            kernel_size.
        DtypeError: for integers.
    """
    return pooled(MaxPool2dFunction, x, pool_windows(kernel_size, stride, padding))


@answered
def avg_pool2d(
    x: Tensor,
    kernel_size: PairLike,
    stride: PairLike | None = None,
    padding: PairLike = 0,
) -> Tensor:
    """Return each window's mean, (batch, out_height, out_width, channels).

    Border pixels count as 0. Same arguments and errors as `max_pool2d`.
    """
    return pooled(AvgPool2dFunction, x, pool_windows(kernel_size, stride, padding))


@answered
def max_pool3d(
    x: Tensor, kernel_size: Triple, stride: Triple | None = None, padding: Triple = 0
) -> Tensor:
    """Return the largest element of each window, (batch, out_d, out_h, out_w, channels).

    Args:
        x: volumes, (batch, depth, height, width, channels).
        kernel_size, stride, padding: one number, or one each for depth, rows and columns; as for
            `max_pool2d`, and so are the errors.
    """
    return pooled3d(MaxPool2dFunction, x, *pool_volumes(kernel_size, stride, padding))


@answered
def avg_pool3d(
    x: Tensor, kernel_size: Triple, stride: Triple | None = None, padding: Triple = 0
) -> Tensor:
    """Return each window's mean, (batch, out_d, out_h, out_w, channels).

    Border elements count as 0. Same arguments and errors as `max_pool3d`.
    """
    return pooled3d(AvgPool2dFunction, x, *pool_volumes(kernel_size, stride, padding))


def pooled3d(
    kind: type[Pool2dFunction], x: Tensor, in_plane: PoolWindows, in_depth: PoolWindows
) -> Tensor:
    """Apply a pooling operation to volumes: within each plane, then over the planes.

    A maximum of maxima is the maximum, and its first place is the first of the window; so is a
    mean of means, since all windows of a plane have one size.

    Args:
        in_plane, in_depth: see `pool_volumes`.
    """
    name = kind.name.replace("2d", "3d")
    require_floating(name, x)
    if x.ndim != 5:
        raise ShapeError(
            f"{name} needs volumes (batch, depth, height, width,"
            f" channels), not an array of shape {x.shape}"
        )
    n, depth, height, width, channels = x.shape
    _check_fit(name, x.shape, ("depth", "height", "width"), _volumes(in_plane, in_depth))
    x = kind(in_plane)(x.reshape(n * depth, height, width, channels))
    rows, columns = x.shape[1:3]
    x = kind(in_depth)(x.reshape(n, depth, rows * columns, channels))
    return x.reshape(n, x.shape[1], rows, columns, channels)


def _volumes(in_plane: PoolWindows, in_depth: PoolWindows) -> Sequence[Shape]:
    """Return kernel, stride and padding of volumes: depth, rows and columns."""
    return [(deep, *flat) for (deep, _), flat in zip(in_depth, in_plane, strict=True)]


def pool_volumes(
    kernel_size: Triple, stride: Triple | None, padding: Triple
) -> tuple[PoolWindows, PoolWindows]:
    """Return the windows in a plane and over the planes, each of which is a row there.

    Raises:
        UsageError: for a kernel_size or stride below 1, or a padding below 0.
    """
    kernel = triple("kernel_size", kernel_size, 1)
    steps = kernel if stride is None else triple("stride", stride, 1)
    border = triple("padding", padding, 0)
    in_plane = pool_windows(kernel[1:], steps[1:], border[1:])
    return in_plane, pool_windows((kernel[0], 1), (steps[0], 1), (border[0], 0))


def pooled(kind: type[Pool2dFunction], x: Tensor, over: PoolWindows) -> Tensor:
    """Apply a pooling operation to images of floating point. Same errors as `max_pool2d`."""
    name = kind.name
    require_floating(name, x)
    if x.ndim != 4:
        raise ShapeError(
            f"{name} needs images (batch, height, width, channels), not an array of shape {x.shape}"
        )
    _check_fit(name, x.shape, ("height", "width"), over)
    return kind(over)(x)


def _check_fit(name: str, shape: Shape, axes: Sequence[str], over: Sequence[Shape]) -> None:
    """Refuse windows that do not fit images or volumes.

    Args:
        name: of the operation.
        shape: of its input.
        axes: names of the axes behind the first.
        over: kernel, stride and padding, along these axes each.
    """
    sizes, steps, border = over
    for axis, what in enumerate(axes):
        if 2 * border[axis] > sizes[axis]:
            raise UsageError(
                f"{name}'s padding {border} is more than half of its kernel_size {sizes}; give less"
            )
        if out_size(shape[axis + 1], sizes[axis], steps[axis], border[axis]) < 1:
            items = "images" if len(axes) == 2 else "volumes"
            raise ShapeError(
                f"{name}'s window of {sizes} does not fit the {what} of {items} {shape}"
            )


def pool_windows(kernel_size: PairLike, stride: PairLike | None, padding: PairLike) -> PoolWindows:
    """Return the geometry of windows from a layer's arguments.

    Raises:
        UsageError: for a kernel_size or stride below 1, or a padding below 0.
    """
    sizes = pair("kernel_size", kernel_size, 1)
    return PoolWindows(
        sizes, sizes if stride is None else pair("stride", stride, 1), pair("padding", padding, 0)
    )
