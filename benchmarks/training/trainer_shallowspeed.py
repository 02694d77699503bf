"""The design of ShallowSpeed (github.com/siboehm/ShallowSpeed), for a comparison: NumPy and mpi4py, nothing fused.

Each parameter and each gradient is an array of its own; every operation makes a new array; gradients are cleared and
added to; one non-blocking all-reduce is begun for each parameter when its gradient is known, and all of them are waited
for after the backward pass; then plain SGD. The loss is the squared error of the softmax, of which only the gradient is
computed, as there.
"""

from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from benchmarks.training.contestants import Contestant
from benchmarks.training.trainer import Trainer

Values = NDArray[np.float32]


class Weight:
    """A parameter with its gradient."""

    def __init__(self, *shape: int) -> None:
        self.data, self.grad = np.zeros(shape, np.float32), np.zeros(shape, np.float32)


class Layer:
    """x W^T + b, with ReLU behind it unless it is the last one.

    Args:
        inputs, outputs: features of a row.
        relu: whether a ReLU follows.
    """

    def __init__(self, inputs: int, outputs: int, relu: bool) -> None:
        self.weight, self.bias, self.relu = Weight(outputs, inputs), Weight(1, outputs), relu
        self.parameters = [self.weight, self.bias]
        self._x: Any = None
        self._positive: Any = None

    def forward(self, x: Values) -> Values:
        """Return the result (rows, outputs) of (rows, inputs)."""
        self._x = x
        y = x @ self.weight.data.T + self.bias.data
        if not self.relu:
            return y
        self._positive = y > 0
        return np.maximum(y, 0)

    def backward(self, dy: Values) -> Values:
        """Add to the gradients; return that of the input."""
        if self.relu:
            dy = dy * self._positive
        self.weight.grad += dy.T @ self._x
        self.bias.grad += dy.sum(axis=0, keepdims=True)
        return dy @ self.weight.data


class ShallowSpeedTrainer(Trainer):
    """A rank of it.

    Args:
        contestant: what it runs.
        rank: not used: MPI knows it.
        folder: where data and first weights are.
    """

    def __init__(self, contestant: Contestant, rank: int, folder: Path) -> None:
        self._comm = MPI.COMM_WORLD
        super().__init__(contestant, self._comm.rank)
        self._x, labels = self.load(folder)
        self._target = np.eye(self.case.classes, dtype=np.float32)[labels]
        sizes = self.case.sizes
        self._layers = [Layer(sizes[i], sizes[i + 1], i < len(sizes) - 2) for i in range(len(sizes) - 1)]
        self._weights = [weight for layer in self._layers for weight in layer.parameters]

    def step(self) -> float:
        """See `Trainer.step`; it computes no loss, and returns NaN."""
        for weight in self._weights:
            weight.grad.fill(0)
        x: Values = self._x
        for layer in self._layers:
            x = layer.forward(x)
        powers = np.exp(x - x.max(axis=1, keepdims=True))
        softmax = powers / powers.sum(axis=1, keepdims=True)
        dy = 2 * (softmax - self._target) / np.float32(self.case.batch)
        dy = softmax * (dy - (dy * softmax).sum(axis=1, keepdims=True))
        requests = []
        for layer in reversed(self._layers):
            dy = layer.backward(dy)
            if self._comm.size > 1:
                requests += [self._comm.Iallreduce(MPI.IN_PLACE, weight.grad) for weight in layer.parameters]
        MPI.Request.Waitall(requests)
        for weight in self._weights:
            weight.data -= np.float32(self.lr) * weight.grad
        return nan

    def barrier(self) -> None:
        """See `Trainer.barrier`."""
        self._comm.Barrier()

    def arrays(self) -> list[NDArray[np.floating]]:
        """See `Trainer.arrays`; weights are (out, in), as PyTorch's."""
        return [weight.data.reshape(-1) if len(weight.data) == 1 else weight.data for weight in self._weights]

    def facts(self) -> dict[str, str]:
        """See `Trainer.facts`."""
        return {}

    def close(self) -> None:
        """See `Trainer.close`; MPI ends with the process."""
