"""Pooling of channels-last images: the largest element, or the mean, of each window.

The operations check shapes and keep what backward needs; kernels compute (see `backend.kernels.pooling`).
"""

from typing import Any

from nnmpi.backend.array import Array
from nnmpi.backend.kernels.base import Kernels
from nnmpi.backend.kernels.lookup import kernels_for
from nnmpi.backend.kernels.pooling import PoolWindows
from nnmpi.backend.windows import Pair, out_size, pair
from nnmpi.errors import ShapeError, UsageError
from nnmpi.tensor.convert import with_kernels
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import require_floating
from nnmpi.tensor.placement import Placement, uncut
from nnmpi.tensor.tensor import Tensor


class Pool2dFunction(Function):
    """One number for each window over rows and columns, of each image and channel alone."""

    __slots__ = ("kernels", "over")

    def __init__(self, kernels: Kernels, over: PoolWindows) -> None:
        self.kernels, self.over = kernels, over

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on the ranks: as before, where each rank has whole images of its channels."""
        return uncut(self, inputs[0], (1, 2), "looks at neighbouring pixels")


class MaxPool2dFunction(Pool2dFunction):
    """The largest element of each window; the first of equal ones gets the gradient."""

    __slots__ = ()

    replayable = True

    def forward(self, x: Array) -> Array:
        y, self.saved = self.kernels.max_pool(self.xp, x, self.over, self.needs[0])  # (n, out_h, out_w, c)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self.kernels.max_pool_grad(self.xp, grad, self.saved, self.over),)


class AvgPool2dFunction(Pool2dFunction):
    """The mean of each window, the border's zeros included."""

    __slots__ = ()

    replayable = True

    def forward(self, x: Array) -> Array:
        self.saved = x.shape
        return self.kernels.avg_pool(self.xp, x, self.over)  # (n, out_h, out_w, c)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self.kernels.avg_pool_grad(self.xp, grad, self.saved, self.over),)


def max_pool2d(x: Tensor, kernel_size: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0) -> Tensor:
    """Return the largest element of each window, (batch, out_height, out_width, channels).

    Args:
        x: images, (batch, height, width, channels).
        kernel_size, stride, padding: one number, or one for rows and one for columns; the stride is the kernel_size by
            default.
            The border counts for nothing. Rows and columns that no window covers are left out.

    Raises:
        ShapeError: when x is no batch of images, or the window does not fit.
        UsageError: for a kernel_size or stride below 1, or a padding of more than half of the kernel_size.
        DtypeError: for integers.
    """
    return pooled(MaxPool2dFunction, x, _checked("max_pool2d", x, kernel_size, stride, padding))


def avg_pool2d(x: Tensor, kernel_size: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0) -> Tensor:
    """Return the mean of each window, (batch, out_height, out_width, channels); the border counts as zeros.

    Arguments and errors are those of `max_pool2d`.
    """
    return pooled(AvgPool2dFunction, x, _checked("avg_pool2d", x, kernel_size, stride, padding))


def pooled(function: type[Pool2dFunction], x: Tensor, over: PoolWindows) -> Tensor:
    """Return what an operation makes of each window of images of floats; there may be none."""
    kernels = kernels_for(x.data)
    return with_kernels(kernels, function(kernels, over), x)


def _checked(
    name: str, x: Tensor, kernel_size: int | Pair, stride: int | Pair | None, padding: int | Pair
) -> PoolWindows:
    require_floating(name, x)
    over = pool_windows(kernel_size, stride, padding)
    sizes, steps, border = over
    if x.ndim != 4:
        raise ShapeError(f"{name} needs images (batch, height, width, channels), not an array of shape {x.shape}")
    for axis, what in ((0, "height"), (1, "width")):
        if 2 * border[axis] > sizes[axis]:
            raise UsageError(f"{name}'s padding {border} is more than half of its kernel_size {sizes}")
        if out_size(x.shape[axis + 1], sizes[axis], steps[axis], border[axis]) < 1:
            raise ShapeError(f"{name}'s window of {sizes} does not fit the {what} of images {x.shape}")
    return over


def pool_windows(kernel_size: int | Pair, stride: int | Pair | None, padding: int | Pair) -> PoolWindows:
    """Return how windows go over images, of what a user gives.

    Raises:
        UsageError: for a kernel_size or stride below 1, or a padding below 0.
    """
    sizes = pair("kernel_size", kernel_size, 1)
    return PoolWindows(sizes, sizes if stride is None else pair("stride", stride, 1), pair("padding", padding, 0))
