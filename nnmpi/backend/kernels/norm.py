"""Normalization: of rows, in one kernel each way; of columns, the sums that it needs."""

from typing import Any

from nnmpi.backend.array import Array, Residuals
from nnmpi.backend.kernels.sums import product_sum, row_blocks, row_sum


class NormKernels:
    """Normalization by the array library's functions.

    All passes over a block of rows are made while it lies in the cache. Sums along a row are products with vectors,
    which BLAS computes faster than NumPy adds; the mean, from which differences are taken, is summed pairwise.
    """

    __slots__ = ()

    def layer_norm(
        self, xp: Any, x: Array, scale: Array, shift: Array, eps: float, keep: bool
    ) -> tuple[Array, Residuals]:
        """Return (x - mean) / sqrt(variance + eps) * scale + shift for each row, and what the gradient needs.

        A row whose variance is infinite is NaN.

        Args:
            xp: the arrays' module, or a recorder's stand-in for it.
            x: (rows, n), n at least 1; any strides.
            scale, shift: (n,).
            eps: added to the variance.
            keep: whether `layer_norm_grad` will be called.
        """
        n = scale.size
        y, inverse = xp.empty(x.shape, x.dtype), xp.empty((len(x), 1), x.dtype)
        normal = xp.empty(x.shape, x.dtype) if keep else y
        for part in row_blocks(x):
            block, moment = normal[part], inverse[part]
            xp.add.reduce(x[part], axis=1, keepdims=True, out=moment)
            xp.divide(moment, n, out=moment)  # of equal numbers this gives the number, a product with 1 / n may not
            xp.subtract(x[part], moment, out=block)
            xp.multiply(xp.einsum("ij,ij->i", block, block)[:, None], 1 / n, out=moment)
            xp.add(moment, eps, out=moment)
            xp.divide(xp.sqrt(moment), moment, out=moment)  # NaN of infinity, where 1 / sqrt would be 0
            xp.multiply(block, moment, out=block)
            xp.multiply(block, scale, out=y[part])
            xp.add(y[part], shift, out=y[part])
        return y, (normal, inverse)

    def layer_norm_grad(
        self,
        xp: Any,
        grad: Array,
        residuals: Residuals,
        scale: Array,
        to_x: Array | None,
        to_scale: Array | None,
        to_shift: Array | None,
    ) -> None:
        """Write the gradients of x, scale and shift, each where there is a place for it.

        Args:
            xp: as for `layer_norm`.
            grad: (rows, n), the gradient of the result.
            residuals: what `layer_norm` returned.
            scale: (n,).
            to_x: (rows, n), or None.
            to_scale, to_shift: (n,), or None.
        """
        normal, inverse = residuals
        n = normal.shape[1]
        weights = xp.multiply(scale, 1 / n)
        if to_shift is not None:
            row_sum(xp, grad, out=to_shift)
        blocks = row_blocks(grad)
        scratch = xp.empty((blocks[0].stop, n), grad.dtype)
        for part in blocks:
            block, product = grad[part], scratch[: part.stop - part.start]
            xp.multiply(block, normal[part], out=product)
            if to_scale is not None:
                if part.start == 0:
                    row_sum(xp, product, out=to_scale)
                else:
                    xp.add(to_scale, row_sum(xp, product), out=to_scale)
            if to_x is not None:
                result = to_x[part]
                both = xp.dot(block, weights)[:, None], xp.dot(product, weights)[:, None]  # (block, 1) each
                xp.multiply(block, scale, out=result)
                xp.subtract(result, both[0], out=result)
                xp.multiply(normal[part], both[1], out=product)
                xp.subtract(result, product, out=result)
                xp.multiply(result, inverse[part], out=result)

    def column_means(self, xp: Any, x: Array) -> Array:
        """Return the mean of each column of x (rows, n), as (n,); zeros where there are no rows."""
        means: Array = self.column_sums(xp, x) / max(len(x), 1)
        return means

    def column_sums(self, xp: Any, a: Array, b: Array | None = None, out: Array | None = None) -> Array:
        """Return the sum of each column of a, or of a * b.

        Args:
            xp: the arrays' module.
            a: (rows, n).
            b: (rows, n), or None.
            out: (n,), where to write the sums of a; None for a new array.
        """
        return row_sum(xp, a, out) if b is None else product_sum(xp, a, b)
