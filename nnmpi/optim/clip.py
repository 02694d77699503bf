"""The gradient norm, clipping by it, and loss scaling.

A strategy with sharded gradients sums `sum_of_squares` over its ranks and scales by `coefficient`;
a serial run does the same with a single shard.

Loss scaling keeps small gradients within the range of float16 (Micikevicius et al., "Mixed
precision training", 2018):

    backward begins with loss * scale    float16 gradients of activations, float32 of parameters
    the gradient norm is finite          divide by the scale, update; after 2000 updates: scale * 2
    it is not (beyond 65504 in float16)  skip the update; scale / 2

The scale is a power of two, so multiplying by it rounds nothing. The norm is that of the gradient
summed over all ranks, and each rank has it anyway. So an overflow on one rank is an overflow on
all, without a further message.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from nnmpi.backend.array import HOST_NUMBERS, Array, is_array, namespace, zeros
from nnmpi.backend.kernels import kernels_of
from nnmpi.backend.program.record import bare
from nnmpi.backend.recording import active, call, refuse
from nnmpi.base.errors import CheckpointError, UsageError, number
from nnmpi.base.settled import Settled
from nnmpi.optim.optimizer import block_elements, pieces

__all__ = ["clip_by_global_norm", "global_norm"]

# Added to the norm, as in torch: the clipped norm is slightly below the limit, never above it.
_MARGIN = 1e-6

FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24  # loss scales: the initial one and the bounds
GOOD_STEPS = 2000

# Bounds of a reliable float32 sum of squares. Infinity means overflow. Squares of numbers under
# 1e-19 underflow; in a sum above the lower bound they would not count.
_TRUSTED = (1e-25, math.inf)


def sum_of_squares(grads: Sequence[Array]) -> float:
    """Return the sum of all squared elements, accumulated over blocks in float64.

    On the host a block of float32 is summed by a float32 dot product: relative error about 1e-8, in
    a quarter of the time of float64. After an overflow or underflow the sum is computed again in
    float64, block by block, so that gradients of 1e30 or 1e-30 have the right norm.
    """
    refuse("a gradient's norm")
    total = _read(sum(_squares(grad, grad.dtype) for grad in grads))
    if not trusted(total):
        total = _read(sum(_squares(grad, "float64") for grad in grads))
    return total


def add_squares(grads: Sequence[Array], to: Array) -> None:
    """Add the first sum of `sum_of_squares` to a number on the gradients' device, not waiting."""
    for grad in grads:
        kernels_of(grad).squares(grad, to, grad.dtype)


def _read(total: Array | float) -> float:
    """Return a number, after waiting for the device explicitly; `float` would wait implicitly."""
    if isinstance(total, HOST_NUMBERS):
        return float(total)
    stream, host = namespace(total).cuda.get_current_stream(), np.empty(())
    total.get(stream=stream, out=host, blocking=False)
    stream.synchronize()
    return float(host)


def trusted(total: float) -> bool:
    """True if a sum of squares of float32 blocks can neither overflow nor underflow."""
    return _TRUSTED[0] < total < _TRUSTED[1]


def global_norm(grads: Sequence[Any]) -> float:
    """Return the Euclidean norm of all gradients together; 0.0 for none.

    For `model.parameters()`, or the `storage.grads`, of a sharded model (ZeRO, tensor or expert
    parallelism) it is the norm over all ranks, and the call is collective.

    Args:
        grads: see `clip_by_global_norm`.

    Raises:
        UsageError: for the gradients of a pipeline's stages, and what are no gradients.
    """
    grads = _gradients("global_norm", grads)
    total = 0.0
    for groups, parts in _by_ranks(grads).items():
        squares = sum_of_squares(parts)
        for group in groups:
            squares = group.sum_floats([squares])[0]
        total += squares
    return math.sqrt(total)


def coefficient(norm: float, max_norm: float) -> float:
    """Return the clipping factor max_norm / (norm + 1e-6), at most 1; 1 if the norm is not finite.

    Raises:
        UsageError: for a max_norm that is not above 0; infinity is allowed and never clips.
    """
    _check(max_norm)
    if not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + _MARGIN))


def device_coefficient(squares: Array, max_norm: float) -> Array:
    """Return the same number for a square of the norm on a device, not waiting for it."""
    _check(max_norm)
    norm = np.sqrt(squares)
    return np.where(np.isfinite(norm), np.minimum(max_norm / (norm + _MARGIN), 1.0), 1.0)


def _check(max_norm: float) -> None:
    if not number("max_norm", max_norm, most=math.inf):
        raise UsageError(
            f"max_norm is {max_norm}; give a number above 0, or inf to measure the norm without"
            " clipping"
        )


def scale(grads: Sequence[Array], factor: Any) -> None:
    """Multiply every gradient in place by a number of the host or of the gradients' device.

    A 1 of the host skips the pass.
    """
    on_host = isinstance(factor, HOST_NUMBERS)
    if on_host and factor == 1.0:
        return
    for grad in grads:
        here = float(factor) if on_host else factor.astype(grad.dtype)
        namespace(grad).multiply(grad, here, out=grad)


def clip_by_global_norm(grads: Sequence[Any], max_norm: float) -> float:
    """Scale gradients in place to a global norm of at most max_norm; return the norm before.

    Method: Pascanu et al., "On the difficulty of training recurrent neural networks" (2013),
    algorithm 1. The numbers are those of torch's clip_grad_norm_, with one difference: gradients
    with a NaN or infinity stay unchanged, so that a caller who checks the norm can locate them
    (torch turns all gradients into NaN or 0). A compiled step clips in each replay, but the
    returned number is the first step's; on a device, whose graph does not wait for it, NaN.

    Args:
        grads: model.parameters(), whose gradients are first completed, with zeros for unused
            parameters; some of them, of one model or several, each of which counts once; or arrays,
            such as model.storage.grads after its `finish_gradients`. Both are this rank's shards of
            a sharded model (ZeRO, tensor or expert parallelism); the call is then collective, and
            the norm is over all ranks. Other arrays are taken as they are.
        max_norm: above 0.

    Raises:
        UsageError: see `coefficient` and `global_norm`.
    """
    found = _gradients("clip_by_global_norm", grads)
    recorder, on_device = active(), found and not isinstance(found[0], np.ndarray)
    if recorder is not None and recorder.captures and on_device and set(_by_ranks(found)) == {()}:
        squares = zeros(namespace(found[0]), (), "float64")
        add_squares(found, squares)
        scale(found, device_coefficient(squares, max_norm))
        return math.nan
    return call(_clip, (found, max_norm))


def _by_ranks(grads: Sequence[Array]) -> dict[tuple[Any, ...], Sequence[Array]]:
    """Return gradients by the groups of ranks that have further parts of them."""
    by_ranks = getattr(grads, "by_ranks", None)  # of a storage's gradients
    return {(): grads} if by_ranks is None else by_ranks()


def _gradients(name: str, given: Any) -> Sequence[Array]:
    """Return arrays as they are, and the gradients of parameters; refuse what is neither."""
    is_one = is_array(given) or hasattr(given, "gradients_of") or not isinstance(given, Iterable)
    grads = [given] if is_one else given if isinstance(given, list) else [*given]
    if all(hasattr(item, "gradients_of") for item in grads):
        grads = grads[0].gradients_of(grads) if grads else []
    if not all(map(is_array, grads)):
        raise UsageError(f"{name} takes model.parameters(), a list of some, or arrays of gradients")
    return bare(grads)  # a storage's own list stays as it is


def _clip(grads: Sequence[Array], max_norm: float) -> float:
    norm = global_norm(grads)
    scale(grads, coefficient(norm, max_norm))
    return norm


def _squares(grad: Array, dtype: DTypeLike) -> Array | float:
    """Return the sum of one gradient's squares, each block's in `dtype`, the total in float64.

    On a device the total is an array of a number, for which the host need not wait yet.
    """
    if not isinstance(grad, np.ndarray):
        result = zeros(namespace(grad), (), "float64")
        kernels_of(grad).squares(grad, result, dtype)
        return result
    total = 0.0
    for block in _blocks(grad, dtype):
        total += float(np.vdot(block, block))  # unlike `dot` it does not warn of an overflow
    return total


def _blocks(grad: Array, dtype: DTypeLike) -> Iterator[Array]:
    for (part,) in pieces([grad], block_elements(grad)):
        yield part.astype(dtype, copy=False)  # copies one block at most


class LossScale(Settled):
    """A dynamic loss scale.

    Args:
        value: the initial scale, a power of two.
        good_steps: the number of updates without overflow after which it doubles.

    Attributes:
        value: the scale.
        good: the number of updates since its last change.
        skipped: the number of updates skipped for overflow, in the entire run.
    """

    def __init__(self, value: float = FIRST, good_steps: int = GOOD_STEPS) -> None:
        self.value, self.good, self.skipped = float(value), 0, 0
        self._good_steps = good_steps

    def grow(self) -> None:
        """Count an update without overflow; double the scale after `good_steps` of them."""
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
        """Return the state for a checkpoint, as JSON values."""
        return {"value": self.value, "good": self.good, "skipped": self.skipped}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`.

        Raises:
            CheckpointError: when a value is missing.
        """
        try:
            value, good, skipped = float(state["value"]), int(state["good"]), int(state["skipped"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's loss scale lacks a value: {error}") from None
        self.value, self.good, self.skipped = value, good, skipped
