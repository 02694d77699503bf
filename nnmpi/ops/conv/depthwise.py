"""Convolution of each channel by a kernel of its own: shifted images times numbers, added up.

    y  =  sum over r, s of   x moved by (r, s)  *  W[r, s]        W[r, s]: a number for each channel

Channels lie side by side, so each of the kh kw terms is a product along whole rows of an image; a
product of matrices, which im2col makes of each channel, would have one column. Images are taken in
blocks, or strips of rows, that stay in the cache through all terms. Backward goes over the same
terms: dx moved by (r, s) gets dy W[r, s], and dW[r, s] is the sum of dy times x moved by (r, s).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.kernels import bias_grad, kernels_for
from nnmpi.backend.precision import cast
from nnmpi.backend.sums import ELEMENTS
from nnmpi.backend.windows import Pair, windows
from nnmpi.ops.conv.algorithm import Algorithm, Gradients, record_flat


class Depthwise(Algorithm):
    """A depthwise convolution, with one group per channel; no ReLU, no pooling."""

    def forward(
        self, xp: Any, x: Array, weight: Array, bias: Array | None, y: Array, keep: bool
    ) -> None:
        if (kernels := self._compiled(x, weight)) is not None:
            arrays, (padding, stride) = (x, weight, y), (self.spec.padding, self.spec.stride)
            self._call(xp, kernels.forward, arrays, y.shape[1:3], padding, (1, 1), stride)
            if bias is not None:
                xp.add(y, bias, out=y)
            return
        kernels = self._kernels(xp, weight, x.dtype, y.shape[2])
        for block, strips in self._blocks(xp, y):
            seen = windows(self._bordered(xp, x[block]), *self.spec[:2], self.spec.dilation)
            for rows, scratch in strips:
                target = y[block, rows]
                for number, (i, j) in enumerate(np.ndindex(self.spec.kernel)):
                    term = xp.multiply(
                        seen[:, rows, :, i, j], kernels[i, j], out=scratch if number else target
                    )
                    if number:
                        xp.add(target, term, out=target)
                if bias is not None:
                    xp.add(target, bias, out=target, casting="unsafe")

    def backward(
        self, xp: Any, grad: Array, x: Array, weight: Array, kept: None, out: Gradients
    ) -> None:
        (top, left), (h, w, c) = self.spec.padding, x.shape[1:]
        if out.bias is not None:
            bias_grad(xp, xp.reshape(grad, (grad.size // c, c)), out.bias)
        if (compiled := self._compiled(x, weight)) is not None:
            grad, turned = xp.ascontiguousarray(grad), xp.ascontiguousarray(weight[::-1, ::-1])
            sizes, stride, reach = grad.shape[1:3], self.spec.stride, self._reach()
            if out.x is not None:
                # a convolution of the gradient, whose pixels are spread by the stride
                arrays, border = (grad, turned, out.x), (reach[0] - top, reach[1] - left)
                self._call(xp, compiled.forward, arrays, (h, w), border, stride, (1, 1))
            if out.weight is not None:
                arrays = x, grad, out.weight
                self._call(xp, compiled.backward, arrays, sizes, (top, left), (1, 1), stride)
            return
        kernels, sums = self._kernels(xp, weight, x.dtype, grad.shape[2]), []
        for block, strips in self._blocks(xp, grad):
            images = self._bordered(xp, x[block])
            shares = xp.zeros(images.shape, x.dtype)
            seen, given = (
                windows(item, *self.spec[:2], self.spec.dilation) for item in (images, shares)
            )
            for rows, scratch in strips:
                dy, part = grad[block, rows], xp.empty((*self.spec.kernel, c), weight.dtype)
                for i, j in np.ndindex(self.spec.kernel):
                    if out.x is not None:
                        target = given[:, rows, :, i, j]
                        xp.add(target, xp.multiply(dy, kernels[i, j], out=scratch), out=target)
                    if out.weight is not None:
                        term = xp.multiply(dy, seen[:, rows, :, i, j], out=scratch)
                        bias_grad(xp, term.reshape(term.size // c, c), part[i, j])
                sums.append(part)
            if out.x is not None:
                xp.copyto(out.x[block], shares[:, top : top + h, left : left + w], casting="unsafe")
        if out.weight is not None:
            parts = xp.concatenate([part.reshape(1, part.size) for part in sums])
            xp.add.reduce(parts, axis=0, dtype=np.float64, out=out.weight.reshape(out.weight.size))

    def _compiled(self, x: Array, weight: Array) -> Any:
        """Return the compiled pair of functions for such arrays, or None."""
        (down, across), (top, left) = self._reach(), self.spec.padding
        fits = top <= down and left <= across and weight.dtype == x.dtype and x.size > 0
        kernels = kernels_for(x, "depthwise") if fits else None
        return None if kernels is None else kernels.depthwise(*self.spec.kernel)

    def _reach(self) -> Pair:
        """Return the distance between a window's first and last pixels, down and across."""
        down, across = (
            (size - 1) * far for size, far in zip(self.spec.kernel, self.spec.dilation, strict=True)
        )
        return down, across

    def _call(
        self,
        xp: Any,
        kernel: Any,
        arrays: tuple[Array, ...],
        out: Any,
        padding: Pair,
        apart: Pair,
        stride: Pair,
    ) -> None:
        """Call a kernel; it copies the images, spread if necessary, into a border of zeros.

        Args:
            xp: the array library.
            kernel: see `backend.jit.kernels.depthwise`.
            arrays: the images (n, h, w, c), the other operand, and the array written.
            out: rows and columns of windows.
            padding, apart, stride: of the images, of their pixels, of windows.
        """
        h, w, c = arrays[0].shape[1:]
        axes = zip(out, stride, self._reach(), (h, w), apart, padding, strict=True)
        rows, columns = (
            max((n - 1) * step + reach + 1, (m - 1) * far + edge + 1)
            for n, step, reach, m, far, edge in axes
        )
        border, sizes = (
            xp.empty((rows * columns * c,), arrays[0].dtype),
            (h, w, c, columns, *padding, *apart),
        )
        sizes = (*sizes, *out, *stride, *self.spec.dilation)
        record_flat(kernel, *arrays, border, sizes)

    def _kernels(self, xp: Any, weight: Array, dtype: Any, columns: int) -> Array:
        """Return the weight, repeated for every column of an image: (kh, kw, columns, c)."""
        kernels: Array = xp.empty((*self.spec.kernel, columns, weight.shape[3]), dtype)
        xp.copyto(kernels, cast(xp, weight, dtype))
        return kernels

    def _bordered(self, xp: Any, images: Array) -> Array:
        """Return images in their border of zeros."""
        (top, left), (n, h, w, c) = self.spec.padding, images.shape
        if not top and not left:
            return images
        bordered: Array = xp.zeros((n, h + 2 * top, w + 2 * left, c), images.dtype)
        xp.copyto(bordered[:, top : top + h, left : left + w], images)
        return bordered

    def _blocks(self, xp: Any, y: Array) -> Iterator[tuple[slice, list[tuple[slice, Array]]]]:
        """Yield blocks of the result's images, each with strips of rows and their scratch."""
        n, height, width, channels = y.shape
        room = ELEMENTS if xp.__name__ == "numpy" else y.size
        most = max(1, room // (width * channels))  # rows of the result
        count, strip = max(1, most // max(1, height)), max(1, min(height, most))
        for start in range(0, max(n, 1), count):
            block = slice(start, min(start + count, n))
            scratch = xp.empty((block.stop - start, strip, width, channels), y.dtype)
            starts = range(0, max(1, height), strip)  # even without rows there is one strip
            strips = [slice(row, min(row + strip, height)) for row in starts]
            yield block, [(rows, scratch[:, : rows.stop - rows.start]) for rows in strips]
