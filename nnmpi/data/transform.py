"""Transforms between storage and model: Normalize, and random image augmentations.

A transform is called with (x, indices, epoch, seed) and returns new rows. Its random numbers for a
sample depend on (seed, epoch, index of the sample) alone: every layout and batch size augments the
sample alike. Augment before normalizing: augmentations fill with 0, which is black only in images
that are not normalized yet.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from nnmpi.backend.array import Array, Integers, namespace
from nnmpi.backend.random import key_pair, random_bits
from nnmpi.base.errors import ShapeError, UsageError, check_int
from nnmpi.base.settled import Settled
from nnmpi.data.dataset import Dataset


def integers(seed: int, epoch: int, indices: Integers, what: str, high: int) -> Integers:
    """Return a random number in 0..high-1 per sample index, (rows,) int64; high at most 2**31.

    Each number is a hash of its index: it does not depend on the other indices. The 32-bit hash is
    multiplied by high and the upper half of the product is the result (Lemire, 2019), without a
    division. A generator per sample, as of `backend.random.stream`, would cost 20 us each.

    Args:
        seed: of the run.
        epoch: of the samples.
        indices: (rows,), of the samples in the data set.
        what: names the stream of random numbers, such as "flip".
        high: upper bound, exclusive.
    """
    (bits,) = random_bits(
        np, 0, 1, indices.astype(np.uint32), key_pair(int(seed), int(epoch), what)
    )
    return ((bits.astype(np.uint64) * np.uint64(high)) >> np.uint64(32)).astype(np.int64)


Draw: TypeAlias = Callable[[str, int], Integers]


class Transform(Protocol):
    """The interface of a transform: a class of this module, or any function with this signature."""

    def __call__(self, x: Array, indices: Integers, epoch: int, seed: int) -> Array:
        """Return transformed rows of x (rows, *sample_shape), same dtype; x stays unchanged."""
        ...


class Compose(Settled):
    """Transforms in order: Compose([Shift(2), Flip(), Normalize.fit(train)])."""

    def __init__(self, *transforms: Transform | Sequence[Transform]) -> None:
        self.transforms = [
            item
            for entry in transforms
            for item in (entry if isinstance(entry, Sequence) else [entry])
        ]

    def __call__(self, x: Array, indices: Integers, epoch: int, seed: int) -> Array:
        """Return x after all transforms, in the order given."""
        for transform in self.transforms:
            x = transform(x, indices, epoch, seed)
        return x


@dataclass(frozen=True, eq=False)
class Normalize:
    """(x - mean) / std, per channel of images or per feature of tables.

    Attributes:
        mean, std: numbers, or arrays that broadcast against one sample: (features,) or (channels,).

    Raises:
        UsageError: for a std that is 0, negative or NaN.
    """

    mean: Array | float
    std: Array | float

    def __post_init__(self) -> None:
        if not np.all(np.asarray(self.std) > 0):
            raise UsageError(
                f"std is {self.std}; it must be more than 0 (1 for a constant feature)"
            )

    @classmethod
    def fit(cls, train: Dataset) -> "Normalize":
        """Fit the normalization that gives the training samples mean 0 and standard deviation 1.

        Statistics are per channel for images (n, height, width, channels), else per feature, in
        float64; see `Dataset.moments`. A constant feature is only centred (std 1).
        """
        of = train.moments
        mean, std = of.mean * train.scale, of.std * train.scale
        # Rounding gives a constant feature a tiny std; division by it would amplify the rounding.
        return cls(mean, np.where(std > 1e-12 * np.maximum(np.abs(mean), 1.0), std, 1.0))

    def __call__(self, x: Array, indices: Integers, epoch: int, seed: int) -> Array:
        """Return (x - mean) / std in the dtype of x.

        Raises:
            ShapeError: when mean or std does not broadcast against a sample.
        """
        mean = np.asarray(self.mean, x.dtype)
        std = np.asarray(self.std, x.dtype)
        shape = x.shape[1:]
        # Subtract arrays of a full sample: broadcasting over a short last axis takes NumPy 4 times
        # as long.
        try:
            flat_mean, flat_std = (np.broadcast_to(item, shape).reshape(-1) for item in (mean, std))
        except ValueError:
            raise ShapeError(
                f"mean {mean.shape} and std {std.shape} do not fit samples of shape {shape}"
            ) from None
        xp = namespace(x)
        result = x.reshape(len(x), flat_mean.size) - xp.asarray(flat_mean)
        result /= xp.asarray(flat_std)
        return result.reshape(x.shape)


class Augmentation(ABC):
    """Base of the image augmentations: subclasses write `change`."""

    def __call__(self, x: Array, indices: Integers, epoch: int, seed: int) -> Array:
        """Return the changed images, (rows, height, width, channels).

        Raises:
            ShapeError: for x of other dimensions.
        """
        if x.ndim != 4:
            raise ShapeError(
                f"samples of shape {x.shape[1:]} are not images (height, width, channels); leave"
                " this augmentation out"
            )
        return self.change(x, partial(integers, seed, epoch, indices))

    @abstractmethod
    def change(self, x: Array, draw: Draw) -> Array:
        """Return the changed images; `draw(what, high)` gives random integers per sample."""


@dataclass(frozen=True)
class Shift(Augmentation):
    """Shift each image by up to `pixels`, padding with 0: a random crop.

    Attributes:
        pixels: the largest shift; every shift from -pixels to pixels is equally likely, down and
            across.
    """

    pixels: int = 2

    def __post_init__(self) -> None:
        check_int("a shift's pixels", self.pixels, 0)

    def change(self, x: Array, draw: Draw) -> Array:
        """Return the shifted images."""
        rows, height, width, channels = x.shape
        p = self.pixels
        down, across = (draw(f"shift {axis}", 2 * p + 1) for axis in ("down", "across"))
        lines = np.zeros((rows, height + 2 * p, (width + 2 * p) * channels), x.dtype)
        lines[:, p : p + height, p * channels : (p + width) * channels] = x.reshape(
            rows, height, width * channels
        )
        # All crops as a view: (rows, windows down, windows across, height, width * channels).
        # Width and channels are one axis: each row of a crop is copied as one contiguous block.
        crops = sliding_window_view(lines, (height, width * channels), (1, 2))
        return crops[np.arange(rows), down, across * channels].reshape(x.shape)


@dataclass(frozen=True)
class Flip(Augmentation):
    """Mirror each image left to right with probability 1/2. Not for digits or text."""

    def change(self, x: Array, draw: Draw) -> Array:
        """Return the images, some of them mirrored."""
        chosen, result = draw("flip", 2).astype(bool), x.copy()
        result[chosen] = x[chosen, :, ::-1]
        return result


@dataclass(frozen=True)
class Rotate(Augmentation):
    """Rotate each image about its centre by up to `degrees`, bilinear, filling with 0."""

    degrees: float = 10.0

    def change(self, x: Array, draw: Draw) -> Array:
        """Return the rotated images."""
        height, width = x.shape[1:3]
        angle = np.deg2rad(_uniform(draw, "rotate", self.degrees))[..., 0]
        down, across = (np.arange(n) - (n - 1) / 2 for n in (height, width))
        cos, sin, down = np.cos(angle), np.sin(angle), down[:, None]
        # The source of each pixel. The image is padded by one black row and column before and two
        # after, so that bilinear neighbours of clipped sources exist and are black.
        rows = np.clip(cos * down + sin * across + (height + 1) / 2, 0, height + 1)
        columns = np.clip(cos * across - sin * down + (width + 1) / 2, 0, width + 1)
        padded = np.pad(x, ((0, 0), (1, 2), (1, 2), (0, 0)))
        top, left = rows.astype(np.int64), columns.astype(np.int64)
        image, result = np.arange(len(x))[:, None, None], np.zeros(x.shape)
        for i, j in np.ndindex(2, 2):
            weight = abs(1 - i - (rows - top)) * abs(1 - j - (columns - left))
            result += weight[..., None] * padded[image, top + i, left + j]
        return result.astype(x.dtype)


@dataclass(frozen=True)
class ColorJitter(Augmentation):
    """Scale brightness, contrast and saturation by random factors in 1 - value .. 1 + value.

    Contrast is around the image's mean, saturation around each pixel's mean over the channels.
    """

    brightness: float = 0.2
    contrast: float = 0.2
    saturation: float = 0.2

    def change(self, x: Array, draw: Draw) -> Array:
        """Return the changed images, clipped to 0..1."""
        # A factor scales the distance from 0 (brightness) or from a mean (the other two).
        for axes, (what, most) in zip((0, 3, 1), vars(self).items(), strict=True):
            middle = x.mean((1, 2, 3)[-axes:], keepdims=True) if axes else 0
            x = middle + (x - middle) * (1 + _uniform(draw, what, most)).astype(x.dtype)
        return np.clip(x, 0, 1)


@dataclass(frozen=True)
class Cutout(Augmentation):
    """Blacken a square at a random pixel of each image (DeVries and Taylor, 2017)."""

    pixels: int = 8

    def change(self, x: Array, draw: Draw) -> Array:
        """Return the images, each with a hole."""
        # Doubled distances from the pixel: an even square has its centre between two pixels. Both
        # even and odd squares cover exactly `pixels` rows and columns inside the image.
        down, across = (
            abs(2 * (np.arange(size) - draw(f"cutout {axis}", size)[:, None]) + 1 - self.pixels % 2)
            < self.pixels
            for axis, size in zip(("down", "across"), x.shape[1:3], strict=True)
        )
        return np.where((down[:, :, None] & across[:, None])[..., None], x.dtype.type(0), x)


def _uniform(draw: Draw, what: str, most: float) -> Array:
    """Return a random number in -most..most per sample: (rows, 1, 1, 1), float64."""
    return most * (draw(what, 2**31 - 1) / 2**30 - 1).reshape(-1, 1, 1, 1)


# Each row makes a transform from the length of an image's shorter side.
AUGMENTATIONS: Mapping[str, Callable[[int], Transform]] = MappingProxyType(
    {
        "shift": lambda side: Shift(max(1, side // 12)),
        "flip": lambda side: Flip(),
        "rotate": lambda side: Rotate(),
        "color": lambda side: ColorJitter(),
        "cutout": lambda side: Cutout(max(1, side // 4)),
    }
)
