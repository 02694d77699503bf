"""Winograd's convolution by NumPy. F(2x2, 3x3) takes 1 / 2.25 of the products, F(4x4, 3x3) 1 / 4,
F(2x2, 5x5) 1 / 2.78.

    images (n, h, w, c)                          kernels (3, 3, c, o) or (5, 5, c, o)
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

a tile of the result is A^T [ (G g G^T) * (B^T d B) ] A, d being the pixels that it sees (patches
overlap by two, or by four) and the product being that of channels, a GEMM for each of the places.
Backward is the adjoint, step by step; the result's gradient dy becomes A dy A^T, and so on.

The transforms are products of these small matrices with large ones that have a row per pixel or
place: BLAS reads memory once, additions would read it several times. A block's memory has images
next to channels, (..., images, channels), so that these rows are long.

A tile of 2 x 2 pixels is also a window of the pooling. Its four results lie on the planes that the
pooling compares (see `planes`), and the convolution's result is never assembled.

The transforms are the channels' own. Only the products know groups: one for each place and group.

Patches of 6 x 6 pixels have fewer places per result, and round five times as coarsely. A result
that sees zeros alone is 0 with patches of 4 x 4, but a rounding error of its neighbours with those
of 6 x 6, and a ReLU passes half of these: on MNIST, with biases of 0, a bias gradient was wrong by
0.6 of the largest. So these results are set to 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array, Shape, namespace, ones
from nnmpi.backend.planes import Planes, flattened
from nnmpi.backend.program.record import viewed
from nnmpi.backend.recording import call
from nnmpi.backend.sums import repeated, slices
from nnmpi.backend.windows import corners
from nnmpi.ops.conv.algorithm import NO_POOL, ConvAlgorithm, ConvSpec, Gradients
from nnmpi.ops.conv.im2col import ProductSum

# Bytes of a block of images: about a usual second-level cache. With larger transformed kernels a
# block has their size.
TILES_BYTES = 5 << 18
# The interpolation points besides infinity; the first three for patches of 4 x 4. With 2 and -2
# instead of the last two, results are off by twice as much.
POINTS = (0.0, 1.0, -1.0, 0.5, -2.0)
# Numbers in a matrix of kernels that is transposed as a view. From 512 to 512 channels a transposed
# copy takes 5 ms, and the view's products of 4 tiles 1 ms more; from 256 to 256, the same.
LARGE_KERNELS = 1 << 17


class Transforms(NamedTuple):
    """The matrices for one size of tiles and kernels, with side + kernel - 1 places each way.

    Attributes:
        side: pixels of a tile's result, each way.
        b: B^T, (places, pixels).
        g: G for both ways, (places places, kernel kernel).
        a: A^T, (results, places).
    """

    side: int
    b: Array
    g: Array
    a: Array


@cache
def transforms(side: int, kernel: int) -> Transforms:
    """Return the Toom-Cook matrices for tiles of so many results and kernels of so many rows."""
    points, places = POINTS[: side + kernel - 2], side + kernel - 1
    b, g = np.zeros((places, places)), np.zeros((places, kernel))
    for i, point in enumerate(points):
        others = [item for item in points if item != point]
        b[i, :-1] = np.poly(others)[::-1]
        g[i] = point ** np.arange(kernel) / np.prod(np.subtract(point, others))
    b[-1], g[-1, -1] = np.poly(points)[::-1], 1
    g[0], b[0] = g[0] * b[0, 0], b[0] / b[0, 0]
    a = np.vander([*points, 0], side, increasing=True).T
    a[:, -1] = np.arange(side) == side - 1  # the value at infinity
    return Transforms(side, b, np.kron(g, g), a)


class WinogradNumpy(ConvAlgorithm):
    """A tiled convolution with kernels of 3 x 3 or 5 x 5, whose results have the images' size.

    Alone, or with ReLU and a max-pooling over 2 x 2 pixels, whose winners are saved per image, in
    the order of the tiles (uint8).

    Args:
        spec: the convolution.
        side: of a tile: 2 or 4 pixels; 2 with pooling or kernels of 5 x 5.
    """

    def __init__(self, spec: ConvSpec, side: int) -> None:
        super().__init__(spec)
        self._transforms = transforms(side, spec.kernel[0])

    def forward(
        self, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool
    ) -> Array | None:
        xp = namespace(x)
        n, o, spec = len(x), weight.shape[3], self.spec
        saved: Array | None = None
        if keep and spec.pool != NO_POOL:
            saved = xp.empty((n, y[:1].size), np.uint8)
        kernel = self._kernel(weight)  # (places, c, o)
        biases: Array | None = None  # once per pixel, for the largest block
        for images, tiles in self._blocks(x, weight):
            tiles.load(x[images])
            tiles.multiply(kernel)
            if bias is not None and biases is None:
                biases = repeated(bias, tiles.results.size // o)
            flat = flattened(tiles.results)
            part = None if saved is None else flattened(saved[images])
            if spec.pool != NO_POOL:
                pooled = flattened(tiles.pooled)
                if part is not None:
                    np.copyto(part, 0)
                tiles.planes.largest(flat.reshape(4, flat.size // 4), pooled, part)
                tiles.planes.bias_relu(biases, pooled, part)
                np.copyto(flat_pixels(y[images]).transpose(1, 2, 0), flat_pixels(tiles.pooled))
                continue
            if biases is not None:
                np.add(flat, biases[: len(flat)], out=flat)
            np.copyto(tiles.pixels(flat_pixels(y[images])), flat_pixels(tiles.results))
        return saved

    def backward(
        self, grad: Array, x: Array, weight: Array, kept: Array | None, out: Gradients
    ) -> None:
        xp = namespace(grad)
        grad = xp.ascontiguousarray(grad)
        groups, (_, _, c, o) = self.spec.groups, weight.shape
        kernel = None if out.x is None else self._turned(weight)
        places = xp.empty((len(self._transforms.g), c, o), weight.dtype)
        to_kernel = ProductSum(_grouped(places, groups))
        to_bias = ProductSum(out.bias) if out.bias is not None else None
        for images, tiles in self._blocks(x, weight):
            if kept is None:
                np.copyto(flat_pixels(tiles.results), tiles.pixels(flat_pixels(grad[images])))
            else:
                np.copyto(flat_pixels(tiles.pooled), flat_pixels(grad[images]).transpose(1, 2, 0))
                planes = tiles.results.reshape(4, tiles.results.size // 4)
                tiles.planes.gradient(flattened(tiles.pooled), flattened(kept[images]), planes)
            sums = tiles.spread()
            if to_bias is not None:
                to_bias.add(ones(sums, len(sums)), sums)
            if out.weight is not None:
                tiles.load(x[images])
                to_kernel.add(*tiles.kernel_gradient())
            if out.x is not None and kernel is not None:
                tiles.input_gradient(kernel, out.x[images])
        if out.weight is not None:
            to_kernel.finish()
            g = self._transforms.g.T.astype(places.dtype)
            np.matmul(g, places.reshape(len(places), c * o), out=out.weight.reshape(len(g), c * o))
        if to_bias is not None:
            to_bias.finish()

    def _kernel(self, weight: Array) -> Array:
        """Return G g G^T for the kernels g of a weight (.., .., c, o): (places, c, o)."""
        xp = namespace(weight)
        (_, _, c, o), g = weight.shape, self._transforms.g.astype(weight.dtype)
        places = xp.empty((len(g), c, o), weight.dtype)
        np.matmul(g, np.reshape(weight, (g.shape[1], c * o)), out=places.reshape(len(g), c * o))
        return places

    def _turned(self, weight: Array) -> Array:
        """Return the transposed kernels' matrices, by group: (places, [groups,] o, c).

        Large ones are views. Small products of a transposed matrix take twice as long.
        """
        groups, (rows, columns, c, o) = self.spec.groups, weight.shape
        if c * o >= LARGE_KERNELS:
            return _grouped(self._kernel(weight), groups).swapaxes(-1, -2)
        apart = weight.reshape(rows, columns, c, groups, o // groups).transpose(0, 1, 4, 3, 2)
        turned = np.ascontiguousarray(apart, like=weight).reshape(
            rows, columns, o // groups, groups * c
        )
        return _grouped(self._kernel(turned), groups)

    def _blocks(self, x: Array, weight: Array) -> Iterator[tuple[slice, Tiles]]:
        """Yield blocks of images, with memory for their tiles."""
        xp = namespace(x)
        (n, h, w, c), o, matrices = x.shape, weight.shape[3], self._transforms
        room = max(TILES_BYTES, len(matrices.g) * weight[0, 0].size * x.dtype.itemsize)
        image = places_per_image(h, w, matrices.side, self.spec.kernel[0]) * (c + o)
        count = max(1, min(n, room // (image * x.dtype.itemsize)))
        for images in slices(n, count):
            size = images.stop - images.start
            if images.start == 0 or size < count:
                tiles = Tiles(xp, matrices, (size, h, w, c), o, x.dtype, self.spec.groups)
            yield images, tiles


def places_per_image(h: int, w: int, side: int, kernel: int) -> int:
    """Return the places of a channel of an image of h x w pixels.

    Args:
        h, w: rows and columns of pixels.
        side: of a tile.
        kernel: rows of a kernel.
    """
    return (side + kernel - 1) ** 2 * (h // side) * (w // side)


class Tiles:
    """The transforms of a block of images (count, h, w, c) to results (count, h, w, o) and back.

    The next block reuses the memory.

    Args:
        xp: the array library.
        matrices: for tiles that divide the images.
        shape: of the images.
        o: channels of the result.
        dtype: of all.
        groups: of channels.

    Attributes:
        results: (side, side, h / side, w / side, count, o): results by their position in a tile, or
            their gradient, for `spread`.
        pooled: (h / 2, w / 2, count, o), one element per tile of 2 x 2.
        planes: pools the results of such tiles.
    """

    def __init__(
        self, xp: Any, matrices: Transforms, shape: Shape, o: int, dtype: Any, groups: int
    ) -> None:
        (count, h, w, c), side, each = shape, matrices.side, len(matrices.b)
        rows, columns, run, shared = h // side, w // side, count * c, each - side
        self._side, self._groups, border = side, groups, shared // 2
        self._own = slice(border, border + side)  # a patch's pixels of its own tile
        b, a = matrices.b.astype(dtype), matrices.a.astype(dtype)
        self._matrices = [b, a, a.T.copy(), b.T.copy()]
        self._spread: Array = xp.zeros((h + shared, w + shared, count, c), dtype)
        self._inner = self._spread[border:-border, border:-border]
        height, width = self._spread.shape[:2]
        self._patches: Array = xp.empty((each, each, rows, columns, count, c), dtype)
        self._back: Array = xp.empty(self._patches.shape, dtype)
        # `each` rows of pixels per row of tiles, and as many columns per tile; neighbours share
        # some
        seen = self._back.reshape(self._back.size)[: each * rows * width * run]
        self._rows = _overlapping(self._spread.reshape(height, width * run), side, each)
        self._seen = seen.reshape(each, rows, width * run).swapaxes(0, 1)
        self._tiles = _overlapping(seen.reshape(each, rows, width, run), side, each)
        tile = (rows, columns, count, o)
        self._places: Array = xp.empty((each, each, *tile), dtype)
        self._half: Array = xp.empty((side * each, *tile), dtype)  # transformed one way
        self.results: Array = xp.empty((side, side, *tile), dtype)
        self.pooled: Array = xp.empty(tile, dtype)
        self.planes = Planes(xp, side * side, self.pooled.size)

    def pixels(self, images: Array) -> Array:
        """Return images as a view (side, side, h / side, w / side, count, ...), like `results`."""
        parts = corners(images, (self._side, self._side))
        return parts.transpose(0, 1, 3, 4, 2, *range(5, parts.ndim))

    def load(self, images: Array) -> None:
        """Transform the patches of images: B^T d B."""
        patches = self._patches
        np.copyto(flat_pixels(self._inner), flat_pixels(images).transpose(1, 2, 0))
        # rows first, B^T d, and then columns
        np.matmul(self._matrices[0], self._rows, out=self._seen)
        each, _, rows, columns, count, c = patches.shape
        patches = patches.reshape(each, each, rows, columns, count * c).transpose(0, 2, 3, 1, 4)
        np.matmul(self._matrices[0], self._tiles, out=patches)

    def multiply(self, kernel: Array) -> None:
        """Compute the results of the loaded images."""
        self._multiply(self._patches, _grouped(kernel, self._groups), self._places)
        self._both_ways(self._matrices[1], self._places, self.results)
        if len(self._places) > 4:
            call(_clear, (), (self._spread, self.results))

    def _multiply(self, places: Array, kernel: Array, out: Array) -> None:
        """Write the products of each place and group."""
        left, result = (_grouped(_stacked(item), self._groups) for item in (places, out))
        np.matmul(left, kernel, out=result)

    def spread(self) -> Array:
        """Transform the output gradient, A dy A^T; return the tiles' sums (tiles count, o)."""
        self._both_ways(self._matrices[2], self.results, self._places)
        # place (1, 1) is the sum over a tile
        return _stacked(self._places)[len(self._places) + 1]

    def _both_ways(self, matrix: Array, x: Array, out: Array) -> None:
        n, k = matrix.shape
        size = x.size // (k * k)
        half = self._half.reshape(n, k, size)
        np.matmul(matrix, x.reshape(k, k * size), out=half.reshape(n, k * size))
        np.matmul(matrix, half, out=out.reshape(n, n, size))

    def kernel_gradient(self) -> tuple[Array, Array]:
        """Return two arrays whose product is the loaded images' part of the kernel gradient."""
        left, right = (
            _grouped(_stacked(item), self._groups) for item in (self._patches, self._places)
        )
        return left.swapaxes(-1, -2), right

    def input_gradient(self, kernel: Array, out: Array) -> None:
        """Write the input gradient, B dv B^T, to out (count, h, w, c); overwrite the loaded images.

        Args:
            kernel: (places, [groups,] o, c), of the transposed kernels.
        """
        v, back, side = self._patches, self._back, self._side
        each, _, rows, columns, count, c = v.shape
        size, b, own = rows * columns * count * c, self._matrices[3], self._own
        self._multiply(self._places, kernel, v)
        np.matmul(b, v.reshape(each, each, size), out=back.reshape(each, each, size))
        self._add_ends(back.swapaxes(0, 1))
        pixels = back.reshape(each, each * size)[:, own.start * size : own.stop * size]
        # `v` is free by now
        local = v.reshape(v.size)[: each * side * size].reshape(each, side, rows, columns, count, c)
        np.matmul(b, pixels, out=local.reshape(each, side * size))
        self._add_ends(local.swapaxes(2, 3))
        np.copyto(self.pixels(flat_pixels(out)), flat_pixels(local[own]))

    def _add_ends(self, patches: Array) -> None:
        """Add the pixels at the ends of patches to those of the tiles that they lie in.

        Args:
            patches: (pixels of a patch, ., ., tiles, ...).
        """
        own, border = patches[self._own], self._own.start
        head, tail = own[:border, :, :, 1:], own[-border:, :, :, :-1]
        np.add(head, patches[-border:, :, :, :-1], out=head)
        np.add(tail, patches[:border, :, :, 1:], out=tail)


def _clear(pixels: Array, results: Array) -> None:
    """Set results that see zeros alone to 0.

    Args:
        pixels: (rows, columns, images, c), with a border of zeros.
        results: (side, side, rows / side, columns / side, images, o).
    """
    side, _, rows, columns, count, _ = results.shape
    kernel, c = len(pixels) - rows * side + 1, pixels.shape[3]
    channels, one = pixels.reshape(pixels.size // c, c), ones(pixels, c)
    if np.count_nonzero(np.dot(channels, one)) == rows * columns * side * side * count:
        return  # only the border sums to 0
    # a sum of magnitudes is 0 for zeros alone
    seen = (np.dot(np.abs(channels), one) != 0).reshape(pixels.shape[:3])
    for _ in range(2):  # rows, then columns
        shifted = [seen[i : len(seen) - kernel + 1 + i] for i in range(kernel)]
        seen = np.logical_or.reduce(shifted).swapaxes(0, 1)
    tiles = seen.reshape(rows, side, columns, side, count).transpose(1, 3, 0, 2, 4)
    results[~tiles] = 0


def _stacked(places: Array) -> Array:
    each, _, rows, columns, count, c = places.shape
    return places.reshape(each * each, rows * columns * count, c)


def _grouped(matrices: Array, groups: int) -> Array:
    """View matrices (places, n, channels) as (places, groups, n, channels / groups)."""
    places, n, channels = matrices.shape
    if groups == 1:
        return matrices
    return matrices.reshape(places, n, groups, channels // groups).swapaxes(1, 2)


def flat_pixels(images: Array) -> Array:
    """Return a view of images (..., c) with one element per pixel.

    NumPy copies such elements 1.5 times as fast as a few channels one by one.
    """
    return images.view(np.dtype((np.void, images.shape[-1] * images.itemsize)))[..., 0]


def _overlapping(pixels: Array, side: int, each: int) -> Array:
    """View pixels (..., n, run) as (..., tiles, each, run), `side` pixels apart."""
    *lead, n, run = pixels.shape
    *steps, step, item = pixels.strides
    return viewed(
        np.lib.stride_tricks.as_strided,
        pixels,
        shape=(*lead, (n - each) // side + 1, each, run),
        strides=(*steps, side * step, step, item),
        writeable=False,
    )
