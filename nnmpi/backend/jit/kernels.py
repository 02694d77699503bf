"""What of `Kernels` numba computes for NumPy's float32 arrays; all else is inherited from NumPy's."""

from typing import Any

from nnmpi.backend.array import Array, Residuals
from nnmpi.backend.jit import table
from nnmpi.backend.kernels.base import Kernels
from nnmpi.backend.recording import perform


class CompiledKernels(Kernels):
    """Kernels compiled by numba, for float32. Arguments and results are those of `Kernels`.

    The compiled functions read and write arrays without gaps; a recorded step notes each as one call.

    Attributes:
        functions: the module that compiles functions when they are first asked for.
    """

    __slots__ = ()

    functions: Any = table

    # ---- dense layers

    def bias_relu(self, xp: Any, y: Array, bias: Array | None) -> None:
        """Add the bias and cut off in one pass."""
        if bias is None:
            super().bias_relu(xp, y, bias)
        else:
            perform(table.loop("bias_relu"), y, xp.ascontiguousarray(bias))

    def relu_grad_bias(self, xp: Any, grad: Array, y: Array, to_bias: Array | None) -> Array:
        """Compute both gradients in one pass."""
        if to_bias is None:
            return super().relu_grad_bias(xp, grad, y, None)
        result: Array = xp.empty(grad.shape, grad.dtype)
        perform(table.loop("relu_grad_bias"), xp.ascontiguousarray(grad), y, result, to_bias)
        return result

    # ---- long short-term memory, which is not recorded call by call

    def lstm_step(self, xp: Any, g: Array, product: Array, c: Array, new_c: Array, new_h: Array) -> None:
        """Compute it in one pass."""
        table.loop("lstm_step")(g, product, c, new_c, new_h)

    def lstm_step_grad(
        self, xp: Any, g: Array, slopes: Array, h: Array, grad: Array, cell: Array, last_c: Array, c: Array
    ) -> None:
        """Compute it in one pass."""
        table.loop("lstm_step_grad")(g, slopes, h, grad, cell, last_c, c)

    # ---- rows

    def softmax_loss(
        self, xp: Any, logits: Array, labels: Array, ignore_index: int | None, smoothing: float
    ) -> tuple[Array, Residuals]:
        """Compute losses and their gradients in one pass, where all labels count and none is smoothed."""
        if ignore_index is not None or smoothing or labels.dtype != "int64":
            return super().softmax_loss(xp, logits, labels, ignore_index, smoothing)
        logits, labels = xp.ascontiguousarray(logits), xp.ascontiguousarray(labels)
        losses, gradients = xp.empty((len(logits),), logits.dtype), xp.empty(logits.shape, logits.dtype)
        perform(table.loop("softmax_loss"), logits, labels, losses, gradients)
        return losses, (gradients,)

    def softmax_loss_grad(self, xp: Any, share: Array, residuals: Residuals, smoothing: float, dtype: Any) -> Array:
        """Scale the gradients that are there already."""
        if len(residuals) > 1:  # the losses were NumPy's
            return super().softmax_loss_grad(xp, share, residuals, smoothing, dtype)
        gradient: Array = xp.multiply(residuals[0], xp.reshape(share, (share.size, 1)))
        return gradient
