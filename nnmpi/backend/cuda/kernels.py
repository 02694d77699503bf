"""`Kernels` on a device: all of them, by functions in CUDA C++."""

from functools import cache
from math import prod, sqrt
from types import ModuleType
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, Residuals
from nnmpi.backend.cuda.dense import Dense
from nnmpi.backend.cuda.images import Images
from nnmpi.backend.cuda.launch import NAMES, Dtype
from nnmpi.backend.cuda.rows import Rows
from nnmpi.backend.cuda.tables import Tables
from nnmpi.backend.cuda.updates import Updates
from nnmpi.backend.gemm import gemm
from nnmpi.backend.precision import is_low
from nnmpi.backend.recording import perform


class DeviceFunctions(Dense, Rows, Images, Tables, Updates):
    """The kernels of one library (CuPy); they are queued on its current stream."""


def works_on(dtype: Dtype) -> bool:
    """Return whether there are kernels for activations of this dtype."""
    return dtype.name in NAMES


class DeviceKernels:
    """Kernels of one library (CuPy), queued on its current stream. Operations ask for them (see `backend.kernels`).

    The functions read and write arrays without gaps; a recorded step notes each as one call.

    Attributes:
        functions: what launches the compiled code; nothing is compiled before it is first used.
    """

    __slots__ = ("functions",)

    def __init__(self, xp: ModuleType) -> None:
        self.functions = DeviceFunctions(xp)

    # ---- optimizers' updates, of whole blocks

    @property
    def sgd(self) -> Any:
        """See `Updates`."""
        return self.functions.sgd

    @property
    def sgd_momentum(self) -> Any:
        """See `Updates`."""
        return self.functions.sgd_momentum

    @property
    def adam(self) -> Any:
        """See `Updates`."""
        return self.functions.adam

    # ---- dense layers

    def bias_grad(self, xp: Any, grad: Array, to_bias: Array) -> None:
        """Add up the rows."""
        perform(self.functions.column_sum, grad, to_bias)

    def bias_relu(self, xp: Any, y: Array, bias: Array | None) -> None:
        """Add the bias and cut off in one pass."""
        perform(self.functions.bias_relu, y, _shift(xp, y, bias))

    def relu_grad_bias(self, xp: Any, grad: Array, y: Array, to_bias: Array | None) -> Array:
        """Compute both gradients in one pass."""
        result: Array = xp.empty(grad.shape, grad.dtype)
        perform(self.functions.relu_grad_bias, grad, y, result, to_bias)
        return result

    def gelu(self, xp: Any, x: Array, tanh: bool) -> tuple[Array, Array]:
        """Compute value and derivative in one pass, as behind a linear layer."""
        width = x.shape[-1] if x.ndim else 1
        y, slope = xp.array(x, order="C"), xp.empty(x.shape, x.dtype)
        flat = (x.size // max(width, 1), width)
        self.bias_gelu(xp, y.reshape(flat), None, slope.reshape(flat), tanh)
        return y, slope

    def bias_gelu(self, xp: Any, y: Array, bias: Array | None, slope: Array, tanh: bool) -> None:
        """Compute bias, GELU and its derivative in one pass."""
        function = self.functions.bias_gelu_tanh_slope if tanh else self.functions.bias_gelu_slope
        perform(function, y, _shift(xp, y, bias), slope)

    def slope_grad_bias(self, xp: Any, grad: Array, slope: Array, to_bias: Array | None) -> Array:
        """Compute both gradients in one pass."""
        result: Array = xp.empty(grad.shape, grad.dtype)
        perform(self.functions.slope_grad_bias, grad, slope, result, to_bias)
        return result

    # ---- attention

    def attend(
        self, xp: Any, inputs: tuple[Array, ...], y: Array, causal: bool, keep: bool, drop: Any = None
    ) -> Residuals:
        """Multiply all heads at once, as they lie, with a softmax kernel over all scores in place between the products.

        scores (batch, heads, queries, keys) = Q K^T    --softmax-->  P, which is kept in the dtype of the heads
        dP = dY V^T  --softmax's gradient-->  dS      dQ = dS K      dK = dS^T Q      dV = P^T dY

        The scores of heads of half precision are float32: they may be too large for float16, and powers of them would
        show all that bfloat16 rounds away.
        """
        q, k, v = inputs
        scores = xp.empty((*q.shape[:3], k.shape[2]), _accumulated(q))
        gemm(xp, q, k.swapaxes(2, 3), out=scores)
        perform(self.functions.softmax, scores, 1 / sqrt(q.shape[3]), causal, scores)
        p = scores
        if scores.dtype != q.dtype:
            p = xp.empty(scores.shape, q.dtype)
            xp.copyto(p, scores, casting="unsafe")
        gemm(xp, self._left(xp, p, drop), v, out=y)
        return (q, k, v, p)

    def attend_grad(
        self, xp: Any, grad: Array, kept: Residuals, places: tuple[Array, ...], causal: bool, drop: Any = None
    ) -> None:
        """Write all three gradients; the mask is drawn again."""
        (q, k, v, p), (to_q, to_k, to_v) = kept, places
        d = xp.empty(p.shape, p.dtype)
        gemm(xp, grad, v.swapaxes(2, 3), out=d)
        gemm(xp, self._left(xp, p, drop).swapaxes(2, 3), grad, out=to_v)
        d = self._left(xp, d, drop)
        perform(self.functions.softmax_grad, d, p, 1 / sqrt(q.shape[3]), causal, d)
        gemm(xp, d, k, out=to_q)
        gemm(xp, d.swapaxes(2, 3), q, out=to_k)

    def _left(self, xp: Any, p: Array, drop: Any) -> Array:
        """Return what dropout leaves of probabilities (batch, heads, queries, keys), or of their gradient."""
        return p if drop is None else self.dropout(xp, p, drop.rate, drop.key, drop.first_row, None)

    # ---- rows

    def layer_norm(self, xp: Any, x: Array, scale: Array, shift: Array, eps: float) -> tuple[Array, Residuals]:
        """Normalize rows in one pass; x is kept, and not what it is normalized to, which need not be written then."""
        x, scale, shift = xp.ascontiguousarray(x), xp.ascontiguousarray(scale), xp.ascontiguousarray(shift)
        y, wide = xp.empty(x.shape, x.dtype), _accumulated(x)
        inverse, mean = xp.empty((len(x),), wide), xp.empty((len(x),), wide)
        perform(self.functions.layer_norm, x, scale, shift, eps, y, None, inverse, mean)
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
        """Write those gradients that are asked for."""
        x, inverse, mean, scale = residuals  # the scale here is one without gaps
        grad, places = xp.ascontiguousarray(grad), (to_x, to_scale, to_shift)
        perform(self.functions.layer_norm_grad, grad, x, inverse, scale, *places, mean)

    def column_sums(self, xp: Any, a: Array, out: Array | None) -> Array:
        """Return the columns' sums, which with few columns are several times as fast as CuPy's."""
        place: Array = xp.empty(a.shape[1:], a.dtype) if out is None else out
        self.functions.column_sum(xp.ascontiguousarray(a), place)
        return place

    def softmax(self, xp: Any, x: Array) -> Array:
        """Return the softmax along the last axis, in one pass."""
        y: Array = xp.empty(x.shape, x.dtype)
        perform(self.functions.softmax, xp.ascontiguousarray(x), 1.0, False, y)
        return y

    def softmax_grad(self, xp: Any, grad: Array, y: Array) -> Array:
        """Return the gradient, in one pass."""
        to_x: Array = xp.empty(y.shape, y.dtype)
        perform(self.functions.softmax_grad, xp.ascontiguousarray(grad), y, 1.0, False, to_x)
        return to_x

    def softmax_loss(
        self, xp: Any, logits: Array, labels: Array, ignore_index: int | None, smoothing: float
    ) -> tuple[Array, Residuals]:
        """Compute losses and their gradients, in float32 or more, in one pass over the logits."""
        logits, labels, wide = xp.ascontiguousarray(logits), xp.ascontiguousarray(labels), _accumulated(logits)
        losses, gradients = xp.empty((len(logits),), wide), xp.empty(logits.shape, wide)
        perform(self.functions.softmax_loss, logits, labels, losses, gradients, ignore_index, smoothing)
        return losses, (gradients,)

    def sum_of_squares(self, x: Array, out: Array, add: bool = False) -> None:
        """Write the sum of the squares of x to `out`, (1,) float64, or add it there; nobody waits for it.

        Args:
            x: any shape, without gaps.
            out: (1,), float64.
            add: whether the sum is added to what `out` holds.
        """
        self.functions.sum_of_squares(x, out, add)

    # ---- tables

    def embedding(self, xp: Any, table: Array, indices: Array, dtype: np.dtype[Any]) -> Array:
        """Copy and convert rows; nobody waits for a look at the indices, and one out of range gives a row of NaN."""
        rows: Array = xp.empty((*indices.shape, table.shape[1]), dtype)
        self.functions.embedding(xp.ascontiguousarray(table), xp.ascontiguousarray(indices), rows)
        return rows

    def embedding_grad(
        self,
        xp: Any,
        grad: Array,
        indices: Array,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        into: Array | None,
        add: bool,
    ) -> Array:
        """Add up rows in the order in which they stand, in the place itself; indices out of range are left out."""
        spread: Array = xp.empty(shape, dtype) if into is None else into
        self.functions.embedding_grad(xp.ascontiguousarray(grad), xp.ascontiguousarray(indices), spread, add)
        return spread

    def dropout(
        self, xp: Any, x: Array, rate: float, key: tuple[int, int], first_row: int, columns: Array | None
    ) -> Array:
        """Draw and use the mask in one pass; of a gradient too, for which nothing is kept but the key."""
        result: Array = xp.empty(x.shape, x.dtype)
        self.functions.dropout(xp.ascontiguousarray(x), rate, key, first_row, columns, result)
        return result

    # ---- images

    def max_pool(self, xp: Any, x: Array, over: Any, keep: bool) -> tuple[Array, Array | None]:
        """Find the largest in one pass, with NumPy's winners."""
        n, h, w, c = x.shape
        y: Array = xp.empty((n, *over.out(h, w), c), x.dtype)
        winner = xp.empty(y.shape, np.min_scalar_type(prod(over.kernel))) if keep else None
        perform(self.functions.max_pool, xp.ascontiguousarray(x), y, winner, *over)
        return y, winner

    def max_pool_grad(self, xp: Any, grad: Array, winner: Array, shape: tuple[int, ...], over: Any) -> Array:
        """Gather each pixel's gradient from the windows that it has won."""
        to_x: Array = xp.empty(shape, grad.dtype)
        perform(self.functions.max_pool_grad, xp.ascontiguousarray(grad), winner, to_x, *over)
        return to_x


def _shift(xp: Any, y: Array, bias: Array | None) -> Array:
    """Return a bias (n,) without gaps for y (rows, n): zeros for none."""
    shift: Array = xp.zeros((y.shape[1],), y.dtype) if bias is None else xp.ascontiguousarray(bias)
    return shift


def _accumulated(x: Array) -> np.dtype[Any]:
    """Return the dtype in which kernels add up numbers of an array's dtype."""
    return np.dtype(np.float32) if is_low(x.dtype) else x.dtype


def device_kernels(xp: ModuleType) -> DeviceKernels | None:
    """Return the kernels of a device's library, or None for a library that compiles none. Nothing is compiled yet."""
    return _made_once(xp) if hasattr(xp, "RawModule") else None


@cache
def _made_once(xp: ModuleType) -> DeviceKernels:
    return DeviceKernels(xp)
