"""Which dtypes may meet in an operation, and in which a product is computed."""

from typing import Any

import numpy as np

from nnmpi.backend.array import Dtype
from nnmpi.backend.precision import FLOAT32, LOW, dtype_named, precision, rounds_products
from nnmpi.base.errors import DtypeError, GraphError, UsageError


def may_meet(name: str, *inputs: Any) -> Dtype:
    """Return the operands' first dtype; refuse other ones, except by mixed precision (see `mixes`).

    Operations call it before they read shapes: what is no operand has none.

    Raises:
        DtypeError: naming the operation and the dtypes.
        GraphError: for an input that is neither a tensor nor an array.
    """
    dtypes = [_dtype_of(x) for x in inputs]
    for i, dtype in enumerate(dtypes):  # `in` would not do: NumPy's float64 equals None
        if dtype is None:
            raise no_tensor(name, inputs[i])
    if dtypes.count(dtypes[0]) != len(dtypes) and not mixes(*dtypes):
        words, remedy = ", ".join(map(str, dtypes)), "convert with astype"
        if "uint8" in dtypes:  # by astype they would be many times what the loader makes of them
            remedy = "take a data.Loader's batches or dataset.rows(indices), which scale bytes"
        raise DtypeError(f"{name} of {words} would change a dtype silently; {remedy}")
    return dtypes[0]


def mixes(*dtypes: Any) -> bool:
    """True if mixed precision allows these dtypes together: float32 and its low dtype."""
    low = LOW.get(precision())
    return low is not None and all(str(dtype) in (low, "float32") for dtype in dtypes)


def product_dtype(name: str, *inputs: Any) -> Dtype:
    """Return the input dtype of a matrix product: the operands', or mixed precision's low one.

    On the host in bf16 it is float32, unless all operands are bfloat16: what is rounded is no
    array's dtype there.

    Raises:
        DtypeError, GraphError: for inputs that may not be combined (see `may_meet`).
        UsageError: for tf32 with NumPy arrays: NumPy has no tf32 products.
    """
    mode = precision()
    if mode != "float32":
        dtypes, values = list(map(_dtype_of, inputs)), getattr(inputs[0], "_data", inputs[0])
        if mode in LOW and mixes(*dtypes):
            single = rounds_products(values) and FLOAT32 in dtypes
            return FLOAT32 if single else dtype_named(LOW[mode])
        if mode == "tf32" and isinstance(values, np.ndarray):
            raise UsageError(
                f"{name} cannot be computed in tf32 by NumPy; use precision float32, or backend"
                " cupy on a CUDA device"
            )
    return may_meet(name, *inputs)


def no_tensor(name: str, x: Any) -> GraphError:
    """Return the error for an input that is neither a tensor nor an array."""
    return GraphError(
        f"{name} needs a Tensor, not {type(x).__name__}; wrap the array in nnmpi.Tensor"
    )


def _dtype_of(x: Any) -> Any:
    # not by getattr, which would hide the error of a parameter without values
    kind = type(x)
    if not hasattr(kind, "dtype"):
        return None
    return (x.wide or x._data.dtype) if hasattr(kind, "_data") else x.dtype  # without a call
