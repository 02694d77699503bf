"""Kernels for channels-last images: pooling, and convolution's columns."""

from nnmpi.backend.array import Array
from nnmpi.backend.cuda.launch import NOTHING, THREADS, Family, flat_grid, sums_grid, totals_grid
from nnmpi.backend.windows import Pair, out_size

ONE: Pair = (1, 1)
NONE: Pair = (0, 0)


class Images(Family):
    """Arrays are C-contiguous; T and P are the roles of `Family`. Images are (n, h, w, c), pairs (rows, columns)."""

    def max_pool(self, x: Array, y: Array, winner: Array | None, kernel: Pair, stride: Pair, padding: Pair) -> None:
        """The largest of each window, the first of equal ones; a NaN wins over numbers, and the border over nothing.

        Args:
            x: T (n, h, w, c).
            y: out T (n, out_h, out_w, c).
            winner: out, like y: which place in the window it was, i * kernel[1] + j; unsigned, wide enough for all
                places and one number more; or None.
        """
        self._pool("max_pool", x, None, y, winner, (kernel, stride, padding), cut=False)

    def bias_relu_pool(self, x: Array, bias: Array | None, y: Array, winner: Array | None, kernel: Pair) -> None:
        """y = max(largest + bias, 0) for windows side by side; the winner is its dtype's largest number where y is 0.

        Args:
            x, y, winner: as those of `max_pool`.
            bias: P (c,), or None.
        """
        self._pool("bias_relu_pool", x, bias, y, winner, (kernel, kernel, NONE), cut=True)

    def _pool(
        self,
        name: str,
        x: Array,
        bias: Array | None,
        y: Array,
        winner: Array | None,
        window: tuple[Pair, Pair, Pair],
        cut: bool,
    ) -> None:
        launch = self.kernel("pooling", "max_pool", "TPTb", x, bias, y, winner)
        sizes = _frame(name, x, y, *window)
        if y.size:
            places = (NOTHING, 1) if winner is None else (winner, winner.dtype.itemsize)
            added = NOTHING if bias is None else bias
            grid = flat_grid(y.size, y.dtype.itemsize)
            launch(grid, (THREADS,), (x, added, y, *places, int(cut), *sizes))

    def max_pool_grad(self, grad: Array, winner: Array, out: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
        """Write each window's gradient at its winner, summed where windows overlap; elsewhere 0.

        Args:
            grad: T (n, out_h, out_w, c).
            winner: like grad, as `max_pool` wrote it.
            out: out T (n, h, w, c).
            kernel, stride, padding: the windows.
        """
        launch = self.kernel("pooling", "max_pool_grad", "TbT", grad, winner, out)
        sizes = _frame("max_pool_grad", out, grad, kernel, stride, padding)
        if out.size:
            grid = flat_grid(out.size, out.dtype.itemsize)
            launch(grid, (THREADS,), (grad, winner, out, winner.dtype.itemsize, *sizes))

    def bias_relu_pool_grad(self, grad: Array, winner: Array, out: Array, to_bias: Array | None, kernel: Pair) -> None:
        """Write the gradients of `bias_relu_pool`.

        Args:
            grad: T (n, out_h, out_w, c).
            winner: like grad, as `bias_relu_pool` wrote it.
            out: out T (n, h, w, c).
            to_bias: out P (c,), or None.
            kernel: the windows, side by side.
        """
        self.max_pool_grad(grad, winner, out, kernel, kernel, NONE)
        if to_bias is None or to_bias.size == 0:
            return
        n, rows = to_bias.size, grad.size // to_bias.size
        launch = self.kernel("pooling", "winner_sum", "TbP", grad, winner, to_bias)
        grid, block = sums_grid(rows, n, grad.dtype.itemsize)
        partial = self.totals(n, grid[1], grad.dtype)
        launch(grid, block, (grad, winner, winner.dtype.itemsize, to_bias, partial, rows, n))
        if grid[1] > 1:
            total = self.kernel("pooling", "winner_total", "TP", grad, to_bias)
            total(*totals_grid(n), (partial, to_bias, grid[1], n))

    def im2col(
        self, x: Array, columns: Array, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair = ONE, first: int = 0
    ) -> None:
        """Copy the windows of images into the rows of a matrix; the border is 0.

        Args:
            x: T (n, h, w, all channels).
            columns: out T (n out_h out_w, kernel_h kernel_w c), row (image, i, j), column (ki, kj, channel).
            kernel, stride, padding, dilation: the windows.
            first: the first of the c channels that are meant.
        """
        self._columns("im2col", x, columns, (kernel, stride, padding, dilation), first)

    def col2im(
        self, columns: Array, x: Array, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair = ONE, first: int = 0
    ) -> None:
        """Add the columns up where `im2col` takes them from: x is written, in the channels that are meant.

        Args:
            columns: T (n out_h out_w, kernel_h kernel_w c).
            x: out T (n, h, w, all channels).
            kernel, stride, padding, dilation: the windows.
            first: the first of the c channels that are meant.
        """
        self._columns("col2im", x, columns, (kernel, stride, padding, dilation), first)

    def _columns(
        self, name: str, x: Array, columns: Array, geometry: tuple[Pair, Pair, Pair, Pair], first: int
    ) -> None:
        kernel, stride, padding, dilation = geometry
        launch = self.kernel("columns", name, "TT", x, columns)
        n, h, w, channels = x.shape
        out = tuple(out_size(x.shape[i + 1], kernel[i], stride[i], padding[i], dilation[i]) for i in (0, 1))
        c = columns.shape[1] // (kernel[0] * kernel[1])
        written = columns.size if name == "im2col" else n * h * w * c
        if written:
            sizes = (n, h, w, channels, first, c, *out, *kernel, *stride, *padding, *dilation)
            arrays = (x, columns) if name == "im2col" else (columns, x)
            launch(flat_grid(written, x.dtype.itemsize), (THREADS,), (*arrays, *sizes))


def _frame(name: str, x: Array, y: Array, kernel: Pair, stride: Pair, padding: Pair) -> tuple[int, ...]:
    """Return the sizes that pooling's kernels take, for images x and what they are pooled to."""
    n, h, w, c = x.shape
    out = tuple(max(0, out_size(x.shape[i + 1], kernel[i], stride[i], padding[i])) for i in (0, 1))
    return (n, h, w, c, *out, *kernel, *stride, *padding)
