"""Rules for operands: which dtypes and shapes may meet.

Dtypes never promote silently. For example, float32 with float64 is an error, so that one stray
array cannot turn a float32 model into float64 unnoticed. Only mixed precision relaxes the rule.
"""

from typing import Any

import numpy as np

from nnmpi.backend.array import Shape, asarray, is_array
from nnmpi.backend.precision import FLOAT32, is_floating
from nnmpi.base.errors import DtypeError, ShapeError
from nnmpi.tensor.dtypes import mixes, no_tensor
from nnmpi.tensor.function import Variable, converted
from nnmpi.tensor.placement import is_sharded


def operands(name: str, a: Any, b: Any) -> tuple[Any, Any]:
    """Return both operands ready for an elementwise operation, or refuse them.

    Python numbers and NumPy's scalars take the other operand's dtype. Arrays must have the same
    dtype, or be masks. Mixed precision (see `backend.precision`) converts its low dtype to float32
    when the other operand is float32.

    Args:
        name: of the operation, for errors.
        a, b: tensors, arrays or numbers.

    Raises:
        DtypeError: when the result would have another dtype than the operands, such as for float32
            with float64.
        ShapeError: when the shapes do not broadcast.
    """
    a, b = _plain(a), _plain(b)
    dtype_a, dtype_b = _dtype(a), _dtype(b)
    if dtype_a is not None and dtype_b is not None:
        if dtype_a != dtype_b and dtype_a.kind != "b" and dtype_b.kind != "b":
            if not mixes(dtype_a, dtype_b):
                raise DtypeError(
                    f"{name} of {dtype_a} and {dtype_b} would change a dtype silently; use astype"
                    " on one"
                )
            a, b = converted(a, FLOAT32), converted(b, FLOAT32)
        # shards show the full shapes here; the operation's `placed` compares their placements
        check_broadcast(name, a.shape, b.shape)
        return a, b
    dtype, number = (dtype_a, b) if dtype_b is None else (dtype_b, a)
    kinds = "biuf" if isinstance(number, bool) else "iuf" if isinstance(number, int) else "f"
    if dtype is not None and dtype.kind not in kinds and not is_floating(dtype):
        raise DtypeError(
            f"{name} of a {dtype} tensor and {number} would change the dtype; convert with astype"
        )
    if (
        dtype is not None
        and dtype.kind in "iu"
        and not np.iinfo(dtype).min <= number <= np.iinfo(dtype).max
    ):
        raise DtypeError(
            f"{name} of a {dtype} tensor and {number}, which {dtype} cannot hold; convert with"
            " astype"
        )
    return a, b


def check_broadcast(name: str, *shapes: Shape) -> None:
    """Refuse shapes that do not broadcast.

    Raises:
        ShapeError: naming the operation and the shapes.
    """
    if len(set(shapes)) > 1:
        try:
            np.broadcast_shapes(*shapes)
        except ValueError:
            raise ShapeError(
                f"{name} of shapes {' and '.join(map(str, shapes))}: they do not broadcast"
            ) from None


def refuse_parts(
    operation: object, *inputs: Any, why: str = "combines it with a whole tensor"
) -> None:
    """Refuse shards (`sharded.ShardedTensor`) for an operation that does not support them.

    Args:
        operation: a `Function`, or a name.
        inputs: anything; only shards are refused.
        why: the reason, for the error.

    Raises:
        LayoutError: naming the layer that made the shard.
    """
    for x in inputs:
        if is_sharded(x):
            raise x.shard.error(operation, why) from None


def values_or_refuse(name: str, x: Any) -> Any:
    """Return a tensor's array, or another library's; return anything else unchanged.

    Raises:
        LayoutError: for a shard, whose array is not the full tensor's.
    """
    if not isinstance(x, Variable):
        return asarray(x)
    if x.shard is not None:
        raise x.shard.error(name, "takes the values of a whole tensor")
    return x._data


def require_floating(name: str, x: Variable) -> Variable:
    """Return x if its values are floating point.

    Raises:
        DtypeError: for integers and booleans: the result would have another dtype.
        GraphError: when x is no tensor.
    """
    if not isinstance(x, Variable):
        raise no_tensor(name, x)
    if x._data.dtype.kind != "f" and not is_floating(x._data.dtype):
        raise DtypeError(
            f"{name} needs floating point, not {x._data.dtype}; convert with astype('float32')"
        )
    return x


def given(x: Any) -> tuple[Any, ...]:
    """Return an optional input as a tuple: empty for None."""
    return () if x is None else (x,)


def _plain(x: Any) -> Any:
    """Convert NumPy's scalars to Python numbers, which promote no dtype; refuse lists."""
    if isinstance(x, np.generic):
        x = x.item()
    if isinstance(x, Variable | bool | int | float) or is_array(x := asarray(x)):
        return x
    raise DtypeError(
        f"{type(x).__name__} cannot be combined with a tensor; give a number, an array or a Tensor"
    )


def values_of(x: Any) -> Any:
    """Return a tensor's array, also a shard's; return anything else unchanged."""
    return x._data if isinstance(x, Variable) else x


def _dtype(x: Any) -> Any:
    return x._data.dtype if isinstance(x, Variable) else getattr(x, "dtype", None)


def checked_axes(ndim: int, *axes: Any) -> tuple[int, ...]:
    """Return axes as non-negative numbers.

    Raises:
        ShapeError: for an axis that the array does not have, or something else than an integer.
    """
    result: list[int] = []
    for axis in axes:
        try:
            result.append(range(ndim)[axis])
        except (IndexError, TypeError):
            raise ShapeError(
                f"axis {axis!r} does not fit an array of {ndim} dimensions; give one of its axes, a"
                " whole number"
            ) from None
    return tuple(result)
