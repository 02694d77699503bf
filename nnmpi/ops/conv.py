"""Two-dimensional convolution of channels-last images, by im2col and GEMM.

    images  (n, h, w, c)                   kernel (kh, kw, c, o)
       | windows: a view, no copy               |
       v                                        v
    columns (pixels, kh kw c)       @      (kh kw c, o)      ->   (pixels, o) = images (n, out_h, out_w, o)

Columns are made for a few images at a time, so that they stay in the processor's cache between the copy and the GEMM,
and are made again in backward instead of being kept: the copy costs less than the memory. The input's gradient is, for
stride 1, a convolution of the output's gradient with the flipped kernel; otherwise each kernel element's share is
added into place.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from operator import index

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.windows import Pair, bordered, out_size, tap, windows
from nnmpi.errors import ShapeError, UsageError
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import same_dtype
from nnmpi.tensor.tensor import Tensor

COLUMNS_BYTES = 1 << 19  # of one block of columns: half of a usual second-level cache


def _blocks(view: Array) -> Iterator[tuple[slice, Array]]:
    """Yield the columns (pixels, kh kw c) of a few images at a time, with the images' slice. The memory is reused."""
    n, out_h, out_w, kh, kw, c = view.shape
    bytes_each = max(1, out_h * out_w * kh * kw * c * view.dtype.itemsize)
    count = max(1, min(n, COLUMNS_BYTES // bytes_each))
    columns = namespace(view).empty((count, *view.shape[1:]), dtype=view.dtype)
    for start in range(0, n, count):
        images = slice(start, min(start + count, n))
        block = columns[: images.stop - start]
        block[...] = view[images]
        yield images, block.reshape(len(block) * out_h * out_w, kh * kw * c)  # not -1: there may be no elements


def correlate(x: Array, kernel: Array, stride: Pair, dilation: Pair, out: Array) -> Array:
    """Write the correlation of bordered images with a kernel to `out` and return it.

    Args:
        x: (n, h, w, c), with its border.
        kernel: (kh, kw, c, o).
        out: (n, out_h, out_w, o); its images must be contiguous, or its last axis a slice of longer ones.
    """
    outputs = kernel.shape[-1]
    matrix = kernel.reshape(prod(kernel.shape[:-1]), outputs)
    xp = namespace(x)
    view = windows(x, (kernel.shape[0], kernel.shape[1]), stride, dilation)
    direct = out.flags.c_contiguous
    for images, columns in _blocks(view):
        if direct:
            xp.matmul(columns, matrix, out=out[images].reshape(len(columns), outputs))
        else:
            out[images] = (columns @ matrix).reshape(out[images].shape)
    return out


class Conv2d(Function):
    """The convolution (in the sense of neural networks: kernels are not flipped) of a batch of images."""

    __slots__ = ("dilation", "groups", "padding", "stride")

    def __init__(self, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> None:
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        n, h, w, _ = x.shape
        kh, kw, _, o = weight.shape
        out_h = out_size(h, kh, self.stride[0], self.padding[0], self.dilation[0])
        out_w = out_size(w, kw, self.stride[1], self.padding[1], self.dilation[1])
        x = bordered(x, self.padding)
        y: Array = namespace(x).empty((n, out_h, out_w, o), dtype=x.dtype)
        for inputs, outputs in self._groups(x.shape[3], o):
            correlate(x[..., inputs], weight[..., outputs], self.stride, self.dilation, y[..., outputs])
        if bias is not None:
            y += bias
        self.saved = (x, weight)
        return y

    def _groups(self, c: int, o: int) -> Iterator[tuple[slice, slice]]:
        """Yield each group's slice of the input channels and of the output channels."""
        c, o = c // self.groups, o // self.groups
        for g in range(self.groups):
            yield slice(g * c, (g + 1) * c), slice(g * o, (g + 1) * o)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        x, weight = self.saved
        xp = namespace(grad)
        grad = xp.ascontiguousarray(grad)
        to_x = self._input_gradient(grad, x, weight) if self.needs[0] else None
        to_weight = self._weight_gradient(grad, x, weight) if self.needs[1] else None
        rows = grad.reshape(prod(grad.shape[:3]), grad.shape[3])
        to_bias = xp.sum(rows, axis=0, out=self.into(2)) if self.needs[2] else None
        return to_x, to_weight, to_bias

    def _weight_gradient(self, grad: Array, x: Array, weight: Array) -> Array:
        """The sum over pixels of column times output gradient: columns^T grad, block by block."""
        result = self.into(1)
        result = namespace(grad).empty_like(weight) if result is None else result
        result[...] = 0
        kernel = (weight.shape[0], weight.shape[1])
        for inputs, outputs in self._groups(x.shape[3], grad.shape[3]):
            part = result[..., outputs]
            for images, columns in _blocks(windows(x[..., inputs], kernel, self.stride, self.dilation)):
                share = columns.T @ grad[images][..., outputs].reshape(len(columns), part.shape[-1])
                part += share.reshape(part.shape)
        return result

    def _input_gradient(self, grad: Array, x: Array, weight: Array) -> Array:
        xp = namespace(grad)
        (ph, pw), (kh, kw) = self.padding, weight.shape[:2]
        around = (self.dilation[0] * (kh - 1) - ph, self.dilation[1] * (kw - 1) - pw)
        n, h, w, c = x.shape
        inner = (n, h - 2 * ph, w - 2 * pw, c)
        if self.stride == (1, 1) and min(around) >= 0:
            result: Array = xp.empty(inner, dtype=grad.dtype)
            spread = bordered(grad, around)
            for inputs, outputs in self._groups(c, grad.shape[3]):
                flipped = xp.ascontiguousarray(weight[::-1, ::-1, :, outputs].swapaxes(2, 3))
                correlate(spread[..., outputs], flipped, (1, 1), self.dilation, result[..., inputs])
            return result
        whole: Array = xp.zeros_like(x)
        for inputs, outputs in self._groups(c, grad.shape[3]):
            self._scatter(grad[..., outputs], weight[..., outputs], whole[..., inputs])
        return whole[:, ph : ph + inner[1], pw : pw + inner[2]]

    def _scatter(self, grad: Array, weight: Array, spread: Array) -> None:
        """Add each kernel element's share of the input gradient to the pixels that it saw."""
        out = (grad.shape[1], grad.shape[2])
        rows = grad.reshape(prod(grad.shape[:3]), grad.shape[3])
        for i in range(weight.shape[0]):
            for j in range(weight.shape[1]):
                seen = tap(spread, (i, j), out, self.stride, self.dilation)
                seen += (rows @ weight[i, j].T).reshape(seen.shape)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
) -> Tensor:
    """Return the two-dimensional convolution of images with a bank of kernels.

    Args:
        x: images, (batch, height, width, in).
        weight: kernels, (kernel_height, kernel_width, in / groups, out).
        bias: (out,), or None.
        stride, padding, dilation: one number, or one for rows and one for columns. Padding is with zeros.
        groups: the channels are cut into this many groups that do not mix.

    Returns:
        (batch, out_height, out_width, out), out_height = (height + 2 padding - dilation (kernel - 1) - 1) / stride + 1.

    Raises:
        ShapeError: when the shapes do not fit one another, or the kernel does not fit the image.
        DtypeError: when x, weight and bias differ in dtype.
        UsageError: for a stride or dilation below 1, a negative padding, or groups that do not divide the channels.
    """
    stride, padding, dilation = pair("stride", stride, 1), pair("padding", padding, 0), pair("dilation", dilation, 1)
    _check(x, weight, bias, groups)
    for axis, name in ((0, "height"), (1, "width")):
        kernel, size = weight.shape[axis], x.shape[axis + 1]
        if out_size(size, kernel, stride[axis], padding[axis], dilation[axis]) < 1:
            reach = dilation[axis] * (kernel - 1) + 1
            raise ShapeError(
                f"a kernel that reaches over {reach} pixels does not fit a {name} of {size} + 2 * {padding[axis]}"
            )
    return Conv2d(stride, padding, dilation, groups)(x, weight, bias)


def pair(name: str, value: int | Pair, least: int) -> Pair:
    """Return one number as a pair, and check both.

    Raises:
        UsageError: when a value is below `least`, or there are not two.
    """
    given = tuple(value) if isinstance(value, tuple | list) else (value, value)
    try:
        first, second = (index(v) for v in given)
    except (TypeError, ValueError):  # no whole numbers, or not two of them
        first = second = least - 1
    if min(first, second) < least:
        raise UsageError(f"{name} is one whole number of at least {least}, or two, not {value!r}")
    return first, second


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> None:
    if x.ndim != 4:
        raise ShapeError(f"conv2d needs images (batch, height, width, channels), not an array of shape {x.shape}")
    if weight.ndim != 4:
        raise ShapeError(f"conv2d needs a weight (kernel_height, kernel_width, in, out), not {weight.shape}")
    if groups < 1 or x.shape[3] % groups or weight.shape[3] % groups:
        raise UsageError(f"groups {groups} does not divide {x.shape[3]} input and {weight.shape[3]} output channels")
    if weight.shape[2] * groups != x.shape[3]:
        raise ShapeError(
            f"conv2d of images {x.shape} with {groups} groups needs a weight (.., .., {x.shape[3] // groups}, ..), "
            f"not {weight.shape}"
        )
    if bias is not None and bias.shape != weight.shape[3:]:
        raise ShapeError(f"conv2d's bias has shape {bias.shape}; the weight {weight.shape} needs {weight.shape[3:]}")
    same_dtype("conv2d", x, weight, bias)
