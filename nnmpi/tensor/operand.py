"""What may stand beside a tensor in an operation: the rules for dtypes, and gradients under broadcasting."""

from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.errors import DtypeError, ShapeError
from nnmpi.tensor.variable import Variable


def operands(name: str, a: Any, b: Any) -> tuple[Any, Any]:
    """Return both operands ready for an elementwise operation, or refuse them.

    Python numbers (and NumPy's scalars) take the other operand's dtype; arrays must have the same dtype, or be masks.

    Raises:
        DtypeError: where the result would get another dtype than the operands, such as float32 with float64.
        ShapeError: where the shapes do not broadcast.
    """
    a, b = _plain(a), _plain(b)
    dtype_a, dtype_b = _dtype(a), _dtype(b)
    if dtype_a is not None and dtype_b is not None:
        if dtype_a != dtype_b and "b" not in (dtype_a.kind, dtype_b.kind):
            raise DtypeError(
                f"{name} of {dtype_a} and {dtype_b} would change a dtype silently; convert one with astype"
            )
        shape_a, shape_b = _values(a).shape, _values(b).shape
        if shape_a != shape_b:
            try:
                np.broadcast_shapes(shape_a, shape_b)
            except ValueError:
                raise ShapeError(f"{name} of shapes {shape_a} and {shape_b}: they do not broadcast") from None
        return a, b
    dtype, number = (dtype_a, b) if dtype_b is None else (dtype_b, a)
    if isinstance(number, float) and dtype is not None and dtype.kind not in "fc":
        raise DtypeError(f"{name} of a {dtype} tensor and {number} would change the dtype; convert with astype")
    return a, b


def real(name: str, x: Variable) -> Variable:
    """Return x if its values are floating point.

    Raises:
        DtypeError: for integers and booleans, whose result would have another dtype.
    """
    if x.data.dtype.kind != "f":
        raise DtypeError(f"{name} needs floating point, not {x.data.dtype}; convert with astype('float32')")
    return x


def unbroadcast(grad: Array, shape: tuple[int, ...]) -> Array:
    """Return the gradient of an operand of that shape, given the gradient of the broadcast result: a sum."""
    if grad.shape == shape:
        return grad
    extra = grad.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(extra + i for i, n in enumerate(shape) if n == 1 and grad.shape[extra + i] != 1)
    result: Array = grad.sum(axis=axes).reshape(shape)
    return result


def _plain(x: Any) -> Any:
    """Turn NumPy's scalars into Python numbers, which promote nothing, and lists into an error."""
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, Variable | bool | int | float) or hasattr(x, "dtype"):
        return x
    raise DtypeError(f"{type(x).__name__} cannot stand beside a tensor; give a number, an array or a Tensor")


def _values(x: Any) -> Any:
    return x.data if isinstance(x, Variable) else x


def _dtype(x: Any) -> Any:
    """Return the dtype of a tensor or array, None for a number."""
    return getattr(_values(x), "dtype", None)
