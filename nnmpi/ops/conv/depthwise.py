"""Convolution of each channel by a kernel of its own: shifted images times numbers, added up.

    y  =  sum over r, s of   x moved by (r, s)  *  W[r, s]        W[r, s]: a number for each channel

A product of matrices, which im2col makes of each channel, would have one column. Channels lie side
by side, and so do the pixels of a row: with as many copies of the weight, a term is an elementwise
product of long rows.

    row of x      a b c | d e f | g h i | ...       pixels of three channels
    W[r, s]       u v w | u v w | u v w | ...

NumPy's `einsum` multiplies and adds in one pass, and takes all terms of a row while it is in the
cache: a third of the time of a pass for each product and each sum, and less than half of the time
of Winograd's tiles of 4 x 4. A device has kernels of its own. Without them (`jit(False)`) each term
is a product and a sum there, as `einsum` would store all products.

With a stride, the columns of pixels that windows see are copied first, one array per column of the
kernel. The input gradient is a depthwise convolution, too, see `im2col.Phase`; dW[r, s] is the sum
of dy times x moved by (r, s).
"""

from collections.abc import Iterator

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.kernels import add_bias, bias_grad, cast, copy, load
from nnmpi.backend.precision import FLOAT32, is_low
from nnmpi.backend.recording import call
from nnmpi.backend.sums import ELEMENTS, ROWS, slices
from nnmpi.ops.conv.algorithm import ConvAlgorithm, ConvSpec, Gradients, record_flat
from nnmpi.ops.conv.im2col import input_gradient, pixel_rows


class Depthwise(ConvAlgorithm):
    """A depthwise convolution, with one group per channel; no ReLU, no pooling."""

    def convolve(self, x: Array, weight: Array, y: Array) -> None:
        """Write the convolution, without a bias, to y."""
        call(convolve, (x, weight), (y, self.spec))

    def input_grad(self, grad: Array, weight: Array, to_x: Array) -> None:
        """Write the gradient of x, given that of y."""
        input_gradient(grad, weight, self.spec, to_x, type(self))

    def weight_grad(self, x: Array, grad: Array, to_weight: Array) -> None:
        """Write the gradient of the weight."""
        call(products, (x, grad), (to_weight, self.spec))

    def forward(self, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool) -> None:
        self.convolve(x, weight, y)
        if bias is not None:
            add_bias(y, bias)

    def backward(self, grad: Array, x: Array, weight: Array, kept: None, out: Gradients) -> None:
        grad = np.ascontiguousarray(cast(grad, x.dtype), like=grad)
        if out.bias is not None:
            bias_grad(pixel_rows(grad), out.bias)
        if out.x is not None:
            self.input_grad(grad, weight, out.x)
        if out.weight is not None:
            self.weight_grad(x, grad, out.weight)


class CompiledDepthwise(Depthwise):
    """By numba's kernels, of images that are not empty."""

    def convolve(self, *arrays: Array) -> None:
        """See `Depthwise.convolve`."""
        self._call("forward", *arrays)

    def weight_grad(self, *arrays: Array) -> None:
        """See `Depthwise.weight_grad`."""
        self._call("backward", *arrays)

    def _call(self, name: str, images: Array, given: Array, out: Array) -> None:
        xp = namespace(images)
        (h, w, c), (top, left), spec = images.shape[1:], self.spec.padding, self.spec
        columns, size = w + 2 * left, spec.pooled_size(h, w)
        border = xp.empty(((h + 2 * top) * columns * c,), FLOAT32)
        sizes = (h, w, c, columns, top, left, *size, *spec.stride, *spec.dilation)
        function = getattr(load().depthwise(*spec.kernel), name)
        record_flat(function, (xp.ascontiguousarray(images), given), (out, border, sizes))


def _seen(images: Array, spec: ConvSpec) -> Iterator[tuple[slice, Array]]:
    """Yield blocks of images as views (block, out_h, kernel_h, kernel_w, out_w c) of all windows.

    Args:
        images: (n, h, w, c).
        spec: the convolution.
    """
    (n, h, w, c), (top, left), xp = images.shape, spec.padding, namespace(images)
    (kh, kw), (down, across), (apart, beside) = spec.kernel, spec.stride, spec.dilation
    rows, columns, size, count = h + 2 * top, w + 2 * left, spec.pooled_size(h, w), n
    if xp is np:
        count = max(1, min(n, ELEMENTS // (rows * columns * c), ROWS // size[0]))
    # with a stride a copy of its pixels for each column of the kernel
    shape = (kw, size[1]) if across > 1 else (1, columns)
    border = xp.zeros((count, rows, *shape, c), images.dtype)
    inner, (image, row, tap, pixel, item) = border[:, top : top + h], border.strides
    view = xp.lib.stride_tricks.as_strided(
        border,
        (count, size[0], kh, kw, size[1] * c),
        (image, row * down, row * apart, tap if across > 1 else pixel * beside, item),
    )
    for block in slices(n, count):
        m = block.stop - block.start
        for j in range(shape[0]):
            place = j * beside - left  # the column that the first window sees
            first = min(shape[1], max(0, -(place // across)))
            seen = images[block, :, place + first * across :: across][:, :, : shape[1] - first]
            xp.copyto(inner[:m, :, j, first : first + seen.shape[2]], seen)
        yield block, view[:m]


def convolve(images: Array, weight: Array, y: Array, spec: ConvSpec) -> None:
    """Write the convolution of images (n, h, w, c) with a weight (kh, kw, 1, c) to y."""
    xp, (h, w, c) = namespace(images), y.shape[1:]
    taps = xp.empty((*spec.kernel, w, c), images.dtype)
    copy(taps, weight)
    taps = taps.reshape(*spec.kernel, w * c)
    for block, view in _seen(images, spec) if y.size else ():
        place = y[block].reshape(len(view), h, w * c)
        result = place if y.dtype == images.dtype else xp.empty(place.shape, images.dtype)
        if xp is np:
            np.einsum("nhrsx,rsx->nhx", view, taps, out=result)
        else:
            result[...] = 0
            for i, j in np.ndindex(spec.kernel):
                result += view[:, :, i, j] * taps[i, j]
        if result is not place:
            copy(place, result)


def products(images: Array, grad: Array, out: Array, spec: ConvSpec) -> None:
    """Write the sums over all windows of their pixels times grad to out (kh, kw, 1, c)."""
    xp, (_, h, w, c) = namespace(images), grad.shape
    sums = xp.zeros((*spec.kernel, c), np.float64)
    kind = FLOAT32 if is_low(grad.dtype) else grad.dtype
    for block, view in _seen(images, spec) if grad.size else ():
        given = grad[block].reshape(len(view), h, w * c)
        parts = xp.empty((*spec.kernel, w * c), kind)
        for j in range(spec.kernel[1]):  # a column's taps at once: given is read once for all
            seen, out_j = view[:, :, :, j], parts[:, j]
            if xp is np:
                np.einsum("nhrx,nhx->rx", seen, given, out=out_j)
            else:
                xp.add.reduce(seen * given[:, :, None], axis=(0, 1), out=out_j)
        sums += parts.reshape(*spec.kernel, w, c).sum(2, dtype=np.float64)
    copy(out, sums.reshape(out.shape))
