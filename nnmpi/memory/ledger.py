"""The ledger: what of a rank's memory is for what, now and at most, beside what was predicted.

    parameters              the arrays that the model computes with, or this rank's part of them
    gradients               as many, or this rank's part
    optimizer state         the arrays of the optimizer's slots
    activations             what operations save for their backward, or what a plan takes; what
                            recordings keep
    communication buffers   where arrays are gathered to, or wait to be summed
    batches                 samples and labels of the step

What stays is asked of those who hold it, whenever it may have changed. What operations save is
counted when a backward begins, of each microbatch that is on its way; what they take for a moment
is not. That is done in one step, or where a trace is recorded, and holds for the others: in the
second step, and after that in each of a larger batch.

    nnmpi.memory.report().held["gradients"]        bytes, of the worker that was made last
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from nnmpi.errors import UsageError
from nnmpi.memory.store import saved_memory
from nnmpi.tensor.backward import watching
from nnmpi.tensor.function import Function, Variable

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, COMMUNICATION, BATCHES = "activations", "communication buffers", "batches"
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, COMMUNICATION, BATCHES)

_ledger: ContextVar[MemoryLedger | None] = ContextVar("nnmpi_ledger", default=None)


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one rank by kind.

    Attributes:
        held: now; between two steps no activations but what recorded passes keep.
        peaks: the most of each kind.
        peak: the most of all kinds together.
        predicted: what formulas said before, of the kinds that they know.
    """

    held: Mapping[str, int]
    peaks: Mapping[str, int]
    peak: int
    predicted: Mapping[str, int]


class MemoryLedger:
    """The account of one rank's arrays, for `report`.

    Args:
        predicted: bytes by kind.
    """

    def __init__(self, predicted: Mapping[str, int] | None = None) -> None:
        self._predicted = dict(predicted or {})
        self._held, self._peaks, self._peak = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0), 0
        self._named: dict[str, int] = {}
        _ledger.set(self)

    def note(self, held: Mapping[str, int]) -> None:
        """Say how many bytes of some kinds there are now."""
        if all(
            self._held.get(kind) == nbytes <= self._peaks[kind] for kind, nbytes in held.items()
        ):
            return  # as in most steps
        self._held |= held
        for kind, nbytes in held.items():
            self._peaks[kind] = max(self._peaks[kind], nbytes)
        self._peak = max(self._peak, sum(self._held.values()))
        self._named = {}

    @contextmanager
    def measuring(self, of_all: Callable[[int], int]) -> Iterator[None]:
        """Count what the block's operations save as activations.

        Args:
            of_all: the most bytes of one microbatch -> those of all that were on their way at once,
                after the block.
        """
        before, most = self._held[ACTIVATIONS], 0  # what recordings keep

        def see(operations: Sequence[Function]) -> None:
            nonlocal most
            edges = [edge for operation in operations for edge in operation.edges or ()]
            local = [
                item.data
                for item in edges
                if isinstance(item, Variable) and item.buffer is not None
            ]
            # of the plan that it is part of
            planned = [getattr(operation, "planned_bytes", 0) for operation in operations]
            most = max(most, sum(saved_memory(operations, local).values()), *planned)

        token = watching.set(see)
        try:
            yield
        finally:
            watching.reset(token)
        self.note({ACTIVATIONS: before + of_all(most)})
        self._held[ACTIVATIONS] = before

    def peaks_by_name(self) -> Mapping[str, int]:
        """Return the peaks as metrics: "memory_parameters" ..., and the total "memory_peak"."""
        if not self._named:
            self._named = {
                f"memory_{kind.split()[0]}": nbytes for kind, nbytes in self._peaks.items()
            }
            self._named["memory_peak"] = self._peak
        return self._named

    def report(self) -> MemoryReport:
        """Return what there is, was at most, and was predicted."""
        return MemoryReport(dict(self._held), dict(self._peaks), self._peak, dict(self._predicted))


def report() -> MemoryReport:
    """Return the memory of the worker that was made last here, of this rank.

    Raises:
        UsageError: where there is none.
    """
    ledger = _ledger.get()
    if ledger is None:
        raise UsageError(
            "no worker was made here, so there is no memory to report; make an nnmpi.Worker first"
        )
    return ledger.report()
