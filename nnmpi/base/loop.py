"""The loader that a program's `for batch in loader` takes its batches from.

A loader says so, an optimizer notes it, and a checkpoint asks the optimizer: a resumed program must
not begin with the first epoch again.
"""

from contextvars import ContextVar
from typing import Protocol


class Iterated(Protocol):
    """What is iterated over."""

    @property
    def place(self) -> tuple[int, int]:
        """The epoch and the batch that come next."""


iterated: ContextVar[Iterated | None] = ContextVar("nnmpi_iterated", default=None)
