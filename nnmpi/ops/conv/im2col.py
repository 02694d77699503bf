"""Convolution by im2col: each window's pixels become a row of a matrix, and a product follows.

    images (n, h, w, c)                kernels (kh, kw, c, o)
       |  a block of images               |  viewed as a matrix
       v                                  v
    columns (pixels, kh kw c)     @    (kh kw c, o)     =    (pixels, o), or (n, out_h, out_w, o)

    dW = columns^T dy, summed over blocks       columns are made again: saving them costs more
    dx = columns of dy @ flipped kernels        for a stride, by the pixels that see the same
                                                elements of the kernels (see `Phase`)

A block is a few images, or some rows of a large one, so that on the host the columns stay in the
processor's cache between the copy and the product. Rows are ordered by their corner of the pooling
window that follows. So the product has one contiguous plane per corner, and pooling is arithmetic
on whole planes:

    | corner 0: all pixels of the block | corner 1 | corner 2 | corner 3 |      of a 2 x 2 pooling

In channels-last images the pixels under a kernel row are one run of memory. On the host columns are
such runs, and each kernel row has a product of its own:

    y[i]  =  sum over r of  runs of row i + r  @  W[r]                   runs (rows, pixels, kw c)

Each pixel is then copied kw times, not kh kw times, and W[r] is small enough for products without
packing (see `backend.gemm`): for 32 images of 16 x 16 and 5 x 5 kernels from 32 to 64 channels, 6.1
ms instead of 9.7. Columns are whole windows on a device, where larger products are faster, and
where runs, products or images are small. If the runs are short (few channels), the matrix is stored
transposed, and the copy runs along the images' rows instead.

`Im2col` computes any convolution, one group after another. `Im2colReluPool` fuses bias, ReLU and
max-pooling: it pools each block at once and never stores the convolution's whole result. Backward
needs only the positions of the largest elements.

    forward     columns @ W = | y0 | y1 | y2 | y3 |       one plane per corner of the window
                h = relu(max(y0 .. y3) + b)               winner = the first corner with the
                                                          largest value, if h > 0
    backward    dyk = dh where the winner is k            dW = columns^T dy, block by block
                dx = conv(dy with a border, W flipped)    db = sum of dy

A device adds up float16 and bfloat16 in float32, and keeps the kernels' gradient in float32.
"""

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeAlias

from nnmpi.backend.array import Array
from nnmpi.backend.gemm import gemm
from nnmpi.backend.kernels import add_bias, bias_grad, cast, copy
from nnmpi.backend.planes import Planes, flattened
from nnmpi.backend.sums import repeated, row_sum
from nnmpi.backend.windows import corners, windows
from nnmpi.ops.conv.algorithm import NO_POOL, ConvAlgorithm, ConvSpec, Gradients

# Bytes of a block's columns and result: about half of a usual second-level cache. With larger
# kernels a block has the size of the kernels.
COLUMNS_BYTES = 3 << 18
DEVICE_BYTES = 1 << 28  # the same on a device, which needs larger products to be busy
SHORT_RUN = 24  # elements
LEAST_PRODUCT = 1 << 17  # multiplications; smaller products take less time than their calls
# By rows, the kernels' gradient has a product for each image, as deep as it has pixels. For 32
# images of 8 x 8 and 4 x 4 kernels with stride 2 from 128 to 256 channels, whole windows take 0.6
# of the time; for results of 8 x 8 and 5 x 5 kernels, 1.04.
LEAST_PIXELS = 64


# runs of pixels, each with a matrix (pixels, terms) or a stack of them (images, pixels, terms) for
# each part of the kernels
RunsOfPixels: TypeAlias = list[tuple[slice, list[Array]]]


class Strip(NamedTuple):
    """The columns of some rows of a block's images.

    Attributes:
        rows: of the result, after pooling.
        pixels: of the convolution: corners, images, rows and columns together.
        products: the matrices of these pixels.
    """

    rows: slice
    pixels: int
    products: RunsOfPixels

    def multiply(self, xp: Any, kernel: Array, out: Array) -> None:
        """Write the products with the kernels (parts, terms, o) to `out`, (pixels, o)."""
        for run, matrices in self.products:
            for number, matrix in enumerate(matrices):
                target = out[run]
                if matrix.ndim == 3:
                    target = target.reshape(*matrix.shape[:2], out.shape[1])
                gemm(xp, matrix, kernel[number], target, number > 0)

    def add_to(self, sums: "list[ProductSum]", grad: Array) -> None:
        """Add the kernels' gradients, one per part, given that of the pixels, (pixels, o)."""
        for run, matrices in self.products:
            for total, matrix in zip(sums, matrices, strict=True):
                if matrix.ndim == 2:
                    total.add(matrix.T, grad[run])
                    continue
                images = grad[run].reshape(*matrix.shape[:2], grad.shape[1])
                for left, right in zip(matrix, images, strict=True):
                    total.add(left.T, right)


class Columns:
    """The columns of one block of images after another, in the same memory.

        for block in columns.blocks():                  a slice of the images
            for strip in columns.strips(block):         some of their rows: all, unless images are
                                                        large

    Args:
        xp: the array library.
        x: all images, (n, h, w, c). Without padding, windows are views of them, not of a copy.
        spec: the convolution.
        outputs: elements of the result per row of columns.

    Attributes:
        out: rows and columns of the result, after pooling.
        count: images in a block; the last one may have fewer.
        parts: of the kernels: their rows, if these are multiplied one by one; otherwise 1.
    """

    def __init__(self, xp: Any, x: Array, spec: ConvSpec, outputs: int) -> None:
        self._xp, self._x, self._spec = xp, x, spec
        (n, h, w, c), (top, left), (kh, kw) = x.shape, spec.padding, spec.kernel
        self.out = spec.pooled_size(h, w)
        # each window is one pixel: the images are the columns
        alone = spec[:3] == ((1, 1), (1, 1), (0, 0)) and spec.pool == NO_POOL
        self._is_pixels = alone and x.flags.c_contiguous
        self._short, host = kw * c < SHORT_RUN, xp.__name__ == "numpy"
        plane = prod(self.out) * kw * c * outputs  # multiplications of a product by rows
        large = plane >= LEAST_PRODUCT and prod(self.out) >= LEAST_PIXELS
        by_rows = host and not self._short and kh > 1 and large
        self.parts = kh if by_rows else 1
        # rows of the images: the distance of those that neighbouring rows of the result see, and
        # the first one that each corner of the pooling and row of the kernels sees
        self._step = spec.pool[0] * spec.stride[0]
        self._starts = [
            [a * spec.stride[0] + r * spec.dilation[0] for r in range(kh)]
            for a in range(spec.pool[0])
        ]
        first = [start for starts in self._starts for start in starts]
        self._phases = sorted({start % self._step for start in first}) if by_rows else [0]
        self._more = max(first) // self._step if by_rows else 0
        width = self.out[1] * spec.pool[1] * kw * c  # elements of a row of columns by rows
        row = width * (len(self._phases) if by_rows else spec.pool[0] * kh)
        kernel = kh * kw * c
        result = self.out[1] * prod(spec.pool) * outputs
        room = max(COLUMNS_BYTES, kernel * outputs * x.dtype.itemsize) if host else DEVICE_BYTES
        most = room // (max(1, row + result) * x.dtype.itemsize)  # rows of the result
        self.count = max(1, min(n, most // max(1, self.out[0] + self._more)))
        self._strip_rows = max(1, min(self.out[0], most - self._more))
        size = 0 if self._is_pixels else self.count * (self._strip_rows + self._more) * row
        self._memory: Array = xp.empty((size,), x.dtype)
        # receives a block's images; around it is a border of zeros
        self._inner: Array | None = None
        self._bordered, height = x, h + 2 * top
        if by_rows:
            height = max(height, self._step * (self.out[0] + self._more))
        if height > h or left:
            self._bordered = xp.zeros((self.count, height, w + 2 * left, c), x.dtype)
            self._inner = self._bordered[:, top : top + h, left : left + w]

    def blocks(self) -> Iterator[slice]:
        """Yield the images of one block after another."""
        for start in range(0, len(self._x), self.count):
            yield slice(start, min(start + self.count, len(self._x)))

    def strips(self, block: slice, fill: bool = True) -> Iterator[Strip]:
        """Yield the columns of a block's images, strip by strip.

        They overwrite the previous ones, or are the images themselves. Without `fill` their values
        are undefined.
        """
        height, n = self.out[0], block.stop - block.start
        if self._is_pixels:
            pixels = _pixels(self._x[block])
            yield Strip(slice(0, height), len(pixels), [(slice(len(pixels)), [pixels])])
            return
        images = self._bordered[block if self._inner is None else slice(n)]
        if self._inner is not None and fill:
            copy(self._xp, self._inner[:n], self._x[block])
        make = self._joined if self.parts == 1 else self._by_rows
        for start in range(0, height, self._strip_rows):
            rows = slice(start, min(start + self._strip_rows, height))
            count = prod(self._spec.pool) * n * (rows.stop - start) * self.out[1]
            yield Strip(rows, count, make(images, rows, fill))

    def _joined(self, images: Array, rows: slice, fill: bool) -> RunsOfPixels:
        """Copy whole windows: one matrix (pool_h pool_w images rows columns, kh kw c)."""
        spec = self._spec
        # (n, out_h, out_w, kh, kw, c), then (pool_h, pool_w, n, rows, columns, kh, kw, c)
        seen = corners(windows(images, spec.kernel, spec.stride, spec.dilation), spec.pool)
        seen = seen[:, :, :, rows]
        terms, pixels = prod(seen.shape[5:]), prod(seen.shape[:5])
        memory = self._memory[: pixels * terms]
        if self._short:
            # (kh, kw, c, pool_h, pool_w, n, rows, columns)
            seen = seen.transpose(5, 6, 7, 0, 1, 2, 3, 4)
        if fill:
            copy(self._xp, memory.reshape(seen.shape), seen)
        matrix = memory.reshape(terms, pixels).T if self._short else memory.reshape(pixels, terms)
        return [(slice(pixels), [matrix])]

    def _by_rows(self, images: Array, rows: slice, fill: bool) -> RunsOfPixels:
        """Copy the windows' rows: (phases, pool_w, images, rows, columns, kw c)."""
        spec, n, step, c = self._spec, len(images), self._step, images.shape[3]
        kw, pool = spec.kernel[1], spec.pool[1]
        count, columns = rows.stop - rows.start, self.out[1]
        shape = (len(self._phases), pool, n, count + self._more, columns, kw * c)
        memory = self._memory[: prod(shape)].reshape(shape)
        for number, phase in enumerate(self._phases if fill else ()):
            strip = images[:, phase + rows.start * step :]
            seen = windows(strip, (1, kw), (step, spec.stride[1]), (1, spec.dilation[1]))
            for j in range(pool):
                target = memory[number, j].reshape(*shape[2:5], kw, c)
                part = seen[:, : shape[3], j : j + (columns - 1) * pool + 1 : pool, 0]
                self._xp.copyto(target, part)
        size, products = n * count * columns, RunsOfPixels()
        for starts in self._starts:
            for j in range(pool):
                matrices = []
                for start in starts:
                    skip = start // step
                    seen = memory[self._phases.index(start % step), j, :, skip : skip + count]
                    matrices.append(seen.reshape(n, count * columns, kw * c))
                begin = len(products) * size
                products.append((slice(begin, begin + size), matrices))
        return products


class ProductSum:
    """A sum of products of matrices, or of stacks of them.

    Args:
        xp: the library that computes.
        total: the array for the sum, of a product's shape.
    """

    def __init__(self, xp: Any, total: Array) -> None:
        self._xp, self._total, self._begun = xp, total, False

    def add(self, left: Array, right: Array) -> None:
        """Add left @ right."""
        gemm(self._xp, left, right, self._total, self._begun)
        self._begun = True

    def finish(self) -> Array:
        """Return the sum; zeros if nothing was added."""
        if not self._begun:
            self._xp.copyto(self._total, 0)
        return self._total


class Phase(NamedTuple):
    """Some pixels of an axis of the images, `stride` apart, which see the same kernel elements.

    Their gradient is a convolution of the result's gradient with these elements.

    Attributes:
        pixels: of the images.
        taps: elements of the kernels; none if no window sees these pixels.
        dilation: of the convolution.
        start, stop: of the result's pixels with a border, which these pixels see.
    """

    pixels: slice
    taps: slice
    dilation: int = 1
    start: int = 0
    stop: int = 0


def _phases(
    size: int, out: int, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[list[Phase], int]:
    """Return the phases of an axis of images with so many pixels, and the border that they need.

    Pixel q stride + phase of the images with their border is seen through kernel element r by the
    window q - (r dilation - phase) / stride, if that is a whole number.
    """
    phases = []
    for phase in range(stride):
        first, last = -((phase - padding) // stride), (padding + size - 1 - phase) // stride
        pixels = slice(first * stride + phase - padding, size, stride)
        taps = [r for r in range(kernel) if (r * dilation - phase) % stride == 0]
        if not taps:
            phases.append(Phase(pixels, slice(0)))
            continue
        step = taps[1] - taps[0] if len(taps) > 1 else 1
        nearest, furthest = ((r * dilation - phase) // stride for r in (taps[0], taps[-1]))
        elements, apart = slice(taps[0], taps[-1] + 1, step), max(1, step * dilation // stride)
        phases.append(Phase(pixels, elements, apart, first - furthest, last - nearest + 1))
    border = max(0, *(max(-item.start, item.stop - out) for item in phases))
    return [
        item._replace(start=item.start + border, stop=item.stop + border) for item in phases
    ], border


def input_gradient(
    xp: Any,
    grad: Array,
    weight: Array,
    spec: ConvSpec,
    out: Array,
    algorithm: Callable[[ConvSpec], ConvAlgorithm],
) -> None:
    """Write the input gradient of any convolution, phase by phase, see `Phase`.

    For stride 1, dx[i, j] = sum over r, s of dy[i + top - r d, j + left - s d] W[r, s]^T. With a
    stride, the phases see different pixels of one copy of dy with a border: none computes more
    results than it has pixels.

    Args:
        xp: the library that computes.
        grad: of the result, (n, out_h, out_w, o), contiguous.
        weight: (kh, kw, c / groups, o).
        spec: the convolution.
        out: (n, h, w, c).
        algorithm: computes each phase.
    """
    (c, o), groups, (height, width) = weight.shape[2:], spec.groups, grad.shape[1:3]
    (rows, top), (columns, left) = (
        _phases(*axis) for axis in zip(out.shape[1:3], (height, width), *spec[:4], strict=True)
    )
    padding = top, left
    if spec.stride != (1, 1) and padding != (0, 0):
        inner, padding = grad, (0, 0)
        grad = xp.zeros((len(grad), height + 2 * top, width + 2 * left, o), grad.dtype)
        copy(xp, grad[:, top : top + height, left : left + width], inner)
    for row, column in product(rows, columns):
        target, part = out[:, row.pixels, column.pixels], weight[row.taps, column.taps]
        if not part.size or not target.size:
            xp.copyto(target, 0)
            continue
        kernel = part.shape[:2]
        turned = xp.empty((*kernel, o // groups, groups, c), grad.dtype)
        apart = part.reshape(*kernel, c, groups, o // groups)[::-1, ::-1]
        copy(xp, turned, apart.transpose(0, 1, 4, 3, 2))
        convolution = ConvSpec(kernel, (1, 1), padding, (row.dilation, column.dilation), groups)
        seen = grad[:, row.start : row.stop, column.start : column.stop]
        plane = target if target.flags.c_contiguous else xp.empty(target.shape, out.dtype)
        kernels = turned.reshape(*kernel, o // groups, groups * c)
        algorithm(convolution).forward(xp, seen, kernels, None, plane, False)
        if plane is not target:
            copy(xp, target, plane)


class Im2col(ConvAlgorithm):
    """Any convolution without ReLU and pooling, group by group."""

    def forward(
        self, xp: Any, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool
    ) -> None:
        for inputs, outputs in _groups(self.spec, x.shape[3], weight.shape[3]):
            result = y[..., outputs]  # (n, out_h, out_w, o / groups)
            kernel = _matrix(xp, cast(xp, weight[..., outputs], x.dtype))
            columns = Columns(xp, x[..., inputs], self.spec, kernel.shape[1])
            for block in columns.blocks():
                for strip in columns.strips(block):
                    place = _pixels(result[block][:, strip.rows])
                    strip.multiply(xp, _parts(kernel, columns), place)
        if bias is not None:
            add_bias(xp, y, bias)

    def backward(
        self, xp: Any, grad: Array, x: Array, weight: Array, kept: None, out: Gradients
    ) -> None:
        spec = self.spec
        grad = cast(xp, xp.ascontiguousarray(grad), x.dtype)
        if out.bias is not None and xp.__name__ == "numpy":  # first over images, in long additions
            sums = row_sum(xp, grad.reshape(len(grad), prod(grad.shape[1:])))
            row_sum(xp, sums.reshape(prod(grad.shape[1:3]), grad.shape[3]), out=out.bias)
        elif out.bias is not None:
            bias_grad(xp, _pixels(grad), out.bias)
        if out.x is not None:
            input_gradient(xp, grad, weight, spec, out.x, Im2col)
        for inputs, outputs in (
            _groups(spec, x.shape[3], weight.shape[3]) if out.weight is not None else ()
        ):
            sent, place = grad[..., outputs], out.weight[..., outputs]  # type: ignore[index]
            shape = (prod(place.shape[:3]), place.shape[3])  # (kh kw c / groups, o / groups)
            # a group's outputs are not contiguous in `place`: a product cannot be written there
            summed = place.reshape(shape) if spec.groups == 1 else xp.empty(shape, place.dtype)
            columns = Columns(xp, x[..., inputs], spec, shape[1])
            totals = [ProductSum(xp, part) for part in _parts(summed, columns)]
            for block in columns.blocks():
                for strip in columns.strips(block):
                    strip.add_to(totals, _pixels(sent[block][:, strip.rows]))
            for total in totals:
                total.finish()
            if spec.groups > 1:
                xp.copyto(place, summed.reshape(place.shape))


class Im2colReluPool(ConvAlgorithm):
    """A convolution in one group with ReLU, and with max-pooling if there is some."""

    def forward(
        self, xp: Any, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool
    ) -> Array | None:
        o, places = weight.shape[3], prod(self.spec.pool)
        columns = Columns(xp, x, self.spec, o)
        row = columns.out[1] * o  # elements of y
        image = columns.out[0] * row
        flat = flattened(y)
        planes = Planes(xp, places, columns.count * image)
        winner: Array | None = xp.empty((y.size,), planes.dtype) if keep else None
        kernel = _matrix(xp, weight)
        # without a pooling the product goes straight to y
        memory = xp.empty((places * columns.count * image,), x.dtype) if places > 1 else None
        biases = None if bias is None else repeated(xp, bias, columns.count * prod(columns.out))
        for block in columns.blocks():
            for strip in columns.strips(block):
                start = block.start * image + strip.rows.start * row
                size = strip.pixels * o // places
                h = flat[start : start + size]
                z = (h if memory is None else memory[: places * size]).reshape(places, size)
                strip.multiply(xp, _parts(kernel, columns), z.reshape(strip.pixels, o))
                won = None if winner is None else winner[start : start + size]
                if won is not None:
                    xp.copyto(won, 0)
                if places > 1:
                    planes.largest(z, h, won)
                planes.bias_relu(biases, h, won)
        return winner

    def backward(
        self, xp: Any, grad: Array, x: Array, weight: Array, kept: Array, out: Gradients
    ) -> None:
        spec, (n, height, width, o), dtype = self.spec, grad.shape, x.dtype
        places, row = prod(spec.pool), width * o
        flat = xp.reshape(grad, (grad.size,))
        columns = Columns(xp, x, spec, o)
        memory = xp.empty((places * columns.count * height * row,), dtype)
        planes = Planes(xp, places, columns.count * height * row)
        to_weight = []
        if out.weight is not None:
            whole = out.weight.reshape(prod(weight.shape[:3]), o)
            to_weight = [ProductSum(xp, part) for part in _parts(whole, columns)]
        to_bias = None if out.bias is None else ProductSum(xp, out.bias)
        ones = xp.ones(places * columns.count * height * width, dtype)
        spread = None  # dy of all images, for that of x
        if out.x is not None:
            spread = xp.zeros((n, *spec._replace(pool=(1, 1)).pooled_size(*x.shape[1:3]), o), dtype)
        for block in columns.blocks():
            for strip in columns.strips(block, bool(to_weight)):
                start = (block.start * height + strip.rows.start) * row
                size = strip.pixels * o // places
                dy = memory[: places * size].reshape(places, size)
                planes.gradient(flat[start : start + size], kept[start : start + size], dy)
                pixels = dy.reshape(strip.pixels, o)  # in the order of the columns
                if to_weight:
                    strip.add_to(to_weight, pixels)
                if to_bias is not None:
                    to_bias.add(ones[: len(pixels)], pixels)
                if spread is not None:
                    target = corners(spread, spec.pool)[:, :, block, strip.rows]
                    copy(xp, target, dy.reshape(target.shape))
        for item in (*to_weight, to_bias):
            if item is not None:
                item.finish()
        if out.x is not None and spread is not None:
            input_gradient(xp, spread, weight, spec, out.x, Im2col)


def _groups(spec: ConvSpec, c: int, o: int) -> Iterator[tuple[slice, slice]]:
    c, o = c // spec.groups, o // spec.groups
    for g in range(spec.groups):
        yield slice(g * c, (g + 1) * c), slice(g * o, (g + 1) * o)


def _parts(kernel: Array, columns: Columns) -> Array:
    """Return kernels (kh kw c, o) as a view (parts, terms, o)."""
    return kernel.reshape(columns.parts, len(kernel) // columns.parts, kernel.shape[1])


def _matrix(xp: Any, weight: Array) -> Array:
    """Return kernels (kh, kw, c, o) as a matrix (kh kw c, o)."""
    return xp.reshape(weight, (prod(weight.shape[:3]), weight.shape[3]))


def _pixels(images: Array) -> Array:
    """Return images (n, h, w, c) as a view (pixels, c)."""
    # not -1: there may be no elements
    return images.reshape(prod(images.shape[:3]), images.shape[3])
