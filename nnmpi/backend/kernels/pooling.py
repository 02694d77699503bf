"""Pooling of channels-last images: the largest element, or the mean, of each window. Windows may overlap.

    x (n, h, w, c)  --border-->  places (kernel_h, kernel_w, n, out_h, out_w, c)  -->  y (n, out_h, out_w, c)

Max-pooling copies a few images' windows at a time into planes, one per place in the window, and then computes on long
runs of memory (see `planes`). The mean adds the places up where they lie, each seen in all windows at once as a strided
view ("tap").
"""

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array, Residuals
from nnmpi.backend.kernels.planes import Planes
from nnmpi.backend.windows import Pair, bordered, out_size, tap, windows

PLANES_BYTES = 1 << 19  # of one block of planes: half of a usual second-level cache


class PoolWindows(NamedTuple):
    """How windows go over images; each is rows and columns of pixels."""

    kernel: Pair
    stride: Pair
    padding: Pair

    def out(self, h: int, w: int) -> Pair:
        """Return the rows and columns of the result for images of h x w; 0 where there are too few pixels."""
        return (
            max(0, out_size(h, self.kernel[0], self.stride[0], self.padding[0])),
            max(0, out_size(w, self.kernel[1], self.stride[1], self.padding[1])),
        )

    @property
    def overlap(self) -> bool:
        """Whether windows share pixels."""
        return self.kernel[0] > self.stride[0] or self.kernel[1] > self.stride[1]

    def places(self, x: Array) -> Array:
        """Return images with their border as a view (kernel_h, kernel_w, n, out_h, out_w, c)."""
        return windows(x, self.kernel, self.stride).transpose(3, 4, 0, 1, 2, 5)

    def taps(self, x: Array, out: Pair) -> Iterator[Array]:
        """Yield, per place in the window, the view (n, out_h, out_w, c) of images with their border that it sees."""
        for place in np.ndindex(*self.kernel):
            yield tap(x, place, out, self.stride)

    def inside(self, x: Array) -> Array:
        """Return a view of images without their border."""
        (top, left), (h, w) = self.padding, x.shape[1:3]
        return x[:, top : h - top, left : w - left]


class PoolingKernels:
    """Pooling by the array library's functions."""

    __slots__ = ()

    def max_pool(self, xp: Any, x: Array, over: PoolWindows, keep: bool) -> tuple[Array, Residuals]:
        """Return the largest of each window, (n, out_h, out_w, c), and what the gradient needs.

        The border counts for nothing. A window with a NaN gives NaN.

        Args:
            xp: the array's module, or a recorder's stand-in for it.
            x: (n, h, w, c), any strides.
            over: the windows.
            keep: whether `max_pool_grad` will be called.
        """
        rows, columns = over.out(*x.shape[1:3])
        x = bordered(x, over.padding, -float("inf"), xp)
        y: Array = xp.empty((len(x), rows, columns, x.shape[3]), x.dtype)
        planes = Planes(xp, prod(over.kernel), _count(y, over) * y[:1].size)
        winner = xp.empty(y.shape, planes.dtype) if keep else None
        if y.size:
            seen = over.places(x)
            for images, block in _blocks(xp, y, over):
                xp.copyto(block, seen[:, :, images])
                won = None if winner is None else _flat(winner[images])
                planes.largest(_stacked(block), _flat(y[images]), won)
        return y, (winner, x.shape)

    def max_pool_grad(self, xp: Any, grad: Array, residuals: Residuals, over: PoolWindows) -> Array:
        """Return the gradient of x, (n, h, w, c): each window's goes to the first of its largest elements.

        Args:
            xp: as for `max_pool`.
            grad: of the result, (n, out_h, out_w, c), any strides.
            residuals: what `max_pool` returned.
            over: the windows.
        """
        winner, shape = residuals
        grad = xp.reshape(grad, (grad.size,)).reshape(grad.shape)  # without gaps
        result: Array = xp.zeros(shape, grad.dtype)
        planes = Planes(xp, prod(over.kernel), _count(grad, over) * grad[:1].size)
        if grad.size:
            seen = over.places(result)
            for images, block in _blocks(xp, grad, over):
                planes.gradient(_flat(grad[images]), _flat(winner[images]), _stacked(block))
                if not over.overlap:
                    xp.copyto(seen[:, :, images], block)
                else:
                    for place in np.ndindex(*over.kernel):  # one after another, as windows share pixels
                        xp.add(seen[place][images], block[place], out=seen[place][images])
        return over.inside(result)

    def avg_pool(self, xp: Any, x: Array, over: PoolWindows) -> Array:
        """Return the mean of each window, (n, out_h, out_w, c), the border's zeros included.

        Args:
            xp: the array's module, or a recorder's stand-in for it.
            x: (n, h, w, c), any strides.
            over: the windows.
        """
        out = over.out(*x.shape[1:3])
        x = bordered(x, over.padding, 0.0, xp)
        y: Array = xp.empty((len(x), *out, x.shape[3]), x.dtype)
        for number, values in enumerate(over.taps(x, out)):
            if number:
                xp.add(y, values, out=y)
            else:
                xp.copyto(y, values)
        xp.multiply(y, 1 / prod(over.kernel), out=y)
        return y

    def avg_pool_grad(self, xp: Any, grad: Array, shape: tuple[int, ...], over: PoolWindows) -> Array:
        """Return the gradient of x: each window's, spread evenly over its pixels.

        Args:
            xp: as for `avg_pool`.
            grad: of the result, (n, out_h, out_w, c), any strides.
            shape: of x, (n, h, w, c).
            over: the windows.
        """
        (n, h, w, c), (top, left) = shape, over.padding
        result: Array = xp.zeros((n, h + 2 * top, w + 2 * left, c), grad.dtype)
        share = xp.multiply(grad, 1 / prod(over.kernel))
        for place in over.taps(result, (grad.shape[1], grad.shape[2])):
            if over.overlap:
                xp.add(place, share, out=place)
            else:
                xp.copyto(place, share)
        return over.inside(result)


def _count(y: Array, over: PoolWindows) -> int:
    """Return how many images of a result, or of its gradient, make a block."""
    each = y[:1].size * prod(over.kernel) * y.dtype.itemsize
    return max(1, min(len(y), PLANES_BYTES // max(1, each)))


def _blocks(xp: Any, y: Array, over: PoolWindows) -> Iterator[tuple[slice, Array]]:
    """Yield a few images at a time, with memory for their planes (kernel_h, kernel_w, count, out_h, out_w, c)."""
    n, count = len(y), _count(y, over)
    memory = xp.empty((count * y[:1].size * prod(over.kernel),), y.dtype)
    for start in range(0, n, count):
        images = slice(start, min(start + count, n))
        shape = (*over.kernel, *y[images].shape)
        yield images, memory[: prod(shape)].reshape(shape)


def _flat(images: Array) -> Array:
    """Return images without gaps as a view in one axis."""
    return images.reshape(images.size)


def _stacked(planes: Array) -> Array:
    """Return planes (kernel_h, kernel_w, ...) as a view (kernel_h kernel_w, elements)."""
    places = planes.shape[0] * planes.shape[1]
    return planes.reshape(places, planes.size // places)
