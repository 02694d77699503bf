"""Activations: ReLU, leaky ReLU, sigmoid, tanh, SiLU, GELU, ELU, SELU, softplus, softmax, SwiGLU.

The arithmetic of all that compute each element by itself is in `backend.activations`. GELU is x
times the normal distribution's cumulative function (Hendrycks and Gimpel, 2016). There are two
forms: the exact one with the error function, and GPT-2's approximation with the hyperbolic tangent.
Softmax and its logarithm are shifted by each row's largest element, so that nothing overflows.
"""

from typing import Any, ClassVar

import numpy as np

from nnmpi.backend.activations import (
    ELU,
    GELU,
    GELU_TANH,
    LEAKY_RELU,
    RELU,
    SELU,
    SIGMOID,
    SILU,
    SOFTPLUS,
    gated_silu,
    gated_silu_grad,
    leaky_grad,
)
from nnmpi.backend.array import Array, masked
from nnmpi.backend.kernels import kernels_of
from nnmpi.backend.plain import largest
from nnmpi.backend.precision import FLOAT32, is_low
from nnmpi.backend.sums import row_totals
from nnmpi.base.errors import ShapeError, UsageError, number
from nnmpi.base.words import answered
from nnmpi.tensor.dtypes import mixes
from nnmpi.tensor.elementwise import activated
from nnmpi.tensor.function import Elementwise, Function, Grads
from nnmpi.tensor.operand import checked_axes, operands, require_floating
from nnmpi.tensor.placement import Placement, placement_if_uncut
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import Channels, Sample, Traits

__all__ = [
    *("elu", "gelu", "leaky_relu", "log_softmax", "prelu", "relu", "selu", "sigmoid", "silu"),
    *("softmax", "softplus", "swiglu", "tanh"),
]


@answered
def relu(x: Tensor) -> Tensor:
    """Return max(x, 0), elementwise."""
    return activated(RELU, x)


@answered
def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Return x where it is positive and negative_slope * x elsewhere."""
    require_floating("leaky_relu", x)
    slope = float(operands("leaky_relu", x, negative_slope)[1])
    return activated(LEAKY_RELU, x, slope)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x), elementwise, without overflow."""
    y = activated(SIGMOID, x)
    y.made_by = "sigmoid"
    return y


@answered
def silu(x: Tensor) -> Tensor:
    """Return SiLU, x * sigmoid(x), elementwise (swish; Elfwing, Uchibe and Doya, 2017)."""
    return activated(SILU, x)


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
    return activated(GELU_TANH if approximate == "tanh" else GELU, x)


@answered
def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Return x where positive, alpha (e^x - 1) elsewhere (Clevert et al., 2016), elementwise."""
    return activated(ELU, x, float(number("elu's alpha", alpha)))


@answered
def selu(x: Tensor) -> Tensor:
    """Return SELU, 1.0507 elu(x, 1.67326), elementwise (Klambauer et al., 2017)."""
    return activated(SELU, x)


@answered
def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """Return log(1 + e^(beta x)) / beta, elementwise; x itself where beta x is above the threshold.

    Raises:
        UsageError: unless beta is above 0.
    """
    if not number("softplus's beta", beta):
        raise UsageError(f"softplus's beta is {beta}; give a number above 0")
    return activated(SOFTPLUS, x, float(beta), float(number("threshold", threshold)))


class PReLUFunction(Elementwise):
    """x where it is positive, a learned slope times x elsewhere: one slope for all elements."""

    __slots__ = ()

    computes = "float32"
    traits = Traits(
        onnx="PRelu",
        samples=(
            Sample("prelu", lambda x, slope: prelu(x, slope), ((3, 4), (1,)), (), "nonzero", 1),
        ),
    )

    def forward(self, x: Array, slope: Array) -> Array:
        self.saved = (x, slope)
        return leaky_grad(x, x, slope)[0]

    def backward(self, grad: Array) -> Grads:
        x, slope = self.saved
        to_x = leaky_grad(grad, x, slope)[0] if self.needs[0] else None
        return to_x, masked(np.logical_not(x > 0), grad * x) if self.needs[1] else None


class ChannelPReLUFunction(PReLUFunction):
    """The same with a slope of each channel, which PyTorch has on the second axis."""

    __slots__ = ()

    traits = Traits(
        onnx="PRelu",
        channels=Channels.NORMALIZED,
        samples=(
            Sample(
                "prelu channels",
                lambda x, slopes: prelu(x, slopes),
                ((2, 3, 2, 4), (4,)),
                (),
                "nonzero",
                1,
            ),
        ),
    )


@answered
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """Return x where it is positive and weight * x elsewhere (He et al., 2015), elementwise.

    Args:
        x: (..., channels).
        weight: the learned slope, (1,), or one of each channel, (channels,).

    Raises:
        ShapeError: for a weight of another shape.
    """
    require_floating("prelu", x)
    require_floating("prelu", weight)
    if weight.ndim != 1 or weight.size not in (1, *x.shape[-1:]):
        raise ShapeError(
            f"prelu of shape {x.shape} needs a weight of one slope (1,), or of one of each channel"
            f" {x.shape[-1:]}, not {weight.shape}"
        )
    if not mixes(x._data.dtype, weight._data.dtype):
        operands("prelu", x, weight)
    if not x.ndim:  # which would be broadcast to the weight's axis
        return prelu(x.reshape(1), weight).reshape(())
    return (PReLUFunction if weight.size == 1 else ChannelPReLUFunction)()(x, weight)


class GatedSiLU(Elementwise):
    """silu(gate) x, for two arrays of one shape."""

    __slots__ = ()

    computes = "kernels"
    traits = Traits(
        onnx=lambda f, y, gate, x: gate * gate.each("Sigmoid") * x,
        samples=(Sample("swiglu", lambda gate, x: swiglu(gate, x), ((3, 4), (3, 4))),),
    )

    def forward(self, gate: Array, x: Array) -> Array:
        kernels = kernels_of(gate)
        self.saved = (gate, x, kernels)
        return self._rows(kernels, gated_silu, gate, x)[0]

    def backward(self, grad: Array) -> Grads:
        *inputs, kernels = self.saved
        return self._rows(kernels, gated_silu_grad, grad, *inputs)

    @staticmethod
    def _rows(kernels: Any, formula: Any, *arrays: Array) -> tuple[Array, ...]:
        """Return a formula's results, in the arrays' dtype; half precision is computed wide."""
        dtype, shape = arrays[0].dtype, arrays[0].shape
        width = shape[-1] if shape else 1
        rows = [np.reshape(item, (item.size // max(width, 1), width)) for item in arrays]
        if is_low(dtype):  # of a device
            rows = [kernels.cast(item, FLOAT32) for item in rows]
        results = kernels.rows(formula, *rows)
        return tuple(kernels.cast(item, dtype).reshape(shape) for item in results)


@answered
def swiglu(gate: Tensor, x: Tensor) -> Tensor:
    """Return silu(gate) * x, elementwise (Shazeer, "GLU variants improve transformer", 2020).

    Raises:
        ShapeError: when the two differ in shape.
    """
    require_floating("swiglu", gate)
    if not mixes(gate._data.dtype, require_floating("swiglu", x)._data.dtype):
        operands("swiglu", gate, x)
    if gate.shape != x.shape:
        raise ShapeError(f"swiglu needs two tensors of one shape, not {gate.shape} and {x.shape}")
    return GatedSiLU()(gate, x)


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

    traits = Traits(
        onnx=lambda f, y, x: x.add("Softmax", axis=f.axis),
        samples=(
            Sample("softmax", lambda x: softmax(x), ((3, 4),)),
            Sample("softmax middle axis", lambda x: softmax(x, 1), ((2, 3, 2),)),
        ),
    )

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

    traits = Traits(
        onnx=lambda f, y, x: x.add("LogSoftmax", axis=f.axis),
        samples=(
            Sample("log_softmax", lambda x: log_softmax(x), ((3, 4),)),
            Sample("log_softmax middle axis", lambda x: log_softmax(x, 1), ((2, 3, 2),)),
        ),
    )

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
