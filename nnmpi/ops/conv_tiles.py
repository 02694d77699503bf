"""Convolution of 3x3 kernels by Winograd's tiles, alone, with ReLU, or with ReLU and 2x2 max-pooling.

A tile of the result is 2x2 pixels, and so is a window of the pooling: the four places in a tile are the planes of which
the pooling takes the largest, and the convolution's result is never put together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.windows import corners
from nnmpi.ops.columns import Frame, repeated
from nnmpi.ops.conv_grad import ProductSum
from nnmpi.ops.tiles import TILES_BYTES, Tiles, image_bytes, kernel_places, weight_gradient
from nnmpi.tensor.function import Function
from nnmpi.tensor.tensor import Tensor

FEW_CHANNELS = 16  # below, the transforms cost more than the products that they save
LARGE_BYTES = 1 << 23  # of one image's transforms: above, they would come from memory and not from a cache


def fits(x: Tensor, weight: Tensor, frame: Frame, groups: int) -> bool:
    """Return whether the classes below compute this convolution, and faster than im2col; for NumPy's arrays only."""
    if frame[:4] != ((3, 3), (1, 1), (1, 1), (1, 1)) or groups != 1:
        return False
    (n, h, w, c), o = x.shape, weight.shape[3]
    if h % 2 or w % 2 or min(c, o) < FEW_CHANNELS or type(x.data) is not np.ndarray or x.dtype.kind != "f":
        return False
    return n > 0 and image_bytes(h, w, c, o, x.dtype.itemsize) <= LARGE_BYTES


def _blocks(xp: Any, x: Array, o: int) -> Iterator[tuple[slice, Tiles]]:
    """Yield a few images at a time, with the memory for their tiles."""
    n, h, w, c = x.shape
    count = max(1, min(n, TILES_BYTES // image_bytes(h, w, c, o, x.dtype.itemsize)))
    tiles = Tiles(xp, (count, h, w, c), o, x.dtype)
    for start in range(0, n, count):
        stop = min(start + count, n)
        if stop - start < count:
            tiles = Tiles(xp, (stop - start, h, w, c), o, x.dtype)
        yield slice(start, stop), tiles


class TiledConv(Function):
    """The convolution of images (n, h, w, c), h and w even, with kernels (3, 3, c, o) and a padding of 1."""

    __slots__ = ()

    replayable = True

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        xp, (n, h, w, _), o = self.xp, x.shape, weight.shape[3]
        y, kept = self._results(n, h, w, o, x.dtype)
        kernel = kernel_places(xp, weight)
        added: Array | None = None
        for images, tiles in _blocks(xp, x, o):
            tiles.load(x[images])
            tiles.multiply(kernel)
            if bias is not None and added is None:
                added = repeated(xp, bias, tiles.results.size // o)
            self._close(tiles, added, y[images], None if kept is None else _of(kept, images))
        self.saved = (x, weight, kept)
        return y

    def _results(self, n: int, h: int, w: int, o: int, dtype: Any) -> tuple[Array, Array | None]:
        """Return memory for the result, and for what the subclass keeps for backward, (n, bytes per image)."""
        return self.xp.empty((n, h, w, o), dtype), None

    def _close(self, tiles: Tiles, bias: Array | None, y: Array, kept: Array | None) -> None:
        """Make some images of the result from `tiles.results`.

        Args:
            tiles: the block's.
            bias: the bias once per pixel, (pixels * o,), for at least as many; or None.
            y: (count, h, w, o), or half as high and wide if there is a pooling.
            kept: the images' part of what is kept, in one axis.
        """
        if bias is not None:
            flat = tiles.results.reshape(tiles.results.size)
            self.xp.add(flat, bias[: len(flat)], out=flat)
        self.xp.copyto(_in_places(y), tiles.results)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        x, weight, kept = self.saved
        xp, o = self.xp, weight.shape[3]
        kernel = self._transposed(weight) if self.needs[0] else None
        to_x = xp.empty(x.shape, x.dtype) if self.needs[0] else None
        to_kernel = ProductSum(xp, xp.empty((16, *weight.shape[2:]), weight.dtype))
        to_bias = ProductSum(xp, self._place(2, (o,), weight.dtype)) if self.needs[2] else None
        ones: Array | None = None
        for images, tiles in _blocks(xp, x, o):
            self._open(tiles, grad[images], None if kept is None else _of(kept, images))
            sums = tiles.spread()
            if to_bias is not None:
                ones = xp.ones(len(sums), sums.dtype) if ones is None else ones
                to_bias.add(ones[: len(sums)], sums)
            if self.needs[1]:
                tiles.load(x[images])
                to_kernel.add(*tiles.kernel_gradient())
            if to_x is not None and kernel is not None:
                tiles.input_gradient(kernel, to_x[images])
        to_weight = weight_gradient(xp, to_kernel.finish(), self.into(1)) if self.needs[1] else None
        return to_x, to_weight, None if to_bias is None else to_bias.finish()

    def _open(self, tiles: Tiles, grad: Array, kept: Array | None) -> None:
        """Put the gradient of some images of the result into `tiles.results`; the arguments are `_close`'s."""
        self.xp.copyto(tiles.results, _in_places(grad))

    def _transposed(self, weight: Array) -> Array:
        """Return the kernel's places as (16, o, c)."""
        places = kernel_places(self.xp, weight).swapaxes(1, 2)
        result: Array = self.xp.empty(places.shape, places.dtype)
        self.xp.copyto(result, places)
        return result

    def _place(self, i: int, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return where the gradient of input i goes."""
        place = self.into(i)
        return self.xp.empty(shape, dtype) if place is None else place


class TiledConvRelu(TiledConv):
    """The same with a ReLU; where it passed is kept."""

    __slots__ = ()

    def _results(self, n: int, h: int, w: int, o: int, dtype: Any) -> tuple[Array, Array | None]:
        passed = self.xp.empty((n, h * w * o), bool) if True in self.needs else None
        return self.xp.empty((n, h, w, o), dtype), passed

    def _close(self, tiles: Tiles, bias: Array | None, y: Array, kept: Array | None) -> None:
        flat = tiles.results.reshape(tiles.results.size)
        if bias is not None:
            self.xp.add(flat, bias[: len(flat)], out=flat)
        self.xp.maximum(flat, 0, out=flat)
        if kept is not None:
            self.xp.greater(flat, 0, out=kept)
        self.xp.copyto(_in_places(y), tiles.results)

    def _open(self, tiles: Tiles, grad: Array, kept: Array | None) -> None:
        assert kept is not None  # forward made it, as something needed a gradient
        self.xp.copyto(tiles.results, kept.reshape(tiles.results.shape))
        self.xp.multiply(tiles.results, _in_places(grad), out=tiles.results)


class TiledConvReluPool(TiledConv):
    """The same with a ReLU and a 2x2 max-pooling; the winners are kept (see `planes`)."""

    __slots__ = ()

    def _results(self, n: int, h: int, w: int, o: int, dtype: Any) -> tuple[Array, Array | None]:
        winner = self.xp.empty((n, h * w * o // 4), np.uint8) if True in self.needs else None
        return self.xp.empty((n, h // 2, w // 2, o), dtype), winner

    def _close(self, tiles: Tiles, bias: Array | None, y: Array, kept: Array | None) -> None:
        places = tiles.results.reshape(4, tiles.results.size // 4)
        tiles.pooling.largest(places, tiles.pooled.reshape(tiles.pooled.size), kept)
        tiles.pooling.cut(bias, tiles.pooled.reshape(tiles.pooled.size), kept)
        self.xp.copyto(y.transpose(1, 2, 0, 3), tiles.pooled)

    def _open(self, tiles: Tiles, grad: Array, kept: Array | None) -> None:
        assert kept is not None  # forward made it, as something needed a gradient
        self.xp.copyto(tiles.pooled, grad.transpose(1, 2, 0, 3))
        places = tiles.results.reshape(4, tiles.results.size // 4)
        tiles.pooling.spread(tiles.pooled.reshape(tiles.pooled.size), kept, places)


def _in_places(images: Array) -> Array:
    """Return images (count, h, w, o) as a view (2, 2, h / 2, w / 2, count, o)."""
    return corners(images, (2, 2)).transpose(0, 1, 3, 4, 2, 5)


def _of(kept: Array, images: slice) -> Array:
    """Return the part of (n, bytes per image) that belongs to some images, in one axis: their order is the tiles'."""
    part = kept[images]
    return part.reshape(part.size)
