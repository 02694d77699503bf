"""Convolution by im2col: the pixels that each window sees become a row of a matrix, and the convolution a product.

    images (n, h, w, c)                          kernels (kh, kw, c, o)
       |  a few images at a time                     |  seen as a matrix
       v                                             v
    columns (pixels, kh kw c)          @         (kh kw c, o)          ->   (pixels, o) = images (n, out_h, out_w, o)

    dW = columns^T dy, summed over the blocks of images               (made again: that costs less than keeping them)
    dx = columns of dy @ flipped kernels                              for stride 1: a convolution, too
         dy W[r, s]^T added to the pixels that kernel element r, s saw      otherwise

Columns are made for a few images at a time, or for some rows of a large one, so that on the host they stay in the
processor's cache between the copy and the product. Rows are ordered by their place in the windows of a pooling that
follows, so that the product has one contiguous plane per place, and pooling is arithmetic on whole planes:

    | place 0: all pixels of all images of the block |  place 1  |  place 2  |  place 3  |      of a 2x2 pooling

In channels-last images the pixels that a row of the kernel sees are one run of memory. Where the runs are short (few
channels), the matrix is stored transposed, so that the copy runs along the images' rows instead.

`Im2col` computes any convolution, one group after another. `Im2colReluPool` does bias, ReLU and max-pooling on the way,
and the convolution's whole result is never stored: a block's is pooled at once, and backward needs but where the
largest elements were.

    forward     columns @ W = | y0 | y1 | y2 | y3 |       one plane per place in the pooling's window
                h = relu(max(y0 .. y3) + b)               winner = the first place that is the largest, if h > 0
    backward    dyk = dh where the winner is k            dW = columns^T dy, block by block; db = sum of dy
                dx = conv(dy with a border, W flipped)

On a device float16 and bfloat16 are added up in float32, and the kernels' gradient stays float32.
"""

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.gemm import gemm
from nnmpi.backend.kernels import bias_grad
from nnmpi.backend.precision import FLOAT32, cast, is_floating, is_low
from nnmpi.backend.sums import row_sum
from nnmpi.backend.windows import corners, tap, windows
from nnmpi.ops.conv.algorithm import Algorithm, ConvSpec, Gradients
from nnmpi.ops.planes import Planes, repeated

COLUMNS_BYTES = 3 << 18  # of one block of columns and its result: half of a usual second-level cache
DEVICE_BYTES = 1 << 28  # of the same on a device, which has more to do at a time
SHORT_RUN = 24  # elements


class Strip(NamedTuple):
    """Some rows of the result, of all images of a block, and memory for their columns.

    Attributes:
        images: which images the block has.
        rows: which rows of what the pooling leaves.
        source: what is copied, in that order.
        target: where it goes, of the same shape.
        matrix: the same memory, (pool_h pool_w images rows columns, kh kw c).
    """

    images: slice
    rows: slice
    source: Array
    target: Array
    matrix: Array


class Columns:
    """The columns of one block of images after another, in memory that every block uses again.

        for block in columns.blocks():                  a slice of the images
            for strip in columns.strips(block, x):      some rows of them: all, unless images are large
                matrix = columns.fill(strip)

    Args:
        xp: the library that copies.
        shape: of all images, (n, h, w, c).
        dtype: of their elements.
        spec: the convolution.
        outputs: elements of the result of each row of columns.
        count: the most images in a block.
        source: all images, if they are known by now: without a border, windows then lie in them and not in a copy.

    Attributes:
        out: rows and columns that the pooling leaves.
        count: images in a block; the last one may have fewer.
        inner: (count, h, w, c), where a block's images go, unless they lie in `source`. The border around it is zero.
    """

    __slots__ = ("_in_place", "_memory", "_n", "_short", "_strip_rows", "_view", "_xp", "count", "inner", "out")

    def __init__(
        self,
        xp: Any,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        spec: ConvSpec,
        outputs: int,
        count: int | None = None,
        source: Array | None = None,
    ) -> None:
        self._xp = xp
        (self._n, h, w, c), (top, left) = shape, spec.padding
        self.out = spec.pooled_size(h, w)
        row = self.out[1] * prod(spec.pool)  # pixels of the convolution for a row of the result
        terms = prod(spec.kernel) * c
        room = COLUMNS_BYTES if xp.__name__ == "numpy" else DEVICE_BYTES
        most = room // (max(1, row * (terms + outputs)) * dtype.itemsize)  # rows of the result
        self.count = max(1, min(self._n, most // max(1, self.out[0]), self._n if count is None else count))
        self._strip_rows = max(1, min(self.out[0], most))
        self._memory: Array = xp.empty((self.count * self._strip_rows * row * terms,), dtype)
        self._in_place = source is not None and top == left == 0
        bordered = source
        if bordered is None or not self._in_place:
            bordered = xp.zeros((self.count, h + 2 * top, w + 2 * left, c), dtype)
        self.inner: Array = bordered[:, top : top + h, left : left + w]
        view = windows(bordered, spec.kernel, spec.stride, spec.dilation)  # (n, out_h, out_w, kh, kw, c)
        self._view = corners(view, spec.pool)  # (pool_h, pool_w, n, rows, columns, kh, kw, c)
        self._short = spec.kernel[1] * c < SHORT_RUN

    def blocks(self) -> Iterator[slice]:
        """Yield the images of one block after another."""
        for start in range(0, self._n, self.count):
            yield slice(start, min(start + self.count, self._n))

    def strips(self, block: slice, x: Array | None = None) -> Iterator[Strip]:
        """Yield the strips of a block, of whose images, out of all (n, h, w, c), the columns are to be made.

        Without x the images lie in `inner`, or are not looked at.
        """
        images, height = block, self.out[0]
        if not self._in_place:
            images = slice(0, block.stop - block.start)
            if x is not None:
                self._xp.copyto(self.inner[images], x[block])
        for start in range(0, height, self._strip_rows):
            rows = slice(start, min(start + self._strip_rows, height))
            seen = self._view[:, :, images, rows]
            terms = prod(seen.shape[5:])
            pixels = prod(seen.shape[:5])
            memory = self._memory[: pixels * terms]
            if self._short:
                seen = seen.transpose(5, 6, 7, 0, 1, 2, 3, 4)  # (kh, kw, c, pool_h, pool_w, n, rows, columns)
            matrix = memory.reshape(terms, pixels).T if self._short else memory.reshape(pixels, terms)
            yield Strip(block, rows, seen, memory.reshape(seen.shape), matrix)

    def fill(self, strip: Strip) -> Array:
        """Return the columns of a strip; they overwrite the columns before."""
        self._xp.copyto(strip.target, strip.source)
        return strip.matrix


def multiply(xp: Any, left: Array, right: Array, out: Array) -> None:
    """Write left @ right; also of whole numbers, which no BLAS multiplies, and of a vector."""
    if left.ndim > 1 and is_floating(left.dtype):
        gemm(xp, left, right, out=out)
    else:
        xp.matmul(left, right, out=out)


class ProductSum:
    """A sum of products of matrices, or of stacks of them.

    Args:
        xp: the library that computes.
        total: where the sum goes, in the shape of a product.
    """

    __slots__ = ("_begun", "_product", "_total", "_xp")

    def __init__(self, xp: Any, total: Array) -> None:
        self._xp, self._total, self._begun = xp, total, False
        self._product: Array | None = None

    def add(self, left: Array, right: Array) -> None:
        """Add left @ right."""
        xp = self._xp
        if self._begun and self._product is None:
            self._product = xp.empty(self._total.shape, self._total.dtype)
        place = self._total if self._product is None else self._product
        multiply(xp, left, right, place)
        if self._begun:
            xp.add(self._total, place, out=self._total)
        self._begun = True

    def finish(self) -> Array:
        """Return the sum, which is zero when nothing was added."""
        if not self._begun:
            self._xp.copyto(self._total, 0)
        return self._total


class InputGradient:
    """The input's gradient of a convolution of stride 1: the result's gradient, convolved with the flipped kernel.

        dx[i, j] = sum over r, s of dy[i + top - r d, j + left - s d] W[r, s]^T

    Args:
        xp: the library that computes.
        shape: of the result's gradient, (n, out_h, out_w, o).
        weight: (kh, kw, c, o).
        spec: the convolution.
        dtype: of the result's gradient.
        out: where the gradient goes, (n, h, w, c), in memory without gaps but perhaps between its pixels.
        source: the result's gradient, if it is known by now (see `Columns`).
    """

    __slots__ = ("_kernel", "_out", "_xp", "columns")

    def __init__(
        self,
        xp: Any,
        shape: tuple[int, ...],
        weight: Array,
        spec: ConvSpec,
        dtype: np.dtype[Any],
        out: Array,
        source: Array | None = None,
    ) -> None:
        self._xp, self._out = xp, out
        kh, kw, c, o = weight.shape
        self.columns = Columns(xp, shape, dtype, spec.backwards(), c, source=source)
        kernel = xp.empty((kh, kw, o, c), dtype)
        xp.copyto(kernel, weight[::-1, ::-1].swapaxes(2, 3), casting="unsafe")
        self._kernel = kernel.reshape(kh * kw * o, c)

    def write(self, block: slice, grad: Array | None = None) -> None:
        """Compute some images' gradient, of the result's whole one, or of the block of it in `columns.inner`."""
        for strip in self.columns.strips(block, grad):
            rows = self._out[block][:, strip.rows]
            matrix = self.columns.fill(strip)  # (pixels, kh kw o)
            multiply(self._xp, matrix, self._kernel, rows.reshape(len(matrix), rows.shape[3]))


def scatter_windows(xp: Any, grad: Array, weight: Array, spec: ConvSpec, out: Array) -> None:
    """Write the input's gradient of any convolution: each window's share is added to the pixels that it saw.

    Args:
        xp: the library that computes.
        grad: of the result, (n, out_h, out_w, o).
        weight: (kh, kw, c, o).
        spec: the convolution.
        out: (n, h, w, c).
    """
    (kh, kw, c, o), (n, h, w, _), (top, left) = weight.shape, out.shape, spec.padding
    pixels, wide = grad.shape[1] * grad.shape[2], FLOAT32 if is_low(grad.dtype) else grad.dtype
    room = COLUMNS_BYTES if xp.__name__ == "numpy" else DEVICE_BYTES
    count = max(1, min(n, 2 * room // max(1, (pixels * (c + o) + h * w * c) * wide.itemsize)))
    memory = xp.empty((count * pixels, c), wide)
    bordered = xp.empty((count, h + 2 * top, w + 2 * left, c), wide)
    weight = cast(xp, weight, grad.dtype)
    for start in range(0, n, count):
        images = grad[start : start + count]
        rows, block = images.reshape(len(images) * pixels, o), bordered[: len(images)]
        share = memory[: len(rows)]
        xp.copyto(block, 0)
        for i, j in np.ndindex(kh, kw):
            multiply(xp, rows, weight[i, j].T, share)  # (pixels, c)
            seen = tap(block, (i, j), (images.shape[1], images.shape[2]), spec.stride, spec.dilation)
            xp.add(seen, share.reshape(seen.shape), out=seen)
        xp.copyto(out[start : start + count], block[:, top : top + h, left : left + w], casting="unsafe")


def _sum_pixels(xp: Any, images: Array, out: Array) -> None:
    """Write the sum of (n, h, w, c) over all pixels to out (c,): on the host first over images, in long additions."""
    n, h, w, c = images.shape
    if xp.__name__ == "numpy":
        row_sum(xp, row_sum(xp, images.reshape(n, h * w * c)).reshape(h * w, c), out=out)
    else:
        bias_grad(xp, images.reshape(n * h * w, c), out)


class Im2col(Algorithm):
    """Any convolution without ReLU and pooling, group by group."""

    __slots__ = ()

    def forward(self, xp: Any, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool) -> None:
        for inputs, outputs in self._groups(x.shape[3], weight.shape[3]):
            images, result = x[..., inputs], y[..., outputs]  # (n, h, w, c / groups), (n, out_h, out_w, o / groups)
            kernel = _matrix(xp, cast(xp, weight[..., outputs], x.dtype))
            columns = Columns(xp, images.shape, x.dtype, self.spec, kernel.shape[1], source=images)
            for block in columns.blocks():
                for strip in columns.strips(block, images):
                    multiply(xp, columns.fill(strip), kernel, _pixels(result[block][:, strip.rows]))
        if bias is not None:
            flat = y.reshape(len(y), prod(y.shape[1:]))  # (n, out_h out_w o)
            xp.add(flat, repeated(xp, bias, y.shape[1] * y.shape[2]), out=flat, casting="unsafe")

    def backward(self, xp: Any, grad: Array, x: Array, weight: Array, kept: None, out: Gradients) -> None:
        spec, dtype = self.spec, x.dtype
        grad = cast(xp, xp.reshape(grad, (grad.size,)).reshape(grad.shape), dtype)  # without gaps
        if out.bias is not None:
            _sum_pixels(xp, grad, out.bias)
        for inputs, outputs in self._groups(x.shape[3], weight.shape[3]):
            images, sent, part = x[..., inputs], grad[..., outputs], weight[..., outputs]
            if out.x is not None and not spec.reversible:
                scatter_windows(xp, sent, part, spec, out.x[..., inputs])
            elif out.x is not None:
                reverse = InputGradient(xp, sent.shape, part, spec, dtype, out.x[..., inputs], source=sent)
                for block in reverse.columns.blocks():
                    reverse.write(block, sent)
            if out.weight is not None:
                place = out.weight[..., outputs]
                shape = (prod(part.shape[:3]), part.shape[3])  # (kh kw c / groups, o / groups)
                # a group's outputs lie apart in `place`, where no product can be written
                total = ProductSum(xp, place.reshape(shape) if spec.groups == 1 else xp.empty(shape, place.dtype))
                columns = Columns(xp, images.shape, dtype, spec, shape[1], source=images)
                for block in columns.blocks():
                    for strip in columns.strips(block, images):
                        total.add(columns.fill(strip).T, _pixels(sent[block][:, strip.rows]))
                summed = total.finish()
                if spec.groups > 1:
                    xp.copyto(place, summed.reshape(place.shape))

    def _groups(self, c: int, o: int) -> Iterator[tuple[slice, slice]]:
        """Yield each group's slice of the input channels and of the output channels."""
        c, o = c // self.spec.groups, o // self.spec.groups
        for g in range(self.spec.groups):
            yield slice(g * c, (g + 1) * c), slice(g * o, (g + 1) * o)


class Im2colReluPool(Algorithm):
    """A convolution of stride 1 in one group with ReLU, and with max-pooling if there is some."""

    __slots__ = ()

    def forward(self, xp: Any, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool) -> Array | None:
        o, places = weight.shape[3], prod(self.spec.pool)
        columns = Columns(xp, x.shape, x.dtype, self.spec, o, source=x)
        row = columns.out[1] * o  # elements of y
        image = columns.out[0] * row
        flat = y.reshape(y.size)
        planes = Planes(xp, places, columns.count * image)
        winner: Array | None = xp.empty((y.size,), planes.dtype) if keep else None
        kernel = _matrix(xp, weight)
        # without a pooling the product goes straight to y
        memory = xp.empty((places * columns.count * image,), x.dtype) if places > 1 else None
        biases = None if bias is None else repeated(xp, bias, columns.count * prod(columns.out))
        for block in columns.blocks():
            for strip in columns.strips(block, x):
                matrix = columns.fill(strip)  # (places pooled pixels, kh kw c)
                start, size = block.start * image + strip.rows.start * row, len(matrix) * o // places
                h = flat[start : start + size]
                z = (h if memory is None else memory[: places * size]).reshape(places, size)
                multiply(xp, matrix, kernel, z.reshape(len(matrix), o))
                won = None if winner is None else winner[start : start + size]
                if places > 1:
                    planes.largest(z, h, won)
                elif won is not None:
                    xp.copyto(won, 0)
                planes.bias_relu(biases, h, won)
        return winner

    def backward(self, xp: Any, grad: Array, x: Array, weight: Array, kept: Array, out: Gradients) -> None:
        spec, (n, height, width, o), dtype = self.spec, grad.shape, x.dtype
        places, row = prod(spec.pool), width * o
        flat = xp.reshape(grad, (grad.size,))
        reverse = None
        if out.x is not None:
            shape = (n, *spec._replace(pool=(1, 1)).pooled_size(*x.shape[1:3]), o)
            reverse = InputGradient(xp, shape, weight, spec, dtype, out.x)
        # both work on the same images at a time: dy is computed once
        columns = Columns(xp, x.shape, dtype, spec, o, None if reverse is None else reverse.columns.count, x)
        reverse_places = None if reverse is None else corners(reverse.columns.inner, spec.pool)
        memory = xp.empty((places * columns.count * height * row,), dtype)
        planes = Planes(xp, places, columns.count * height * row)
        to_weight = None if out.weight is None else ProductSum(xp, out.weight.reshape(prod(weight.shape[:3]), o))
        to_bias = None if out.bias is None else ProductSum(xp, out.bias)
        ones = xp.ones(places * columns.count * height * width, dtype)
        for block in columns.blocks():
            for strip in columns.strips(block, None if to_weight is None else x):
                start = (block.start * height + strip.rows.start) * row
                size = len(strip.matrix) * o // places
                dy = memory[: places * size].reshape(places, size)
                planes.gradient(flat[start : start + size], kept[start : start + size], dy)
                pixels = dy.reshape(len(strip.matrix), o)  # in the order of the columns
                if to_weight is not None:
                    to_weight.add(columns.fill(strip).T, pixels)
                if to_bias is not None:
                    to_bias.add(ones[: len(pixels)], pixels)
                if reverse_places is not None:
                    target = reverse_places[:, :, : block.stop - block.start, strip.rows]
                    xp.copyto(target, dy.reshape(target.shape))
            if reverse is not None:
                reverse.write(block)
        for each in (to_weight, to_bias):
            if each is not None:
                each.finish()


def _matrix(xp: Any, weight: Array) -> Array:
    """Return kernels (kh, kw, c, o) as a matrix (kh kw c, o)."""
    return xp.reshape(weight, (prod(weight.shape[:3]), weight.shape[3]))


def _pixels(images: Array) -> Array:
    """Return images (n, h, w, c) as a view (pixels, c)."""
    return images.reshape(prod(images.shape[:3]), images.shape[3])  # not -1: there may be no elements
