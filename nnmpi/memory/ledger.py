"""The ledger: a rank's memory by purpose, now and at its peak, beside predictions.

    parameters              the arrays that the model computes with, or this rank's part of them
    gradients               as many, or this rank's part
    optimizer state         the arrays of the optimizer's slots
    activations             arrays that operations save for their backward, what a forward or a
                            backward takes besides; memory of recordings
    communication buffers   gathered arrays, and arrays that wait for their sum
    batches                 samples and labels of the step

The owners report lasting arrays whenever these may have changed. A pass measures what a microbatch
costs each stage (`pipeline.stage`), and its program says how many are in flight at once. The count
is made in one step and holds for later ones: in the second step, and then in each step with a
larger batch.

    nnmpi.memory.report().held["gradients"]        bytes, of the newest worker
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from nnmpi.base.errors import UsageError

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, COMMUNICATION, BATCHES = "activations", "communication buffers", "batches"
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, COMMUNICATION, BATCHES)

_ledger: ContextVar[MemoryLedger | None] = ContextVar("nnmpi_ledger", default=None)


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one rank by kind.

    Attributes:
        held: now; between two steps the activations are those of recorded passes.
        peaks: the peak of each kind.
        peak: the peak of all kinds together.
        predicted: by formulas, for the kinds that have one.

    Example:
        >>> def program(group):
        ...     model = nn.Linear(3, 2).initialize(seed=0)
        ...     nnmpi.Worker(model, optim.Adam(model.storage), group)
        ...     report = nnmpi.memory.report()
        ...     return report.held["optimizer state"], report.predicted["optimizer state"]
        >>> nnmpi.simulate(program, ranks=1)  # 8 parameters, two slots, rows of 64 bytes
        [(256, 256)]
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
        _ledger.set(self)

    def note(self, amounts: Mapping[str, int]) -> None:
        """Set the present bytes of some kinds."""
        self._held |= amounts
        for kind, nbytes in amounts.items():
            self._peaks[kind] = max(self._peaks[kind], nbytes)
        self._peak = max(self._peak, sum(self._held.values()))

    def note_activations(self, nbytes: int) -> None:
        """Note the most activations of a pass that has ended, beside those of recordings."""
        before = self._held[ACTIVATIONS]
        self.note({ACTIVATIONS: before + nbytes})
        self._held[ACTIVATIONS] = before

    def peaks_by_name(self) -> Mapping[str, int]:
        """Return the peaks as metrics: "memory_parameters" ..., and the total "memory_peak"."""
        kinds = {f"memory_{kind.split()[0]}": nbytes for kind, nbytes in self._peaks.items()}
        return kinds | {"memory_peak": self._peak}

    def report(self) -> MemoryReport:
        """Return the bytes now, at their peak, and predicted."""
        return MemoryReport(dict(self._held), dict(self._peaks), self._peak, dict(self._predicted))


def report() -> MemoryReport:
    """Return this rank's memory by purpose, for the newest worker.

    Raises:
        UsageError: without a worker.

    Example:
        >>> def program(group):
        ...     model = nn.Linear(3, 2).initialize(seed=0)
        ...     worker = nnmpi.Worker(model, optim.SGD(model.storage, lr=0.1), group)
        ...     worker.step(np.ones((4, 3)), np.zeros(4, int))
        ...     return nnmpi.memory.report().peaks["batches"]
        >>> nnmpi.simulate(program, ranks=1)  # 4 x 3 float32 samples, 4 int64 labels
        [80]
    """
    ledger = _ledger.get()
    if ledger is None:
        raise UsageError(
            "no worker was made here, so there is no memory to report; make an nnmpi.Worker first"
        )
    return ledger.report()
