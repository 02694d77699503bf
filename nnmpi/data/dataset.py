"""Dataset: samples and labels in memory, and how a set is cut into a training and a test part."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nnmpi.backend.array import Array
from nnmpi.backend.random import stream
from nnmpi.errors import DataError, UsageError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled samples in memory.

    Attributes:
        name: for messages and headers.
        x: (n, *sample_shape), float32 or uint8. Images are (n, height, width, channels), grayscale with 1 channel,
            and stay uint8 so that memory stays small: `rows` converts one batch at a time.
        y: (n,), int64, labels in 0..classes-1.
        classes: number of classes.
        scale: what x is multiplied by to become model input (1/255 for bytes, 1/16 for the 8x8 digits, 1 for floats).
        class_names: one name for each class, or empty.

    Raises:
        DataError: when the arrays do not fit one another or a label is out of range.
    """

    name: str
    x: Array
    y: NDArray[np.int64]
    classes: int
    scale: float = 1.0
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.x.dtype not in (np.float32, np.uint8) or self.y.dtype != np.int64:
            raise DataError(
                f"{self.name}: samples are {self.x.dtype} and labels {self.y.dtype}; "
                "give float32 or uint8 samples and int64 labels"
            )
        if self.x.ndim < 2 or self.y.ndim != 1 or len(self.x) != len(self.y):
            raise DataError(
                f"{self.name}: samples of shape {self.x.shape} and labels of shape {self.y.shape}; "
                "give (n, ...) samples and n labels"
            )
        if self.class_names and len(self.class_names) != self.classes:
            raise DataError(f"{self.name}: {len(self.class_names)} class names for {self.classes} classes")
        wrong = np.flatnonzero((self.y < 0) | (self.y >= self.classes))
        if wrong.size:
            raise DataError(
                f"{self.name}: label {self.y[wrong[0]]} of sample {wrong[0]} is not in 0..{self.classes - 1}"
            )

    def __len__(self) -> int:
        return len(self.y)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Return the shape of one sample: (features,) or (height, width, channels)."""
        return tuple(self.x.shape[1:])

    def rows(self, indices: NDArray[np.int64], dtype: DTypeLike = "float32") -> Array:
        """Return the samples at these indices as new floats, scaled: (rows, *sample_shape), C-contiguous."""
        taken = np.take(self.x, indices, axis=0)
        kind = np.dtype(dtype)
        if self.scale == 1.0:
            return taken.astype(kind, copy=False)
        result: Array = np.multiply(taken, np.asarray(self.scale, kind), dtype=kind)
        return result

    def take(self, indices: NDArray[np.int64]) -> "Dataset":
        """Return a data set of the samples at these indices, in that order (copied)."""
        return replace(self, x=self.x[indices], y=self.y[indices])


def split(dataset: Dataset, test_fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Return a training and a test part: the test part is the first round(n * test_fraction) of a permutation.

    The permutation is keyed by the seed. The split is not stratified: class shares may differ between the parts.
    Both parts get at least one sample.

    Args:
        dataset: what is split.
        test_fraction: the share of the test part, between 0 and 1.
        seed: of the permutation.

    Raises:
        UsageError: for a fraction that is not between 0 and 1.
        DataError: for a set of fewer than 2 samples.
    """
    if not 0 < test_fraction < 1:
        raise UsageError(f"test fraction {test_fraction} is not between 0 and 1; try 0.2")
    n = len(dataset)
    if n < 2:
        raise DataError(f"{dataset.name}: {n} samples cannot be split into a training and a test part")
    tests = min(max(round(n * test_fraction), 1), n - 1)
    order = stream(seed, "split").permutation(n)
    return dataset.take(order[tests:]), dataset.take(order[:tests])


def check_pair(train: Dataset, test: Dataset) -> tuple[Dataset, Dataset]:
    """Return both parts as given, after checking that a model for one fits the other.

    Raises:
        DataError: for a part without samples, or parts with samples of different shapes.
    """
    for part, what in ((train, "training"), (test, "test")):
        if len(part) == 0:
            raise DataError(f"{part.name}: the {what} part has no samples")
    if train.sample_shape != test.sample_shape:
        raise DataError(
            f"{train.name}: training samples have shape {train.sample_shape} and test samples {test.sample_shape}"
        )
    return train, test
