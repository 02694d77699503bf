"""What local SGD and gossip share: ranks with weights of their own, and the meetings at which these become equal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from nnmpi import timeline
from nnmpi.comm.group import Group
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.alike import check_alike
from nnmpi.parallel.mean import average
from nnmpi.tensor.flat import FlatStorage


class Averaging(ABC):
    """Weights that differ from rank to rank between meetings. Making one is collective.

    Parameters that need no gradient are equal everywhere and stay as they are, bit for bit.

    Args:
        group: the ranks that train together.
        storage: the model's, with the same weights on all ranks.
        optimizer: of that storage; its state is this rank's own between meetings.

    Attributes:
        messages, bytes: what this rank has sent since `begin`, meetings not counted. A message that had to be cut
            counts once; an all-reduce counts as one on a ring.

    Raises:
        CommError: on all ranks, when their models differ.
    """

    def __init__(self, group: Group, storage: FlatStorage, optimizer: Optimizer) -> None:
        check_alike(group, storage)
        self.group = group.duplicate()
        self.storage, self.optimizer = storage, optimizer
        self.messages = self.bytes = 0
        self._done = 0  # steps since the ranks met
        self._released = False

    def begin(self) -> None:
        """Begin to count anew, at a time when the weights are the same everywhere."""
        self.messages = self.bytes = self._done = 0

    def age(self, step: int) -> int:
        """Return for how many of this rank's own steps before this one its weights have not been those of all.

        With gossip they are so at meetings alone, whatever the step.
        """
        return self._done

    @abstractmethod
    def after(self, step: int, rows: int) -> None:
        """Average as it is this step's turn, after this rank's own update. All ranks call it, after the same steps.

        Args:
            step: the number of the step in the run, from 0, the same on all ranks.
            rows: the samples that this rank's update was made of.
        """

    @abstractmethod
    def _weight(self) -> float:
        """Return this rank's weight in the mean at a meeting; collective, and returns when all ranks have come."""

    def meet(self) -> float:
        """Let all ranks have the same weights and the same state of the optimizer, bit for bit. Collective.

        The weights become their mean, by rows with local SGD; the state becomes the plain mean, and its number of steps
        the largest.

        Returns:
            How far the ranks' weights were apart: the root of the mean over the ranks of |w_i - w|^2, divided by |w|,
            where w is the mean (0 if it is 0). The same on all ranks.
        """
        weight = self._weight()
        with timeline.span("meeting", "collective", timeline.REDUCE):
            with put_back(self.storage):
                spread = average(self.storage.data, self.group, weight)
            for arrays in self.optimizer.slots().values():
                average(arrays, self.group, 1 / self.group.size)
            self.optimizer.steps = int(self.group.max_floats([self.optimizer.steps])[0])
        self._done = 0
        return spread.relative

    def release(self) -> None:
        """Give the communicator back to MPI. Collective; a second call does nothing."""
        if not self._released:
            self._released = True
            self.group.free()


@contextmanager
def put_back(storage: FlatStorage) -> Iterator[None]:
    """Let parameters that need no gradient have afterwards, bit for bit, the values that they have now."""
    kept = [(part, part.copy()) for part in storage.frozen()]
    yield
    for part, values in kept:
        part[...] = values
