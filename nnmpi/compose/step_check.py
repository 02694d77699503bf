"""Whether all ranks do the same step: one number among those that they sum anyway.

Each rank of a group adds a checksum of what must be equal, its root that times 1 - size. So the sum
is 0 if all checksums are equal, and with near certainty another number if one differs. Only then
are the texts exchanged, to name what differs: a message of their own in every step would take as
long as the sum of the losses.
"""

from collections.abc import Sequence
from zlib import crc32

from nnmpi.base.errors import UsageError
from nnmpi.comm.agreement import agreed, require_equal
from nnmpi.compose.arrange import Arrangement, require_same_options
from nnmpi.tensor.parameter import FlatStorage

_OTHER_ROWS = "the ranks of one replica were given different rows"
_SAME_ROWS = (
    "give ranks with the same arrangement.data_rank the same samples and labels, in the same order;"
    " a Loader does that is given the arrangement: data.Loader(dataset, batch_size, arrangement)"
)


class StepCheck:
    """What the ranks compare in each step: the step, frozen parameters, shared rows.

    Args:
        arrangement: of the model.
        storage: the model's.
    """

    def __init__(self, arrangement: Arrangement, storage: FlatStorage) -> None:
        mesh = arrangement.mesh
        self._world, self._sharers = mesh.world, arrangement.same_rows
        # the stages of a pipeline have different parameters
        self._copies = mesh.replicas if arrangement.is_pipeline else mesh.world
        self._parameters = [span.parameter for span in storage.spans]
        self._trained: list[bool] = []
        self._frozen: list[str] = []
        self._step: list[str] = []
        self._rows: list[str] = []

    def begin(self, step: str, rows: Sequence[str]) -> None:
        """Begin a step: describe it, and this rank's rows if several ranks compute the same ones."""
        self._step, self._rows = [step], list(rows)
        trained = [item.requires_grad for item in self._parameters]
        if trained != self._trained:  # seldom: texts of all parameters cost more than their flags
            self._trained = trained
            frozen = (item.name for item in self._parameters if not item.requires_grad)
            self._frozen = [f"{name} frozen" for name in frozen]

    def number(self) -> int:
        """Return this rank's summand."""
        if self._world.size == 1:
            return 0
        parts = [(self._world, self._step), (self._copies, self._frozen)]
        return sum(
            crc32(f"{texts}".encode()) * (1 - group.size * group.is_root)
            for group, texts in [*parts, *((group, self._rows) for group in self._sharers)]
        )

    def refuse(self) -> None:
        """Refuse what differs between ranks. Collective.

        Raises:
            UsageError: on all ranks, naming it.
        """
        for group, texts in ((self._world, self._step), (self._copies, self._frozen)):
            with agreed(self._world):
                require_same_options(group, texts)
        self.require_same_rows(self._rows)

    def require_same_rows(self, rows: Sequence[object]) -> None:
        """Refuse ranks of one replica that were given different rows. Collective."""
        for group in self._sharers:
            with agreed(self._world):
                require_equal(group, rows, _OTHER_ROWS, _SAME_ROWS, UsageError, None)
