"""The parts of im2col's backward pass: sums of products, and the input's gradient in two ways.

ProductSum        sum over blocks of  columns^T dy
InputGradient     columns(dy with a border) @ flipped kernels      of stride 1
scatter_windows   dx[what kernel element r, s saw] += dy W[r, s]^T      of any stride
pixel_sum         dbias = sum of dy over all pixels
"""

from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.gemm import gemm
from nnmpi.backend.sums import row_sum
from nnmpi.backend.windows import tap
from nnmpi.ops.conv.algorithm import ConvSpec
from nnmpi.ops.conv.columns import COLUMNS_BYTES, Columns


def multiply(xp: Any, left: Array, right: Array, out: Array) -> None:
    """Write left @ right: by the chosen BLAS on the host, by the library's own product on a device.

    So are products of whole numbers, which no BLAS multiplies, and of a vector.
    """
    if xp.__name__ == "numpy" and left.ndim > 1 and left.dtype.kind == "f":
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

    A block of dy is put into `columns.inner`, and `write` computes the same images of dx.

    Args:
        xp: the library that computes.
        shape: of the result's gradient, (n, out_h, out_w, o).
        weight: (kh, kw, c, o).
        spec: the convolution.
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
        out: Array,
        source: Array | None = None,
    ) -> None:
        self._xp, self._out = xp, out
        kh, kw, c, o = weight.shape
        self.columns = Columns(xp, shape, weight.dtype, spec.backwards(), c, source=source)
        kernel = xp.empty((kh, kw, o, c), weight.dtype)
        xp.copyto(kernel, weight[::-1, ::-1].swapaxes(2, 3))
        self._kernel = kernel.reshape(kh * kw * o, c)

    def write(self, block: slice) -> None:
        """Compute some images' gradient from the block of the result's gradient."""
        out = self._out[block]
        for strip in self.columns.strips(len(out)):
            rows = out[:, strip.rows]
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
    pixels = grad.shape[1] * grad.shape[2]
    count = max(1, min(n, 2 * COLUMNS_BYTES // max(1, (pixels * (c + o) + h * w * c) * grad.dtype.itemsize)))
    memory = xp.empty((count * pixels, c), grad.dtype)
    bordered = xp.empty((count, h + 2 * top, w + 2 * left, c), grad.dtype)
    for start in range(0, n, count):
        images = grad[start : start + count]
        rows, block = images.reshape(len(images) * pixels, o), bordered[: len(images)]
        share = memory[: len(rows)]
        xp.copyto(block, 0)
        for i, j in np.ndindex(kh, kw):
            multiply(xp, rows, weight[i, j].T, share)  # (pixels, c)
            seen = tap(block, (i, j), (images.shape[1], images.shape[2]), spec.stride, spec.dilation)
            xp.add(seen, share.reshape(seen.shape), out=seen)
        xp.copyto(out[start : start + count], block[:, top : top + h, left : left + w])


def pixel_sum(xp: Any, images: Array, out: Array) -> None:
    """Write the sum over all pixels to out (c,): first over images, in long additions.

    Args:
        xp: the library that computes.
        images: (n, h, w, c), C-contiguous.
        out: (c,).
    """
    n, h, w, c = images.shape
    sums = row_sum(xp, images.reshape(n, h * w * c))
    row_sum(xp, sums.reshape(h * w, c), out=out)
