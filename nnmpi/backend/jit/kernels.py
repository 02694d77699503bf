"""What numba computes for NumPy's float32 arrays, as operations ask for it (see `backend.kernels`)."""

from typing import Any

from nnmpi.backend.array import Array, Residuals
from nnmpi.backend.jit import table
from nnmpi.backend.recording import perform


class CompiledKernels:
    """Kernels compiled by numba, for float32. They read and write arrays without gaps.

    Attributes:
        functions: the module that compiles functions when they are first asked for.
    """

    __slots__ = ()

    functions: Any = table

    @property
    def adam(self) -> table.Kernel:
        """Adam's update of a block; see `optim.updates`."""
        return table.loop("adam")

    def bias_relu(self, xp: Any, y: Array, bias: Array | None) -> None:
        """y = max(y + bias, 0), in place."""
        shift = xp.zeros((y.shape[1],), y.dtype) if bias is None else xp.ascontiguousarray(bias)
        perform(table.loop("bias_relu"), y, shift)

    def relu_grad_bias(self, xp: Any, grad: Array, y: Array, to_bias: Array | None) -> Array:
        """Return grad where y is positive and else 0, and write its sum over the rows."""
        result: Array = xp.empty(grad.shape, grad.dtype)
        place = xp.empty(grad.shape[1:], grad.dtype) if to_bias is None else to_bias
        perform(table.loop("relu_grad_bias"), xp.ascontiguousarray(grad), y, result, place)
        return result

    def lstm_step(self, g: Array, product: Array, c: Array, new_c: Array, new_h: Array) -> None:
        """See `ops.lstm`; it is not recorded call by call."""
        table.loop("lstm_step")(g, product, c, new_c, new_h)

    def lstm_step_grad(
        self, g: Array, slopes: Array, h: Array, grad: Array, cell: Array, last_c: Array, c: Array
    ) -> None:
        """See `ops.lstm`."""
        table.loop("lstm_step_grad")(g, slopes, h, grad, cell, last_c, c)

    def softmax_loss(
        self, xp: Any, logits: Array, labels: Array, ignore_index: int | None, smoothing: float
    ) -> tuple[Array, Residuals] | None:
        """Return losses and their gradients, where all labels count and none is smoothed; else None."""
        if ignore_index is not None or smoothing or labels.dtype != "int64":
            return None
        logits, labels = xp.ascontiguousarray(logits), xp.ascontiguousarray(labels)
        losses, gradients = xp.empty((len(logits),), logits.dtype), xp.empty(logits.shape, logits.dtype)
        perform(table.loop("softmax_loss"), logits, labels, losses, gradients)
        return losses, (gradients,)
