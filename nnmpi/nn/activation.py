"""Layers without parameters: activations, softmax, and the flattening of images."""

from nnmpi.aliases import also
from nnmpi.errors import UsageError
from nnmpi.nn.module import Module
from nnmpi.ops.activation import leaky_relu, relu, sigmoid, silu, tanh
from nnmpi.ops.gelu import gelu
from nnmpi.ops.softmax import softmax
from nnmpi.tensor.tensor import Tensor


class ReLU(Module):
    """max(x, 0)"""

    def forward(self, x: Tensor) -> Tensor:
        """Return max(x, 0)."""
        return relu(x)


class LeakyReLU(Module):
    """x where positive, slope * x elsewhere."""

    @also(negative_slope="slope")
    def __init__(self, slope: float = 0.01) -> None:
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        """Return x with its negative elements scaled."""
        return leaky_relu(x, self.slope)


class GELU(Module):
    """x Phi(x); approximate="tanh" gives the form of GPT-2."""

    def __init__(self, approximate: str = "none") -> None:
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """Return x Phi(x)."""
        return gelu(x, self.approximate)


class SiLU(Module):
    """x * sigmoid(x)"""

    def forward(self, x: Tensor) -> Tensor:
        """Return x * sigmoid(x)."""
        return silu(x)


class Tanh(Module):
    """The hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        """Return tanh x."""
        return tanh(x)


class Sigmoid(Module):
    """1 / (1 + e^-x)"""

    def forward(self, x: Tensor) -> Tensor:
        """Return the sigmoid."""
        return sigmoid(x)


class Softmax(Module):
    """e^x / sum(e^x) along an axis."""

    @also(dim="axis")
    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Return the softmax."""
        return softmax(x, self.axis)


class Flatten(Module):
    """(batch, ...) -> (batch, features)"""

    def forward(self, x: Tensor) -> Tensor:
        """Return x with all axes but the first made into one."""
        return x.flatten()


def activation(name: str) -> Module:
    """Return the activation layer of that name: relu, leaky-relu, gelu, silu, tanh or sigmoid.

    Raises:
        UsageError: for another name.
    """
    layers: dict[str, type[Module]] = {
        "relu": ReLU,
        "leaky-relu": LeakyReLU,
        "gelu": GELU,
        "silu": SiLU,
        "tanh": Tanh,
        "sigmoid": Sigmoid,
    }
    if name not in layers:
        raise UsageError(f"activation {name!r} is unknown; choose one of {', '.join(layers)}")
    return layers[name]()
