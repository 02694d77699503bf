"""Convolution with what usually follows it, as one operation: conv -> bias -> ReLU -> max-pool, conv -> bias -> ReLU.

The convolution's whole result is never stored: a block's is pooled at once, and backward needs but where the largest
elements were (see `planes`).

    forward     columns @ W = | y0 | y1 | y2 | y3 |       one plane per place in the pooling's window (see `columns`)
                h = relu(max(y0 .. y3) + b)               winner = the first place that is the largest, if h > 0
    backward    dyk = dh where the winner is k            dW = columns^T dy, block by block; db = sum of dy
                dx = conv(dy with a border, W flipped)
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from nnmpi.backend.array import Array
from nnmpi.backend.windows import Pair, corners
from nnmpi.ops import winograd
from nnmpi.ops.activation import relu
from nnmpi.ops.columns import Columns, Frame, repeated
from nnmpi.ops.conv import check, conv2d, convolve, pair
from nnmpi.ops.conv_grad import InputGradient, ProductSum
from nnmpi.ops.conv_tiles import TiledConvRelu, TiledConvReluPool, fits
from nnmpi.ops.planes import Planes
from nnmpi.ops.pool import max_pool2d
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import real
from nnmpi.tensor.tensor import Tensor

_TILED = {(1, 1): TiledConvRelu, (2, 2): TiledConvReluPool}  # by the pooling


class ConvReluPool(Function):
    """max_pool(relu(conv(x))) for a convolution of stride 1 in one group; a pooling of 1 x 1 is none."""

    __slots__ = ("dilation", "padding", "pool")

    replayable = True

    def __init__(self, padding: Pair, dilation: Pair, pool: Pair) -> None:
        self.padding, self.dilation, self.pool = padding, dilation, pool

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        xp, o = self.xp, weight.shape[3]
        columns = Columns(xp, x.shape, x.dtype, self._frame(weight), o, whole=x)
        places, row = prod(self.pool), columns.out[1] * o
        image = columns.out[0] * row
        y: Array = xp.empty((len(x), *columns.out, o), x.dtype)
        flat = y.reshape(y.size)
        pooling = Planes(xp, places, columns.count * image)
        winner = xp.empty((y.size,), pooling.dtype) if True in self.needs else None
        kernel = xp.reshape(weight, (prod(weight.shape[:3]), o))
        memory = xp.empty((places * columns.count * image,), x.dtype) if places > 1 else None
        added = None if bias is None else repeated(xp, bias, columns.count * prod(columns.out))
        for images in columns.blocks():
            columns.load(x, images)
            for part in columns.parts(images.stop - images.start):
                seen = columns.fill(part)
                start, size = images.start * image + part.rows.start * row, len(seen) * o // places
                h = flat[start : start + size]
                planes = (h if memory is None else memory[: places * size]).reshape(places, size)
                xp.matmul(seen, kernel, out=planes.reshape(len(seen), o))
                won = None if winner is None else winner[start : start + size]
                if places > 1:
                    pooling.largest(planes, h, won)
                elif won is not None:
                    xp.copyto(won, 0)
                pooling.cut(added, h, won)
        self.saved = (x, weight, winner)
        return y

    def _frame(self, weight: Array) -> Frame:
        return Frame((weight.shape[0], weight.shape[1]), (1, 1), self.padding, self.dilation, self.pool)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        x, weight, winner = self.saved
        xp, frame, (n, height, width, o) = self.xp, self._frame(weight), grad.shape
        places, row, dtype = prod(self.pool), width * o, x.dtype
        flat = xp.reshape(grad, (grad.size,))
        to_x = xp.empty(x.shape, dtype) if self.needs[0] else None
        back = None
        if to_x is not None:
            back = InputGradient(xp, (n, *frame.out(*x.shape[1:3]), o), weight, frame, to_x)
        columns = Columns(xp, x.shape, dtype, frame, o, None if back is None else back.columns.count, x)
        back_corners = None if back is None else corners(back.columns.inner, self.pool)
        memory = xp.empty((places * columns.count * height * row,), dtype)
        pooling = Planes(xp, places, columns.count * height * row)
        kernel, total = self._place(1, weight.shape, dtype), self._place(2, (o,), dtype)
        to_weight = ProductSum(xp, kernel.reshape(prod(weight.shape[:3]), o)) if self.needs[1] else None
        to_bias = ProductSum(xp, total) if self.needs[2] else None
        terms = xp.ones(places * columns.count * height * width, dtype)
        for images in columns.blocks():
            count = images.stop - images.start
            if to_weight is not None:
                columns.load(x, images)
            for part in columns.parts(count):
                start = (images.start * height + part.rows.start) * row
                size = len(part.matrix) * o // places
                dy = memory[: places * size].reshape(places, size)
                pooling.spread(flat[start : start + size], winner[start : start + size], dy)
                pixels = dy.reshape(len(part.matrix), o)
                if to_weight is not None:
                    to_weight.add(columns.fill(part).T, pixels)
                if to_bias is not None:
                    to_bias.add(terms[: len(pixels)], pixels)
                if back_corners is not None:
                    target = back_corners[:, :, :count, part.rows]
                    xp.copyto(target, dy.reshape(target.shape))
            if back is not None:
                back.write(images)
        for each in (to_weight, to_bias):
            if each is not None:
                each.finish()
        return to_x, kernel if self.needs[1] else None, total if self.needs[2] else None

    def _place(self, i: int, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return where the gradient of input i goes."""
        place = self.into(i)
        return self.xp.empty(shape, dtype) if place is None else place


def conv_relu_pool(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    pool: int | Pair = 2,
) -> Tensor:
    """Return max_pool2d(relu(conv2d(x, weight, bias, stride, padding, dilation, groups)), pool).

    Args:
        pool: the window of the pooling, whose stride is its size; one number, or one for rows and one for columns.
            Rows and columns of the convolution that no window covers are left out.

    The other arguments and the errors are those of `conv2d` and `max_pool2d`.
    """
    steps, border, spread = pair("stride", stride, 1), pair("padding", padding, 0), pair("dilation", dilation, 1)
    sizes = pair("pool", pool, 1)
    check(x, weight, bias, steps, border, spread, groups)
    frame = Frame((weight.shape[0], weight.shape[1]), steps, border, spread, sizes)
    if min(frame.pooled(*x.shape[1:3])) < 1:  # which the pooling says of its own input
        return max_pool2d(relu(conv2d(x, weight, bias, steps, border, spread, groups)), sizes)
    return convolve(partial(_conv_relu_pool, frame, groups), x, weight, bias, frame, groups, relu=True)


def _conv_relu_pool(frame: Frame, groups: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if winograd.fits(x, weight, bias, frame, groups):
        return winograd.compiled_conv(x, weight, bias, frame.pool)
    if frame.pool in _TILED and fits(x, weight, frame, groups):
        return _TILED[frame.pool]()(x, weight, bias)
    if groups == 1 and frame.reversible:
        return ConvReluPool(frame.padding, frame.dilation, frame.pool)(real("conv_relu_pool", x), weight, bias)
    y = relu(conv2d(x, weight, bias, *frame[1:4], groups))
    return y if frame.pool == (1, 1) else max_pool2d(y, frame.pool)


def conv_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
) -> Tensor:
    """Return relu(conv2d(x, weight, bias, stride, padding, dilation, groups)); arguments and errors are its own."""
    return conv_relu_pool(x, weight, bias, stride, padding, dilation, groups, pool=1)
