"""What may stand beside a tensor in an operation: the rules for dtypes, and gradients under broadcasting."""

from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.errors import DtypeError, GraphError, ShapeError
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
        if dtype_a != dtype_b and dtype_a.kind != "b" and dtype_b.kind != "b":
            raise DtypeError(f"{name} of {dtype_a} and {dtype_b} would change a dtype silently; use astype on one")
        check_broadcast(name, _values(a).shape, _values(b).shape)
        return a, b
    dtype, number = (dtype_a, b) if dtype_b is None else (dtype_b, a)
    kinds = "biuf" if isinstance(number, bool) else "iuf" if isinstance(number, int) else "f"
    if dtype is not None and dtype.kind not in kinds:
        raise DtypeError(f"{name} of a {dtype} tensor and {number} would change the dtype; convert with astype")
    return a, b


def check_broadcast(name: str, *shapes: tuple[int, ...]) -> None:
    """Refuse shapes that do not broadcast.

    Raises:
        ShapeError: naming the operation and the shapes.
    """
    if len(set(shapes)) > 1:
        try:
            np.broadcast_shapes(*shapes)
        except ValueError:
            raise ShapeError(f"{name} of shapes {' and '.join(map(str, shapes))}: they do not broadcast") from None


def real(name: str, x: Variable) -> Variable:
    """Return x if its values are floating point.

    Raises:
        DtypeError: for integers and booleans, whose result would have another dtype.
        GraphError: when x is no tensor.
    """
    if not isinstance(x, Variable):
        raise GraphError(f"{name} needs a Tensor, not {type(x).__name__}; wrap the array in nnmpi.Tensor")
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


def same_dtype(name: str, *inputs: Any) -> None:
    """Refuse tensors and arrays of different dtypes; None stands for an input that is not there.

    Raises:
        DtypeError: naming the operation and the dtypes.
    """
    dtypes = [_dtype(x) for x in inputs if x is not None]
    if any(dtype != dtypes[0] for dtype in dtypes):
        words = ", ".join(map(str, dtypes))
        raise DtypeError(f"{name} of {words} would change a dtype silently; convert with astype")


def _plain(x: Any) -> Any:
    """Turn NumPy's scalars into Python numbers, which promote nothing, and lists into an error."""
    if isinstance(x, np.generic):
        x = x.item()
    if isinstance(x, Variable | bool | int | float) or hasattr(x, "dtype"):
        return x
    raise DtypeError(f"{type(x).__name__} cannot stand beside a tensor; give a number, an array or a Tensor")


def _values(x: Any) -> Any:
    return x.data if isinstance(x, Variable) else x


def _dtype(x: Any) -> Any:
    """Return the dtype of a tensor or array, None for a number."""
    return getattr(_values(x), "dtype", None)
