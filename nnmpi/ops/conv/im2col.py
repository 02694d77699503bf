"""Convolution by im2col: each window's pixels become a row of a matrix, and a product follows.

    images (n, h, w, c)                kernels (kh, kw, c, o)
       |  a block of images               |  viewed as a matrix
       v                                  v
    columns (pixels, kh kw c)     @    (kh kw c, o)     =    (pixels, o), or (n, out_h, out_w, o)

    dW = columns^T dy, summed over blocks       columns are made again: saving them costs more
    dx = columns of dy @ flipped kernels        for a stride, by the pixels that see the same
                                                elements of the kernels (see `Phase`)

A block is a few images, or some rows of a large one, so that on the host the columns stay in the
processor's cache between the copy and the product.

If a window's rows are short (few channels), the matrix is stored transposed, and the copy runs
along the images' rows instead.

A device adds up float16 and bfloat16 in float32, and keeps the kernels' gradient in float32.
"""

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.gemm import gemm
from nnmpi.backend.kernels import add_bias, bias_grad, cast, copy
from nnmpi.backend.planes import flattened
from nnmpi.backend.sums import repeated, row_sum, slices
from nnmpi.backend.windows import windows
from nnmpi.ops.conv.algorithm import ConvAlgorithm, ConvSpec, Gradients

# Bytes of a block's columns and result: about half of a usual second-level cache. With larger
# kernels a block has the size of the kernels.
COLUMNS_BYTES = 3 << 18
DEVICE_BYTES = 1 << 28  # the same on a device, which needs larger products to be busy
SHORT_RUN = 24  # elements


class Columns:
    """The columns of one block of images after another, in the same memory.

        for pixels, matrix in columns:      a block of images, or some rows of one of them

        pixels: an index of the result: (images, rows)
        matrix: their windows (images rows columns, kh kw c)

    Args:
        x: all images, (n, h, w, c). Without padding, windows are views of them, not of a copy.
        spec: the convolution.
        outputs: elements of the result per row of columns.
        room: bytes of a block's columns and result on the host.

    Attributes:
        length: the most rows of a matrix.
    """

    def __init__(self, x: Array, spec: ConvSpec, outputs: int, room: int = COLUMNS_BYTES) -> None:
        self._x, self._spec = x, spec
        (n, h, w, c), (top, left) = x.shape, spec.padding
        self._height, width = spec.pooled_size(h, w)
        # each window is one pixel: the images are the columns
        alone = spec[:3] == ((1, 1), (1, 1), (0, 0))
        self._is_pixels = alone and x.flags.c_contiguous
        self._short, host = spec.kernel[1] * c < SHORT_RUN, isinstance(x, np.ndarray)
        terms, row = prod(spec.kernel) * c, width
        room = max(room, terms * outputs * x.dtype.itemsize) if host else DEVICE_BYTES
        most = room // (max(1, row * (terms + outputs)) * x.dtype.itemsize)  # rows of the result
        self._count = max(1, min(n, most // max(1, self._height)))
        self._rows = max(1, min(self._height, most))
        self.length = self._count * self._rows * row
        size = 0 if self._is_pixels else self.length * terms
        self._memory: Array = np.empty((size,), x.dtype, like=x)
        # receives a block's images; around it is a border of zeros
        self._inner: Array | None = None
        self._bordered = x
        if top or left:
            self._bordered = np.zeros((self._count, h + 2 * top, w + 2 * left, c), x.dtype, like=x)
            self._inner = self._bordered[:, top : top + h, left : left + w]

    def __iter__(self) -> Iterator[tuple[tuple[slice, slice], Array]]:
        """Copy and yield the columns of some pixels; those yielded before become undefined."""
        n, height, spec = len(self._x), self._height, self._spec
        for block in slices(n, self._count):
            if self._is_pixels:
                yield (block, slice(height)), pixel_rows(self._x[block])
                continue
            images = self._bordered[block]
            if self._inner is not None:
                images = self._bordered[: block.stop - block.start]
                copy(self._inner[: len(images)], self._x[block])
            # (n, out_h, out_w, kh, kw, c)
            seen = windows(images, spec.kernel, spec.stride, spec.dilation)
            for rows in slices(height, self._rows):
                part = seen[:, rows]
                pixels, terms = prod(part.shape[:3]), prod(part.shape[3:])
                memory = self._memory[: pixels * terms]
                if self._short:
                    part = part.transpose(3, 4, 5, 0, 1, 2)
                copy(memory.reshape(part.shape), part)
                matrix = (
                    memory.reshape(terms, pixels).T
                    if self._short
                    else memory.reshape(pixels, terms)
                )
                yield (block, rows), matrix


class ProductSum:
    """A sum of products of matrices, or of stacks of them.

    Args:
        total: the array for the sum, of a product's shape.
        multiply: writes or adds one of them, as `gemm` does.
    """

    def __init__(self, total: Array, multiply: Callable[..., object] = gemm) -> None:
        self._total, self._multiply, self._begun = total, multiply, False

    def add(self, left: Array, right: Array) -> None:
        """Add left @ right."""
        self._multiply(left, right, self._total, self._begun)
        self._begun = True

    def finish(self) -> Array:
        """Return the sum; zeros if nothing was added."""
        if not self._begun:
            np.copyto(self._total, 0)
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
        grad: of the result, (n, out_h, out_w, o), contiguous.
        weight: (kh, kw, c / groups, o).
        spec: the convolution.
        out: (n, h, w, c).
        algorithm: computes each phase.
    """
    xp = namespace(grad)
    (c, o), groups, (height, width) = weight.shape[2:], spec.groups, grad.shape[1:3]
    (rows, top), (columns, left) = (
        _phases(*axis) for axis in zip(out.shape[1:3], (height, width), *spec[:4], strict=True)
    )
    padding = top, left
    if spec.stride != (1, 1) and padding != (0, 0):
        inner, padding = grad, (0, 0)
        grad = xp.zeros((len(grad), height + 2 * top, width + 2 * left, o), grad.dtype)
        copy(grad[:, top : top + height, left : left + width], inner)
    for row, column in product(rows, columns):
        target, part = out[:, row.pixels, column.pixels], weight[row.taps, column.taps]
        if not part.size or not target.size:
            np.copyto(target, 0)
            continue
        kernel = part.shape[:2]
        turned = xp.empty((*kernel, o // groups, groups, c), grad.dtype)
        apart = part.reshape(*kernel, c, groups, o // groups)[::-1, ::-1]
        copy(turned, apart.transpose(0, 1, 4, 3, 2))
        convolution = ConvSpec(kernel, (1, 1), padding, (row.dilation, column.dilation), groups)
        seen = grad[:, row.start : row.stop, column.start : column.stop]
        plane = target if target.flags.c_contiguous else xp.empty(target.shape, out.dtype)
        kernels = turned.reshape(*kernel, o // groups, groups * c)
        algorithm(convolution).forward(seen, kernels, None, plane, False)
        if plane is not target:
            copy(target, plane)


class Im2col(ConvAlgorithm):
    """Any convolution without ReLU and pooling, group by group."""

    def forward(self, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool) -> None:
        xp = namespace(x)
        biases: Array | None = None  # added while a block is in the cache
        in_blocks = self.spec.groups == 1 and xp.__name__ == "numpy"
        for inputs, outputs in _groups(self.spec, x.shape[3], weight.shape[3]):
            result = y[..., outputs]  # (n, out_h, out_w, o / groups)
            kernel = pixel_rows(cast(weight[..., outputs], x.dtype))
            blocks = Columns(x[..., inputs], self.spec, kernel.shape[1])
            if bias is not None and in_blocks:
                biases = repeated(bias, blocks.length)
            for pixels, columns in blocks:
                gemm(columns, kernel, pixel_rows(result[pixels]))
                if biases is not None:
                    part = flattened(y[pixels])
                    np.add(part, biases[: len(part)], out=part)
        if bias is not None and biases is None:
            add_bias(y, bias)

    def backward(self, grad: Array, x: Array, weight: Array, kept: None, out: Gradients) -> None:
        xp = namespace(grad)
        spec = self.spec
        grad = cast(xp.ascontiguousarray(grad), x.dtype)
        if out.bias is not None:
            bias_gradient(grad, out.bias)
        if out.x is not None:
            input_gradient(grad, weight, spec, out.x, Im2col)
        for inputs, outputs in (
            _groups(spec, x.shape[3], weight.shape[3]) if out.weight is not None else ()
        ):
            sent, place = grad[..., outputs], out.weight[..., outputs]  # type: ignore[index]
            shape = (prod(place.shape[:3]), place.shape[3])  # (kh kw c / groups, o / groups)
            # a group's outputs are not contiguous in `place`: a product cannot be written there
            summed = place.reshape(shape) if spec.groups == 1 else xp.empty(shape, place.dtype)
            total = ProductSum(summed)
            for pixels, columns in Columns(x[..., inputs], spec, shape[1]):
                total.add(columns.T, pixel_rows(sent[pixels]))
            total.finish()
            if spec.groups > 1:
                np.copyto(place, summed.reshape(place.shape))


def bias_gradient(grad: Array, out: Array) -> None:
    """Write the sum of a contiguous gradient (n, h, w, o) over all pixels of all images."""
    if isinstance(grad, np.ndarray):  # first over images, in long additions
        sums = row_sum(grad.reshape(len(grad), prod(grad.shape[1:])))
        row_sum(sums.reshape(prod(grad.shape[1:3]), grad.shape[3]), out=out)
    else:
        bias_grad(pixel_rows(grad), out)


def _groups(spec: ConvSpec, c: int, o: int) -> Iterator[tuple[slice, slice]]:
    c, o = c // spec.groups, o // spec.groups
    for g in range(spec.groups):
        yield slice(g * c, (g + 1) * c), slice(g * o, (g + 1) * o)


def pixel_rows(images: Array) -> Array:
    """Return images (n, h, w, c) as a view (pixels, c); kernels (kh, kw, c, o) as (kh kw c, o)."""
    # not -1: there may be no elements
    return images.reshape(prod(images.shape[:3]), images.shape[3])
