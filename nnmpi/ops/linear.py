"""The linear layer's operation: x W + b."""

from __future__ import annotations

from math import prod

from nnmpi.backend.array import Array, namespace
from nnmpi.errors import ShapeError
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import same_dtype
from nnmpi.tensor.tensor import Tensor


class Linear(Function):
    """x W + b, with the leading axes of x made into one, so that each product is one GEMM."""

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])  # not -1, which nothing can be divided by
        self.saved = (rows, weight, x.shape)
        y: Array = rows @ weight
        if bias is not None:
            y += bias
        return y.reshape(*x.shape[:-1], weight.shape[1])

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        rows, weight, shape = self.saved
        xp = namespace(grad)
        grad = grad.reshape(len(rows), weight.shape[1])
        to_x = (grad @ weight.T).reshape(shape) if self.needs[0] else None
        to_weight = xp.matmul(rows.T, grad, out=self.into(1)) if self.needs[1] else None
        to_bias = xp.sum(grad, axis=0, out=self.into(2)) if self.needs[2] else None
        return to_x, to_weight, to_bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W + b.

    Args:
        x: (..., in).
        weight: (in, out): BLAS reads it as it lies.
        bias: (out,), or None.

    Returns:
        (..., out), in the dtype of x.

    Raises:
        ShapeError: when x has another number of features than the weight has rows.
        DtypeError: when x, weight and bias differ in dtype.
    """
    if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[0]:
        raise ShapeError(
            f"linear needs (..., {weight.shape[0]}) for a weight of shape {weight.shape}, not {x.shape}; "
            "flatten images first"
        )
    if bias is not None and bias.shape != weight.shape[1:]:
        raise ShapeError(
            f"linear's bias has shape {bias.shape}; the weight of shape {weight.shape} needs {weight.shape[1:]}"
        )
    same_dtype("linear", x, weight, bias)
    return Linear()(x, weight, bias)
