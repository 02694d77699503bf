"""Winograd's convolution by NumPy: F(2x2, 3x3) takes 1 / 2.25, F(4x4, 3x3) 1 / 4 of the products.

    images (n, h, w, c)                          kernels (3, 3, c, o)
       |  4 x 4 or 6 x 6 pixels per tile             |
       v  B^T d B                                    v  G g G^T
    places (16 or 36, tiles, c)         @        places (.., c, o)      =      (.., tiles, o)
                                                                                   |  A^T m A
                                                                                   v
                                            2 x 2 or 4 x 4 results per tile, (n, h, w, o)

After Lavin and Gray, "Fast algorithms for convolutional neural networks" (2016). With the matrices
of `transforms`, for tiles of 2 x 2

         |1  0 -1  0|          |1    0   0|          |1  1  1  0|
    B^T =|0  1  1  0|     G =  |.5  .5  .5|    A^T = |0  1 -1  1|
         |0 -1  1  0|          |.5 -.5  .5|
         |0 -1  0  1|          |0    0   1|

a tile of the result is A^T [ (G g G^T) * (B^T d B) ] A, d being the pixels that it sees (tiles
overlap by two) and the product being that of channels, a GEMM for each of the places. Backward is
the adjoint, step by step; the result's gradient dy becomes A dy A^T, and so on.

The transforms are products of these small matrices with large ones that have a row per pixel or
place: BLAS reads memory once, additions would read it several times. A block's memory has images
next to channels, (..., images, channels), so that these rows are long.

A tile of 2 x 2 pixels is also a window of the pooling. Its four places are the planes that the
pooling compares (see `planes`), and the convolution's result is never assembled.

Tiles of 4 x 4 have half as many places per pixel, and round five times as coarsely. A result whose
pixels are all zeros is 0 with tiles of 2 x 2, but a rounding error with tiles of 4 x 4, which a
ReLU may pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array, Shape, ones
from nnmpi.backend.windows import corners
from nnmpi.ops.conv.algorithm import NO_POOL, Algorithm, ConvSpec, Gradients, flattened
from nnmpi.ops.conv.im2col import ProductSum
from nnmpi.ops.planes import Planes, rectify, repeated

# Bytes of a block of images: about a usual second-level cache. With larger transformed kernels a
# block has their size.
TILES_BYTES = 5 << 18
# The interpolation points besides infinity; the first three for tiles of 2 x 2. With 2 and -2
# instead of the last two, results are off by twice as much.
POINTS = (0.0, 1.0, -1.0, 0.5, -2.0)


class Transforms(NamedTuple):
    """The matrices for one size of tiles, (side + 2) places each way.

    Attributes:
        side: pixels of a tile's result, each way.
        b: B^T, (places, pixels). A patch's first pixel affects the first place alone, and its last
            pixel the last place alone.
        g: G for both ways, (places places, 9).
        a: A^T, (results, places).
    """

    side: int
    b: Array
    g: Array
    a: Array


@cache
def transforms(side: int) -> Transforms:
    """Return the Toom-Cook matrices for tiles of 2 x 2 or 4 x 4 results."""
    points = POINTS[: side + 1]
    b, g = np.zeros((side + 2, side + 2)), np.zeros((side + 2, 3))
    for i, point in enumerate(points):
        others = [item for item in points if item != point]
        b[i, :-1] = np.poly(others)[::-1]
        g[i] = point ** np.arange(3) / np.prod(np.subtract(point, others))
    b[-1], g[-1, 2] = np.poly(points)[::-1], 1
    g[0], b[0] = g[0] * b[0, 0], b[0] / b[0, 0]
    a = np.vander([*points, 0], side, increasing=True).T
    a[:, -1] = np.arange(side) == side - 1  # the value at infinity
    return Transforms(side, b, np.kron(g, g), a)


class WinogradNumpy(Algorithm):
    """A tiled convolution of images (n, h, w, c) with kernels (3, 3, c, o) and padding 1.

    Alone, with ReLU, or with ReLU and a max-pooling over 2 x 2 pixels. Saved per image, in the
    order of the tiles: with ReLU the elements that it passed (bool), with pooling the winners
    (uint8).

    Args:
        spec: the convolution.
        side: of a tile: 2 or 4 pixels; 2 with pooling.
    """

    def __init__(self, spec: ConvSpec, side: int) -> None:
        super().__init__(spec)
        self._transforms = transforms(side)

    def forward(
        self, xp: Any, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool
    ) -> Array | None:
        n, o, spec = len(x), weight.shape[3], self.spec
        saved: Array | None = None
        if keep and spec.relu:
            saved = xp.empty((n, y[:1].size), bool if spec.pool == NO_POOL else np.uint8)
        kernel = self._kernel(xp, weight)  # (places, c, o)
        biases: Array | None = None  # once per pixel, for the largest block
        for images, tiles in self._blocks(xp, x, weight):
            tiles.load(x[images])
            tiles.multiply(kernel)
            if bias is not None and biases is None:
                biases = repeated(xp, bias, tiles.results.size // o)
            flat, part = (
                flattened(tiles.results),
                None if saved is None else flattened(saved[images]),
            )
            if spec.pool != NO_POOL:
                pooled = flattened(tiles.pooled)
                tiles.planes.largest(flat.reshape(4, flat.size // 4), pooled, part)
                tiles.planes.bias_relu(biases, pooled, part)
                xp.copyto(whole_pixels(y[images]).transpose(1, 2, 0), whole_pixels(tiles.pooled))
                continue
            if biases is not None:
                xp.add(flat, biases[: len(flat)], out=flat)
            if spec.relu:
                rectify(xp, flat, flat)
                if part is not None:
                    xp.greater(flat, 0, out=part)
            xp.copyto(tiles.pixels(whole_pixels(y[images])), whole_pixels(tiles.results))
        return saved

    def backward(
        self, xp: Any, grad: Array, x: Array, weight: Array, kept: Array | None, out: Gradients
    ) -> None:
        grad = xp.ascontiguousarray(grad)
        turned = xp.ascontiguousarray(weight.swapaxes(2, 3))
        kernel = None if out.x is None else self._kernel(xp, turned)
        to_kernel = ProductSum(
            xp, xp.empty((len(self._transforms.g), *weight.shape[2:]), weight.dtype)
        )
        to_bias = ProductSum(xp, out.bias) if out.bias is not None else None
        for images, tiles in self._blocks(xp, x, weight):
            if kept is None:
                xp.copyto(whole_pixels(tiles.results), tiles.pixels(whole_pixels(grad[images])))
            elif self.spec.pool == NO_POOL:
                xp.copyto(tiles.results, kept[images].reshape(tiles.results.shape))
                xp.multiply(tiles.results, tiles.pixels(grad[images]), out=tiles.results)
            else:
                xp.copyto(whole_pixels(tiles.pooled), whole_pixels(grad[images]).transpose(1, 2, 0))
                planes = tiles.results.reshape(4, tiles.results.size // 4)
                tiles.planes.gradient(flattened(tiles.pooled), flattened(kept[images]), planes)
            sums = tiles.spread()
            if to_bias is not None:
                to_bias.add(ones(xp, len(sums), sums.dtype), sums)
            if out.weight is not None:
                tiles.load(x[images])
                to_kernel.add(*tiles.kernel_gradient())
            if out.x is not None and kernel is not None:
                tiles.input_gradient(kernel, out.x[images])
        if out.weight is not None:
            places = to_kernel.finish().reshape(len(self._transforms.g), out.weight[0, 0].size)
            g = self._transforms.g.T.astype(places.dtype)
            xp.matmul(g, places, out=out.weight.reshape(9, places.shape[1]))
        if to_bias is not None:
            to_bias.finish()

    def _kernel(self, xp: Any, weight: Array) -> Array:
        """Return G g G^T for the kernels g of a weight (3, 3, c, o): (places, c, o)."""
        (_, _, c, o), g = weight.shape, self._transforms.g.astype(weight.dtype)
        places: Array = xp.empty((len(g), c, o), weight.dtype)
        xp.matmul(g, xp.reshape(weight, (9, c * o)), out=places.reshape(len(g), c * o))
        return places

    def _blocks(self, xp: Any, x: Array, weight: Array) -> Iterator[tuple[slice, Tiles]]:
        """Yield blocks of images, with memory for their tiles."""
        (n, h, w, c), o, side = x.shape, weight.shape[3], self._transforms.side
        room = max(TILES_BYTES, len(self._transforms.g) * weight[0, 0].size * x.dtype.itemsize)
        count = max(1, min(n, room // image_bytes(h, w, c, o, x.dtype.itemsize, side)))
        tiles = Tiles(xp, self._transforms, (count, h, w, c), o, x.dtype)
        for start in range(0, n, count):
            stop = min(start + count, n)
            if stop - start < count:
                tiles = Tiles(xp, self._transforms, (stop - start, h, w, c), o, x.dtype)
            yield slice(start, stop), tiles


def image_bytes(h: int, w: int, c: int, o: int, itemsize: int, side: int) -> int:
    """Return the bytes of the places of an image and of its result.

    Args:
        h, w: the image's rows and columns of pixels.
        c, o: channels of the image and of the result.
        itemsize: bytes of an element.
        side: of a tile.
    """
    return (side + 2) ** 2 * (h // side) * (w // side) * (c + o) * itemsize


class Tiles:
    """The transforms of a block of images (count, h, w, c) to results (count, h, w, o) and back.

    The next block reuses the memory.

    Args:
        xp: the array library.
        matrices: for tiles that divide the images.
        shape: of the images.
        o: channels of the result.
        dtype: of all.

    Attributes:
        results: (side, side, h / side, w / side, count, o): results by their position in a tile, or
            their gradient, for `spread`.
        pooled: (h / 2, w / 2, count, o), one element per tile of 2 x 2.
        planes: pools the results of such tiles.
    """

    def __init__(self, xp: Any, matrices: Transforms, shape: Shape, o: int, dtype: Any) -> None:
        (count, h, w, c), side = shape, matrices.side
        rows, columns, run, four = h // side, w // side, count * c, side + 2
        self._xp, self._side = xp, side
        b, a = matrices.b.astype(dtype), matrices.a.astype(dtype)
        # the last: the pixels of a patch that no other tile shares
        self._matrices = [b, a, a.T.copy(), b.T[1:-1]]
        spread: Array = xp.zeros((h + 2, w + 2, count, c), dtype)
        seen: Array = xp.empty((four, rows, w + 2, count, c), dtype)
        self._inner = spread[1:-1, 1:-1]
        # four (or six) rows of pixels per row of tiles, and as many columns per tile; neighbours
        # share two
        self._rows = _overlapping(spread.reshape(h + 2, (w + 2) * run), side)
        self._seen = seen.reshape(four, rows, (w + 2) * run).swapaxes(0, 1)
        self._tiles = _overlapping(seen.reshape(four, rows, w + 2, run), side)
        self._patches: Array = xp.empty((four, four, rows, columns, count, c), dtype)
        back = seen.reshape(seen.size)[: four * side * rows * columns * run]
        self._back = back.reshape(four, side, rows, columns, count, c)
        tile = (rows, columns, count, o)
        self._places: Array = xp.empty((four, four, *tile), dtype)
        self._half: Array = xp.empty((side * four, *tile), dtype)  # transformed one way
        self.results: Array = xp.empty((side, side, *tile), dtype)
        self.pooled: Array = xp.empty(tile, dtype)
        self.planes = Planes(xp, side * side, self.pooled.size)

    def pixels(self, images: Array) -> Array:
        """Return images as a view (side, side, h / side, w / side, count, ...), like `results`."""
        parts = corners(images, (self._side, self._side))
        return parts.transpose(0, 1, 3, 4, 2, *range(5, parts.ndim))

    def load(self, images: Array) -> None:
        """Transform the patches of images: B^T d B."""
        xp, patches = self._xp, self._patches
        xp.copyto(whole_pixels(self._inner), whole_pixels(images).transpose(1, 2, 0))
        # rows first, B^T d, and then columns
        xp.matmul(self._matrices[0], self._rows, out=self._seen)
        four, _, rows, columns, count, c = patches.shape
        patches = patches.reshape(four, four, rows, columns, count * c).transpose(0, 2, 3, 1, 4)
        xp.matmul(self._matrices[0], self._tiles, out=patches)

    def multiply(self, kernel: Array) -> None:
        """Compute the results of the loaded images."""
        self._xp.matmul(_stacked(self._patches), kernel, out=_stacked(self._places))
        self._both_ways(self._matrices[1], self._places, self.results)

    def spread(self) -> Array:
        """Transform the output gradient, A dy A^T; return the tiles' sums (tiles count, o)."""
        self._both_ways(self._matrices[2], self.results, self._places)
        # place (1, 1) is the sum over a tile
        return _stacked(self._places)[self._side + 3]

    def _both_ways(self, matrix: Array, x: Array, out: Array) -> None:
        (n, k), xp = matrix.shape, self._xp
        size = x.size // (k * k)
        half = self._half.reshape(n, k, size)
        xp.matmul(matrix, x.reshape(k, k * size), out=half.reshape(n, k * size))
        xp.matmul(matrix, half, out=out.reshape(n, n, size))

    def kernel_gradient(self) -> tuple[Array, Array]:
        """Return two arrays whose product is the loaded images' part of the kernel gradient."""
        return _stacked(self._patches).swapaxes(1, 2), _stacked(self._places)

    def input_gradient(self, kernel: Array, out: Array) -> None:
        """Write the input gradient, B dv B^T, to out (count, h, w, c); overwrite the loaded images.

        Args:
            kernel: (places, o, c), of the transposed kernels.
        """
        xp, v, back, side = self._xp, self._patches, self._back, self._side
        four, _, rows, columns, count, c = v.shape
        xp.matmul(_stacked(self._places), kernel, out=_stacked(v))
        size = rows * columns * count * c
        xp.matmul(
            self._matrices[3], v.reshape(four, four, size), out=back.reshape(four, side, size)
        )
        # the last pixel of the tile before
        xp.add(back[:, 0, :, 1:], v[:, -1, :, :-1], out=back[:, 0, :, 1:])
        # the first pixel of the tile after
        xp.add(back[:, -1, :, :-1], v[:, 0, :, 1:], out=back[:, -1, :, :-1])
        # `v` is free by now
        local = v.reshape(v.size)[: side * side * size].reshape(side, side, rows, columns, count, c)
        xp.matmul(
            self._matrices[3], back.reshape(four, side * size), out=local.reshape(side, side * size)
        )
        xp.add(local[0, :, 1:], back[-1, :, :-1], out=local[0, :, 1:])  # the same for rows
        xp.add(local[-1, :, :-1], back[0, :, 1:], out=local[-1, :, :-1])
        xp.copyto(self.pixels(whole_pixels(out)), whole_pixels(local))


def _stacked(places: Array) -> Array:
    four, _, rows, columns, count, c = places.shape
    return places.reshape(four * four, rows * columns * count, c)


def whole_pixels(images: Array) -> Array:
    """Return a view of images (..., c) with one element per pixel.

    NumPy copies such elements 1.5 times as fast as a few channels one by one.
    """
    return images.view(np.dtype((np.void, images.shape[-1] * images.itemsize)))[..., 0]


def _overlapping(pixels: Array, side: int) -> Array:
    """View pixels (..., n, run) as (..., n // side, side + 2, run): neighbours share two."""
    *lead, n, run = pixels.shape
    *steps, step, item = pixels.strides
    return np.lib.stride_tricks.as_strided(
        pixels,
        (*lead, (n - 2) // side, side + 2, run),
        (*steps, side * step, step, item),
        writeable=False,
    )
