"""Kernels around matrix products: bias, ReLU, GELU, softmax and cross-entropy, layer normalization, sums of columns."""

from nnmpi.backend.array import Array
from nnmpi.backend.cuda.launch import (
    NOTHING,
    Family,
    columns_grid,
    sums_grid,
    totals_grid,
)


class Dense(Family):
    """Arrays are C-contiguous; T, P and A are the roles of `Family`."""

    def bias_relu(self, y: Array, bias: Array) -> None:
        """y: T (..., n), in place; bias: P (n,): y = max(y + bias, 0); NaN stays."""
        self._with_bias("dense", "bias_relu", y, bias)

    def relu_grad_bias(self, grad: Array, y: Array, out: Array, to_bias: Array | None) -> None:
        """Write grad where the ReLU's output y is positive, else 0, and its sum over the rows.

        grad, y, out: T (..., n), out may be grad; to_bias: P (n,) or None.
        """
        self._grad_bias("relu_grad_bias", grad, y, out, to_bias)

    def slope_grad_bias(self, grad: Array, slope: Array, out: Array, to_bias: Array | None) -> None:
        """Write grad * slope, and its sum over the rows.

        Args:
            grad: T (..., n), the gradient of the result.
            slope: T (..., n), the derivative at each element.
            out: T (..., n), which is written; it may be grad.
            to_bias: P (n,) for the sum, or None.
        """
        self._grad_bias("slope_grad_bias", grad, slope, out, to_bias)

    def column_sum(self, x: Array, out: Array, add: bool = False) -> None:
        """Write the sum over the rows, or add it.

        Args:
            x: T (..., n).
            out: P (n,), which is written.
            add: whether the sum is added to what `out` holds.
        """
        launch, n = self.kernel("dense", "column_sum", "TP", x, out), out.size
        if n == 0:
            return
        rows = x.size // n
        grid, block = sums_grid(rows, n, x.dtype.itemsize)
        partial = self.totals(n, grid[1], x.dtype)
        launch(grid, block, (x, out, partial, rows, n, int(add)))
        self._column_total(x, out, partial, grid[1], n, int(add))

    def _with_bias(self, family: str, name: str, y: Array, bias: Array, slope: Array | None = None) -> None:
        launch, n, size = self.kernel(family, name, "TPT", y, bias, slope), bias.size, y.size
        if size == 0:
            return
        grid, block = columns_grid(size // n, n, y.dtype.itemsize)
        launch(grid, block, (y, bias, size // n, n) if slope is None else (y, bias, slope, size // n, n))

    def _grad_bias(self, name: str, grad: Array, kept: Array, out: Array, to_bias: Array | None) -> None:
        launch, size = self.kernel("dense", name, "TTTP", grad, kept, out, to_bias), grad.size
        n = grad.shape[-1] if to_bias is None else to_bias.size
        if n == 0 or (size == 0 and to_bias is None):
            return
        rows = size // n
        if to_bias is None:
            grid, block = columns_grid(rows, n, grad.dtype.itemsize)
            launch(grid, block, (grad, kept, out, NOTHING, NOTHING, rows, n))
            return
        grid, block = sums_grid(rows, n, grad.dtype.itemsize)
        partial = self.totals(n, grid[1], grad.dtype)
        launch(grid, block, (grad, kept, out, to_bias, partial, rows, n))
        self._column_total(grad, to_bias, partial, grid[1], n, 0)

    def _column_total(self, like: Array, out: Array, partial: Array, blocks: int, n: int, add: int) -> None:
        if blocks > 1:
            launch = self.kernel("dense", "column_total", "TPA", like, out, partial)
            launch(*totals_grid(n), (partial, out, blocks, n, add))

    # ---- GELU

    def bias_gelu_tanh_slope(self, x: Array, bias: Array, slope: Array) -> None:
        """x: T (..., n), in place; bias: P (n,); slope: out T like x: x = gelu_tanh(x + bias), and the derivative."""
        self._with_bias("gelu", "bias_gelu_tanh_slope", x, bias, slope)

    def bias_gelu_slope(self, x: Array, bias: Array, slope: Array) -> None:
        """x: T (..., n), in place; bias: P (n,); slope: out T like x: x = gelu(x + bias), and the derivative."""
        self._with_bias("gelu", "bias_gelu_slope", x, bias, slope)
