"""Convolution in half precision where no device does it: rounded inputs, sums in float32, a rounded result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.casting import FLOAT32, cast
from nnmpi.backend.precision import is_low
from nnmpi.tensor.convert import converted
from nnmpi.tensor.function import Function
from nnmpi.tensor.tensor import Tensor


class _Rounded(Function):
    """x with what half precision keeps of it, in float32; the gradient stays as exact as it comes."""

    __slots__ = ("low",)

    replayable = True

    def __init__(self, low: np.dtype[Any]) -> None:
        self.low = low

    def forward(self, x: Array) -> Array:
        return cast(self.xp, cast(self.xp, x, self.low), FLOAT32)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (grad,)


def narrowly(
    dtype: np.dtype[Any],
    function: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Return function(x, weight, bias), of inputs rounded to the dtype if it is float16 or bfloat16, and so the result.

    A float32 weight is rounded where it is read, and gets a float32 gradient.
    """
    if not is_low(dtype):
        return function(x, weight, bias)
    x = converted(converted(x, dtype), FLOAT32)
    weight = _Rounded(dtype)(weight) if weight.dtype == FLOAT32 else converted(weight, FLOAT32)
    bias = None if bias is None else converted(bias, FLOAT32)
    result: Tensor = converted(function(x, weight, bias), dtype)
    return result
