"""Convolutions on the host in bf16: images, kernels and the result's gradient are rounded.

Sums are in float32, and neither the bias nor its gradient is rounded. All algorithms give the same
numbers, up to the order of sums and to Winograd's transforms.
"""

from math import prod
from typing import Any

import numpy as np

from nnmpi.backend import onednn
from nnmpi.backend.array import Array, Shape
from nnmpi.backend.kernels import add_bias
from nnmpi.backend.precision import round_to_bfloat16
from nnmpi.backend.recording import call
from nnmpi.ops.conv.algorithm import ConvAlgorithm, Gradients
from nnmpi.ops.conv.depthwise import Depthwise
from nnmpi.ops.conv.im2col import Columns, ProductSum, bias_gradient, input_gradient, pixel_rows
from nnmpi.ops.conv.winograd_numpy import WinogradNumpy

# Elements of the kernels for each pixel of a result, from which on products of columns are faster
# than oneDNN's convolutions for AMX, which multiply image by image. An Emerald Rapids, 32 images,
# ms, by convolution and by products:
#
#     pixels  channels         kernels   elements   forward       images' gr.   kernels' gr.
#     2 x 2   512 to 512       3 x 3     590,000    9.0    3.2    9.2    6.6    30.3   2.2
#     4 x 4   512 to 512       3 x 3     147,000    10.5   5.9    10.6   9.4    22.1   7.6
#     4 x 4   256 to 256       3 x 3      37,000    2.1    1.4    2.2    2.2    4.9    1.2
#     4 x 4   64 to 128 (64)   5 x 5, 2   13,000    1.4    1.2    4.4    1.9    3.8    1.3
#     8 x 8   256 to 256       3 x 3       9,200    6.9    5.1    7.0    5.9    7.4    4.7
#     8 x 8   128 to 256       3 x 3       4,600    1.2    2.4    1.3    3.4    3.3    2.4
#     4 x 4   64 to 64 (64)    3 x 3       2,300    0.16   0.29   0.17   0.33   0.57   0.42
#     8 x 8   64 to 64 (64)    3 x 3         600    0.7    1.2    0.7    1.2    1.1    1.6
LARGE_KERNELS, LARGE_GRADIENTS = 9000, 1500
COLUMNS_BYTES = 1 << 22  # of a block: products of fewer rows pack the kernels too often


def rounding(exact: ConvAlgorithm, x: Shape, weight: Shape) -> ConvAlgorithm:
    """Return the algorithm for a convolution of rounded arrays.

    It is oneDNN's, unless that has no fast code for it. With AMX it is 1.4 to 7 times as fast as
    the others without rounding (Emerald Rapids). Twice the speed of float32, which is
    AVX512-BF16's, is less than what Winograd's algorithm gains.

    Args:
        exact: the algorithm without rounding, without pooling.
        x, weight: shapes (n, h, w, c) and (kh, kw, c / groups, o).
    """
    library, spec = onednn.installed(), exact.spec
    if library is None or (library.unit == onednn.AVX512 and isinstance(exact, WinogradNumpy)):
        return Rounded(exact)
    y = (x[0], *spec.pooled_size(*x[1:3]), weight[3])
    known = onednn.convolves(x, weight, y, spec[1:5])
    if not known:
        return Rounded(exact)
    return ByOnednn(exact, weight, y, library.unit == onednn.AMX)


class Rounded(ConvAlgorithm):
    """A convolution of rounded arrays by another algorithm, without pooling."""

    def __init__(self, exact: ConvAlgorithm) -> None:
        super().__init__(exact.spec)
        self._exact = exact

    def forward(self, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool) -> Any:
        images, kernels = round_to_bfloat16(x), round_to_bfloat16(weight)
        return self._exact.forward(images, kernels, bias, y, keep)

    def backward(self, grad: Array, x: Array, weight: Array, kept: Any, out: Gradients) -> None:
        grad = np.ascontiguousarray(grad, like=grad)
        if out.bias is not None:
            bias_gradient(grad, out.bias)
        grad, images, kernels = (round_to_bfloat16(item) for item in (grad, x, weight))
        self._exact.backward(grad, images, kernels, kept, out._replace(bias=None))


class ByOnednn(ConvAlgorithm):
    """Any convolution without pooling, by oneDNN; each pass by the way that is faster for it.

    Args:
        exact: the algorithm without rounding.
        weight, y: shapes without a 0.
        is_amx: whether AMX multiplies; the others' speeds are not known.
    """

    def __init__(self, exact: ConvAlgorithm, weight: Shape, y: Shape, is_amx: bool) -> None:
        super().__init__(exact.spec)
        self._by_products = ByProducts(self.spec)
        large = prod(weight) // prod(y[1:3]) if is_amx and self.spec.groups == 1 else 0
        self._has_large_kernels = large >= LARGE_KERNELS
        self._has_large_gradients = large >= LARGE_GRADIENTS
        # with a stride, products make the images' gradient of 28 x 28 x 128 faster, too (1.35)
        least = LARGE_KERNELS if self.spec.stride == (1, 1) else LARGE_GRADIENTS
        self._images_by_products = large >= least
        # for AMX its image gradient goes group by group: 20 ms instead of 5 for 64 channels
        is_slow = is_amx and self.spec.stride != (1, 1) and isinstance(exact, Depthwise)
        self._depthwise = Rounded(exact) if is_slow else None

    def forward(self, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool) -> None:
        if self._has_large_kernels:
            self._by_products.forward(x, weight, bias, y, keep)
            return
        call(onednn.convolve, (x, weight), (y, self.spec[1:5]))
        if bias is not None:
            add_bias(y, bias)

    def backward(self, grad: Array, x: Array, weight: Array, kept: None, out: Gradients) -> None:
        grad = np.ascontiguousarray(grad, like=grad)
        if out.bias is not None:
            bias_gradient(grad, out.bias)
        if self._depthwise is not None:
            self._depthwise.backward(grad, x, weight, None, Gradients(out.x, None, None))
            out = out._replace(x=None)
        low, windows = _low(grad), self.spec[1:5]
        if out.x is not None and self._images_by_products:
            self._by_products.image_gradient(low, weight, out.x)
        elif out.x is not None:
            call(onednn.image_gradient, (low, weight), (out.x, windows))
        if out.weight is not None and self._has_large_gradients:
            self._by_products.weight_gradient(x, low, out.weight)
        elif out.weight is not None:
            call(onednn.weight_gradient, (x, low), (out.weight, windows))


class ByProducts(ConvAlgorithm):
    """A convolution of one group without pooling, as products of columns of bfloat16 (`im2col`).

    Images and gradients are float32, or bfloat16 already.
    """

    def forward(self, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool) -> None:
        kernels = pixel_rows(_low(weight))
        for pixels, columns in Columns(_low(x), self.spec, kernels.shape[1], COLUMNS_BYTES):
            _multiply(columns, kernels, pixel_rows(y[pixels]), False)
        if bias is not None:
            add_bias(y, bias)

    def backward(self, grad: Array, x: Array, weight: Array, kept: None, out: Gradients) -> None:
        grad = np.ascontiguousarray(grad, like=grad)
        if out.bias is not None:
            bias_gradient(grad, out.bias)
        low = _low(grad)
        if out.x is not None:
            self.image_gradient(low, weight, out.x)
        if out.weight is not None:
            self.weight_gradient(x, low, out.weight)

    def image_gradient(self, grad: Array, weight: Array, to_x: Array) -> None:
        """Write the gradient of the images."""
        input_gradient(_low(grad), _low(weight), self.spec, to_x, ByProducts)

    def weight_gradient(self, x: Array, grad: Array, to_weight: Array) -> None:
        """Write the gradient of the weight."""
        total, sent = ProductSum(pixel_rows(to_weight), _multiply), _low(grad)
        for pixels, columns in Columns(_low(x), self.spec, to_weight.shape[3], COLUMNS_BYTES):
            total.add(columns.T, pixel_rows(sent[pixels]))
        total.finish()


def _low(x: Array) -> Array:
    """Return the bfloat16 of float32 values, as whole numbers of 16 bits."""
    if x.dtype == np.uint16:
        return x
    out = np.empty(x.shape, np.uint16, like=x)
    call(onednn.lower, (x,), (out,))
    return out


def _multiply(left: Array, right: Array, out: Array, add: bool) -> None:
    """Write a product of bfloat16 to `out`, or add it."""
    call(onednn.multiply, (left, right), (out, add))
