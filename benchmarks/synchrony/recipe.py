"""Data, network and optimizer, the same for every mode of synchronization."""

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
from nnmpi.optim.schedule import Cosine, RateSchedule, Warmup

Data: TypeAlias = tuple[Dataset, Dataset, Compose]
"""Training data, test data, and the transform of both."""


@dataclass(frozen=True)
class Recipe:
    """A recipe: an MLP with one hidden layer, trained by SGD.

    Attributes:
        dataset: its name; "digits" is bundled.
        data_dir: the folder of its files; None: bundled, or downloaded.
        goal: the test accuracy whose time is measured.
        batch: rows of a global batch, divided among the workers.
        steps: global batches of a run.
        every: global batches between two evaluations.
        lr, momentum: of SGD.
        warm: batches in which the learning rate rises to `lr`; then it falls on a cosine to 0 at
            `decay`.
        decay: the global batch at which the rate is 0; None: `steps`.
        partition: the assignment of samples to workers; see `nnmpi.data.sampler`.
        seed: of the first weights, the order of the data and random stragglers.
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
        """Download the data, unless they are there."""
        prepare(self.dataset, self._folder())

    def load(self) -> Data:
        """Return the data."""
        train, test = load(self.dataset, self._folder(), seed=0, test_fraction=0.2)
        return train, test, Compose(Normalize.fit(train))

    def schedule(self) -> RateSchedule:
        """Return the learning rate of each batch."""
        return Warmup(self.warm, Cosine(self.lr, (self.decay or self.steps) - self.warm))

    def loaders(self, data: Data, rank: int, world: int) -> tuple[Loader, Loader]:
        """Return loaders of a rank's training data, and of its part of the test data as one batch.

        Args:
            data: of `load`.
            rank: whose parts.
            world: number of ranks.
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

    def _folder(self) -> Path | None:
        return None if self.data_dir is None else Path(self.data_dir)
