"""What of `Kernels` numba computes for NumPy's float32 arrays; all else is inherited from NumPy's."""

from typing import Any

import numpy as np

from nnmpi.backend.array import Array, Residuals
from nnmpi.backend.jit.table import CompiledFunctions
from nnmpi.backend.kernels.attention import AttentionDropout
from nnmpi.backend.kernels.base import Kernels, UpdateKernels
from nnmpi.backend.kernels.pooling import PoolWindows
from nnmpi.backend.recording import perform

SIDE_BY_SIDE = PoolWindows((2, 2), (2, 2), (0, 0))


class CompiledKernels(Kernels):
    """Kernels compiled by numba, for float32. Arguments and results are those of `Kernels`.

    The compiled functions read and write arrays without gaps; a recorded step notes each as one call.

    Attributes:
        functions: the compiled functions of this process.
    """

    __slots__ = ("functions",)

    def __init__(self) -> None:
        self.functions = CompiledFunctions()

    @property
    def updates(self) -> UpdateKernels:
        """Optimizers' updates, which work on whole buffers."""
        return self.functions

    # ---- dense layers

    def bias_relu(self, xp: Any, y: Array, bias: Array | None) -> None:
        """Add the bias and cut off in one pass."""
        if bias is None:
            super().bias_relu(xp, y, bias)
        else:
            perform(self.functions.bias_relu, y, xp.ascontiguousarray(bias))

    def relu_grad_bias(self, xp: Any, grad: Array, y: Array, to_bias: Array | None) -> Array:
        """Compute both gradients in one pass."""
        if to_bias is None:
            return super().relu_grad_bias(xp, grad, y, None)
        result: Array = xp.empty(grad.shape, grad.dtype)
        perform(self.functions.relu_grad_bias, xp.ascontiguousarray(grad), y, result, to_bias)
        return result

    def gelu(self, xp: Any, x: Array, tanh: bool, keep: bool) -> tuple[Array, Residuals]:
        """Compute GPT-2's form in one pass, and keep x; the exact form is NumPy's."""
        if not tanh:
            return super().gelu(xp, x, tanh, keep)
        flat, y = xp.ascontiguousarray(xp.reshape(x, (x.size,))), xp.empty((x.size,), x.dtype)
        perform(self.functions.gelu_tanh, flat, y)
        return y.reshape(x.shape), (flat,)

    def gelu_grad(self, xp: Any, grad: Array, residuals: Residuals, tanh: bool) -> Array:
        """Compute the gradient of GPT-2's form in one pass."""
        if not tanh:
            return super().gelu_grad(xp, grad, residuals, tanh)
        (flat,), to_x = residuals, xp.empty((grad.size,), grad.dtype)
        perform(self.functions.gelu_tanh_grad, flat, xp.ascontiguousarray(xp.reshape(grad, flat.shape)), to_x)
        result: Array = to_x.reshape(grad.shape)
        return result

    def bias_gelu(self, xp: Any, y: Array, bias: Array | None, tanh: bool, keep: bool) -> Array | None:
        """Compute bias, GPT-2's form and its derivative in one pass; the exact form is NumPy's."""
        if not tanh:
            return super().bias_gelu(xp, y, bias, tanh, keep)
        shift = xp.zeros((y.shape[1],), y.dtype) if bias is None else xp.ascontiguousarray(bias)
        slope: Array = xp.empty(y.shape, y.dtype)
        perform(self.functions.bias_gelu_tanh_slope, y, shift, slope)
        return slope

    def slope_grad_bias(self, xp: Any, grad: Array, slope: Array, to_bias: Array | None) -> Array:
        """Compute both gradients in one pass."""
        if to_bias is None:
            return super().slope_grad_bias(xp, grad, slope, None)
        result: Array = xp.empty(grad.shape, grad.dtype)
        perform(self.functions.slope_grad_bias, xp.ascontiguousarray(grad), slope, result, to_bias)
        return result

    # ---- attention

    def powers(self, xp: Any, p: Array, top: Array, total: Array, before: Array | None, corner: int) -> None:
        """Compute them and their sums in one kernel, without the hidden ones."""
        has_before = before is not None
        perform(self.functions.attention_powers, p, top, total, before if has_before else top, has_before, corner)

    def score_gradients(self, xp: Any, d: Array, p: Array, inner: Array, drop: AttentionDropout | None) -> None:
        """Compute them in one pass, where nothing is dropped."""
        if drop is not None:
            super().score_gradients(xp, d, p, inner, drop)
        else:
            perform(self.functions.attention_score_gradients, d, p, inner)

    # ---- long short-term memory, which is not recorded call by call

    def lstm_step(self, xp: Any, g: Array, product: Array, c: Array, new_c: Array, new_h: Array) -> None:
        """Compute it in one pass."""
        self.functions.lstm_step(g, product, c, new_c, new_h)

    def lstm_step_grad(
        self, xp: Any, g: Array, slopes: Array, h: Array, grad: Array, cell: Array, last_c: Array, c: Array
    ) -> None:
        """Compute it in one pass."""
        self.functions.lstm_step_grad(g, slopes, h, grad, cell, last_c, c)

    # ---- rows

    def layer_norm(
        self, xp: Any, x: Array, scale: Array, shift: Array, eps: float, keep: bool
    ) -> tuple[Array, Residuals]:
        """Normalize rows in one pass."""
        x, scale, shift = xp.ascontiguousarray(x), xp.ascontiguousarray(scale), xp.ascontiguousarray(shift)
        y, normal = xp.empty(x.shape, x.dtype), xp.empty(x.shape, x.dtype)
        inverse = xp.empty((len(x),), x.dtype)
        perform(self.functions.layer_norm, x, scale, shift, eps, y, normal, inverse)
        return y, (normal, inverse, scale)

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
        """Write all gradients in one pass; those that nobody asked for go to scratch memory."""
        normal, inverse, scale = residuals  # the scale here is one without gaps
        if to_x is None:
            to_x = xp.empty(grad.shape, grad.dtype)
        sums = [xp.empty(scale.shape, grad.dtype) if each is None else each for each in (to_scale, to_shift)]
        grad = xp.ascontiguousarray(grad)
        perform(self.functions.layer_norm_grad, grad, normal, inverse, scale, to_x, *sums)

    def softmax_loss(
        self, xp: Any, logits: Array, labels: Array, ignore_index: int | None, smoothing: float
    ) -> tuple[Array, Residuals]:
        """Compute losses and their gradients in one pass, where all labels count and none is smoothed."""
        if ignore_index is not None or smoothing or labels.dtype != "int64":
            return super().softmax_loss(xp, logits, labels, ignore_index, smoothing)
        logits, labels = xp.ascontiguousarray(logits), xp.ascontiguousarray(labels)
        losses, gradients = xp.empty((len(logits),), logits.dtype), xp.empty(logits.shape, logits.dtype)
        perform(self.functions.softmax_loss, logits, labels, losses, gradients)
        return losses, (gradients,)

    def softmax_loss_grad(self, xp: Any, share: Array, residuals: Residuals, smoothing: float, dtype: Any) -> Array:
        """Scale the gradients that are there already."""
        if len(residuals) > 1:  # the losses were NumPy's
            return super().softmax_loss_grad(xp, share, residuals, smoothing, dtype)
        gradient: Array = xp.multiply(residuals[0], xp.reshape(share, (share.size, 1)))
        return gradient

    def max_pool(self, xp: Any, x: Array, over: PoolWindows, keep: bool) -> tuple[Array, Residuals]:
        """Find the largest of 2 x 2 pixels side by side in one pass; other windows are NumPy's."""
        if over != SIDE_BY_SIDE:
            return super().max_pool(xp, x, over, keep)
        n, h, w, c = x.shape
        y: Array = xp.empty((n, h // 2, w // 2, c), x.dtype)
        corner = xp.empty(y.shape, np.uint8)  # which of the four it was
        perform(self.functions.max_pool2, xp.ascontiguousarray(x), y, corner)
        return y, (corner, x.shape)

    def max_pool_grad(self, xp: Any, grad: Array, residuals: Residuals, over: PoolWindows) -> Array:
        """Send gradients back in one pass, for the windows that `max_pool` has here."""
        if over != SIDE_BY_SIDE:
            return super().max_pool_grad(xp, grad, residuals, over)
        corner, shape = residuals
        to_x: Array = xp.empty(shape, grad.dtype)
        perform(self.functions.max_pool2_grad, xp.ascontiguousarray(grad), corner, to_x)
        return to_x
