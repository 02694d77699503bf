"""Dataset: samples and labels in memory, and how a set is cut into a training and a test part."""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nnmpi.backend.array import Array
from nnmpi.backend.random import stream
from nnmpi.errors import DataError, UsageError

IGNORED = -1  # the label of what is not to be predicted, such as padding


def count_targets(labels: Array) -> int:
    """Return how many labels count: whole numbers that are not negative; of labels of another kind, the samples.

    Args:
        labels: (rows, ...).
    """
    if labels.dtype.kind == "i":
        return int((labels >= 0).sum())
    return int(labels.size) if labels.dtype.kind == "u" else len(labels)


class Samples(Protocol):
    """What a loader makes batches of: a `Dataset` in memory, or a text."""

    @property
    def name(self) -> str:
        """For messages and headers."""

    @property
    def classes(self) -> int:
        """How many classes there are; of texts, the tokens of the vocabulary."""

    @property
    def is_tokens(self) -> bool:
        """Whether samples are whole numbers that stand for something, and not quantities."""

    @property
    def vocabulary(self) -> int:
        """How many tokens a model must know; 0 for quantities."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of a sample; where they differ, of one as long as may be."""

    @property
    def targets(self) -> NDArray[np.int64] | None:
        """How many labels of each sample count, (n,); None where each has one."""

    @property
    def lengths(self) -> NDArray[np.int64] | None:
        """How long each sample is, (n,); None where all have the same shape."""

    @property
    def identity(self) -> str:
        """What tells these samples from others: a hash."""

    def __len__(self) -> int: ...

    def rows(self, indices: NDArray[np.int64], dtype: DTypeLike = "float32", length: int | None = None) -> Array:
        """Return the samples at these indices as model input, with their padding: (rows, *shape), C-contiguous.

        Args:
            indices: (rows,).
            dtype: of quantities; tokens are int64.
            length: which samples are padded to, where their lengths differ.
        """

    def stored(self, indices: NDArray[np.int64], length: int | None = None) -> Array:
        """Return the samples at these indices as they are stored; see `rows`."""

    def labels(self, indices: NDArray[np.int64], length: int | None = None) -> NDArray[np.int64]:
        """Return their labels, (rows,) or (rows, ...) int64, padded with `IGNORED`."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled samples in memory.

    Attributes:
        name: for messages and headers.
        x: (n, *sample_shape). float32 or uint8: quantities. Images are (n, height, width, channels), grayscale with 1
            channel, and stay uint8 so that memory stays small: `rows` converts one batch at a time. Other whole
            numbers: tokens, for an embedding.
        y: (n,) or (n, ...), int64, labels in 0..classes-1. With several for each sample, `IGNORED` may be among them.
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
        if (self.x.dtype != np.float32 and self.x.dtype.kind not in "iu") or self.y.dtype != np.int64:
            raise DataError(
                f"{self.name}: samples are {self.x.dtype} and labels {self.y.dtype}; "
                "give float32 or whole numbers as samples and int64 labels"
            )
        if self.x.ndim < 2 or self.y.ndim < 1 or len(self.x) != len(self.y):
            raise DataError(
                f"{self.name}: samples of shape {self.x.shape} and labels of shape {self.y.shape}; "
                "give (n, ...) samples and as many labels"
            )
        if self.class_names and len(self.class_names) != self.classes:
            raise DataError(f"{self.name}: {len(self.class_names)} class names for {self.classes} classes")
        least = IGNORED if self.y.ndim > 1 else 0
        wrong = np.argwhere((self.y < least) | (self.y >= self.classes))
        if wrong.size:
            place = tuple(wrong[0])
            raise DataError(f"{self.name}: label {self.y[place]} of sample {place[0]} is not in 0..{self.classes - 1}")

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        """Say what is in it, without the numbers."""
        shape = " x ".join(map(str, self.sample_shape))
        return f"Dataset({self.name}: {len(self):,} samples of {shape}, {self.x.dtype}, {self.classes} classes)"

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Return the shape of one sample: (features,) or (height, width, channels)."""
        return tuple(self.x.shape[1:])

    @property
    def is_tokens(self) -> bool:
        """Whether samples are tokens, and not quantities."""
        return self.x.dtype.kind in "iu" and self.x.dtype != np.uint8

    @cached_property
    def vocabulary(self) -> int:
        """One more than the largest token; 0 for quantities."""
        return int(self.x.max(initial=0)) + 1 if self.is_tokens else 0

    @cached_property
    def targets(self) -> NDArray[np.int64] | None:
        """How many labels of each sample count, (n,); None where each has one."""
        return None if self.y.ndim == 1 else (self.y >= 0).sum(axis=tuple(range(1, self.y.ndim)), dtype=np.int64)

    @property
    def lengths(self) -> None:
        """All samples have the same shape."""

    @property
    def identity(self) -> str:
        """A hash of samples and labels, with what they are multiplied by."""
        found = hashlib.sha256(f"{self.x.dtype} {self.x.shape} {self.y.shape} {self.classes} {self.scale}".encode())
        for array in (self.x, self.y):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

    def stored(self, indices: NDArray[np.int64], length: int | None = None) -> Array:
        """Return the samples at these indices as they are stored; see `Samples`."""
        return np.take(self.x, indices, axis=0)

    def labels(self, indices: NDArray[np.int64], length: int | None = None) -> NDArray[np.int64]:
        """Return the labels at these indices."""
        return self.y[indices]

    def rows(self, indices: NDArray[np.int64], dtype: DTypeLike = "float32", length: int | None = None) -> Array:
        """Return the samples at these indices as new floats, scaled: (rows, *sample_shape), C-contiguous.

        Tokens are int64.
        """
        taken = np.take(self.x, indices, axis=0)
        if self.is_tokens:
            return taken.astype(np.int64, copy=False)
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
