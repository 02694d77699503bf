"""MNIST as both sides get it: its files where they are, else as many made-up images, which is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nnmpi import data
from nnmpi.data.dataset import Dataset
from nnmpi.errors import NnmpiError

SHAPE, CLASSES = (28, 28, 1), 10
ROWS = (60_000, 10_000)
REAL, MADE_UP = "MNIST", "made up, in MNIST's shape"


def load(folder: Path | None, rows: tuple[int, int] = ROWS) -> tuple[Dataset, Dataset, str]:
    """Return the parts for training and for testing, cut to so many rows, and what they are.

    Args:
        folder: with MNIST's four files, or with a folder mnist in it.
    """
    try:
        train, test = data.load("mnist", folder)
    except NnmpiError:
        return made_up(rows[0], 0), made_up(rows[1], 1), MADE_UP
    return train.take(np.arange(min(rows[0], len(train)))), test.take(np.arange(min(rows[1], len(test)))), REAL


def made_up(rows: int, seed: int) -> Dataset:
    """Return images of one bright bar each, whose place tells the class, with noise."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, CLASSES, rows)
    x = draw.integers(0, 64, (rows, *SHAPE), np.uint8)
    for label in range(CLASSES):
        x[labels == label, 4 + 2 * label : 6 + 2 * label, 4:24] |= 192
    return Dataset("mnist", x, labels, CLASSES, scale=1 / 255)
