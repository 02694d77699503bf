"""Activation functions: ReLU, leaky ReLU, sigmoid, tanh, SiLU and GELU, each beside its derivative."""

from __future__ import annotations

from math import pi, sqrt

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.special import erf
from nnmpi.errors import UsageError
from nnmpi.tensor.elementwise import tanh as tanh
from nnmpi.tensor.function import Function
from nnmpi.tensor.operand import real
from nnmpi.tensor.tensor import Tensor


class Relu(Function):
    """max(x, 0); the derivative at 0 is 0."""

    def forward(self, x: Array) -> Array:
        y: Array = namespace(x).maximum(x, 0)
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (grad * (self.saved[0] > 0),)


class LeakyRelu(Function):
    """x where positive, slope * x elsewhere."""

    __slots__ = ("slope",)

    def __init__(self, slope: float) -> None:
        self.slope = slope

    def forward(self, x: Array) -> Array:
        self.saved = (x,)
        y: Array = namespace(x).where(x > 0, x, x * self.slope)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        return (namespace(grad).where(self.saved[0] > 0, grad, grad * self.slope),)


def _sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), written so that no exponential overflows."""
    xp = namespace(x)
    small = xp.exp(-abs(x))
    result: Array = xp.where(x >= 0, 1 / (1 + small), small / (1 + small))
    return result


class Sigmoid(Function):
    """1 / (1 + e^-x)"""

    def forward(self, x: Array) -> Array:
        y = _sigmoid(x)
        self.saved = (y,)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        (y,) = self.saved
        return (grad * y * (1 - y),)


class Silu(Function):
    """x * sigmoid(x)"""

    def forward(self, x: Array) -> Array:
        s = _sigmoid(x)
        self.saved = (x, s)
        return x * s

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        x, s = self.saved
        return (grad * s * (1 + x * (1 - s)),)


class Gelu(Function):
    """x Phi(x), Phi being the normal distribution's cumulative function (Hendrycks and Gimpel, 2016)."""

    def forward(self, x: Array) -> Array:
        phi = 0.5 * (1 + erf(x * (1 / sqrt(2))))
        self.saved = (x, phi)
        y: Array = x * phi
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        x, phi = self.saved
        density = namespace(x).exp(-0.5 * x * x) * (1 / sqrt(2 * pi))
        return (grad * (phi + x * density),)


class GeluTanh(Function):
    """GELU with Phi approximated by a tanh, the form that GPT-2 uses."""

    def forward(self, x: Array) -> Array:
        inner = namespace(x).tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x))
        self.saved = (x, inner)
        y: Array = 0.5 * x * (1 + inner)
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        x, inner = self.saved
        slope = (1 - inner * inner) * (sqrt(2 / pi) * (1 + 3 * 0.044715 * x * x))
        return (grad * 0.5 * (1 + inner + x * slope),)


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0), elementwise."""
    return Relu()(real("relu", x))


def leaky_relu(x: Tensor, slope: float = 0.01) -> Tensor:
    """Return x where it is positive and slope * x elsewhere."""
    return LeakyRelu(float(slope))(real("leaky_relu", x))


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x), elementwise, without overflow."""
    return Sigmoid()(real("sigmoid", x))


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x), elementwise (also called swish)."""
    return Silu()(real("silu", x))


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return x Phi(x), elementwise.

    Args:
        approximate: "none" for the exact form by the error function, "tanh" for the form of GPT-2.

    Raises:
        UsageError: for another value of `approximate`.
    """
    if approximate not in ("none", "tanh"):
        raise UsageError(f"gelu's approximate is 'none' or 'tanh', not {approximate!r}")
    return (Gelu() if approximate == "none" else GeluTanh())(real("gelu", x))
