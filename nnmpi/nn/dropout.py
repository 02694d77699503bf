"""The dropout layer."""

from functools import partial

from nnmpi.aliases import also
from nnmpi.backend.random import key_pair
from nnmpi.errors import UsageError
from nnmpi.nn.mode import current, warn_later
from nnmpi.nn.module import Module
from nnmpi.ops.dropout import dropout
from nnmpi.tensor.tensor import Tensor


class Dropout(Module):
    """Drops elements at random in training; passes x as it is in evaluation.

    The mask is a function of the run's seed, the step, the layer's full name and the sample's place in the global
    batch (`nn.training` sets them), so that every layout drops the same elements. So one layer that is used twice in a
    pass drops the same places both times: make a layer for each place. Without a new `step` the masks stay the same.

    Args:
        rate: the probability that an element is dropped, in [0, 1).
    """

    @also(p="rate")
    def __init__(self, rate: float = 0.5) -> None:
        if not 0 <= rate < 1:
            raise UsageError(f"dropout's rate is a probability in [0, 1), not {rate}")
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Return x, or in training x with dropped elements."""
        if not current().training or self.rate == 0:
            if self.rate:
                warn_later(x)
            return x
        return dropout(x, self.rate, partial(mask_place, self.path))


def mask_place(path: str) -> tuple[tuple[int, int], int]:
    """Return what the mask of a layer depends on, given its full name: asked anew in each pass of a compiled step."""
    mode = current()
    return key_pair("dropout", mode.seed, mode.step, path), mode.first_row
