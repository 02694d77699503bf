"""ELU and softplus, activations that are linear above 0 and level off below."""

from collections.abc import Callable
from typing import Any, Never

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.kernels import kernels_of
from nnmpi.backend.plain import logistic
from nnmpi.base.errors import UsageError, number
from nnmpi.base.words import refuse_words
from nnmpi.tensor.function import Elementwise, Grads
from nnmpi.tensor.operand import require_floating
from nnmpi.tensor.tensor import Tensor

__all__ = ["elu", "softplus"]


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


def _elu(x: Array, alpha: float) -> tuple[Array, ...]:
    below = np.minimum(x, 0)
    # not by `where`, which mispredicts branches of random signs: it took a third of the time
    rest = (x > 0) * (x.dtype.type(1) * (1 - alpha))
    return np.maximum(x, 0) + alpha * np.expm1(below), alpha * np.exp(below) + rest


def _softplus(x: Array, beta: float, threshold: float) -> tuple[Array, ...]:
    scaled = x * beta
    small, linear = np.exp(-abs(scaled)), scaled > threshold
    y = (np.maximum(scaled, 0) + np.log1p(small)) / beta
    return np.where(linear, x, y), np.where(linear, 1, logistic(scaled, small))


def elu(x: Tensor, alpha: float = 1.0, **words: Never) -> Tensor:
    """Return x where positive, alpha (e^x - 1) elsewhere (Clevert et al., 2016), elementwise."""
    refuse_words("elu", words)
    return _soft("elu", x, _elu, number("elu's alpha", alpha))


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0, **words: Never) -> Tensor:
    """Return log(1 + e^(beta x)) / beta, elementwise; x itself where beta x is above the threshold.

    Raises:
        UsageError: unless beta is above 0.
    """
    refuse_words("softplus", words)
    if not number("softplus's beta", beta):
        raise UsageError(f"softplus's beta is {beta}; give a number above 0")
    return _soft("softplus", x, _softplus, beta, number("threshold", threshold))


def _soft(name: str, x: Tensor, *formula: Any) -> Tensor:
    result: Tensor = Soft(formula[0], *map(float, formula[1:]))(require_floating(name, x))
    return result
