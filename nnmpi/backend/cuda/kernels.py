"""A device's kernels in CUDA C++, as methods for operations (see `backend.kernels`)."""

from functools import cache, partialmethod
from itertools import chain
from math import prod, sqrt
from types import ModuleType
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, Dtype, Matrices, Residuals, Shape, collapsed
from nnmpi.backend.cuda.launch import (
    KERNELS,
    NAMES,
    ROWS_EACH,
    SUM_BLOCKS,
    THREADS,
    KernelLauncher,
)
from nnmpi.backend.gemm import gemm
from nnmpi.backend.precision import is_low
from nnmpi.backend.random import least_kept, place_of

COPY_AXES = 6  # as in copy.cu


def works_on(dtype: Dtype) -> bool:
    """True if there are kernels for activations of this dtype."""
    return dtype.name in NAMES


class DeviceKernels(KernelLauncher):
    """Kernels on CuPy's arrays, queued on the current stream, each compiled at its first use.

    They read and write contiguous arrays. `xp` is the library, or a recorder's stand-in for it.
    """

    def _update(self, name: str, *args: Any) -> None:
        count, data = len(KERNELS[name][1]), args[0]
        numbers = map(float, args[count:])
        self.flat(name, data.size, data.dtype.itemsize, *args[:count], *numbers, data.size)

    # Optimizers' updates of a block; see nnmpi/optim for the arguments.
    sgd = partialmethod(_update, "sgd")  # data, grad, lr, decay
    # data, grad, momentum, lr, beta, decay, nesterov
    sgd_momentum = partialmethod(_update, "sgd_momentum")
    # data, grad, m, v, rate, eps, beta1, beta2, decay, factor
    adam = partialmethod(_update, "adam")

    def squares(self, grad: Array, to: Array) -> None:
        """Add the squares of all elements to a number, `to`, in float64.

        Not by cuBLAS's dot, which no graph of CUDA's can capture through CuPy, and whose float32
        overflows; the order of the sum depends on the size alone.
        """
        if grad.size:
            blocks = min(SUM_BLOCKS, 1 + (grad.size - 1) // (THREADS * ROWS_EACH))
            partial = self.xp.empty(blocks, "float64")
            self.run("squares", (blocks,), (THREADS,), grad, partial, grad.size)
            self.run("squares_total", (1,), (THREADS,), partial, to, blocks, like=grad)

    def copy(self, target: Array, x: Array) -> bool:
        """Write x to `target`, in its dtype; return False if there is no kernel for these arrays.

        CuPy's copies of views, and to and from bfloat16, take two to four times as long on an H100.
        """
        twice = x.dtype.itemsize > 4 and is_low(target.dtype)  # the kernel would round twice
        axes = collapsed(x.shape, Matrices.of(x).strides, Matrices.of(target).strides)
        if x.shape != target.shape or twice or not works_on(x.dtype) or len(axes) > COPY_AXES:
            return False
        axes = [(1, 0, 0)] * (COPY_AXES - len(axes)) + axes
        numbers = chain.from_iterable(zip(*axes, strict=True))
        self.flat("copy", x.size, target.dtype.itemsize, x, target, x.size, *numbers)
        return True

    # ---- dense layers: rows are all axes but the last

    def bias_grad(self, xp: Any, grad: Array, to_bias: Array) -> None:
        """Sum the rows; with few columns this is several times as fast as CuPy's sum."""
        # a sum's gradient is broadcast, so not contiguous
        self.sums("column_sum", "column_total", (xp.ascontiguousarray(grad),), (to_bias,))

    def add_bias(self, xp: Any, y: Array, bias: Array) -> None:
        """y += bias, in place."""
        self.over_columns("add_bias", y, y.shape[-1], xp.ascontiguousarray(bias))

    def bias_relu(self, xp: Any, y: Array, bias: Array | None) -> None:
        """y = max(y + bias, 0), in place; NaN stays."""
        self.over_columns("bias_relu", y, y.shape[-1], _shift(xp, y, bias))

    def _bias_slope(self, name: str, xp: Any, y: Array, bias: Array | None, slope: Array) -> None:
        """y = the activation of y + bias, in place, and its derivative."""
        self.over_columns(name, y, y.shape[-1], _shift(xp, y, bias), slope)

    bias_gelu = partialmethod(_bias_slope, "bias_gelu_slope")
    bias_gelu_tanh = partialmethod(_bias_slope, "bias_gelu_tanh_slope")

    def _grad_bias(
        self, name: str, xp: Any, grad: Array, saved: Array, to_bias: Array | None
    ) -> Array:
        result = xp.empty(grad.shape, grad.dtype)
        if to_bias is not None:
            self.sums(name, "column_total", (grad, saved, result), (to_bias,))
        else:
            self.over_columns(name, grad, grad.shape[-1], saved, result, None, None)
        return result

    # Return the gradient before the activation, and write its sum over the rows to `to_bias`: grad
    # where the ReLU's output is positive, else 0; and grad * slope.
    relu_grad_bias = partialmethod(_grad_bias, "relu_grad_bias")
    slope_grad_bias = partialmethod(_grad_bias, "slope_grad_bias")

    # ---- recurrent layers: a time step beside its product; see nnmpi/ops for the arguments

    lstm_step = partialmethod(KernelLauncher.over_cells, "lstm_step")
    lstm_step_grad = partialmethod(KernelLauncher.over_cells, "lstm_step_grad")
    gru_step = partialmethod(KernelLauncher.over_cells, "gru_step")
    gru_step_grad = partialmethod(KernelLauncher.over_cells, "gru_step_grad")

    # ---- attention

    def attend(
        self,
        xp: Any,
        inputs: tuple[Array, ...],
        y: Array,
        causal: bool,
        keep: bool,
        drop: Any = None,
    ) -> Residuals:
        """Attention of all heads at once: two products, and a softmax kernel in place in between.

            S = Q K^T, (batch, heads, queries, keys)    P = softmax(S), saved in the heads' dtype
            dP = dY V^T    dS = softmax's gradient of dP    dQ = dS K    dK = dS^T Q    dV = P^T dY

        The scores of half-precision heads are float32: they may exceed the range of float16, and
        the exponential would magnify the rounding of bfloat16. Bands of queries, without the keys
        that none of a causal band sees, were 2 % faster on an H100 in a block of 2048 features.
        """
        q, k, v = inputs
        scores = xp.empty((*q.shape[:3], k.shape[2]), _accumulated(q))
        gemm(xp, q, k.swapaxes(2, 3), out=scores)
        p = scores if scores.dtype == q.dtype else xp.empty(scores.shape, q.dtype)
        self._softmax("softmax", 1 / sqrt(q.shape[3]), causal, scores, p)
        gemm(xp, self._left(xp, p, drop), v, out=y)
        return (q, k, v, p)

    def attend_grad(
        self,
        xp: Any,
        grad: Array,
        residuals: Residuals,
        targets: tuple[Array, ...],
        causal: bool,
        drop: Any = None,
    ) -> None:
        """Write all three gradients; the dropout mask is drawn again, not saved."""
        (q, k, v, p), (to_q, to_k, to_v) = residuals, targets
        d = xp.empty(p.shape, p.dtype)
        gemm(xp, grad, v.swapaxes(2, 3), out=d)
        gemm(xp, self._left(xp, p, drop).swapaxes(2, 3), grad, out=to_v)
        d = self._left(xp, d, drop)
        self._softmax("softmax_grad", 1 / sqrt(q.shape[3]), causal, d, p, d)
        gemm(xp, d, k, out=to_q)
        gemm(xp, d.swapaxes(2, 3), q, out=to_k)

    def _left(self, xp: Any, p: Array, drop: Any) -> Array:
        """Apply dropout to probabilities (batch, heads, queries, keys), or to their gradient."""
        return (
            p
            if drop is None
            else self.dropout(xp, p, drop.rate, place_of(drop.key, drop.first_row), None)
        )

    # ---- rows

    def _softmax(self, name: str, scale: float, causal: bool, *arrays: Array) -> None:
        """Write softmax(scale * x) along the last axis, or its gradient.

        The arrays are x and the result; or the result's gradient, the result, and x's gradient.
        Causal scores are (..., queries, keys), and query i sees the keys up to i + keys - queries.
        The scores of hidden keys are not read; their results are 0.
        """
        shape = arrays[0].shape
        rows, queries = prod(shape[:-1]), shape[-2] if causal else 1
        numbers = (float(scale), rows, shape[-1], queries, int(causal))
        self.over_rows(name, rows, shape[-1], *arrays, *numbers)

    def softmax(self, xp: Any, x: Array) -> Array:
        """Return the softmax along the last axis."""
        y = xp.empty(x.shape, x.dtype)
        self._softmax("softmax", 1.0, False, xp.ascontiguousarray(x), y)
        return y

    def softmax_grad(self, xp: Any, grad: Array, y: Array) -> Array:
        """Return the gradient."""
        to_x = xp.empty(y.shape, y.dtype)
        self._softmax("softmax_grad", 1.0, False, xp.ascontiguousarray(grad), y, to_x)
        return to_x

    def softmax_loss(
        self, xp: Any, logits: Array, labels: Array, ignore_index: int | None, smoothing: float
    ) -> tuple[Array, Residuals]:
        """Compute losses and their gradients, in float32 or more, in one pass over the logits.

        A label out of range gives NaN for both; nothing out of bounds is read.
        """
        logits = xp.ascontiguousarray(logits)
        labels = xp.ascontiguousarray(labels)
        wide = _accumulated(logits)
        losses, gradients = xp.empty((len(logits),), wide), xp.empty(logits.shape, wide)
        ignored = (0, 0) if ignore_index is None else (1, int(ignore_index))
        numbers = (*logits.shape, *ignored, float(smoothing))
        self.over_rows(
            "softmax_loss",
            *logits.shape,
            logits,
            labels,
            _integer_bytes(labels),
            losses,
            gradients,
            *numbers,
        )
        return losses, (gradients,)

    def layer_norm(
        self, xp: Any, x: Array, scale: Array, shift: Array, eps: float
    ) -> tuple[Array, Residuals]:
        """Normalize rows in one pass; x is saved instead of the normalized rows."""
        x, scale, shift = map(xp.ascontiguousarray, (x, scale, shift))
        y, wide = xp.empty(x.shape, x.dtype), _accumulated(x)
        inverse, mean = xp.empty((len(x),), wide), xp.empty((len(x),), wide)
        self.over_rows(
            "layer_norm", *x.shape, x, scale, shift, float(eps), y, inverse, mean, *x.shape
        )
        return y, (x, inverse, mean, scale)

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
        """Write the gradients, each unless its target is None."""
        x, inverse, mean, scale = residuals  # this scale is contiguous, the argument may not be
        saved = (xp.ascontiguousarray(grad), x, inverse, mean)
        if to_x is not None:
            self.over_rows("layer_norm_grad", *x.shape, *saved, scale, to_x, *x.shape)
        if to_scale is not None or to_shift is not None:
            self.sums("layer_norm_sums", "layer_norm_total", saved, (to_scale, to_shift))

    # ---- tables

    def embedding(self, xp: Any, table: Array, indices: Array, dtype: Dtype) -> Array:
        """Copy and convert rows; indices are not checked, one out of range gives NaN."""
        rows = xp.empty((*indices.shape, table.shape[1]), dtype)
        table, indices = xp.ascontiguousarray(table), xp.ascontiguousarray(indices)
        args = (table, indices, _integer_bytes(indices), rows, indices.size, *table.shape)
        self.flat("embedding", rows.size, dtype.itemsize, *args)
        return rows

    def embedding_grad(
        self,
        xp: Any,
        grad: Array,
        indices: Array,
        shape: Shape,
        dtype: Dtype,
        into: Array | None,
        add: bool,
    ) -> Array:
        """Add rows in order, in place; indices out of range are skipped."""
        spread = xp.empty(shape, dtype) if into is None else into
        grad = xp.ascontiguousarray(grad)
        indices = xp.ascontiguousarray(indices)
        count = indices.size
        if not add:
            spread.fill(0)
        if grad.size and shape[0]:
            order = xp.argsort(indices.reshape(count)).astype("int64", copy=False)
            args = (grad, indices, _integer_bytes(indices), order, spread, count, *shape, int(add))
            self.run(
                "embedding_grad", (count, min(1 + (shape[1] - 1) // 32, 65535)), (32, 8), *args
            )
        return spread

    def dropout(
        self,
        xp: Any,
        x: Array,
        rate: float,
        key: Any,
        columns: Array | None,
    ) -> Array:
        """Draw and apply the mask in one pass; backward is the same call on the gradient.

        The key is that of row 0: two numbers, or (2,) uint32 on the device.

        y = x / (1 - rate) for elements with `random_bits` at or above the threshold, else 0 * x.
        """
        result = xp.empty(x.shape, x.dtype)
        # the right-hand side reads the old x: ascontiguousarray makes a 0-d array 1-D
        x, rows = xp.ascontiguousarray(x), x.shape[0] if x.ndim else 1
        numbers = (
            *((None, *key) if isinstance(key, tuple) else (key, 0, 0)),
            least_kept(rate),
            1 / (1 - rate),
            rows,
            x.size // max(rows, 1),
        )
        self.flat("dropout", x.size, x.dtype.itemsize, x, result, columns, *numbers)
        return result

    # ---- images

    def max_pool(self, xp: Any, x: Array, over: Any, keep: bool) -> tuple[Array, Array | None]:
        """Return each window's maximum and its position, the first of ties.

        A NaN is the maximum of its window; the border never is.
        """
        x = xp.ascontiguousarray(x)
        y = xp.empty((len(x), *over.out(*x.shape[1:3]), x.shape[3]), x.dtype)
        winner = xp.empty(y.shape, np.min_scalar_type(prod(over.kernel))) if keep else None
        width = 1 if winner is None else winner.dtype.itemsize
        numbers = (width, *x.shape, *y.shape[1:3], *sum(over, ()))
        self.flat("max_pool", y.size, x.dtype.itemsize, x, y, winner, *numbers)
        return y, winner

    def max_pool_grad(self, xp: Any, grad: Array, winner: Array, shape: Shape, over: Any) -> Array:
        """Gather each pixel's gradient from the windows of which it is the maximum."""
        to_x = xp.empty(shape, grad.dtype)
        numbers = (
            winner.dtype.itemsize,
            *shape,
            *grad.shape[1:3],
            *sum(over, ()),
        )
        args = (xp.ascontiguousarray(grad), winner, to_x, *numbers)
        self.flat("max_pool_grad", to_x.size, to_x.dtype.itemsize, *args)
        return to_x


def _shift(xp: Any, y: Array, bias: Array | None) -> Array:
    """Return a contiguous bias (n,) for y (rows, n); zeros for None."""
    return xp.zeros((y.shape[-1],), y.dtype) if bias is None else xp.ascontiguousarray(bias)


def _accumulated(x: Array) -> Dtype:
    """Return the dtype in which kernels accumulate elements of an array's dtype."""
    return np.dtype(np.float32) if is_low(x.dtype) else x.dtype


def _integer_bytes(array: Array) -> int:
    """Return an integer dtype's code for kernels: its bytes, negative for unsigned ones.

    64-bit unsigned integers are read as signed: too large ones become negative, so out of range.
    """
    return (
        array.dtype.itemsize
        if array.dtype.kind == "i" or array.dtype.itemsize == 8
        else -array.dtype.itemsize
    )


@cache
def device_kernels(xp: ModuleType) -> DeviceKernels | None:
    """Return the kernels of a device's library, or None if it cannot compile any."""
    return DeviceKernels(xp) if hasattr(xp, "RawModule") else None
