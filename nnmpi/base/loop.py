"""The loops of a program over its loaders, as far as others must know of them.

A loader says which of its loops `for batch in loader` runs, an optimizer notes it, and a checkpoint
asks the optimizer: a resumed program must not begin with the first epoch again. And each loop over
a loader says which batch it has given out: the ranks compare that in each update.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ReferenceType, ref
from zlib import crc32


class Iterated(Protocol):
    """What is iterated over."""

    @property
    def place(self) -> tuple[int, int]:
        """The epoch and the batch that come next."""


iterated: ContextVar[Iterated | None] = ContextVar("nnmpi_iterated", default=None)


class Origin(Protocol):
    """What decides which samples the batches of a loader have.

    Attributes:
        world: into how many parts each batch is cut.
    """

    world: int

    @property
    def code(self) -> int:
        """A number that differs where something of it does."""

    def texts(self) -> list[str]:
        """Return it as text."""


@dataclass(slots=True)
class Taken:
    """A batch that a loop has taken, without its arrays; see `data.loader.Batch`."""

    source: Origin | None
    epoch: int
    number: int
    first: int
    global_rows: int
    microbatches: int
    cuts: Sequence[Any]

    def _values(self) -> list[int]:
        return [self.epoch, self.number, int(self.first), self.global_rows, self.microbatches]

    @property
    def code(self) -> int:
        """A number that differs where the batch does."""
        return crc32(f"{self.source and self.source.code} {self._values()}".encode())

    def texts(self) -> list[str]:
        """Return which batch it is as text."""
        names = "epoch", "number", "first sample", "rows", "microbatches"
        told = [f"{name} {value}" for name, value in zip(names, self._values(), strict=True)]
        return told if self.source is None else [*self.source.texts(), *told]


class OpenLoop:
    """A loop over a loader: it is open from its first batch until it ends or is given up.

    Attributes:
        taken: its last batch; None before the first, and after the end.
    """

    __slots__ = ("__weakref__", "taken")

    taken: Taken | None

    def __init__(self) -> None:
        self.taken = None

    def take(self, taken: Taken) -> None:
        """Note the batch that the loop takes now."""
        if self.taken is None:
            _open.set((*(item for item in _open.get() if item() not in (None, self)), ref(self)))
        self.taken = taken


_open: ContextVar[tuple[ReferenceType[OpenLoop], ...]] = ContextVar("nnmpi_open", default=())


def open_batches() -> list[Taken]:
    """Return the last batch of each open loop."""
    loops = [item() for item in _open.get()]
    return [item.taken for item in loops if item is not None and item.taken is not None]
