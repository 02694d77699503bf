"""Pooling of channels-last images: the largest element, or the mean, of each window.

The kernel's elements are taken one after another, each seen in all windows at once as a strided view ("tap"):
no windows are copied, and windows may overlap.
"""

from __future__ import annotations

from collections.abc import Iterator

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.windows import Pair, bordered, out_size, tap
from nnmpi.errors import ShapeError, UsageError
from nnmpi.ops.conv import pair
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import real
from nnmpi.tensor.tensor import Tensor


class _Pool(Function):
    """What both kinds share: the windows' geometry."""

    __slots__ = ("kernel", "padding", "stride")

    def __init__(self, kernel: Pair, stride: Pair, padding: Pair) -> None:
        self.kernel, self.stride, self.padding = kernel, stride, padding

    def _taps(self, x: Array, out: Pair) -> Iterator[Array]:
        """Yield, per kernel element, the view of bordered images that it sees."""
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                yield tap(x, (i, j), out, self.stride)

    def _out(self, x: Array) -> Pair:
        """Return the output's height and width for bordered images."""
        return (
            out_size(x.shape[1], self.kernel[0], self.stride[0], 0),
            out_size(x.shape[2], self.kernel[1], self.stride[1], 0),
        )

    def _inside(self, x: Array) -> Array:
        (top, left), (h, w) = self.padding, x.shape[1:3]
        return x[:, top : h - top, left : w - left]


class MaxPool2d(_Pool):
    """The largest element of each window; the first of equal ones gets the gradient."""

    def forward(self, x: Array) -> Array:
        xp = namespace(x)
        x = bordered(x, self.padding, -float("inf"))
        out = self._out(x)
        taps = self._taps(x, out)
        y: Array = next(taps).copy()
        winner = xp.zeros(y.shape, dtype=xp.uint16) if self.needs[0] else None
        for number, values in enumerate(taps, start=1):
            if winner is not None:
                xp.copyto(winner, xp.uint16(number), where=values > y)
            xp.maximum(y, values, out=y)
        self.saved = (winner, x.shape)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        winner, shape = self.saved
        spread = namespace(grad).zeros(shape, dtype=grad.dtype)
        for number, place in enumerate(self._taps(spread, (grad.shape[1], grad.shape[2]))):
            place += grad * (winner == number)
        return (self._inside(spread),)


class AvgPool2d(_Pool):
    """The mean of each window, the border's zeros included."""

    def forward(self, x: Array) -> Array:
        x = bordered(x, self.padding)
        taps = self._taps(x, self._out(x))
        y: Array = next(taps).copy()
        for values in taps:
            y += values
        y *= 1 / (self.kernel[0] * self.kernel[1])
        self.saved = (x.shape,)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (shape,) = self.saved
        spread = namespace(grad).zeros(shape, dtype=grad.dtype)
        share = grad * (1 / (self.kernel[0] * self.kernel[1]))
        for place in self._taps(spread, (grad.shape[1], grad.shape[2])):
            place += share
        return (self._inside(spread),)


def max_pool2d(x: Tensor, kernel: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0) -> Tensor:
    """Return the largest element of each window, (batch, out_height, out_width, channels).

    Args:
        x: images, (batch, height, width, channels).
        kernel, stride, padding: one number, or one for rows and one for columns; the stride is by default the kernel.
            The border counts for nothing. Rows and columns that no window covers are left out.

    Raises:
        ShapeError: when x is no batch of images, or the window does not fit.
        UsageError: for a kernel or stride below 1, or a padding of more than half of the kernel.
    """
    return MaxPool2d(*_geometry("max_pool2d", x, kernel, stride, padding))(real("max_pool2d", x))


def avg_pool2d(x: Tensor, kernel: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0) -> Tensor:
    """Return the mean of each window, (batch, out_height, out_width, channels); the border counts as zeros.

    Arguments and errors are those of `max_pool2d`.
    """
    return AvgPool2d(*_geometry("avg_pool2d", x, kernel, stride, padding))(real("avg_pool2d", x))


def _geometry(
    name: str, x: Tensor, kernel: int | Pair, stride: int | Pair | None, padding: int | Pair
) -> tuple[Pair, Pair, Pair]:
    sizes = pair("kernel", kernel, 1)
    steps = sizes if stride is None else pair("stride", stride, 1)
    border = pair("padding", padding, 0)
    if x.ndim != 4:
        raise ShapeError(f"{name} needs images (batch, height, width, channels), not an array of shape {x.shape}")
    for axis, what in ((0, "height"), (1, "width")):
        if 2 * border[axis] > sizes[axis]:
            raise UsageError(f"{name}'s padding {border} is more than half of its kernel {sizes}")
        if out_size(x.shape[axis + 1], sizes[axis], steps[axis], border[axis]) < 1:
            raise ShapeError(f"{name}'s window of {sizes} does not fit the {what} of images {x.shape}")
    return sizes, steps, border
