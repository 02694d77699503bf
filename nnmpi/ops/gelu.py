"""GELU, x times a distribution's cumulative function (Hendrycks and Gimpel, 2016), alone or on a linear layer's result.

There are two forms: the exact one by the error function, and that of GPT-2 by the hyperbolic tangent (`tanh`).
"""

from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.kernels.base import Kernels
from nnmpi.backend.kernels.lookup import kernels_for
from nnmpi.errors import UsageError
from nnmpi.ops.linear import LinearFunction, check_linear, linear_options
from nnmpi.tensor.convert import with_kernels
from nnmpi.tensor.function import Elementwise
from nnmpi.tensor.operand import require_floating
from nnmpi.tensor.tensor import Tensor


class Gelu(Elementwise):
    """GELU, elementwise.

    Args:
        tanh: whether GPT-2's form is meant.
        kernels: those for x.
    """

    __slots__ = ("kernels", "tanh")

    replayable = True

    def __init__(self, tanh: bool, kernels: Kernels) -> None:
        self.tanh, self.kernels = tanh, kernels

    def forward(self, x: Array) -> Array:
        y, self.saved = self.kernels.gelu(self.xp, x, self.tanh, self.needs[0])
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self.kernels.gelu_grad(self.xp, grad, self.saved, self.tanh),)


class LinearGeluFunction(LinearFunction):
    """GELU of x W + b; the derivative is computed together with the value, and kept.

    Args:
        tanh: whether GPT-2's form is meant.
        kernels, reads: as for `LinearFunction`.
    """

    __slots__ = ("tanh",)

    def __init__(self, tanh: bool, kernels: Kernels, reads: np.dtype[Any] | None) -> None:
        super().__init__(kernels, reads)
        self.tanh = tanh

    def activate(self, y: Array, bias: Array | None) -> Array | None:
        """Turn x W into GELU(x W + b), in place; return its derivative."""
        return self.kernels.bias_gelu(self.xp, y, bias, self.tanh, True in self.needs)

    def before_activation(self, grad: Array, kept: Array | None, to_bias: Array | None) -> Array:
        """Return the gradient of x W + b, given that of the result, and the derivative; write that of b."""
        assert kept is not None
        return self.kernels.slope_grad_bias(self.xp, grad, kept, to_bias)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return x Phi(x), elementwise; Phi is the normal distribution's (Hendrycks and Gimpel, 2016).

    Args:
        approximate: "none" for the exact form by the error function, "tanh" for the form of GPT-2.

    Raises:
        UsageError: for another value of `approximate`.
    """
    tanh = _is_tanh(approximate)
    kernels = kernels_for(require_floating("gelu", x).data)
    return with_kernels(kernels, Gelu(tanh, kernels), x)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Return GELU(x W + b), bit for bit what `gelu(linear(...))` gives, in one operation.

    Arguments and errors are those of `linear` and `gelu`.
    """
    reads = check_linear("linear_gelu", x, weight, bias)
    require_floating("linear_gelu", x)
    return LinearGeluFunction(_is_tanh(approximate), *linear_options(x, reads))(x, weight, bias)


def _is_tanh(approximate: str) -> bool:
    if approximate not in ("none", "tanh"):
        raise UsageError(f"gelu's approximate is 'none' or 'tanh', not {approximate!r}")
    return approximate == "tanh"
