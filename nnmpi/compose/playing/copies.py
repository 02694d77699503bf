"""The weights and the optimizer's state of workers that each have their own, in one process.

worker 0   weights  state          load(0), gradient, step(0)
worker 1   weights  state          load(1), gradient, step(1)
...                                average, mix_ring or mix_pairs: rows of one array
model      weights  state          show: the mean of the weights; meet: of both
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from nnmpi.backend.array import Array, namespace
from nnmpi.optim.clip import sum_of_squares
from nnmpi.optim.optimizer import Optimizer
from nnmpi.optim.storage import Arrays
from nnmpi.tensor.flat import FlatStorage


class Copies:
    """A row of weights and an optimizer for every worker. The gradients are computed in the storage, one at a time.

    Parameters that need no gradient are equal everywhere and stay as they are, bit for bit.

    Args:
        storage: the model's.
        optimizer: of that storage; the workers' have its settings.
        workers: how many there are.
    """

    def __init__(self, storage: FlatStorage, optimizer: Optimizer, workers: int) -> None:
        self.storage, self.optimizer, self.workers = storage, optimizer, workers
        self._weights = [namespace(data).zeros((workers, data.size), data.dtype) for data in storage.data]
        whole = [slice(0, data.size) for data in storage.data]
        self._optimizers = [optimizer.over(_Row(storage, self._row(worker)), whole) for worker in range(workers)]
        for own in self._optimizers:
            own.move(lambda size, dtype: namespace(storage.data[0]).zeros(size, dtype))  # a state of its own

    def begin(self) -> None:
        """Give everybody the model's weights and the optimizer's state."""
        for weights, data in zip(self._weights, self.storage.data, strict=True):
            weights[...] = data
        for own in self._optimizers:
            own.steps = self.optimizer.steps
            for name, arrays in own.slots().items():
                for array, source in zip(arrays, self.optimizer.slots()[name], strict=True):
                    array[...] = source

    def load(self, worker: int) -> None:
        """Let the model have a worker's weights."""
        for data, row in zip(self.storage.data, self._row(worker), strict=True):
            data[...] = row

    def step(self, worker: int, lr: float) -> None:
        """Update a worker's weights with the gradient in the storage."""
        self._optimizers[worker].lr = lr
        self._optimizers[worker].step()

    def skip(self, worker: int) -> None:
        """Count a step of a worker that had no rows."""
        self._optimizers[worker].steps += 1

    def average(self, shares: Sequence[float]) -> None:
        """Give everybody the mean of all weights; the shares add up to 1."""
        for weights in self._weights:
            weights[...] = _mean(weights, shares)

    def mix_ring(self) -> None:
        """Average everybody's weights with the two beside it, by 1/4, 1/2, 1/4 (see `comm.algorithms.gossip`)."""
        if self.workers == 2:
            return self.average((0.5, 0.5))
        for weights in self._weights:
            first, left = weights[0].copy(), weights[-1].copy()
            for worker in range(self.workers):
                own = weights[worker].copy()
                right = weights[worker + 1] if worker + 1 < self.workers else first
                weights[worker] = (left + 2 * own + right) / 4
                left = own
        return None

    def mix_pairs(self, partners: Sequence[int]) -> None:
        """Average everybody's weights with those of its partner, who may be itself."""
        for worker, partner in enumerate(partners):
            if worker < partner:
                for weights in self._weights:
                    weights[worker] = weights[partner] = (weights[worker] + weights[partner]) / 2

    def show(self, shares: Sequence[float]) -> None:
        """Let the model have the mean of all weights."""
        for data, weights in zip(self.storage.data, self._weights, strict=True):
            data[...] = _mean(weights, shares)

    def meet(self, shares: Sequence[float]) -> float:
        """Let the model have the mean of all weights, and the optimizer that of all states.

        Returns:
            The disagreement before; see `parallel.gossip.Averaging.meet`.
        """
        self.show(shares)
        apart = sum(
            sum_of_squares([row - data])
            for weights, data in zip(self._weights, self.storage.data, strict=True)
            for row in weights
        )
        length = sum_of_squares(self.storage.data)
        states = [own.slots() for own in self._optimizers]
        for name, targets in self.optimizer.slots().items():
            for number, target in enumerate(targets):
                rows = [state[name][number] for state in states]
                target[...] = _mean(rows, [1 / self.workers] * self.workers)
        self.optimizer.steps = max(own.steps for own in self._optimizers)
        return sqrt(apart / self.workers / length) if length else 0.0

    def _row(self, worker: int) -> list[Array]:
        return [weights[worker] for weights in self._weights]


class _Row(Arrays):
    """One worker's weights, with the gradients that the model has computed."""

    def __init__(self, storage: FlatStorage, row: Sequence[Array]) -> None:
        super().__init__(row, storage.grads, storage.groups)
        self._storage = storage

    def frozen(self) -> list[Array]:
        """Return the parts of the parameters that need no gradient now."""
        spans = [span for span in self._storage.spans if not span.parameter.requires_grad]
        return [self.data[span.buffer][span.start : span.stop] for span in spans]


def _mean(rows: Sequence[Array] | Array, shares: Sequence[float]) -> Array:
    """Return the weighted mean; of equal rows, bit for bit, that row."""
    base = rows[0]
    mean = base.copy()
    for row, share in zip(rows, shares, strict=True):
        mean += share * (row - base)
    return mean
