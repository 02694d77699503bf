"""Convolution of each channel by a kernel of its own: shifted images times numbers, added up.

    y  =  sum over r, s of   x moved by (r, s)  *  W[r, s]        W[r, s]: a number for each channel

A product of matrices, which im2col makes of each channel, would have one column. Channels lie side
by side, and so do the pixels of a row: with as many copies of the weight, a term is an elementwise
product of long rows.

    row of x      a b c | d e f | g h i | ...       pixels of three channels
    W[r, s]       u v w | u v w | u v w | ...

NumPy's `einsum` multiplies and adds in one pass, and takes all terms of a row while it is in the
cache: a third of the time of a pass for each product and each sum, and less than half of the time
of Winograd's tiles of 4 x 4. On a device, where `einsum` would store all products, each term is a
product and a sum.

Backward is made of the same two functions. The input gradient is a convolution of the gradient,
whose pixels are spread by the stride, with the kernel turned; dW[r, s] is the sum of dy times x
moved by (r, s). With a stride, all columns of pixels are computed, and some are taken.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.kernels import bias_grad, kernels_for
from nnmpi.backend.precision import FLOAT32, cast, is_low
from nnmpi.backend.recording import record_call
from nnmpi.backend.sums import ELEMENTS, ROWS
from nnmpi.backend.windows import Pair
from nnmpi.ops.conv.algorithm import Algorithm, Gradients, record_flat
from nnmpi.ops.planes import repeated


class Depthwise(Algorithm):
    """A depthwise convolution, with one group per channel; no ReLU, no pooling."""

    def forward(
        self, xp: Any, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool
    ) -> None:
        seen = Seen(y.shape[1:3], self.spec.padding, (1, 1), self.spec.stride, self.spec.dilation)
        _call(xp, True, (x, weight, y), weight.shape[:2], seen)
        if bias is not None:
            rows = y.reshape(len(y), y[:1].size)
            xp.add(rows, repeated(xp, bias, y[:1].size // bias.size), out=rows, casting="unsafe")

    def backward(
        self, xp: Any, grad: Array, x: Array, weight: Array, kept: None, out: Gradients
    ) -> None:
        spec, kernel = self.spec, weight.shape[:2]
        grad = xp.ascontiguousarray(cast(xp, grad, x.dtype))
        if out.bias is not None:
            bias_grad(xp, grad.reshape(grad.size // grad.shape[3], grad.shape[3]), out.bias)
        if out.x is not None:
            top, left = (
                (size - 1) * far - border
                for size, far, border in zip(kernel, spec.dilation, spec.padding, strict=True)
            )
            seen = Seen(x.shape[1:3], (top, left), spec.stride, (1, 1), spec.dilation)
            turned = xp.ascontiguousarray(weight[::-1, ::-1])
            _call(xp, True, (grad, turned, out.x), kernel, seen)
        if out.weight is not None:
            seen = Seen(grad.shape[1:3], spec.padding, (1, 1), spec.stride, spec.dilation)
            _call(xp, False, (x, grad, out.weight), kernel, seen)


class Seen(NamedTuple):
    """The pixels that windows see; each pair is for rows and columns.

    Attributes:
        out: the number of windows.
        padding: the place of the images' first pixel within the pixels that windows see; negative
            if they see none of the first ones.
        apart: the distance of the images' pixels; between them are zeros.
        stride: the distance of windows.
        dilation: the distance of a window's pixels.
    """

    out: Pair
    padding: Pair
    apart: Pair
    stride: Pair
    dilation: Pair

    def sizes(self, kernel: Pair) -> Pair:
        """Return the numbers of rows and columns that windows of a kernel see."""
        axes = zip(self.out, self.stride, kernel, self.dilation, strict=True)
        rows, columns = ((n - 1) * step + (size - 1) * far + 1 for n, step, size, far in axes)
        return rows, columns

    def blocks(self, images: Array, kernel: Pair) -> Iterator[tuple[slice, Array]]:
        """Yield blocks of images as views (block, out_h, kernel_h, kernel_w, run) of all windows.

        A run has the channels of all windows of a row, and of those that the stride leaves out.
        """
        (n, _, _, c), xp, (rows, columns) = images.shape, namespace(images), self.sizes(kernel)
        count = n
        if xp is np:
            count = max(1, min(n, ELEMENTS // (rows * columns * c), ROWS // self.out[0]))
        border = xp.zeros((count, rows, columns, c), images.dtype)
        axes = zip((rows, columns), images.shape[1:3], self.padding, self.apart, strict=True)
        places, pixels = zip(*(_inside(*axis) for axis in axes), strict=True)
        item, row, column, channel = border.strides
        view = xp.lib.stride_tricks.as_strided(
            border,
            (count, self.out[0], *kernel, ((self.out[1] - 1) * self.stride[1] + 1) * c),
            (
                item,
                row * self.stride[0],
                row * self.dilation[0],
                column * self.dilation[1],
                channel,
            ),
        )
        for start in range(0, n, count):
            block = slice(start, min(start + count, n))
            size = block.stop - start
            xp.copyto(border[(slice(size), *places)], images[(block, *pixels)])
            yield block, view[:size]


def _inside(size: int, pixels: int, first: int, apart: int) -> tuple[slice, slice]:
    """Return the places of an axis that have a pixel, and these pixels.

    Args:
        size: places.
        pixels: of the axis, of which the first is at the place `first`.
        apart: the distance of two pixels.
    """
    begin = max(0, -(first // apart))
    end = max(begin, min(pixels, (size - 1 - first) // apart + 1))
    place = first + begin * apart
    return slice(place, place + (end - begin - 1) * apart + 1, apart), slice(begin, end)


def _call(xp: Any, forward: bool, arrays: tuple[Array, ...], kernel: Pair, seen: Seen) -> None:
    """Call `convolve` or `products`, or their compiled form.

    Args:
        xp: the array library, or a recorder's stand-in for it.
        forward: whether to convolve.
        arrays: the images (n, h, w, c), the other operand, and the array written.
        kernel: its rows and columns.
        seen: the pixels that windows see.
    """
    images, plain = arrays[0], min(seen.padding) >= 0 and arrays[0].size > 0
    single = all(item.dtype == FLOAT32 for item in arrays)
    compiled = kernels_for(images, "depthwise") if plain and single else None
    if compiled is None:
        record_call(convolve if forward else products, *arrays, kernel, seen)
        return
    h, w, c = images.shape[1:]
    ends = (
        (m - 1) * far + edge + 1
        for m, far, edge in zip((h, w), seen.apart, seen.padding, strict=True)
    )
    rows, columns = map(max, seen.sizes(kernel), ends)
    sizes = (h, w, c, columns, *seen.padding, *seen.apart, *seen.out, *seen.stride, *seen.dilation)
    border = xp.empty((rows * columns * c,), FLOAT32)
    functions = compiled.depthwise(*kernel)
    record_flat(functions.forward if forward else functions.backward, *arrays, border, sizes)


def convolve(images: Array, weight: Array, y: Array, kernel: Pair, seen: Seen) -> None:
    """Write the convolution of images (n, h, w, c) with a weight (kh, kw, 1, c) to y."""
    xp, step, c = namespace(images), seen.stride[1], images.shape[3]
    if not y.size:
        return
    beside = (y.shape[2] - 1) * step + 1
    taps = xp.empty((*kernel, beside, c), images.dtype)
    xp.copyto(taps, weight, casting="unsafe")
    taps = taps.reshape(*kernel, beside * c)
    for block, view in seen.blocks(images, kernel):
        place, shape = y[block], (len(view), y.shape[1], beside * c)
        direct = step == 1 and y.dtype == images.dtype
        result = place.reshape(shape) if direct else xp.empty(shape, images.dtype)
        if xp is np:
            np.einsum("nhrsx,rsx->nhx", view, taps, out=result)
        else:
            result[...] = 0
            for i, j in np.ndindex(kernel):
                result += view[:, :, i, j] * taps[i, j]
        if not direct:
            columns = result.reshape(*shape[:2], beside, c)[:, :, ::step]
            xp.copyto(place, columns, casting="unsafe")


def products(images: Array, grad: Array, out: Array, kernel: Pair, seen: Seen) -> None:
    """Write the sums over all windows of their pixels times grad to out (kh, kw, 1, c)."""
    xp, step, (_, h, w, c) = namespace(images), seen.stride[1], grad.shape
    sums = xp.zeros((*kernel, c), np.float64)
    for block, view in seen.blocks(images, kernel) if grad.size else ():
        given = grad[block]
        if step > 1:
            spread = xp.zeros((len(given), h, (w - 1) * step + 1, c), grad.dtype)
            spread[:, :, ::step] = given
            given = spread
        given = given.reshape(len(given), h, given.shape[2] * c)
        kind = FLOAT32 if is_low(grad.dtype) else grad.dtype
        parts = xp.empty((*kernel, given.shape[2]), kind)
        for i, j in np.ndindex(kernel):
            if xp is np:
                np.einsum("nhx,nhx->x", view[:, :, i, j], given, out=parts[i, j])
            else:
                xp.add.reduce(view[:, :, i, j] * given, axis=(0, 1), out=parts[i, j])
        sums += parts.reshape(*kernel, parts.shape[2] // c, c).sum(2, dtype=np.float64)
    xp.copyto(out, sums.reshape(out.shape), casting="unsafe")
