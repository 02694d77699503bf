"""Connections that skip some modules of a sequence, wherever the sequence is cut.

    Sequential(conv1, Stash("a"), conv2, conv3, Pop("a"), head)

        conv1 --+--> conv2 --> conv3 --> (+) --> head
                +--------------- "a" -----^

Giving the two ends a name, so that a pipeline can carry the value from one stage to another, is torchgpipe's idea
(Kim et al., "torchgpipe: on-the-fly pipeline parallelism for training giant models", 2020).
"""

from __future__ import annotations

from nnmpi.nn.module import Module
from nnmpi.tensor.tensor import Tensor


class Stash(Module):
    """Passes x on, and keeps it for the `Pop` of the same name later in the same `Sequential`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """Return x; the sequence keeps it."""
        return x


class Pop(Module):
    """x + shortcut(what was kept), for the `Stash` of the same name.

    Args:
        name: the stash's; each is popped once.
        shortcut: makes the kept tensor fit, such as a 1x1 convolution; None takes it as it is.
    """

    def __init__(self, name: str, shortcut: Module | None = None) -> None:
        self.name = name
        self.shortcut = shortcut

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        """Return the sum; both must have the same shape."""
        return x + (kept if self.shortcut is None else self.shortcut(kept))
