"""Kernels for embeddings and dropout, conversions, and the sum of squares."""

from nnmpi.backend.array import Array
from nnmpi.backend.cuda.launch import (
    NOTHING,
    SUM_BLOCKS,
    THREADS,
    Family,
    flat_grid,
    integer_bytes,
)


class Tables(Family):
    """Arrays are C-contiguous; T and P are the roles of `Family`."""

    def embedding(self, table: Array, indices: Array, out: Array) -> None:
        """Copy rows of a table; an index out of range gives a row of NaN.

        Args:
            table: (entries, features), of any floating point.
            indices: (...), integers of any kind.
            out: (..., features), of any floating point.
        """
        launch = self.kernel("embedding", "embedding", "SiT", table, indices, out)
        entries, n = table.shape
        if out.size:
            sizes = (indices.size, entries, n)
            grid = flat_grid(out.size, out.dtype.itemsize)
            launch(grid, (THREADS,), (table, indices, integer_bytes(indices), out, *sizes))

    def embedding_grad(self, grad: Array, indices: Array, out: Array, add: bool = False) -> None:
        """Add the gradients of rows up by the entry that they are of, in the order in which they stand.

        Args:
            grad: (..., features), of any floating point.
            indices: (...), integers of any kind; what is out of range is left out.
            out: (entries, features), of any floating point: entries that no index names get 0.
            add: add to what is there instead.
        """
        launch = self.kernel("embedding", "embedding_grad", "TiS", grad, indices, out)
        (entries, n), count = out.shape, indices.size
        if not add:
            out.fill(0)
        if grad.size and entries:
            order = self.xp.argsort(indices.reshape(count)).astype("int64", copy=False)
            grid, sizes = (count, min(1 + (n - 1) // 32, 65535)), (count, entries, n, int(add))
            launch(grid, (32, 8), (grad, indices, integer_bytes(indices), order, out, *sizes))

    def dropout(
        self, x: Array, rate: float, key: tuple[int, int], first_row: int, columns: Array | None, y: Array
    ) -> None:
        """y = x where the bits of `random_bits` say so, divided by 1 - rate, and 0 times x elsewhere.

        Backward is the same on the gradient.

        Args:
            x, y: T (rows, ...); y may be x.
            rate: in [0, 1).
            key, first_row: as those of `random_bits`.
            columns: uint32, one number per element of a row, or None for 0, 1, ...
        """
        launch, size = self.kernel("dropout", "dropout", "TTu", x, y, columns), x.size
        if size == 0:
            return
        rows = x.shape[0] if x.ndim else 1
        threshold = min(round(rate * 2**32), 2**32 - 1)
        numbers = (key[0], (first_row + key[1]) & 0xFFFFFFFF, threshold, 1 / (1 - rate), rows, size // rows)
        where = NOTHING if columns is None else columns
        launch(flat_grid(size, x.dtype.itemsize), (THREADS,), (x, y, where, *numbers))

    def sum_of_squares(self, x: Array, out: Array, add: bool = False) -> None:
        """Write the sum of x^2, or add it, without waiting for the device.

        Args:
            x: T of any shape.
            out: float64, one element, which is written.
            add: whether the sum is added to what `out` holds.
        """
        launch, n = self.kernel("reduce", "squares", "Td", x, out), x.size
        blocks = min(SUM_BLOCKS, 1 + max(0, n - 1) // (THREADS * 16))
        if blocks == 1:
            launch((1,), (THREADS,), (x, out, n, int(add)))
            return
        sums = self.xp.empty((blocks,), "float64")
        launch((blocks,), (THREADS,), (x, sums, n, 0))
        total = self.kernel("reduce", "squares_total", "Tdd", x, sums, out)
        total((1,), (THREADS,), (sums, out, blocks, int(add)))
