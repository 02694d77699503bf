"""Convolution of device arrays as products of matrices: windows copied into the rows of a matrix, and back.

    forward            columns(x) @ W                    W seen as (kh kw c, o)
    kernels' gradient  columns(x)^T @ dy                 added up over the blocks of images by the product itself
    images' gradient   columns(dy) @ flipped W           for stride 1: a convolution too, rounded once
                       col2im(dy @ W^T)                  otherwise: each pixel gathers what windows that saw it send

A few images at a time, or some rows of a large one, so that their columns take no more than COLUMNS_BYTES. A 1 x 1
convolution needs no columns: its images are the matrix. Groups are put one behind the other first, so that all of them
are one product of stacks:

    (count, h, w, groups, c)  -->  (groups, count, h, w, c)  -->  columns (groups, pixels, kh kw c)

float16 and bfloat16 are added up in float32, and the kernels' gradient stays float32.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.cuda.kernels import DeviceFunctions
from nnmpi.backend.gemm import gemm
from nnmpi.backend.kernels.lookup import cast
from nnmpi.backend.precision import is_low
from nnmpi.backend.windows import Pair
from nnmpi.ops.conv.algorithm import ConvSpec
from nnmpi.ops.conv.device_conv import DeviceAlgorithm

COLUMNS_BYTES = 1 << 28  # of one block's columns


class DeviceIm2col(DeviceAlgorithm):
    """The three products of a convolution, by the device's kernels and cuBLAS."""

    __slots__ = ()

    def convolve(self, x: Array, weight: Array, bias: Array | None, relu: bool, y: Array) -> None:
        """Write conv(x) + bias, and its positive part if there is a ReLU, to y; see `DeviceAlgorithm`."""
        if y.size:
            self._multiply_columns(x, self._stacked(weight, x.dtype), self.spec, y)
            finish(self.functions, y, bias, relu)

    def input_gradient(self, grad: Array, weight: Array, out: Array) -> None:
        """Write the images' gradient; see `DeviceAlgorithm`."""
        if grad.size == 0:
            out.fill(0)
        elif out.size == 0:
            return
        elif self.spec.reversible:
            self._multiply_columns(grad, self._flipped(weight, grad.dtype), self.spec.backwards(), out)
        else:
            self._scatter(grad, weight, out)

    def weight_gradient(self, x: Array, grad: Array, out: Array, add: bool) -> None:
        """Write the kernels' gradient, or add it; see `DeviceAlgorithm`."""
        xp, groups, (kh, kw, c, o) = namespace(x), self.spec.groups, out.shape
        total, begun = out.reshape(1, kh * kw * c, o), add
        if grad.size == 0 or x.size == 0:
            if not add:
                out.fill(0)
            return
        if groups > 1:
            total, begun = xp.empty((groups, kh * kw * c, o // groups), out.dtype), False
        for images, lines in _blocks(grad.shape, kh * kw * x.shape[3] * x.dtype.itemsize):
            columns = self._columns(x[images], self.spec, lines)  # (groups, pixels, kh kw c)
            sent = self._by_group(grad[images, lines]).reshape(groups, columns.shape[1], o // groups)
            _multiply(xp, columns.swapaxes(1, 2), sent, total, begun)
            begun = True
        if groups > 1:
            place = out.reshape(kh * kw * c, groups, o // groups)
            store(place, total.transpose(1, 0, 2), add)

    def _multiply_columns(self, x: Array, kernel: Array, spec: ConvSpec, y: Array) -> None:
        """Write the convolution of images with stacked kernels (groups, kh kw c, o) to y."""
        xp, groups, o = namespace(x), self.spec.groups, y.shape[3]
        for images, lines in _blocks(y.shape, kernel.shape[1] * groups * x.dtype.itemsize):
            columns, part = self._columns(x[images], spec, lines), y[images, lines]
            pixels = columns.shape[1]
            if groups == 1:
                _multiply(xp, columns, kernel, part.reshape(1, pixels, o))
                continue
            result = xp.empty((groups, pixels, o // groups), y.dtype)
            _multiply(xp, columns, kernel, result)
            xp.copyto(part.reshape(pixels, groups, o // groups), result.transpose(1, 0, 2))

    def _columns(self, x: Array, spec: ConvSpec, lines: slice) -> Array:
        """Return what each window in some rows of windows over a block of images sees, (groups, pixels, kh kw c)."""
        if lines.stop - lines.start < spec.conv_size(*x.shape[1:3])[0]:
            x, spec = _cut(x, spec, lines)
        (n, h, w, c), groups = x.shape, self.spec.groups
        height, width = spec.conv_size(h, w)
        images, terms = self._by_group(x), prod(spec.kernel) * c // groups
        if spec[:3] == ((1, 1), (1, 1), (0, 0)):  # a 1 x 1 convolution: the images are the matrix
            return images.reshape(groups, n * h * w, terms)
        columns: Array = namespace(x).empty((groups * n * height * width, terms), x.dtype)
        self.functions.im2col(images, columns, *spec[:4])
        return columns.reshape(groups, n * height * width, terms)

    def _by_group(self, x: Array) -> Array:
        """Return images (n, h, w, c) with a group's channels side by side: (groups n, h, w, c / groups)."""
        groups, (n, h, w, c) = self.spec.groups, x.shape
        if groups == 1:
            return x
        xp = namespace(x)
        memory: Array = xp.empty((groups, n, h, w, c // groups), x.dtype)
        xp.copyto(memory, x.reshape(n, h, w, groups, c // groups).transpose(3, 0, 1, 2, 4))
        return memory.reshape(groups * n, h, w, c // groups)

    def _stacked(self, weight: Array, dtype: np.dtype[Any]) -> Array:
        """Return the kernels as matrices (groups, kh kw c, o / groups)."""
        xp, groups, (kh, kw, c, o) = namespace(weight), self.spec.groups, weight.shape
        if groups == 1:
            return cast(xp, weight, dtype).reshape(1, kh * kw * c, o)
        kernel: Array = xp.empty((groups, kh * kw * c, o // groups), dtype)
        columns = xp.reshape(weight, (kh * kw * c, groups, o // groups))
        xp.copyto(kernel, columns.transpose(1, 0, 2), casting="unsafe")
        return kernel

    def _flipped(self, weight: Array, dtype: np.dtype[Any]) -> Array:
        """Return the stacked kernels (groups, kh kw o, c) that take the result's gradient back to the images."""
        xp, groups, (kh, kw, c, o) = namespace(weight), self.spec.groups, weight.shape
        kernel: Array = xp.empty((groups, kh, kw, o // groups, c), dtype)
        turned = xp.reshape(weight, (kh, kw, c, groups, o // groups))[::-1, ::-1].transpose(3, 0, 1, 4, 2)
        xp.copyto(kernel, turned, casting="unsafe")
        return kernel.reshape(groups, kh * kw * (o // groups), c)

    def _scatter(self, grad: Array, weight: Array, out: Array) -> None:
        """Write the images' gradient of a convolution with strides: products first, then sums over the windows."""
        xp, groups, (kh, kw, c, o) = namespace(grad), self.spec.groups, weight.shape
        (_, h, w, _), spec = out.shape, self.spec
        kernel = self._stacked(weight, grad.dtype).swapaxes(1, 2)
        wide = np.dtype(np.float32) if is_low(grad.dtype) else grad.dtype
        for images, lines in _blocks(grad.shape, kh * kw * c * groups * wide.itemsize):
            count, all_lines = images.stop - images.start, lines.stop - lines.start == grad.shape[1]
            sent = self._by_group(grad[images, lines]).reshape(groups, -1, o // groups)  # (groups, pixels, o / groups)
            columns = xp.empty((groups, sent.shape[1], kh * kw * c), wide)
            _multiply(xp, sent, kernel, columns)
            columns = columns.reshape(groups * sent.shape[1], kh * kw * c)
            if groups == 1 and out.dtype == wide and all_lines:
                self.functions.col2im(columns, out[images], *spec[:4])
                continue
            if all_lines or lines.start == 0:  # several blocks of rows add to the same images
                place = (xp.empty if all_lines else xp.zeros)((groups * count, h, w, c), wide)
            if all_lines:
                self.functions.col2im(columns, place, *spec[:4])
            else:
                self._add_lines(columns, place, lines)
            if lines.stop == grad.shape[1]:
                target = out[images].reshape(count, h, w, groups, c)
                xp.copyto(target, place.reshape(groups, count, h, w, c).transpose(1, 2, 3, 0, 4), casting="unsafe")

    def _add_lines(self, columns: Array, place: Array, lines: slice) -> None:
        """Add what some rows of windows send back to the rows of pixels that they saw."""
        xp, (n, h, w, c), (first, stop) = namespace(place), place.shape, _rows(self.spec, lines)
        part = xp.empty((n, stop - first, w, c), place.dtype)
        spec = self.spec._replace(padding=(0, self.spec.padding[1]))
        self.functions.col2im(columns, part, *spec[:4])
        inner = slice(max(0, first), min(h, stop))
        if inner.start < inner.stop:
            pixels = place[:, inner]
            xp.add(pixels, part[:, inner.start - first : inner.stop - first], out=pixels)


def finish(functions: DeviceFunctions, y: Array, bias: Array | None, relu: bool) -> None:
    """Add a bias to y in place, and cut it off below 0 if there is a ReLU.

    Args:
        functions: the device's kernels.
        y: (n, out_h, out_w, o), C-contiguous, in place.
        bias: (o,), or None.
        relu: whether there is one.
    """
    if relu:
        xp = namespace(y)
        bias = xp.zeros((y.shape[-1],), y.dtype) if bias is None else bias
        functions.bias_relu(y, bias)
    elif bias is not None:
        functions.bias_add(y, bias)


def store(out: Array, values: Array, add: bool) -> None:
    """Write values to out, in its dtype, or add them there.

    Args:
        out: any shape, in place.
        values: of the same shape; any strides and dtype.
        add: whether they are added to what `out` holds.
    """
    xp = namespace(out)
    if add:
        xp.add(out, cast(xp, values, out.dtype), out=out)
    else:
        xp.copyto(out, values, casting="unsafe")


def _multiply(xp: Any, a: Array, b: Array, out: Array, add: bool = False) -> None:
    """Write, or add, the product of stacks of matrices to out; stacks of one are matrices, which libraries like."""
    if len(a) == 1:
        a, b, out = a[0], b[0], out[0]
    gemm(xp, a, b, out, add)


def _blocks(shape: tuple[int, ...], each: int) -> Iterator[tuple[slice, slice]]:
    """Yield which images and which of their rows of windows are computed at a time.

    Args:
        shape: of all windows, (n, out_h, out_w, any).
        each: bytes of a window's columns.
    """
    (n, height, width), most = shape[:3], COLUMNS_BYTES // max(1, each)  # windows
    count = max(1, min(n, most // max(1, height * width)))
    lines = height if height * width <= most else max(1, most // max(1, width))
    for start in range(0, n, count):
        for line in range(0, height, max(1, lines)):
            yield slice(start, min(start + count, n)), slice(line, min(line + lines, height))


def _rows(spec: ConvSpec, lines: slice) -> Pair:
    """Return the first row of pixels that some rows of windows see, and the one after the last; the border counts."""
    reach = spec.dilation[0] * (spec.kernel[0] - 1) + 1
    first = lines.start * spec.stride[0] - spec.padding[0]
    return first, (lines.stop - 1) * spec.stride[0] - spec.padding[0] + reach


def _cut(x: Array, spec: ConvSpec, lines: slice) -> tuple[Array, ConvSpec]:
    """Return the rows of images that some rows of windows see, with those of the border, and the windows over them."""
    xp, (n, h, w, c), (first, stop) = namespace(x), x.shape, _rows(spec, lines)
    part = xp.zeros((n, stop - first, w, c), x.dtype)
    inner = slice(max(0, first), min(h, stop))
    if inner.start < inner.stop:
        xp.copyto(part[:, inner.start - first : inner.stop - first], x[:, inner])
    return part, spec._replace(padding=(0, spec.padding[1]))
