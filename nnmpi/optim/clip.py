"""The norm of all gradients together, and scaling them down to a largest norm.

A strategy that holds only a shard of the gradients adds up `sum_of_squares` over its ranks, and then scales by
`coefficient`; the serial run does the same with one shard.
"""

import math
from collections.abc import Sequence

from nnmpi.backend.array import Array, namespace
from nnmpi.errors import UsageError
from nnmpi.optim.blocks import block_elements, pieces

# Added to the norm, as in torch: the largest gradient after clipping is a little below the limit, never above it.
_MARGIN = 1e-6


def sum_of_squares(grads: Sequence[Array]) -> float:
    """Return the sum of the squares of all elements, accumulated in float64; NaN and infinity come through.

    Blocks of a narrower dtype are widened one at a time, so that no large buffer is copied and a float32 gradient
    of 1e30 does not overflow. On a device this waits for the result, once.
    """
    return float(sum(_squares(grad) for grad in grads))


def global_norm(grads: Sequence[Array]) -> float:
    """Return the Euclidean norm of all gradients taken as one vector, accumulated in float64; 0.0 for no gradients."""
    return math.sqrt(sum_of_squares(grads))


def coefficient(norm: float, max_norm: float) -> float:
    """Return what to multiply gradients of this norm by: max_norm / (norm + 1e-6), at most 1, and 1 if not finite.

    Raises:
        UsageError: for a max_norm that is not above 0; infinity is allowed and never clips.
    """
    if not max_norm > 0:
        raise UsageError(f"max_norm is {max_norm}; give a number above 0, or inf to measure the norm without clipping")
    if not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + _MARGIN))


def scale(grads: Sequence[Array], factor: float) -> None:
    """Multiply every gradient by the factor, in place; a factor of 1 touches nothing."""
    if factor == 1.0:
        return
    for grad in grads:
        namespace(grad).multiply(grad, float(factor), out=grad)


def clip_by_global_norm(grads: Sequence[Array], max_norm: float) -> float:
    """Scale the gradients in place so that their global norm is at most max_norm; return the norm before.

    The same numbers as torch's clip_grad_norm_, with one difference: gradients with a NaN or infinity are left as
    they are (torch turns all of them into NaN or 0), so that the caller, who sees the norm, can find the culprit.
    Method: Pascanu et al., "On the difficulty of training recurrent neural networks" (2013), algorithm 1.

    Raises:
        UsageError: see `coefficient`.
    """
    norm = global_norm(grads)
    scale(grads, coefficient(norm, max_norm))
    return norm


def _squares(grad: Array) -> Array:
    """Return the sum of one gradient's squares: a float64 0-d array where the gradient lies."""
    xp = namespace(grad)
    limit = block_elements(grad)
    wide = xp.zeros(min(limit, grad.size), "float64")
    total: Array = xp.zeros((), "float64")
    for (block,) in pieces([grad], limit):
        part = wide[: block.size]
        part.reshape(block.shape)[...] = block
        xp.add(total, xp.dot(part, part), out=total)
    return total
