"""Activation functions as objects: what each computes, saves, is called elsewhere.

A formula is one of rows (see `PlainKernels.rows`), of an array library's functions, and compiled
kernels are printed from it. To add an activation, write its formulas and its object here: the tests
of gradients, of devices, of ONNX and beside PyTorch follow. A function for `nnmpi.ops` and a layer
for `nnmpi.nn`, whose `_form` is the object, are a few lines each there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import pi, sqrt
from types import MappingProxyType
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, masked
from nnmpi.backend.normal import TAIL_DOUBLE, TAIL_SINGLE
from nnmpi.backend.trace import Symbol, rounds_alike

Formula = Callable[..., tuple[Array, ...]]


class Saves(Enum):
    """What a backward pass reads.

    INPUT, RESULT    forward(x, *settings) -> (y,)
                     backward(gradient, input or result, *settings) -> (the gradient of x,)
    DERIVATIVE       forward(x, keep, *settings) -> (y, dy/dx), without dy/dx unless it is to be
                     kept: for what is computed faster with the value than again
    """

    INPUT = "input"
    RESULT = "result"
    DERIVATIVE = "derivative"


@dataclass(frozen=True, eq=False)
class Activation:
    """A function of each element by itself.

    Attributes:
        name: of the function in `nnmpi.ops`, perhaps followed by its form: "gelu tanh".
        forward, backward: row formulas, see `Saves`; no backward if the derivative is saved.
        saves: what backward reads.
        onnx: an operator's name, or (x, *settings) -> the value in an ONNX file (see
            `tensor.traits.OnnxForm`); None if it has no counterpart there.
        torch: the name of PyTorch's function in torch.nn.functional, which takes the same settings;
            "" if it has none.
        torch_words: its further arguments.
        onednn: the name of oneDNN's function (`onednn.FUNCTIONS`), where that is faster; "" if it
            has none or is not. Its parameter is the first setting.
        settings: with which tests try it.
        values: where it has a derivative: "any", or "nonzero" if it bends at 0.
    """

    name: str
    forward: Formula
    saves: Saves
    onnx: str | Callable[..., Any] | None
    torch: str
    backward: Formula | None = None
    torch_words: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    onednn: str = ""
    settings: tuple[float, ...] = ()
    values: str = "any"

    def nodes(self, x: Any, *settings: float) -> Any:
        """Return its value in an ONNX file, given that of x; None without a counterpart."""
        if isinstance(self.onnx, str):
            return x.each(self.onnx)
        return None if self.onnx is None else self.onnx(x, *settings)


def logistic(x: Array, small: Array) -> Array:
    """The sigmoid of x, by e^-|x|."""
    # as a maximum, since `where` mispredicts branches of random signs
    return np.maximum(small, x >= 0) / (small + 1)


@rounds_alike
def _relu(x: Array) -> tuple[Array]:
    """max(x, 0); the derivative at 0 is 0."""
    return (np.maximum(x, 0),)


@rounds_alike
def _relu_grad(grad: Array, y: Array) -> tuple[Array]:
    return (masked(y > 0, grad),)


@rounds_alike
def _leaky(x: Array, slope: float) -> tuple[Array]:
    return leaky_grad(x, x, slope)


@rounds_alike
def leaky_grad(grad: Array, x: Array, slope: Any) -> tuple[Array]:
    """The gradient times 1 or the slope: NumPy's `where` takes four times as long on random signs,
    which mislead the processor's branch prediction.
    """
    above = x > 0
    return ((np.logical_not(above) * (slope * x.dtype.type(1)) + above) * grad,)


def _sigmoid(x: Array) -> tuple[Array]:
    return (logistic(x, np.exp(-abs(x))),)


def _sigmoid_grad(grad: Array, y: Array) -> tuple[Array]:
    return ((1 - y) * y * grad,)


def _tanh(x: Array) -> tuple[Array]:
    return (np.tanh(x),)


def _tanh_grad(grad: Array, y: Array) -> tuple[Array]:
    return (grad * (1 - y * y),)


def _gelu(x: Array, keep: bool) -> tuple[Array, ...]:
    """Return x Phi(x), and Phi(x) + x density(x) if that is to be kept.

    Phi is the normal distribution's cumulative function. With s = |x| and the tail q = 1 - Phi(s),
    x Phi(x) = max(x, 0) - s q, which preserves the digits of small tails. The derivative is 1/2 +
    sign(x) (1/2 - q + s density(s)).
    """
    # the tail is 0 long before 100; infinity would become NaN, as infinity * 0
    size = np.minimum(abs(x), 100)
    power = size * size
    power *= -0.5
    power = np.exp(power)
    u = 10 / (size + 5)
    u -= 1.25
    terms = TAIL_DOUBLE if x.dtype.itemsize > 4 else TAIL_SINGLE
    tail = u * terms[-1]
    for term in terms[-2:0:-1]:
        tail += term
        tail *= u
    tail += terms[0]
    tail *= power
    y = np.maximum(x, 0)
    y -= size * tail
    if not keep:
        return (y,)
    power *= size
    power *= 1 / sqrt(2 * pi)
    power -= tail
    power += 0.5
    return y, np.copysign(power, x) + 0.5


def _rise(x: Array) -> Array:
    """(1 + tanh(x)) / 2, which a loop computes by an exponential in fewer steps."""
    if isinstance(x, Symbol):
        return 1 / (np.exp(-2 * x) + 1)
    y = np.tanh(x)
    y *= 0.5
    y += 0.5
    return y


def _gelu_tanh(x: Array, keep: bool) -> tuple[Array, ...]:
    """Return GPT-2's approximation of GELU, and its derivative if that is to be kept.

        y = x s     s = (1 + tanh(x p)) / 2     p = c (1 + 0.044715 x^2)     c = sqrt(2 / pi)
        dy/dx = s + y (1 - s) (6 p - 4 c)

    If x^2 is too large for the dtype (in float32 from |x| = 1.9e19 on), dy/dx is NaN. A pass that
    bounds x^2 would cost a tenth of the time.
    """
    c = sqrt(2 / pi)
    p = x * x
    p *= 0.044715 * c
    p += c
    s = _rise(p * x)
    y = x * s
    if not keep:
        return (y,)
    p *= 6
    p -= 4 * c
    # y comes last: p y may overflow, and infinity * (1 - s) is NaN if 1 - s is 0
    p *= 1 - s
    p *= y
    p += s
    return y, p


def _silu(x: Array, keep: bool) -> tuple[Array, ...]:
    """Return y = x s, s = 1 / (1 + e^-x), and s + y (1 - s) if that is to be kept."""
    # e^-x of a smaller x would be infinite; there |x s| is below 1e-36 anyway
    x = np.maximum(x, -708 if x.dtype.itemsize > 4 else -88)
    s = 1 / (np.exp(-x) + 1)
    y = x * s
    return (y, (1 - s) * y + s) if keep else (y,)


def gated_silu(gate: Array, x: Array) -> tuple[Array]:
    """silu(gate) x."""
    return (_silu(gate, False)[0] * x,)


def gated_silu_grad(grad: Array, gate: Array, x: Array) -> tuple[Array, Array]:
    """The gradients of gate and x: the exponential is cheaper than an array that keeps it."""
    y, slope = _silu(gate, True)
    return grad * x * slope, grad * y


def _elu(x: Array, keep: bool, alpha: float) -> tuple[Array, ...]:
    """Return ELU, and its derivative if that is to be kept."""
    below = np.minimum(x, 0)
    y = np.maximum(x, 0) + alpha * np.expm1(below)
    if not keep:
        return (y,)
    # not by `where`, which mispredicts branches of random signs: it took a third of the time
    rest = (x > 0) * (x.dtype.type(1) * (1 - alpha))
    return y, alpha * np.exp(below) + rest


def _selu(x: Array, keep: bool) -> tuple[Array, ...]:
    """Return ELU times a number, and its derivative if that is to be kept.

    The two numbers keep mean 0 and variance 1 of random rows from layer to layer.
    """
    alpha, scale = 1.6732632423543772, 1.0507009873554805
    return tuple([scale * part for part in _elu(x, keep, alpha)])


def _softplus(x: Array, keep: bool, beta: float, threshold: float) -> tuple[Array, ...]:
    """Return softplus, and its derivative if that is to be kept."""
    scaled = x * beta
    small, linear = np.exp(-abs(scaled)), scaled > threshold
    y = np.where(linear, x, (np.maximum(scaled, 0) + np.log1p(small)) / beta)
    return (y, np.where(linear, 1, logistic(scaled, small))) if keep else (y,)


def _softplus_onnx(x: Any, beta: float, threshold: float) -> Any:
    scaled = x * beta
    return scaled.each("Greater", threshold).each("Where", x, scaled.each("Softplus") / beta)


def _half_times(x: Any, risen: Any) -> Any:
    """x (1 + risen) / 2, in an ONNX file."""
    return x * 0.5 * (risen + 1)


RELU = Activation(
    "relu", _relu, Saves.RESULT, "Relu", "relu", backward=_relu_grad, values="nonzero"
)
LEAKY_RELU = Activation(
    "leaky_relu",
    _leaky,
    Saves.INPUT,  # from the result's sign a negative slope could not be told
    lambda x, slope: x.each("LeakyRelu", alpha=slope),
    "leaky_relu",
    backward=leaky_grad,
    onednn="relu",
    settings=(-0.25,),
    values="nonzero",
)
SIGMOID = Activation(
    "sigmoid",
    _sigmoid,
    Saves.RESULT,
    "Sigmoid",
    "sigmoid",
    backward=_sigmoid_grad,
    onednn="logistic",
)
TANH = Activation("tanh", _tanh, Saves.RESULT, "Tanh", "tanh", backward=_tanh_grad)
SILU = Activation(
    "silu",
    _silu,
    Saves.DERIVATIVE,
    lambda x: x * x.each("Sigmoid"),
    "silu",
    onednn="swish",
)
GELU = Activation(
    "gelu",
    _gelu,
    Saves.DERIVATIVE,
    lambda x: _half_times(x, (x * (1 / sqrt(2))).each("Erf")),
    "gelu",
    onednn="gelu_erf",
)
GELU_TANH = Activation(
    "gelu tanh",
    _gelu_tanh,
    Saves.DERIVATIVE,
    lambda x: _half_times(x, ((x + x * x * x * 0.044715) * sqrt(2 / pi)).each("Tanh")),
    "gelu",
    torch_words=MappingProxyType({"approximate": "tanh"}),
    onednn="gelu_tanh",
)
ELU = Activation(
    "elu",
    _elu,
    Saves.DERIVATIVE,
    lambda x, alpha: x.each("Elu", alpha=alpha),
    "elu",
    onednn="elu",
    settings=(0.7,),
    values="nonzero",
)
SELU = Activation("selu", _selu, Saves.DERIVATIVE, "Selu", "selu", values="nonzero")
SOFTPLUS = Activation(
    "softplus", _softplus, Saves.DERIVATIVE, _softplus_onnx, "softplus", settings=(1.5, 1.0)
)

FORMS = tuple([item for item in [*vars().values()] if isinstance(item, Activation)])
"""Every activation of this file; layers by name are `nn.activation.ACTIVATIONS`."""
