"""What is trained, and how: data, network and optimizer, the same for every way of
synchronization.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from nnmpi import optim
from nnmpi.data.catalogue import load, prepare
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Loader
from nnmpi.data.transform import Compose, Normalize
from nnmpi.models.mlp import mlp
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.optim.schedule import Cosine, Schedule, Warmup

Data: TypeAlias = tuple[Dataset, Dataset, Compose]
"""To train on, to test with, and what is done to the samples of both."""


@dataclass(frozen=True)
class Recipe:
    """A recipe: an MLP with one hidden layer, trained by SGD.

    Attributes:
        dataset: its name; "digits" is bundled.
        data_dir: the folder of its files; None where they need none, or are downloaded.
        goal: the test accuracy whose time is taken.
        batch: rows of a global batch, divided among the workers.
        steps: global batches of a run.
        every: global batches between two evaluations.
        lr, momentum: of SGD.
        warm: batches in which the learning rate rises to `lr`; then it falls to 0 on a cosine until
            `decay`.
        decay: the global batches of a whole run, where it is 0; None for `steps`.
        partition: which samples a worker sees; see `nnmpi.data.sampler`.
        seed: of the first weights, of the order of the data and of who is slow by chance.
    """

    dataset: str = "mnist"
    data_dir: str | None = None
    goal: float = 0.97
    hidden: int = 128
    batch: int = 256
    steps: int = 1000
    every: int = 10
    lr: float = 0.35
    momentum: float = 0.0
    warm: int = 50
    decay: int | None = None
    partition: str = "none"
    seed: int = 0

    def fetch(self) -> None:
        """Make sure that the data are there."""
        prepare(self.dataset, self._place())

    def load(self) -> Data:
        """Return the data to train on and to test with."""
        train, test = load(self.dataset, self._place(), seed=0, test_fraction=0.2)
        return train, test, Compose(Normalize.fit(train))

    def schedule(self) -> Schedule:
        """Return the learning rate of each batch."""
        return Warmup(self.warm, Cosine(self.lr, (self.decay or self.steps) - self.warm))

    def loaders(self, data: Data, rank: int, world: int) -> tuple[Loader, Loader]:
        """Return a rank's training data, and its part of the test data, which are one batch.

        Args:
            data: that `load` gave.
            rank: whose part of the training data it is.
            world: how many ranks share both.
        """
        train, test, transform = data
        common = {"rank": rank, "world": world, "transform": transform, "workers": 0}
        local = Loader(train, self.batch, seed=self.seed, partition=self.partition, **common)
        return local, Loader(test, len(test), shuffle=False, **common)

    def build(self, train: Dataset) -> tuple[Module, Optimizer]:
        """Return the network with its first weights, and its optimizer."""
        model = mlp(train.sample_shape, train.classes, (self.hidden,))
        model.initialize(seed=self.seed)
        momentum = self.momentum or None
        return model, optim.build("sgd", model.storage, lr=self.lr, momentum=momentum)

    def _place(self) -> Path | None:
        return None if self.data_dir is None else Path(self.data_dir)
