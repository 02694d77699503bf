"""Kernels that work row by row: softmax, alone and with the cross-entropy, and layer normalization."""

from typing import Any

from nnmpi.backend.array import Array
from nnmpi.backend.cuda.launch import (
    NOTHING,
    Family,
    integer_bytes,
    rows_grid,
    sums_grid,
    totals_grid,
)


class Rows(Family):
    """Arrays are C-contiguous; T, P and A are the roles of `Family`."""

    def softmax(self, x: Array, scale: float, causal: bool, y: Array) -> None:
        """x, y: T (..., n): y = softmax(scale * x) along the last axis. y may be x.

        causal: x is (..., queries, keys); query i sees the keys up to i + keys - queries. What it does not see is not
        read, and 0 in y.
        """
        self._softmax("softmax", (x, y), scale, causal)

    def softmax_grad(self, grad: Array, y: Array, scale: float, causal: bool, out: Array) -> None:
        """Write the gradient of `softmax`.

        Args:
            grad: T (..., n), the gradient of the result.
            y: T (..., n), the result of `softmax`.
            scale, causal: those that `softmax` was given.
            out: T (..., n), which is written; it may be grad.
        """
        self._softmax("softmax_grad", (grad, y, out), scale, causal)

    def _softmax(self, name: str, arrays: tuple[Array, ...], scale: float, causal: bool) -> None:
        size, shape = arrays[0].size, arrays[0].shape
        if size == 0:
            return
        form, grid, block = rows_grid(size // shape[-1], shape[-1])
        launch = self.kernel("softmax", f"{name}_{form}", "T" * len(arrays), *arrays)
        queries = shape[-2] if causal else 1
        launch(grid, block, (*arrays, float(scale), size // shape[-1], shape[-1], queries, int(causal)))

    def softmax_loss(
        self,
        logits: Array,
        labels: Array,
        losses: Array,
        gradient: Array,
        ignore: int | None = None,
        smoothing: float = 0.0,
    ) -> None:
        """Write each row's cross-entropy, and its gradient: softmax(logits) less the target.

        A label out of range gives NaN for the loss and the gradient; nothing out of bounds is read.

        Args:
            logits: T (rows, classes).
            labels: (rows,), integers of any kind.
            losses: out A (rows,).
            gradient: out (rows, classes), T or A; it may be the logits.
            ignore: rows with this label get 0 for both.
            smoothing: the share of the target that is spread over all classes.
        """
        rows, classes = logits.shape
        form, grid, block = rows_grid(rows, classes)
        name = f"softmax_loss_{form}"
        launch = self.kernel("softmax", name, "TiAP", logits, labels, losses, gradient)
        if rows * classes == 0:
            return
        ignored = (0, 0) if ignore is None else (1, int(ignore))
        sizes = (rows, classes, *ignored, float(smoothing))
        launch(grid, block, (logits, labels, integer_bytes(labels), losses, gradient, *sizes))

    def layer_norm(
        self,
        x: Array,
        scale: Array,
        shift: Array,
        eps: float,
        y: Array,
        normal: Array | None,
        inverse: Array,
        mean: Array | None = None,
    ) -> None:
        """normal = (x - mean) * inverse, inverse = 1 / sqrt(variance + eps) per row, y = normal * scale + shift.

        For the gradient keep either `normal`, or x, `inverse` and `mean`, which leaves out writing an array.
        A row whose variance is infinite is NaN.

        Args:
            x, y, normal: T (rows, n); normal may be None.
            scale, shift: P (n,).
            inverse, mean: out A (rows,); mean may be None.
        """
        (rows, n), name = x.shape, "layer_norm"
        form, grid, block = rows_grid(rows, n)
        arrays = (x, scale, shift, y, normal, inverse, mean)
        launch = self.kernel("layer_norm", f"{name}_{form}", "TPPTTAA", *arrays)
        if rows * n == 0:
            return
        kept = (_or_nothing(normal), inverse, _or_nothing(mean))
        launch(grid, block, (x, scale, shift, float(eps), y, *kept, rows, n))

    def layer_norm_grad(
        self,
        grad: Array,
        normal: Array,
        inverse: Array,
        scale: Array,
        to_x: Array | None,
        to_scale: Array | None,
        to_shift: Array | None,
        mean: Array | None = None,
    ) -> None:
        """Write the gradients of `layer_norm`, each where there is a place for it.

        Args:
            grad, to_x: T (rows, n).
            normal: T (rows, n), what `layer_norm` wrote there; its x, if `mean` is given.
            inverse, mean: A (rows,).
            scale, to_scale, to_shift: P (n,).
        """
        (rows, n), name = grad.shape, "layer_norm_grad"
        if n == 0:
            return
        centre = _or_nothing(mean)
        if to_x is not None and rows:
            form, grid, block = rows_grid(rows, n)
            launch = self.kernel("layer_norm", f"{name}_{form}", "TTAAPT", grad, normal, inverse, mean, scale, to_x)
            launch(grid, block, (grad, normal, inverse, centre, scale, to_x, rows, n))
        if to_scale is not None or to_shift is not None:
            kept = (grad, normal, inverse, mean)
            launch = self.kernel("layer_norm", "layer_norm_sums", "TTAAPP", *kept, to_scale, to_shift)
            grid, block = sums_grid(rows, n, grad.dtype.itemsize)
            partial = self.totals(2 * n, grid[1], grad.dtype)
            places = (_or_nothing(to_scale), _or_nothing(to_shift))
            launch(grid, block, (grad, normal, inverse, centre, *places, partial, rows, n))
            if grid[1] > 1:
                total = self.kernel("layer_norm", "layer_norm_total", "TPP", grad, to_scale, to_shift)
                total(*totals_grid(2 * n), (partial, *places, grid[1], n))


def _or_nothing(array: Array | None) -> Any:
    return NOTHING if array is None else array
