"""Loss scaling: what keeps small gradients within the range of float16 (Micikevicius et al., "Mixed precision
training", 2018).

    loss --times the scale, as backward begins-->  float16 gradients of activations  -->  float32 ones of parameters
    the length of the scaled gradient is finite       divide by the scale, update; after 2000 such updates: scale * 2
    it is not: something was beyond 65504             no update; scale / 2

The scale is a power of two, so that nothing is rounded by it. The length is that of the gradient summed over all ranks,
which they all know anyway: what overflows on one of them is an overflow for all, without a message more.
"""

from collections.abc import Mapping
from typing import Any

from nnmpi.errors import CheckpointError

FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24
GOOD_STEPS = 2000


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
        """Hear of an overflow; return whether the step may be skipped: no smaller scale would help where it is 1."""
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
