"""Activation functions, each beside its derivative: ReLU, leaky ReLU, sigmoid, tanh, SiLU, GELU and softmax.

GELU is x times a distribution's cumulative function (Hendrycks and Gimpel, 2016), alone or on a linear layer's result.
There are two forms: the exact one by the error function, and that of GPT-2 by the hyperbolic tangent (`tanh`). Softmax
and its logarithm are shifted by each row's largest element, so that nothing overflows.
"""

from typing import Any

import numpy as np

from nnmpi.backend.array import Array, zero
from nnmpi.backend.kernels.base import Kernels
from nnmpi.backend.kernels.lookup import kernels_for
from nnmpi.errors import ShapeError, UsageError
from nnmpi.ops.linear import LinearFunction, check_linear, linear_options
from nnmpi.tensor.convert import in_float32, with_kernels
from nnmpi.tensor.elementwise import tanh as tanh
from nnmpi.tensor.function import Elementwise, Function
from nnmpi.tensor.operand import require_floating
from nnmpi.tensor.placement import Placement, uncut
from nnmpi.tensor.tensor import Tensor


class Relu(Elementwise):
    """max(x, 0); the derivative at 0 is 0."""

    replayable = True

    def forward(self, x: Array) -> Array:
        y: Array = self.xp.maximum(x, zero(self.xp, x.dtype))
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (y,), xp = self.saved, self.xp
        to_x = xp.empty(y.shape, y.dtype)
        # 0 and 1 in the gradient's dtype: a product with booleans would convert them
        xp.greater(y, zero(xp, y.dtype), out=to_x)
        return (xp.multiply(grad, to_x, out=to_x),)


class LeakyRelu(Elementwise):
    """x where positive, slope * x elsewhere."""

    __slots__ = ("slope",)

    replayable = True

    def __init__(self, slope: float) -> None:
        self.slope = slope

    def forward(self, x: Array) -> Array:
        self.saved = (x,)
        return self._where_positive(x, self.xp.multiply(x, self.slope))

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (self._where_positive(grad, self.xp.multiply(grad, self.slope)),)

    def _where_positive(self, values: Array, others: Array) -> Array:
        """Return the values where x is positive, and the others elsewhere."""
        xp = self.xp
        result: Array = xp.where(xp.greater(self.saved[0], 0), values, others)
        return result


class SigmoidFunction(Elementwise):
    """1 / (1 + e^-x)"""

    replayable = True

    def forward(self, x: Array) -> Array:
        y: Array = _sigmoid(self.xp, x)
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (y,), xp = self.saved, self.xp
        to_x = xp.subtract(1, y, out=xp.empty(y.shape, y.dtype))  # with a place also for a number without axes
        xp.multiply(to_x, y, out=to_x)
        return (xp.multiply(to_x, grad, out=to_x),)


class Silu(Elementwise):
    """x * sigmoid(x)"""

    replayable = True

    def forward(self, x: Array) -> Array:
        s = _sigmoid(self.xp, x)
        y: Array = self.xp.multiply(x, s)
        self.saved = (y, s)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (y, s), xp = self.saved, self.xp
        to_x = xp.subtract(1, s, out=xp.empty(s.shape, s.dtype))  # the derivative is s + y (1 - s)
        xp.multiply(to_x, y, out=to_x)
        xp.add(to_x, s, out=to_x)
        return (xp.multiply(to_x, grad, out=to_x),)


def _sigmoid(xp: Any, x: Array) -> Any:
    """Return 1 / (1 + e^-x) as e^min(x, 0) / (1 + e^-|x|), in which no exponential overflows."""
    small, below = xp.empty(x.shape, x.dtype), xp.empty(x.shape, x.dtype)
    xp.minimum(x, 0, out=small)
    xp.exp(small, out=small)
    xp.absolute(x, out=below)
    xp.negative(below, out=below)
    xp.exp(below, out=below)
    xp.add(below, 1, out=below)
    xp.divide(small, below, out=small)
    return small


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0), elementwise."""
    return in_float32(Relu(), require_floating("relu", x))


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Return x where it is positive and negative_slope * x elsewhere."""
    return in_float32(LeakyRelu(float(negative_slope)), require_floating("leaky_relu", x))


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x), elementwise, without overflow."""
    return in_float32(SigmoidFunction(), require_floating("sigmoid", x))


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x), elementwise: SiLU, also called swish (Elfwing, Uchibe and Doya, 2017)."""
    return in_float32(Silu(), require_floating("silu", x))


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


class SoftmaxFunction(Function):
    """e^x / sum(e^x) along an axis.

    Args:
        axis: along which the results add up to 1.
        kernels: those for x.
    """

    __slots__ = ("axis", "kernels")

    replayable = True

    def __init__(self, axis: int, kernels: Kernels) -> None:
        self.axis, self.kernels = axis, kernels

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on the ranks: as before, where the axis is another one."""
        return uncut(self, inputs[0], (self.axis,), "adds up all of its axis")

    def forward(self, x: Array) -> Array:
        y = self.kernels.softmax(self.xp, x, self.axis)
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (y,) = self.saved
        return (self.kernels.softmax_grad(self.xp, grad, y, self.axis),)


class LogSoftmax(Function):
    """x - log(sum(e^x)) along an axis."""

    __slots__ = ("axis",)

    replayable = True

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def placed(self, *inputs: Any) -> Placement:
        """Return how the result lies on the ranks: as before, where the axis is another one."""
        return uncut(self, inputs[0], (self.axis,), "adds up all of its axis")

    def forward(self, x: Array) -> Array:
        xp = self.xp
        y: Array = xp.subtract(x, xp.max(x, axis=self.axis, keepdims=True))
        xp.subtract(y, xp.log(xp.sum(xp.exp(y), axis=self.axis, keepdims=True)), out=y)
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (y,), xp = self.saved, self.xp
        share = xp.exp(y)
        xp.multiply(share, xp.sum(grad, axis=self.axis, keepdims=True), out=share)
        return (xp.subtract(grad, share, out=share),)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return e^x / sum(e^x) along `axis`: positive numbers that add up to 1.

    Raises:
        ShapeError: when x has no such axis, or no elements along it.
    """
    _check(x, axis)
    kernels = kernels_for(require_floating("softmax", x).data)
    function = SoftmaxFunction(axis, kernels)
    return with_kernels(kernels, function, x) if axis % x.ndim == x.ndim - 1 else in_float32(function, x)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return the logarithm of softmax along `axis`, computed without overflow or log of 0.

    Raises:
        ShapeError: when x has no such axis, or no elements along it.
    """
    _check(x, axis)
    return in_float32(LogSoftmax(axis), require_floating("log_softmax", x))


def _check(x: Tensor, axis: int) -> None:
    if not -x.ndim <= axis < x.ndim or x.shape[axis] == 0:
        raise ShapeError(f"softmax along axis {axis} of shape {x.shape} has no elements")
