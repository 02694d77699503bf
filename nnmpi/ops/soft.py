"""ELU and softplus, activations that are linear above 0 and level off below."""

from collections.abc import Callable
from functools import partial
from typing import Any, Never

from nnmpi.backend.array import Array
from nnmpi.backend.sums import in_blocks
from nnmpi.base.errors import UsageError, number
from nnmpi.base.words import refuse_words
from nnmpi.tensor.function import Elementwise, Grads
from nnmpi.tensor.operand import require_floating
from nnmpi.tensor.tensor import Tensor

__all__ = ["elu", "softplus"]


class Soft(Elementwise):
    """A function, elementwise, whose derivative is computed with the value, block by block.

    Args:
        evaluate: (xp, x) -> the values and the derivatives.
    """

    __slots__ = ("evaluate",)

    computes = "float32"

    def __init__(self, evaluate: Callable[[Any, Array], tuple[Array, ...]]) -> None:
        self.evaluate = evaluate

    def forward(self, x: Array) -> Array:
        y, *self.saved = in_blocks(partial(self.evaluate, self.xp), x)  # type: ignore[assignment]
        return y

    def backward(self, grad: Array) -> Grads:
        return (self.xp.multiply(grad, self.saved[0]),)


def _elu(alpha: float, xp: Any, x: Array) -> tuple[Array, ...]:
    below, above = xp.minimum(x, 0), xp.greater(x, 0)
    return xp.maximum(x, 0) + alpha * xp.expm1(below), xp.where(above, 1, alpha * xp.exp(below))


def _softplus(beta: float, threshold: float, xp: Any, x: Array) -> tuple[Array, ...]:
    scaled = x * beta
    small, linear = xp.exp(-xp.absolute(scaled)), xp.greater(scaled, threshold)
    y = (xp.maximum(scaled, 0) + xp.log1p(small)) / beta
    slope = xp.where(xp.greater(x, 0), 1, small) / (1 + small)
    return xp.where(linear, x, y), xp.where(linear, 1, slope)


def elu(x: Tensor, alpha: float = 1.0, **words: Never) -> Tensor:
    """Return x where positive, alpha (e^x - 1) elsewhere (Clevert et al., 2016), elementwise."""
    refuse_words("elu", words)
    return _soft("elu", partial(_elu, number("elu's alpha", alpha)), x)


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0, **words: Never) -> Tensor:
    """Return log(1 + e^(beta x)) / beta, elementwise; x itself where beta x is above the threshold.

    Raises:
        UsageError: unless beta is above 0.
    """
    refuse_words("softplus", words)
    if not number("softplus's beta", beta):
        raise UsageError(f"softplus's beta is {beta}; give a number above 0")
    return _soft("softplus", partial(_softplus, float(beta), number("threshold", threshold)), x)


def _soft(name: str, evaluate: Callable[..., tuple[Array, ...]], x: Tensor) -> Tensor:
    result: Tensor = Soft(evaluate)(require_floating(name, x))
    return result
