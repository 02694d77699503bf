"""The matrix product, with NumPy's rules: vectors, matrices, and stacks of matrices that broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.gemm import gemm
from nnmpi.backend.kernels import cast
from nnmpi.backend.precision import is_floating, is_low
from nnmpi.errors import LayoutError, ShapeError
from nnmpi.tensor.convert import converted
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import read_as, refuse_parts, unbroadcast
from nnmpi.tensor.placement import Placement, aligned, is_cut, moved, uncut
from nnmpi.tensor.variable import Variable

if TYPE_CHECKING:
    from nnmpi.tensor.tensor import Tensor


class MatMul(Function):
    """a @ b for operands of one, two or more dimensions."""

    replayable = True

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on the ranks: as the stacks, the rows of a, or the columns of b do.

        (..., n, k) @ (..., k, m) -> (..., n, m)       what is cut along k would have to be added up
        """
        a, b = inputs
        for x, inner in ((a, -1), (b, -2 if b.ndim > 1 else -1)):
            if is_cut(x):
                uncut(self, x, (inner,), "adds up along all of that axis")
        x = a if is_cut(a) else b
        behind = x.ndim - x.cut.axis
        if behind > 2:  # an axis of the stacks
            return aligned(self, inputs)
        if is_cut(a) and is_cut(b):
            raise x.cut.refuse(self, "multiplies all parts with all parts")
        return moved(x, max(a.ndim, b.ndim, 2) - behind - (a.ndim == 1))

    def forward(self, a: Array, b: Array) -> Array:
        self.saved = (a, b)
        y = self.multiply(a[None, :] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b)
        y = y[..., 0, :] if a.ndim == 1 else y
        return y[..., 0] if b.ndim == 1 else y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (a, b), xp = self.saved, self.xp
        # a vector on the left is a row, on the right a column: give everything two dimensions, take them away again
        rows = a[None, :] if a.ndim == 1 else a
        columns = b[:, None] if b.ndim == 1 else b
        if a.ndim == 1:
            grad = grad[..., None, :] if b.ndim > 1 else grad[None]  # (..., 1, m)
        if b.ndim == 1:
            grad = grad[..., None]  # (..., n, 1)
        to_a = to_b = None
        if self.needs[0]:
            # (..., n, m) @ (..., m, k) -> (..., n, k); stacks that were broadcast forward are summed here
            to_a = xp.reshape(unbroadcast(xp, self.multiply(grad, columns.swapaxes(-1, -2)), rows.shape), a.shape)
        if self.needs[1]:
            # (..., k, n) @ (..., n, m) -> (..., k, m)
            to_b = xp.reshape(unbroadcast(xp, self.multiply(rows.swapaxes(-1, -2), grad), columns.shape), b.shape)
        return to_a, to_b

    def multiply(self, a: Array, b: Array) -> Array:
        """Return the product of two stacks of matrices."""
        product: Array = gemm(self.xp, a, b) if is_floating(a.dtype) else self.xp.matmul(a, b)
        return product


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
        refuse_parts("matmul", a, b)
        raise ShapeError(f"matmul of shapes {x.shape} and {y.shape}: the inner sizes {x.shape[-1]} and {inner} differ")
    reads = read_as("matmul", a, b)
    if is_floating(reads) if type(x) is not np.ndarray else is_low(reads):
        a, b = (converted(each, reads) if isinstance(each, Variable) else _read(each, reads) for each in (a, b))
    try:
        return MatMul()(a, b)
    except LayoutError:
        raise
    except ValueError as error:
        raise ShapeError(f"matmul of shapes {x.shape} and {y.shape}: {error}") from None


def _read(x: Array, reads: np.dtype[Any]) -> Array:
    return cast(namespace(x), x, reads)


def _values(x: Any) -> Any:
    return x.data if isinstance(x, Variable) else x
