"""Activations: ReLU, leaky ReLU, sigmoid, tanh, SiLU, GELU, softmax.

Their arithmetic, with the derivatives, is in `backend.plain`. GELU is x times the normal
distribution's cumulative function (Hendrycks and Gimpel, 2016). There are two forms: the exact one
with the error function, and GPT-2's approximation with the hyperbolic tangent. Softmax and its
logarithm are shifted by each row's largest element, so that nothing overflows.
"""

from typing import Any, Never

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.kernels import kernels_of
from nnmpi.backend.plain import Activation, largest
from nnmpi.base.errors import ShapeError
from nnmpi.base.words import refuse_words
from nnmpi.tensor.elementwise import activated, gelu_form
from nnmpi.tensor.function import Function, Grads
from nnmpi.tensor.operand import (
    checked_axes,
    operands,
    require_floating,
)
from nnmpi.tensor.placement import Placement, placement_if_uncut
from nnmpi.tensor.tensor import Tensor

__all__ = ["gelu", "leaky_relu", "log_softmax", "relu", "sigmoid", "silu", "softmax", "tanh"]


def relu(x: Tensor, **words: Never) -> Tensor:
    """Return max(x, 0), elementwise."""
    refuse_words("relu", words)
    return activated(Activation.RELU, x)


def leaky_relu(x: Tensor, negative_slope: float = 0.01, **words: Never) -> Tensor:
    """Return x where it is positive and negative_slope * x elsewhere."""
    refuse_words("leaky_relu", words)
    require_floating("leaky_relu", x)
    slope = float(operands("leaky_relu", x, negative_slope)[1])
    return activated(Activation.LEAKY_RELU, x, slope)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x), elementwise, without overflow."""
    y = activated(Activation.SIGMOID, x)
    y.made_by = "sigmoid"
    return y


def silu(x: Tensor, **words: Never) -> Tensor:
    """Return SiLU, x * sigmoid(x), elementwise (swish; Elfwing, Uchibe and Doya, 2017)."""
    refuse_words("silu", words)
    return activated(Activation.SILU, x)


tanh = Tensor.tanh


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return x Phi(x), elementwise; Phi is the normal distribution's (Hendrycks and Gimpel, 2016).

    Args:
        approximate: "none" for the exact form by the error function, "tanh" for the form of GPT-2.

    Raises:
        UsageError: for another value of `approximate`.
    """
    return activated(gelu_form(approximate), x)


class SoftmaxFunction(Function):
    """e^x / sum(e^x) along an axis.

    Args:
        axis: along which the results add up to 1.
    """

    __slots__ = ("axis",)

    computes = "kernels"

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def placed(self, *inputs: Any) -> Placement:
        """Return the input's placement; refuse an input that is sharded along the axis."""
        return placement_if_uncut(self, inputs[0], (self.axis,), "adds up all of its axis")

    def forward(self, x: Array) -> Array:
        kernels = kernels_of(x)
        y: Array = kernels.softmax(x, self.axis)
        self.saved = (y, kernels)
        return y

    def backward(self, grad: Array) -> Grads:
        y, kernels = self.saved
        return (kernels.softmax_grad(grad, y, self.axis),)


def _log_softmax(x: Array) -> tuple[Array]:
    y = x - largest(x)
    return (y - np.log(np.exp(y).sum(axis=-1, keepdims=True)),)


def _log_softmax_grad(grad: Array, y: Array) -> tuple[Array]:
    return (grad - np.exp(y) * grad.sum(axis=-1, keepdims=True),)


class LogSoftmaxFunction(SoftmaxFunction):
    """x - log(sum(e^x)) along an axis."""

    __slots__ = ()

    computes = "float32"

    def forward(self, x: Array) -> Array:
        kernels = kernels_of(x)
        y: Array = kernels.along(_log_softmax, self.axis, x)
        self.saved = (y, kernels)
        return y

    def backward(self, grad: Array) -> Grads:
        y, kernels = self.saved
        return (kernels.along(_log_softmax_grad, self.axis, grad, y),)


def softmax(x: Tensor, axis: int = -1, **words: Never) -> Tensor:
    """Return e^x / sum(e^x) along `axis`: positive numbers that add up to 1.

    Raises:
        ShapeError: when x has no such axis, or no elements along it.
    """
    refuse_words("softmax", words)
    y: Tensor = SoftmaxFunction(_checked_axis("softmax", x, axis))(x)
    y.made_by = "softmax"
    return y


def log_softmax(x: Tensor, axis: int = -1, **words: Never) -> Tensor:
    """Return the logarithm of softmax along `axis`, computed without overflow or log of 0.

    Raises:
        ShapeError: when x has no such axis, or no elements along it.
    """
    refuse_words("log_softmax", words)
    return LogSoftmaxFunction(_checked_axis("log_softmax", x, axis))(x)


def _checked_axis(name: str, x: Tensor, axis: int) -> int:
    (at,) = checked_axes(require_floating(name, x)._data.ndim, axis)
    if x.shape[at] == 0:
        raise ShapeError(f"{name} along axis {axis} of shape {x.shape} has no elements")
    return at
