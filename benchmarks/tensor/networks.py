"""The networks whose layers are divided among ranks, and a batch of noise for each."""

from dataclasses import dataclass

import numpy as np

from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Batch, Loader
from nnmpi.models.cnn import cnn
from nnmpi.models.mlp import mlp
from nnmpi.nn.activation import Flatten, ReLU
from nnmpi.nn.container import Branches, Sequential
from nnmpi.nn.conv import Conv2d, MaxPool2d
from nnmpi.nn.linear import Linear

CLASSES = 10
MLP, CNN, TOWERS = "mlp", "cnn", "towers"
IMAGE = (28, 28, 1)


@dataclass(frozen=True)
class Network:
    """A network and the rows of its batch.

    Attributes:
        name: "mlp", "cnn" or "towers": two equal ones of two convolutions, of which each rank has one.
        rows: of the batch, which is one microbatch.
        width: of the MLP's hidden layers.
        layers: how many hidden layers the MLP has; odd, so that the last layer ends a pair.
    """

    name: str
    rows: int
    width: int = 0
    layers: int = 0

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Return the shape of one sample."""
        return IMAGE if self.name in (CNN, TOWERS) else (self.width,)

    def build(self) -> Sequential:
        """Return the network, not initialized."""
        if self.name == CNN:
            return cnn(IMAGE, CLASSES)
        if self.name == TOWERS:
            return Sequential(Branches(_tower(), _tower()), ReLU(), Linear(128, CLASSES))
        return mlp(self.sample_shape, CLASSES, (self.width,) * self.layers)

    def batch(self) -> Batch:
        """Return a batch of noise, the same on every rank."""
        generator = np.random.default_rng(0)
        x = generator.standard_normal((self.rows, *self.sample_shape), np.float32)
        dataset = Dataset("noise", x, generator.integers(0, CLASSES, self.rows), CLASSES)
        with Loader(dataset, self.rows, shuffle=False, workers=0).epoch(0) as batches:
            return next(batches)


def _tower() -> Sequential:
    return Sequential(
        Conv2d(1, 32, 3, padding=1),
        ReLU(),
        MaxPool2d(2),
        Conv2d(32, 64, 3, padding=1),
        ReLU(),
        MaxPool2d(2),
        Flatten(),
        Linear(3136, 64),
    )
