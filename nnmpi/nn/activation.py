"""Layers without parameters: activations, softmax, dropout, and the flattening of images."""

from functools import partial

from nnmpi.backend.random import key_pair
from nnmpi.errors import UsageError
from nnmpi.nn.mode import current, warn_later
from nnmpi.nn.module import Module
from nnmpi.ops.activation import gelu, leaky_relu, relu, sigmoid, silu, softmax, tanh
from nnmpi.ops.dropout import dropout
from nnmpi.tensor.tensor import Tensor


class ReLU(Module):
    """max(x, 0)"""

    def forward(self, x: Tensor) -> Tensor:
        """Return max(x, 0)."""
        return relu(x)


class LeakyReLU(Module):
    """x where positive, negative_slope * x elsewhere."""

    def __init__(self, negative_slope: float = 0.01) -> None:
        self.negative_slope = negative_slope

    def forward(self, x: Tensor) -> Tensor:
        """Return x with its negative elements scaled."""
        return leaky_relu(x, self.negative_slope)


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

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Return the softmax."""
        return softmax(x, self.dim)


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


class Dropout(Module):
    """Drops elements at random in training; passes x as it is in evaluation.

    The mask is a function of the run's seed, the step, the layer's full name and the sample's place in the global
    batch (`nn.training` sets them), so that every layout drops the same elements. So one layer that is used twice in a
    pass drops the same places both times: make a layer for each place. Without a new `step` the masks stay the same.

    Args:
        p: the probability that an element is dropped, in [0, 1).
    """

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p < 1:
            raise UsageError(f"dropout's p is a probability in [0, 1), not {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Return x, or in training x with dropped elements."""
        if not current().training or self.p == 0:
            if self.p:
                warn_later(x)
            return x
        return dropout(x, self.p, partial(mask_place, self.path))


def mask_place(path: str) -> tuple[tuple[int, int], int]:
    """Return what the mask of a layer depends on, given its full name: asked anew in each pass of a compiled step."""
    mode = current()
    return key_pair("dropout", mode.seed, mode.step, path), mode.first_row
