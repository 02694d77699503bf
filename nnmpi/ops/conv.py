"""Two-dimensional convolution of channels-last images, by im2col and GEMM.

    images  (n, h, w, c)                   kernel (kh, kw, c, o)
       | columns: a few images at a time        |
       v                                        v
    columns (pixels, kh kw c)       @      (kh kw c, o)      ->   (pixels, o) = images (n, out_h, out_w, o)

The input's gradient is, for stride 1, a convolution of the output's gradient with the flipped kernel; otherwise the
product of the output's gradient with the kernel gives what each window adds to the pixels that it saw.

Device arrays take another way, with kernels of their own or cuDNN (see `device_conv`), and NumPy's arrays are rounded
before and after where half precision is asked for (see `conv_low`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from operator import index

from nnmpi.backend.array import Array
from nnmpi.backend.windows import Pair, out_size
from nnmpi.errors import ShapeError, UsageError
from nnmpi.ops import winograd
from nnmpi.ops.columns import Columns, Frame, repeated
from nnmpi.ops.conv_grad import InputGradient, ProductSum, pixel_sum, scatter
from nnmpi.ops.conv_low import narrowly
from nnmpi.ops.conv_tiles import TiledConv, fits
from nnmpi.ops.device_conv import DeviceConv, device_kernels
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import read_as
from nnmpi.tensor.tensor import Tensor


class Conv2d(Function):
    """The convolution (in the sense of neural networks: kernels are not flipped) of a batch of images."""

    __slots__ = ("dilation", "groups", "padding", "stride")

    replayable = True

    def __init__(self, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> None:
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        xp, frame = self.xp, self._frame(weight)
        rows, columns = frame.out(*x.shape[1:3])
        y: Array = xp.empty((len(x), rows, columns, weight.shape[3]), x.dtype)
        for inputs, outputs in self._groups(x.shape[3], weight.shape[3]):
            part, result = weight[..., outputs], y[..., outputs]
            kernel = xp.reshape(part, (prod(part.shape[:3]), part.shape[3]))
            share = x[..., inputs]
            seen = Columns(xp, share.shape, x.dtype, frame, part.shape[3], whole=share)
            for images in seen.blocks():
                seen.load(share, images)
                for piece in seen.parts(images.stop - images.start):
                    pixels = _pixels(result[images][:, piece.rows])
                    xp.matmul(seen.fill(piece), kernel, out=pixels)
        if bias is not None:
            flat = y.reshape(len(y), prod(y.shape[1:]))
            xp.add(flat, repeated(xp, bias, rows * columns), out=flat)
        self.saved = (x, weight)
        return y

    def _frame(self, weight: Array) -> Frame:
        return Frame((weight.shape[0], weight.shape[1]), self.stride, self.padding, self.dilation)

    def _groups(self, c: int, o: int) -> Iterator[tuple[slice, slice]]:
        """Yield each group's slice of the input channels and of the output channels."""
        c, o = c // self.groups, o // self.groups
        for g in range(self.groups):
            yield slice(g * c, (g + 1) * c), slice(g * o, (g + 1) * o)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        x, weight = self.saved
        xp = self.xp
        grad = xp.reshape(grad, (grad.size,)).reshape(grad.shape)  # without gaps
        return (
            self._input_gradient(grad, x, weight) if self.needs[0] else None,
            self._weight_gradient(grad, x, weight) if self.needs[1] else None,
            pixel_sum(xp, grad, self.into(2)) if self.needs[2] else None,
        )

    def _weight_gradient(self, grad: Array, x: Array, weight: Array) -> Array:
        """The sum over pixels of column times output gradient: columns^T grad, block by block."""
        xp, result = self.xp, self.into(1)
        result = xp.empty(weight.shape, weight.dtype) if result is None else result
        for inputs, outputs in self._groups(x.shape[3], weight.shape[3]):
            part = result[..., outputs]
            matrix = (prod(part.shape[:3]), part.shape[3])
            total = ProductSum(xp, part.reshape(matrix) if self.groups == 1 else xp.empty(matrix, part.dtype))
            share = x[..., inputs]
            seen = Columns(xp, share.shape, x.dtype, self._frame(weight), part.shape[3], whole=share)
            for images in seen.blocks():
                seen.load(share, images)
                for piece in seen.parts(images.stop - images.start):
                    total.add(seen.fill(piece).T, _pixels(grad[images][:, piece.rows, :, outputs]))
            summed = total.finish()
            if self.groups > 1:
                xp.copyto(part, summed.reshape(part.shape))
        return result

    def _input_gradient(self, grad: Array, x: Array, weight: Array) -> Array:
        xp, frame = self.xp, self._frame(weight)
        result: Array = xp.empty(x.shape, x.dtype)
        for inputs, outputs in self._groups(x.shape[3], weight.shape[3]):
            share, part, place = grad[..., outputs], weight[..., outputs], result[..., inputs]
            if frame.reversible:
                back = InputGradient(xp, share.shape, part, frame, place, whole=share)
                for images in back.columns.blocks():
                    back.columns.load(share, images)
                    back.write(images)
            else:
                scatter(xp, share, part, frame, place)
        return result


def _pixels(images: Array) -> Array:
    """Return images (n, h, w, c) as a view (pixels, c)."""
    return images.reshape(prod(images.shape[:3]), images.shape[3])  # not -1: there may be no elements


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
    steps, border, spread = pair("stride", stride, 1), pair("padding", padding, 0), pair("dilation", dilation, 1)
    check(x, weight, bias, steps, border, spread, groups)
    frame = Frame((weight.shape[0], weight.shape[1]), steps, border, spread)
    return convolve(partial(_conv2d, frame, groups), x, weight, bias, frame, groups)


def convolve(
    plain: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    frame: Frame,
    groups: int,
    relu: bool = False,
) -> Tensor:
    """Return a convolution by the kernels of the device where x lies, and otherwise plain(x, weight, bias).

    Shapes must fit one another; that there are windows, and rows, is not asked for.

    Args:
        plain: computes the same, with the pooling of `frame` and ReLU, in float32 or float64.
        x, weight, bias, groups: see `conv2d`.
        frame: the windows, and the pooling if there is one; then there is a ReLU.
        relu: whether there is one.

    Raises:
        DtypeError: when x, weight and bias differ in dtype, and the precision does not say that they may.
        DeviceError: when cuDNN is insisted on (see `use_convolution`) and cannot be used.
    """
    dtype, kernels = read_as("conv2d", x, weight, bias), device_kernels(x)
    if kernels is not None:
        return DeviceConv(kernels, dtype, frame, groups, relu)(x, weight, bias)
    return narrowly(dtype, plain, x, weight, bias)


def _conv2d(frame: Frame, groups: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if winograd.fits(x, weight, bias, frame, groups):
        return winograd.compiled_conv(x, weight, bias, relu=False)
    if fits(x, weight, frame, groups):
        return TiledConv()(x, weight, bias)
    return Conv2d(*frame[1:4], groups)(x, weight, bias)


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


def check(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> None:
    """Raise the errors of `conv2d` about the shapes of what it is given."""
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
    for axis, name in ((0, "height"), (1, "width")):
        kernel, size = weight.shape[axis], x.shape[axis + 1]
        if out_size(size, kernel, stride[axis], padding[axis], dilation[axis]) < 1:
            reach = dilation[axis] * (kernel - 1) + 1
            raise ShapeError(
                f"a kernel that reaches over {reach} pixels does not fit a {name} of {size} + 2 * {padding[axis]}"
            )
