"""Pooling of channels-last images: the largest element, or the mean, of each window.

Max-pooling copies a few images' windows at a time into planes, one per place in the window, and then computes on long
runs of memory (see `planes`). The mean adds the places up where they lie, each seen in all windows at once as a strided
view ("tap"). Windows may overlap. Device arrays are pooled by kernels (see `device_pool`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.kernels.active import kernels_for
from nnmpi.backend.windows import Pair, bordered, out_size, tap, windows
from nnmpi.errors import ShapeError, UsageError
from nnmpi.ops.conv import pair
from nnmpi.ops.device_conv import device_kernels
from nnmpi.ops.device_pool import DeviceAvgPool, DeviceMaxPool
from nnmpi.ops.planes import Planes
from nnmpi.tensor.convert import widely
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import real
from nnmpi.tensor.tensor import Tensor

if TYPE_CHECKING:
    from nnmpi.backend.kernels.table import Kernels

PLANES_BYTES = 1 << 19  # of one block of planes: half of a usual second-level cache


class _Pool(Function):
    """What both kinds share: the windows' geometry."""

    __slots__ = ("kernel", "padding", "stride")

    replayable = True

    def __init__(self, kernel: Pair, stride: Pair, padding: Pair) -> None:
        self.kernel, self.stride, self.padding = kernel, stride, padding

    def _places(self, x: Array) -> Array:
        """Return bordered images as a view (kernel_h, kernel_w, n, out_h, out_w, c)."""
        return windows(x, self.kernel, self.stride).transpose(3, 4, 0, 1, 2, 5)

    def _taps(self, x: Array, out: Pair) -> Iterator[Array]:
        """Yield, per place in the window, the view of bordered images that it sees."""
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                yield tap(x, (i, j), out, self.stride)

    def _apart(self) -> bool:
        """Return whether no windows overlap."""
        return self.kernel[0] <= self.stride[0] and self.kernel[1] <= self.stride[1]

    def _out(self, x: Array) -> Pair:
        """Return the output's height and width for bordered images; 0 where there are too few pixels."""
        return (
            max(0, out_size(x.shape[1], self.kernel[0], self.stride[0], 0)),
            max(0, out_size(x.shape[2], self.kernel[1], self.stride[1], 0)),
        )

    def _inside(self, x: Array) -> Array:
        (top, left), (h, w) = self.padding, x.shape[1:3]
        return x[:, top : h - top, left : w - left]


class MaxPool2d(_Pool):
    """The largest element of each window; the first of equal ones gets the gradient."""

    __slots__ = ()

    def forward(self, x: Array) -> Array:
        xp = self.xp
        x = bordered(x, self.padding, -float("inf"), xp)
        y: Array = xp.empty((len(x), *self._out(x), x.shape[3]), x.dtype)
        pooling = Planes(xp, prod(self.kernel), self._count(y) * y[:1].size)
        winner = xp.empty(y.shape, pooling.dtype) if self.needs[0] else None
        if y.size:
            seen = self._places(x)
            for images, planes in self._blocks(y):
                xp.copyto(planes, seen[:, :, images])
                won = None if winner is None else _flat(winner[images])
                pooling.largest(_stacked(planes), _flat(y[images]), won)
        self.saved = (winner, x.shape)
        return y

    def _count(self, y: Array) -> int:
        """Return how many images of a result, or of its gradient, make a block."""
        each = y[:1].size * prod(self.kernel) * y.dtype.itemsize
        return max(1, min(len(y), PLANES_BYTES // max(1, each)))

    def _blocks(self, y: Array) -> Iterator[tuple[slice, Array]]:
        """Yield a few images at a time, with memory for their planes (kernel_h, kernel_w, count, out_h, out_w, c)."""
        n, count = len(y), self._count(y)
        memory = self.xp.empty((count * y[:1].size * prod(self.kernel),), y.dtype)
        for start in range(0, n, count):
            images = slice(start, min(start + count, n))
            shape = (*self.kernel, *y[images].shape)
            yield images, memory[: prod(shape)].reshape(shape)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        winner, shape = self.saved
        xp = self.xp
        grad = xp.reshape(grad, (grad.size,)).reshape(grad.shape)  # without gaps
        result = xp.zeros(shape, grad.dtype)
        pooling = Planes(xp, prod(self.kernel), self._count(grad) * grad[:1].size)
        if grad.size:
            seen = self._places(result)
            for images, planes in self._blocks(grad):
                pooling.spread(_flat(grad[images]), _flat(winner[images]), _stacked(planes))
                if self._apart():
                    xp.copyto(seen[:, :, images], planes)
                else:
                    for place in np.ndindex(*self.kernel):  # one after another, as windows share pixels
                        xp.add(seen[place][images], planes[place], out=seen[place][images])
        return (self._inside(result),)


def _flat(images: Array) -> Array:
    """Return images without gaps as a view in one axis."""
    return images.reshape(images.size)


def _stacked(planes: Array) -> Array:
    """Return planes (kernel_h, kernel_w, ...) as a view (kernel_h kernel_w, elements)."""
    places = planes.shape[0] * planes.shape[1]
    return planes.reshape(places, planes.size // places)


class _CompiledMaxPool2d(Function):
    """The largest of 2 x 2 pixels side by side, by compiled kernels: one pass over the images, and one back."""

    __slots__ = ("kernels",)

    replayable = True

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def forward(self, x: Array) -> Array:
        xp, (n, h, w, c) = self.xp, x.shape
        y: Array = xp.empty((n, h // 2, w // 2, c), x.dtype)
        corner = xp.empty(y.shape, np.uint8)
        self.invoke(self.kernels.max_pool2, xp.ascontiguousarray(x), y, corner)
        self.saved = (corner, x.shape)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        corner, shape = self.saved
        to_x = self.xp.empty(shape, grad.dtype)
        self.invoke(self.kernels.max_pool2_grad, self.xp.ascontiguousarray(grad), corner, to_x)
        return (to_x,)


class AvgPool2d(_Pool):
    """The mean of each window, the border's zeros included."""

    __slots__ = ()

    def forward(self, x: Array) -> Array:
        xp = self.xp
        x = bordered(x, self.padding, 0.0, xp)
        out = self._out(x)
        y: Array = xp.empty((len(x), *out, x.shape[3]), x.dtype)
        for number, values in enumerate(self._taps(x, out)):
            if number:
                xp.add(y, values, out=y)
            else:
                xp.copyto(y, values)
        self.saved = (x.shape,)
        return xp.multiply(y, 1 / prod(self.kernel), out=y)  # type: ignore[no-any-return]

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (shape,) = self.saved
        xp = self.xp
        result = xp.zeros(shape, grad.dtype)
        share = xp.multiply(grad, 1 / prod(self.kernel))
        for place in self._taps(result, (grad.shape[1], grad.shape[2])):
            if self._apart():
                xp.copyto(place, share)
            else:
                xp.add(place, share, out=place)
        return (self._inside(result),)


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
    return largest(x, *_geometry("max_pool2d", x, kernel, stride, padding))


def largest(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Return the largest element of each window of images; there may be no window."""
    real("max_pool2d", x)
    compiled = kernels_for(x.data)
    if compiled is not None and (kernel, stride, padding) == ((2, 2), (2, 2), (0, 0)):
        return _CompiledMaxPool2d(compiled)(x)
    kernels = device_kernels(x)
    if kernels is not None:
        return DeviceMaxPool(kernels, kernel, stride, padding)(x)
    return widely(MaxPool2d(kernel, stride, padding), x)


def avg_pool2d(x: Tensor, kernel: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0) -> Tensor:
    """Return the mean of each window, (batch, out_height, out_width, channels); the border counts as zeros.

    Arguments and errors are those of `max_pool2d`.
    """
    return average(x, *_geometry("avg_pool2d", x, kernel, stride, padding))


def average(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Return the mean of each window of images; there may be no window."""
    real("avg_pool2d", x)
    kernels = device_kernels(x)
    if kernels is not None:
        return DeviceAvgPool(kernels, kernel, stride, padding)(x)
    return widely(AvgPool2d(kernel, stride, padding), x)


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
