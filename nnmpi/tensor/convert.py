"""Conversion to another dtype, as an operation; and operations that compute in float32 whatever they are given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nnmpi.backend.array import Array, is_array, namespace
from nnmpi.backend.kernels import FLOAT32, cast, kernels_for, to_float32
from nnmpi.backend.precision import is_low
from nnmpi.tensor.function import Elementwise, Function
from nnmpi.tensor.variable import Variable

if TYPE_CHECKING:
    from nnmpi.tensor.tensor import Tensor


class AsType(Elementwise):
    """x in another dtype; the gradient goes back in the dtype of x."""

    __slots__ = ("wanted",)

    replayable = True

    def __init__(self, wanted: np.dtype[Any]) -> None:
        self.wanted = wanted

    def forward(self, x: Array) -> Array:
        self.saved = (x.dtype,)
        return cast(self.xp, x, self.wanted)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (cast(self.xp, grad, self.saved[0]),)


def converted(x: Any, dtype: np.dtype[Any]) -> Any:
    """Return a tensor in another dtype, as an operation; itself where it has that dtype."""
    return x if x.data.dtype == dtype else AsType(dtype)(x)


def in_float32(function: Function, *inputs: Any, narrow: bool = True) -> Tensor:
    """Apply an operation in float32 to tensors of float16 or bfloat16, and round its result to their dtype once.

        float16, bfloat16   --AsType-->  float32  --operation-->  float32  --AsType-->  float16, bfloat16
        float32, float64    ---------------------- operation -------------------------->

    Args:
        inputs: tensors, arrays, and plain values, which stay as they are.
        narrow: whether the result is rounded; otherwise it stays float32.
    """
    low = None
    for x in inputs:
        if isinstance(x, Variable) and is_low(x.data.dtype):
            low = x.data.dtype
            break
    if low is None:
        return function(*inputs)
    result = function(*map(_raised, inputs))
    rounded: Tensor = converted(result, low) if narrow and result.data.dtype == FLOAT32 else result
    return rounded


def with_kernels(name: str, function: Function, *inputs: Any, narrow: bool = True) -> Tensor:
    """Apply an operation: `in_float32`, unless a device's kernels of this name read lower precision themselves.

    Args:
        name: of the kernel that the operation asks for.
        function: the operation.
        inputs, narrow: as for `in_float32`.
    """
    first = inputs[0].data
    if type(first) is np.ndarray or kernels_for(first, name) is None:
        return in_float32(function, *inputs, narrow=narrow)
    return function(*inputs)


def _raised(x: Any) -> Any:
    """Return float16 and bfloat16 as float32, and anything else as it is."""
    if isinstance(x, Variable):
        return converted(x, FLOAT32) if is_low(x.data.dtype) else x
    return to_float32(namespace(x), x) if is_array(x) else x
