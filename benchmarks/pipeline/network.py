"""The network of the pipelines: an MLP that can be cut into even stages, and one batch of noise for it.

    flatten | linear relu | linear relu | ... | linear relu | linear
      1.5 w        w             w                   w          classes

The first layer is half as wide again as the others: it computes no gradient for its input, so it has two products where
the others have three, and takes as long as they do.
"""

from dataclasses import dataclass

import numpy as np

from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Batch, Loader
from nnmpi.errors import UsageError
from nnmpi.models.mlp import mlp
from nnmpi.nn.container import Sequential

CLASSES = 10


@dataclass(frozen=True)
class EvenMlp:
    """An MLP and the size of its batch.

    Attributes:
        width: of the hidden layers.
        layers: how many of them there are.
        rows: of a microbatch.
        microbatches: of a step.
        inputs: features of a sample; 0 for half as many again as the width.
    """

    width: int
    layers: int
    rows: int
    microbatches: int
    inputs: int = 0

    @property
    def features(self) -> int:
        """Return the features of a sample."""
        return self.inputs or self.width * 3 // 2

    def build(self) -> Sequential:
        """Return the model, not initialized."""
        return mlp((self.features,), CLASSES, (self.width,) * self.layers)

    def cut(self, stages: int) -> tuple[int, ...]:
        """Return the number of layers in each of some even stages, all ending after an activation but the last.

        Raises:
            UsageError: when the stages do not divide the layers.
        """
        if self.layers % stages:
            raise UsageError(f"{self.layers} layers cannot be divided evenly among {stages} stages")
        each = [2 * self.layers // stages] * stages
        each[0] += 1  # flatten
        each[-1] += 1  # the last linear layer, which is small
        return tuple(each)

    def batch(self, replica: int = 0, replicas: int = 1) -> Batch:
        """Return a replica's part of a batch of noise."""
        generator, rows = np.random.default_rng(0), self.rows * self.microbatches
        x = generator.standard_normal((rows, self.features), np.float32)
        dataset = Dataset("noise", x, generator.integers(0, CLASSES, rows), CLASSES)
        loader = Loader(
            dataset,
            rows,
            rank=replica,
            world=replicas,
            microbatches=self.microbatches,
            shuffle=False,
            workers=0,
        )
        with loader.epoch(0) as batches:
            return next(batches)
