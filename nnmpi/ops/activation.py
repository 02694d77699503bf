"""Activations: ReLU, leaky ReLU, sigmoid, tanh, SiLU, GELU, ELU, softplus, softmax.

The arithmetic of most, with the derivatives, is in `backend.plain`. GELU is x times the normal
distribution's cumulative function (Hendrycks and Gimpel, 2016). There are two forms: the exact one
with the error function, and GPT-2's approximation with the hyperbolic tangent. Softmax and its
logarithm are shifted by each row's largest element, so that nothing overflows.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.kernels import kernels_of
from nnmpi.backend.plain import Activation, largest, logistic
from nnmpi.backend.sums import row_totals
from nnmpi.base.errors import ShapeError, UsageError, number
from nnmpi.base.words import answered
from nnmpi.tensor.elementwise import activated
from nnmpi.tensor.function import Elementwise, Function, Grads
from nnmpi.tensor.operand import checked_axes, operands, require_floating
from nnmpi.tensor.placement import Placement, placement_if_uncut
from nnmpi.tensor.tensor import Tensor

__all__ = [
    *("elu", "gelu", "leaky_relu", "log_softmax", "relu", "sigmoid", "silu", "softmax"),
    *("softplus", "tanh"),
]


@answered
def relu(x: Tensor) -> Tensor:
    """Return max(x, 0), elementwise."""
    return activated(Activation.RELU, x)


@answered
def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Return x where it is positive and negative_slope * x elsewhere."""
    require_floating("leaky_relu", x)
    slope = float(operands("leaky_relu", x, negative_slope)[1])
    return activated(Activation.LEAKY_RELU, x, slope)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x), elementwise, without overflow."""
    y = activated(Activation.SIGMOID, x)
    y.made_by = "sigmoid"
    return y


@answered
def silu(x: Tensor) -> Tensor:
    """Return SiLU, x * sigmoid(x), elementwise (swish; Elfwing, Uchibe and Doya, 2017)."""
    return activated(Activation.SILU, x)


tanh = Tensor.tanh


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return x Phi(x), elementwise; Phi is the normal distribution's (Hendrycks and Gimpel, 2016).

    Args:
        approximate: "none" for the exact form by the error function, "tanh" for the form of GPT-2.

    Raises:
        UsageError: for another value of `approximate`.
    """
    if approximate not in ("none", "tanh"):
        raise UsageError(f"gelu's approximate is 'none' or 'tanh', not {approximate!r}")
    return activated(Activation.GELU_TANH if approximate == "tanh" else Activation.GELU, x)


class Soft(Elementwise):
    """A function, elementwise, whose derivative is computed with the value, block by block.

    Args:
        evaluate: (x, *numbers) -> the values and the derivatives, a row formula (see
            `PlainKernels.rows`).
        numbers: floats.
    """

    __slots__ = ("evaluate", "numbers")

    computes = "float32"

    def __init__(self, evaluate: Callable[..., tuple[Array, ...]], *numbers: float) -> None:
        self.evaluate, self.numbers = evaluate, numbers

    def forward(self, x: Array) -> Array:
        y, *self.saved = kernels_of(x).rows(self.evaluate, x, *self.numbers)
        return y

    def backward(self, grad: Array) -> Grads:
        return (grad * self.saved[0],)


def elu_rows(x: Array, alpha: float) -> tuple[Array, ...]:
    """ELU and its derivative."""
    below = np.minimum(x, 0)
    # not by `where`, which mispredicts branches of random signs: it took a third of the time
    rest = (x > 0) * (x.dtype.type(1) * (1 - alpha))
    return np.maximum(x, 0) + alpha * np.expm1(below), alpha * np.exp(below) + rest


def softplus_rows(x: Array, beta: float, threshold: float) -> tuple[Array, ...]:
    """Softplus and its derivative."""
    scaled = x * beta
    small, linear = np.exp(-abs(scaled)), scaled > threshold
    y = (np.maximum(scaled, 0) + np.log1p(small)) / beta
    return np.where(linear, x, y), np.where(linear, 1, logistic(scaled, small))


@answered
def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Return x where positive, alpha (e^x - 1) elsewhere (Clevert et al., 2016), elementwise."""
    return _soft("elu", x, elu_rows, number("elu's alpha", alpha))


@answered
def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """Return log(1 + e^(beta x)) / beta, elementwise; x itself where beta x is above the threshold.

    Raises:
        UsageError: unless beta is above 0.
    """
    if not number("softplus's beta", beta):
        raise UsageError(f"softplus's beta is {beta}; give a number above 0")
    return _soft("softplus", x, softplus_rows, beta, number("threshold", threshold))


def _soft(name: str, x: Tensor, *formula: Any) -> Tensor:
    return Soft(formula[0], *map(float, formula[1:]))(require_floating(name, x))


def softmax_rows(x: Array) -> tuple[Array]:
    """e^x / sum(e^x) along the last axis."""
    y = np.exp(x - largest(x))
    y /= row_totals(y)
    return (y,)


def _softmax_grad(grad: Array, y: Array) -> tuple[Array]:
    """The gradient of x for y = softmax_rows(x)."""
    weighted = grad * y
    return (weighted - y * row_totals(weighted),)


class SoftmaxFunction(Function):
    """e^x / sum(e^x) along an axis.

    Args:
        axis: along which the results add up to 1.

    Attributes:
        formulas: of rows: x -> y, and (gradient, y) -> the gradient of x.
    """

    __slots__ = ("axis",)

    computes = "kernels"
    formulas: ClassVar[Any] = softmax_rows, _softmax_grad

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def placed(self, *inputs: Any) -> Placement:
        """Return the input's placement; refuse an input that is sharded along the axis."""
        return placement_if_uncut(self, inputs[0], (self.axis,), "adds up all of its axis")

    def forward(self, x: Array) -> Array:
        kernels = kernels_of(x)
        y = kernels.along(self.formulas[0], self.axis, x)
        self.saved = (y, kernels)
        return y

    def backward(self, grad: Array) -> Grads:
        y, kernels = self.saved
        return (kernels.along(self.formulas[1], self.axis, grad, y),)


def _log_softmax(x: Array) -> tuple[Array]:
    y = x - largest(x)
    return (y - np.log(np.exp(y).sum(axis=-1, keepdims=True)),)


def _log_softmax_grad(grad: Array, y: Array) -> tuple[Array]:
    return (grad - np.exp(y) * grad.sum(axis=-1, keepdims=True),)


class LogSoftmaxFunction(SoftmaxFunction):
    """x - log(sum(e^x)) along an axis."""

    __slots__ = ()

    computes = "float32"
    formulas = _log_softmax, _log_softmax_grad


@answered
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return e^x / sum(e^x) along `axis`: positive numbers that add up to 1.

    Raises:
        ShapeError: when x has no such axis, or no elements along it.
    """
    y = SoftmaxFunction(_checked_axis("softmax", x, axis))(x)
    y.made_by = "softmax"
    return y


@answered
def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return the logarithm of softmax along `axis`, computed without overflow or log of 0.

    Raises:
        ShapeError: when x has no such axis, or no elements along it.
    """
    return LogSoftmaxFunction(_checked_axis("log_softmax", x, axis))(x)


def _checked_axis(name: str, x: Tensor, axis: int) -> int:
    (at,) = checked_axes(require_floating(name, x)._data.ndim, axis)
    if x.shape[at] == 0:
        raise ShapeError(f"{name} along axis {axis} of shape {x.shape} has no elements")
    return at
