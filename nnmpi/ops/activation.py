"""Activation functions: ReLU, leaky ReLU, sigmoid, tanh and SiLU, each beside its derivative. GELU is in `gelu`."""

from typing import Any

from nnmpi.aliases import also
from nnmpi.backend.array import Array, zero
from nnmpi.tensor.convert import in_float32
from nnmpi.tensor.elementwise import tanh as tanh
from nnmpi.tensor.function import Elementwise
from nnmpi.tensor.operand import require_floating
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


@also(input="x")
def relu(x: Tensor) -> Tensor:
    """Return max(x, 0), elementwise."""
    return in_float32(Relu(), require_floating("relu", x))


@also(input="x", negative_slope="slope")
def leaky_relu(x: Tensor, slope: float = 0.01) -> Tensor:
    """Return x where it is positive and slope * x elsewhere."""
    return in_float32(LeakyRelu(float(slope)), require_floating("leaky_relu", x))


@also(input="x")
def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x), elementwise, without overflow."""
    return in_float32(SigmoidFunction(), require_floating("sigmoid", x))


@also(input="x")
def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x), elementwise: SiLU, also called swish (Elfwing, Uchibe and Doya, 2017)."""
    return in_float32(Silu(), require_floating("silu", x))
