"""The norm of all gradients together, and scaling them down to a largest norm.

A strategy that holds only a shard of the gradients adds up `sum_of_squares` over its ranks, and
then scales by `coefficient`; the serial run does the same with one shard.

Loss scaling keeps small gradients within the range of float16 (Micikevicius et al., "Mixed
precision training", 2018):

    loss --times the scale, as backward begins-->  float16 gradients of activations  -->  float32 ones of parameters
    the length of the scaled gradient is finite       divide by the scale, update; after 2000 such
                                                      updates: scale * 2
    it is not: something was beyond 65504             no update; scale / 2

The scale is a power of two, so that nothing is rounded by it. The length is that of the gradient
summed over all ranks, which they all know anyway: what overflows on one of them is an overflow for
all, without a message more.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.recording import perform, refuse
from nnmpi.errors import CheckpointError, UsageError
from nnmpi.optim.optimizer import block_elements, pieces

# Added to the norm, as in torch: the largest gradient after clipping is a little below the limit,
# never above it.
_MARGIN = 1e-6

FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24  # of a loss scale
GOOD_STEPS = 2000

# A float32 sum of squares outside these bounds may have overflowed (below infinity none has), or
# have lost the squares of numbers under 1e-19 to underflow (in a sum this large they do not count).
_TRUSTED = (1e-25, math.inf)


def sum_of_squares(grads: Sequence[Array]) -> float:
    """Return the sum of all squared elements, accumulated over blocks in float64.

    A float32 block's own sum is a float32 dot product: relative error about 1e-8, a quarter of the
    time that widening takes. Where that overflows or underflows, everything is done again in
    float64, block by block, so that gradients of 1e30 or 1e-30 have their right norm.
    """
    refuse("a gradient's norm")
    with np.errstate(over="ignore", invalid="ignore"):
        # the result says it, and the caller acts on that
        total = _read(sum(_squares(grad, grad.dtype) for grad in grads))
        if not trusted(total):
            total = _read(sum(_squares(grad, "float64") for grad in grads))
    return total


def _read(total: Array | float) -> float:
    """Return a number, for which a device is waited for; `float` would do so without a word."""
    if isinstance(total, float | int | np.ndarray | np.generic):
        return float(total)
    stream, host = namespace(total).cuda.get_current_stream(), np.empty(())
    total.get(stream=stream, out=host, blocking=False)
    stream.synchronize()
    return float(host)


def trusted(total: float) -> bool:
    """True if a sum of squares of float32 blocks can neither overflow nor underflow."""
    return _TRUSTED[0] < total < _TRUSTED[1]


def global_norm(grads: Sequence[Array]) -> float:
    """Return the Euclidean norm of all gradients together; 0.0 for none.

    Of gradients that are sharded (the `storage.grads` of ZeRO) it is that of all ranks' parts,
    and collective.
    """
    squares, ranks = sum_of_squares(grads), getattr(grads, "ranks", None)
    return math.sqrt(squares if ranks is None else ranks.sum_floats([squares])[0])


def coefficient(norm: float, max_norm: float) -> float:
    """Return the clipping factor max_norm / (norm + 1e-6), at most 1; 1 if the norm is not finite.

    Raises:
        UsageError: for a max_norm that is not above 0; infinity is allowed and never clips.
    """
    if not max_norm > 0:
        raise UsageError(
            f"max_norm is {max_norm}; give a number above 0, or inf to measure the norm without"
            " clipping"
        )
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
    """Scale gradients in place to a global norm of at most max_norm; return the norm before.

    The same numbers as torch's clip_grad_norm_, with one difference: gradients with a NaN or
    infinity are left as they are (torch turns all of them into NaN or 0), so that the caller, who
    sees the norm, can find the culprit. A compiled step clips each time, but the number that it
    sees is the first step's. Method: Pascanu et al., "On the difficulty of training recurrent
    neural networks" (2013), algorithm 1.

    Args:
        grads: arrays, such as model.storage.grads; or model.parameters(), for those. Of a model
            whose gradients are sharded (ZeRO) they are this rank's parts, and the call is
            collective: the norm is that of all parts.
        max_norm: above 0.

    Raises:
        UsageError: see `coefficient`.
    """
    grads = grads.storage.grads if hasattr(grads, "storage") else grads
    return perform(_clip, grads, max_norm)


def _clip(grads: Sequence[Array], max_norm: float) -> float:
    norm = global_norm(grads)
    scale(grads, coefficient(norm, max_norm))
    return norm


def _squares(grad: Array, dtype: DTypeLike) -> Array | float:
    """Return the sum of one gradient's squares, blocks in `dtype`: a float64 0-d array where the
    gradient lies.
    """
    xp = namespace(grad)
    if xp is np and grad.dtype == dtype:  # the same sum, in half the calls
        return sum(float(block.dot(block)) for (block,) in pieces([grad], block_elements(grad)))
    total: Array = xp.zeros((), "float64")
    for (block,) in pieces([grad], block_elements(grad)):
        flat = block.astype(dtype, copy=False)  # copies one block at most
        xp.add(total, xp.dot(flat, flat), out=total)
    return total


class LossScale:
    """A scale that follows the gradients.

    Args:
        value: to begin with, a power of two.
        good_steps: after how many updates without overflow it is doubled.

    Attributes:
        value: the scale.
        good: how many updates there were since it was changed last.
        skipped: how many there were not, for overflow, in the whole run.
    """

    def __init__(self, value: float = FIRST, good_steps: int = GOOD_STEPS) -> None:
        self.value, self.good, self.skipped = float(value), 0, 0
        self._good_steps = good_steps

    def grow(self) -> None:
        """Hear of an update without overflow."""
        self.good += 1
        if self.good >= self._good_steps:
            self.value, self.good = min(2 * self.value, MOST), 0

    def shrink(self) -> bool:
        """Record an overflow; return True if the step may be skipped, False at scale 1."""
        if self.value <= LEAST:
            return False
        self.value, self.good = max(self.value / 2, LEAST), 0
        self.skipped += 1
        return True

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON values."""
        return {"value": self.value, "good": self.good, "skipped": self.skipped}

    def load(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` gave.

        Raises:
            CheckpointError: when a value is missing.
        """
        try:
            value, good, skipped = float(state["value"]), int(state["good"]), int(state["skipped"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's loss scale lacks a value: {error}") from None
        self.value, self.good, self.skipped = value, good, skipped
