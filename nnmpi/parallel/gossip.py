"""Data parallelism without a sum of gradients: each rank updates weights of its own, which are averaged now and then.

    local SGD, every 3 steps        rank 0   step step step |mean| step step step |mean|
                                    rank 1   step step step |mean| step step step |mean|      one all-reduce in 3 steps
                                    rank 2   step step step |mean| step step step |mean|

    gossip, ring                    rank 0   step <mix> step <mix>          with ranks 3 and 1
                                    rank 1   step <mix> step <mix>          with ranks 0 and 2 ...
    gossip, random                  rank 0   step <2> step <1> step         with another one each time

A rank's own step takes the mean gradient of its own rows: the caller multiplies a gradient that was divided by the rows
of the whole batch by global rows / own rows. Every rank must do the same steps. The weights must be equal at the start
(see `data.share_state`).

Averaging after every step is the synchronous run: for SGD the mean of the updated weights is the update by the mean
gradient; with momentum, too, where all ranks have equally many rows (each rank's momentum counts by its rows of now,
not of the steps that it comes from). Averaging less often sends less and waits less, and the ranks drift apart.

Sources: Stich, "Local SGD converges fast and communicates little" (2019); Lin, Stich, Patel, Jaggi, "Don't use large
mini-batches, use local SGD" (2020), where momentum stays a rank's own, as it does here between meetings; Lian et al.,
"Can decentralized algorithms outperform centralized algorithms?" (2017), for SGD on a ring; Boyd et al., "Randomized
gossip algorithms" (2006), for random pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nnmpi.backend.array import Array
from nnmpi.comm.algorithms.gossip import gossip
from nnmpi.comm.algorithms.pair import pair
from nnmpi.comm.buffers import is_device
from nnmpi.comm.collective import NEIGHBOUR_AVERAGE
from nnmpi.comm.device.staged import Staged
from nnmpi.comm.doze import doze, sum_dozing
from nnmpi.comm.execute import Execution
from nnmpi.comm.group import Group, Pending
from nnmpi.comm.steps import Step
from nnmpi.errors import UsageError
from nnmpi.optim.clip import scale
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.averaging import Averaging, put_back
from nnmpi.synchrony.pairs import NEIGHBOURS, RING, matching
from nnmpi.tensor.flat import FlatStorage


class LocalSGD(Averaging):
    """Averages the weights over all ranks every few steps, each rank's weighted by the rows that it has seen since.

    Args:
        every: an average is taken after step s if s + 1 is a multiple of it.

    Raises:
        UsageError: for less than 1.
    """

    def __init__(self, group: Group, storage: FlatStorage, optimizer: Optimizer, every: int) -> None:
        if every < 1:
            raise UsageError(f"local SGD cannot average every {every} steps; give at least 1")
        super().__init__(group, storage, optimizer)
        self.every = every
        self._rows = 0  # since the last average

    def begin(self) -> None:
        """Begin to count anew; see `Averaging.begin`."""
        super().begin()
        self._rows = 0

    def age(self, step: int) -> int:
        """Return the steps since the last average, or since the ranks met; see `Averaging.age`."""
        return min(step % self.every, self._done)

    def after(self, step: int, rows: int) -> None:
        """Count the rows, and average when it is time; see `Averaging.after`."""
        self._done += 1
        self._rows += rows
        if (step + 1) % self.every == 0:
            self._average()

    def meet(self) -> float:
        """Average the weights by the rows since the last average, and the state; see `Averaging.meet`."""
        disagreement = super().meet()
        self._rows = 0
        return disagreement

    def _weight(self) -> float:
        """Return this rank's share of the rows since the last average; equal shares where nobody had any."""
        total = sum_dozing(self.group, [self._rows])[0]
        return self._rows / total if total else 1 / self.group.size

    def _average(self) -> None:
        """Replace the weights by their mean over all ranks."""
        if self.group.size > 1:
            weight = self._weight()  # asleep until the last rank has come; then MPI's own all-reduce is quickest
            with put_back(self.storage):
                for array in self.storage.data:
                    scale([array], weight)
                    self.group.all_reduce(array, check=False)
                    self._count(array.nbytes)
        self._rows = 0

    def _count(self, nbytes: int) -> None:
        """Count an all-reduce as a ring would do it: 2 (N-1) messages from each rank, with an N-th of the array each.

        What MPI's own does inside is not to be known.
        """
        steps = 2 * (self.group.size - 1)
        self.messages += steps
        self.bytes += steps * nbytes // self.group.size


class Gossip(Averaging):
    """Averages the weights with one or two other ranks after each step, and with nobody else.

    The mean over the ranks is what these averages keep, and so they do not look at rows; see `comm.algorithms.gossip`
    and `pair` for who gets what.

    Args:
        neighbours: "ring" for the two beside it each time, "random" for another partner at every step.
        seed: of the run; keys the pairs.

    Raises:
        UsageError: for other neighbours, or a single rank.
    """

    def __init__(
        self,
        group: Group,
        storage: FlatStorage,
        optimizer: Optimizer,
        neighbours: str = RING,
        seed: int = 0,
    ) -> None:
        if neighbours not in NEIGHBOURS:
            raise UsageError(f"gossip knows no neighbours {neighbours!r}; choose from: {', '.join(NEIGHBOURS)}")
        if group.size < 2:
            raise UsageError("gossip needs somebody to talk to, but there is one rank; start at least 2")
        super().__init__(group, storage, optimizer)
        self.neighbours, self.seed = neighbours, seed
        self._ring: list[Pending] = []  # kept from step to step: the partners and the arrays are the same
        self._moves = -1

    def after(self, step: int, rows: int) -> None:
        """Average with this step's neighbours, as far as they have come; see `Averaging.after`."""
        self._done += 1
        self._follow()
        steps = self._steps(step)
        if not steps:
            return
        with put_back(self.storage):
            self._mix(steps)
        self.messages += len(steps) * len(self.storage.data)
        self.bytes += len(steps) * sum(array.nbytes for array in self.storage.data)

    def release(self) -> None:
        """Give back what MPI keeps; see `Averaging.release`."""
        self._forget()
        super().release()

    def _weight(self) -> float:
        """Return equal weights, when all ranks have come."""
        sum_dozing(self.group, [0.0])
        return 1 / self.group.size

    def _steps(self, step: int) -> tuple[Step, ...]:
        """Return whom this rank talks to at a step; nobody if it is left out."""
        rank, size = self.group.rank, self.group.size
        if self.neighbours == RING:
            return gossip(rank, size)
        return pair(rank, size, matching(size, self.seed, step)[rank])

    def _mix(self, steps: Sequence[Step]) -> None:
        """Replace the weights by the average that the steps make, asleep while others are late."""
        sums = self._ring or self._sums(steps)
        for each in sums:
            each.start()
        doze(lambda: _poll(sums))
        scale(self.storage.data, 1 / (2 * len(steps)))  # each step has doubled the number of buffers in the sum
        if not self._ring:
            for each in sums:
                each.free()

    def _sums(self, steps: Sequence[Step], persistent: bool = False) -> list[Pending]:
        """Return the sums of all buffers, which may be under way at the same time."""
        return [self._sum(steps, array, tag, persistent) for tag, array in enumerate(self.storage.data)]

    def _sum(self, steps: Sequence[Step], array: Array, tag: int, persistent: bool) -> Pending:
        comm = self.group.comm
        if not is_device(array):
            return Execution(steps, array, comm, tag, persistent=persistent)
        bind = partial(Execution, steps, comm=comm, tag=tag, persistent=persistent)
        return Staged(array, bind, NEIGHBOUR_AVERAGE.name, self.group.rank, self.group.size)

    def _follow(self) -> None:
        """Work on the arrays that the storage has now."""
        if self._moves == self.storage.moves:
            return
        self._forget()
        self._moves = self.storage.moves
        if self.neighbours == RING:
            self._ring = self._sums(self._steps(0), persistent=True)

    def _forget(self) -> None:
        for each in self._ring:
            each.free()
        self._ring = []


def _poll(sums: Sequence[Pending]) -> bool:
    """Let all go on, and return whether they are finished."""
    return min([each.poll() for each in sums], default=True)
