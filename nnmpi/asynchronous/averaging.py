"""Model averaging: each rank updates its own weights, which are averaged now and then.

    local SGD, every 3 steps   rank 0   step step step |mean| step step step |mean|
                               rank 1   step step step |mean| step step step |mean|
                               rank 2   step step step |mean| step step step |mean|
                                        one all-reduce in 3 steps

    gossip on a ring of 4      rank 0   step <mix> step <mix>          with ranks 3 and 1
                               rank 1   step <mix> step <mix>          with ranks 0 and 2 ...

This is data parallelism without a sum of gradients. A rank's own step takes the mean gradient of
its own rows. The caller has divided the gradient by the rows of the whole batch, so it multiplies
it by (rows of the batch / own rows). Every rank must do the same steps. The weights must be equal
at the start (see `replication.broadcast_state`).

Averaging after every step is the synchronous run: for SGD the mean of the updated weights is the
update by the mean gradient. With momentum this holds only if all ranks have equally many rows: a
rank's momentum is weighted by its rows in this step, not by its rows in the earlier steps that made
it. The less often the ranks average, the less they send and wait, and the further their weights
drift apart.

A synchronization (`Averaging.synchronize`) gives all ranks the same weights and the same optimizer
state. Models are evaluated and saved there.

DiLoCo uses the mean displacement since the last average as a gradient, and an outer optimizer, SGD
with Nesterov momentum, takes a step with it. Its state is the displacement and the momentum, both
equal on all ranks. Between two runs the displacement is kept instead of the weights of the last
average, so that what a user does to the weights in between is no displacement.

    weights   a --- steps of each rank ---> w_i,   mean w      outer gradient  d = a - w
    outer     b = momentum * b + d                             a = a - lr * (d + momentum * b)

The new `a` are the weights of all ranks. lr 1 and momentum 0 leave the mean as it is: local SGD. On
MNIST the outer momentum gained nothing over local SGD with equal bytes; it stays as an option.

Sources: Stich, "Local SGD converges fast and communicates little" (2019); Lin, Stich, Patel, Jaggi,
"Don't use large mini-batches, use local SGD" (2020), where momentum stays local to the rank, as it
does here between synchronizations; Douillard et al., "DiLoCo: distributed low-communication
training of language models" (2023); Lian et al., "Can decentralized algorithms outperform
centralized algorithms?" (2017), for SGD on a ring.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import sqrt

from nnmpi.backend.array import Array, namespace
from nnmpi.base.errors import number
from nnmpi.comm.algorithms.gossip import gossip
from nnmpi.comm.collective import NEIGHBOUR_AVERAGE
from nnmpi.comm.group import Group
from nnmpi.optim.clip import scale, sum_of_squares
from nnmpi.optim.optimizer import Optimizer
from nnmpi.tensor.parameter import FlatStorage

# The all-reduce of averages: unlike MPI's own, it has the same bits with any MPI and simulated.
SUM = "ring"


class Averaging(ABC):
    """Weights that differ between ranks until they synchronize. Making one is collective.

    Frozen parameters are equal everywhere and stay as they are, bit for bit.

    Args:
        group: the ranks that train together.
        storage: the model's, with the same weights on all ranks.
        optimizer: of that storage; each rank has its own state between synchronizations.
        every: average after step s if s + 1 is a multiple of it.
        outer_lr, outer_momentum: of an outer optimizer; 1 and 0 for none.

    Attributes:
        messages, bytes: sent by this rank since `begin`, without synchronizations. A message that
            is cut because of its length counts once; an all-reduce counts as one on a ring.

    Raises:
        UsageError: for outer values out of range.
    """

    def __init__(
        self,
        group: Group,
        storage: FlatStorage,
        optimizer: Optimizer,
        every: int = 1,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
    ) -> None:
        self.every = every
        self.outer_lr = number("outer_lr", outer_lr)
        self.outer_momentum = number("outer_momentum", outer_momentum, 1)
        storage.distributed = True
        self.group = group.duplicate()
        self.storage, self.optimizer = storage, optimizer
        self._released = False
        self.begin()

    def begin(self) -> None:
        """Reset all counts to 0; the weights must be equal on all ranks then."""
        self.messages = self.bytes = 0
        # steps since the last synchronization; rows since the last weighted average
        self._done = self._rows = 0

    def steps_since_average(self, step: int) -> int:
        """Return the steps since all ranks' weights were last equal.

        Gossip makes them equal only at synchronizations, whatever the step.
        """
        return self._done

    @abstractmethod
    def after_step(self, step: int, rows: int) -> None:
        """Average if this step is due, after the local update. All ranks call it each step.

        Args:
            step: the number of the step in the run, from 0, the same on all ranks.
            rows: the samples in this rank's update.
        """

    def synchronize(self) -> float:
        """Make weights and optimizer state equal on all ranks, bit for bit. Collective.

        The weights become their mean, weighted by rows with local SGD. The state becomes the plain
        mean, and its number of steps the largest.

        Returns:
            The distance between the ranks' weights: the root of the mean over the ranks of |w_i -
            w|^2, divided by |w|, with w the mean (0 if |w| is 0). The same on all ranks.
        """
        weight = self._weight()
        with self.group.collective("synchronize"):
            with keep_frozen(self.storage):
                apart = average(self.storage.data, self.group, weight)
            for name, arrays in self.optimizer.slots().items():
                if name not in self.storage.extra_slots:  # those are equal
                    average(arrays, self.group, 1 / self.group.size)
            self.optimizer.steps = int(self.group.max_floats([self.optimizer.steps])[0])
        self._done = self._rows = 0
        return apart

    def release(self) -> None:
        """Free the communicator. Collective; a second call does nothing."""
        if not self._released:
            self._released = True
            self.storage.extra_slots = {}
            self.group.free()

    def _weight(self) -> float:
        """Return this rank's share of the rows since the last average; 1/N if there were none.

        A rank sleeps, rather than polls, until all have called.
        """
        total = self.group.sum_floats([self._rows], asleep=True)[0]
        return self._rows / total if total else 1 / self.group.size


class LocalSGD(Averaging):
    """Local SGD: averages the weights every few steps, weighted by each rank's rows since.

    With an outer optimizer it is DiLoCo. A subclass may have another `outer_step`. The outer
    optimizer's arrays are saved with the optimizer's.
    """

    def begin(self) -> None:
        """See `Averaging.begin`."""
        super().begin()
        if (self.outer_lr, self.outer_momentum) != (1, 0) and not self.storage.extra_slots:
            self.storage.extra_slots = {
                name: [item * 0 for item in self.storage.data]
                for name in ("outer_displacement", "outer_momentum")
            }
        moved = self._outer("displacement")
        # the weights of the last average, as far from the present ones as they were
        self._anchors = [now + by for now, by in zip(self.storage.data, moved, strict=False)]

    def synchronize(self) -> float:
        """See `Averaging.synchronize`."""
        apart = super().synchronize()
        moved = self._outer("displacement")
        for by, anchor, now in zip(moved, self._anchors, self.storage.data, strict=False):
            by[...] = anchor - now
        return apart

    def _outer(self, name: str) -> list[Array]:
        """Return DiLoCo's state of this name; empty for local SGD."""
        return self.storage.extra_slots.get(f"outer_{name}", [])

    def steps_since_average(self, step: int) -> int:
        """Return the steps since the last average or synchronization."""
        return min(step % self.every, self._done)

    def after_step(self, step: int, rows: int) -> None:
        """Count the rows, and average if due; see `Averaging.after_step`."""
        self._done += 1
        self._rows += rows
        if (step + 1) % self.every == 0:
            weight, size = self._weight(), self.group.size
            self._rows = 0
            with keep_frozen(self.storage):
                for array in self.storage.data if size > 1 else ():
                    scale([array], weight)
                    self.group.all_reduce(array, SUM, check=False)
                    self.messages += 2 * (size - 1)  # of a ring, each 1/N of the array
                    self.bytes += 2 * (size - 1) * array.nbytes // size
            self._step_outside()

    def _step_outside(self) -> None:
        state = self._anchors, self._outer("momentum")
        with keep_frozen(self.storage, *state):
            for now, anchor, momentum in zip(self.storage.data, *state, strict=False):
                self.outer_step(now, anchor, momentum)
                anchor[...] = now

    def outer_step(self, weights: Array, anchor: Array, momentum: Array) -> None:
        """Replace the ranks' mean weights, and the momentum, in place: SGD with Nesterov's.

        Args:
            weights: the mean, the same on all ranks.
            anchor: the weights after the last outer step.
            momentum: zeros at first.
        """
        grad = anchor - weights
        momentum *= self.outer_momentum
        momentum += grad
        weights -= self.outer_lr * (grad + self.outer_momentum * momentum) - grad


class Gossip(Averaging):
    """Average the weights with both neighbours on a ring after each step.

    The averages are not weighted by rows, so they keep the mean over all ranks as it is.
    `comm.algorithms.gossip` defines which rank sends to which; there are at least two.
    """

    _moves = -1  # of the storage, when the sums were bound

    def after_step(self, step: int, rows: int) -> None:
        """Average with the neighbours; see `Averaging.after_step`."""
        self._done += 1
        data, steps = self.storage.data, len(gossip(self.group.rank, self.group.size))
        if self._moves != self.storage.moves:
            self._moves = self.storage.moves
            self._sums = [
                self.group.bind(array, "gossip", tag, NEIGHBOUR_AVERAGE.name)
                for tag, array in enumerate(data)
            ]
        sums = self._sums
        with keep_frozen(self.storage):
            for pending in sums:
                pending.start()
            # The rank sleeps, and uses no core, while its neighbours are late. A list, so that all
            # sums are polled each time: `all` of a generator would stop at the first late one.
            world = self.group.comm.world
            world.wait_until(lambda: all([pending.poll() for pending in sums]))  # noqa: C419
            scale(data, 1 / (2 * steps))  # each step has doubled the number of buffers in the sum
        self.messages += steps * len(data)
        self.bytes += steps * sum(array.nbytes for array in data)


@contextmanager
def keep_frozen(storage: FlatStorage, *state: Sequence[Array]) -> Iterator[None]:
    """Keep frozen parameters, and their state, bit for bit: averaging equal numbers may round."""
    parts = [
        arrays[buffer][part]
        for arrays in filter(None, (storage.data, *state))
        for buffer, part in storage.frozen()
    ]
    saved = [part.copy() for part in parts]
    yield
    for part, values in zip(parts, saved, strict=True):
        part[...] = values


def average(arrays: Iterable[Array], group: Group, weight: float) -> float:
    """Replace each array by its weighted mean over the ranks, the same bits everywhere. Collective.

    It computes rank 0's array plus the mean of the differences from it. So equal arrays stay as
    they are, bit for bit; a sum of N equal numbers divided by N may round. The price is one more
    broadcast.

    Args:
        arrays: float32 or float64, any shape; the same number, shapes and dtypes on all ranks.
        weight: of this rank; the weights of all ranks add up to 1.

    Returns:
        The distance between the ranks' arrays: see `Averaging.synchronize`.
    """
    squares = length = 0.0
    for array in arrays:
        local = namespace(array).ascontiguousarray(array).reshape(-1)
        base = local.copy()
        group.broadcast(base, check=False)
        mean = local - base
        mean *= weight
        group.all_reduce(mean, SUM, check=False)
        mean += base
        squares += sum_of_squares([local - mean])
        length += sum_of_squares([mean])
        array[...] = mean.reshape(array.shape)
    distance = sqrt(group.sum_floats([squares])[0] / group.size)
    return distance / sqrt(length) if length else 0.0
