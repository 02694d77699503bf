"""The matrix product, with NumPy's rules: vectors, matrices, and stacks of matrices that broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnmpi.backend.array import Array
from nnmpi.errors import DtypeError, ShapeError
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import unbroadcast
from nnmpi.tensor.variable import Variable

if TYPE_CHECKING:
    from nnmpi.tensor.tensor import Tensor


class MatMul(Function):
    """a @ b for operands of one, two or more dimensions."""

    def forward(self, a: Array, b: Array) -> Array:
        self.saved = (a, b)
        result: Array = a @ b
        return result

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        a, b = self.saved
        # a vector on the left is a row, on the right a column: give everything two dimensions, take them away again
        rows = a[None, :] if a.ndim == 1 else a
        columns = b[:, None] if b.ndim == 1 else b
        if a.ndim == 1:
            grad = grad[..., None, :] if b.ndim > 1 else grad[None]
        if b.ndim == 1:
            grad = grad[..., None]
        to_a = to_b = None
        if self.needs[0]:
            to_a = unbroadcast(grad @ columns.swapaxes(-1, -2), rows.shape).reshape(a.shape)
        if self.needs[1]:
            to_b = unbroadcast(rows.swapaxes(-1, -2) @ grad, columns.shape).reshape(b.shape)
        return to_a, to_b


def matmul(a: Any, b: Any) -> Tensor:
    """Return the matrix product a @ b.

    Args:
        a: (..., n, k), or (k,) for a row vector.
        b: (..., k, m), or (k,) for a column vector. Leading dimensions broadcast.

    Raises:
        ShapeError: when the inner sizes differ, an operand is a number, or leading dimensions do not broadcast.
        DtypeError: when the dtypes differ.
    """
    x, y = _values(a), _values(b)
    if not hasattr(x, "ndim") or not hasattr(y, "ndim") or x.ndim == 0 or y.ndim == 0:
        raise ShapeError("matmul needs arrays of at least one dimension; use * for numbers")
    inner = y.shape[0] if y.ndim == 1 else y.shape[-2]
    if x.shape[-1] != inner:
        raise ShapeError(f"matmul of shapes {x.shape} and {y.shape}: the inner sizes {x.shape[-1]} and {inner} differ")
    if x.dtype != y.dtype:
        raise DtypeError(f"matmul of {x.dtype} and {y.dtype} would change a dtype silently; convert one with astype")
    try:
        return MatMul()(a, b)
    except ValueError as error:
        raise ShapeError(f"matmul of shapes {x.shape} and {y.shape}: {error}") from None


def _values(x: Any) -> Any:
    return x.data if isinstance(x, Variable) else x
