"""Shapes told without running the model are those that it gives; placements refuse what does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from nnmpi import nn
from nnmpi.errors import LayoutError
from nnmpi.nn.module import Module
from nnmpi.parallel.sharded.rules import shape_after
from nnmpi.tensor.placement import REPLICATED, Placement, features, rows

LAYERS: list[tuple[Module, tuple[int, ...]]] = [
    (nn.Conv2d(2, 6, (3, 2), stride=(2, 1), padding=(0, 2), dilation=(1, 2), groups=2), (9, 7, 2)),
    (nn.MaxPool2d(2), (9, 7, 2)),
    (nn.MaxPool2d((3, 2), (1, 3), 1), (9, 7, 2)),
    (nn.AvgPool2d(3), (9, 7, 2)),
    (nn.GlobalAvgPool2d(), (9, 7, 2)),
    (nn.Flatten(), (9, 7, 2)),
    (nn.Linear(2, 5), (9, 7, 2)),
    (nn.BatchNorm(2), (9, 7, 2)),
    (nn.ReLU(), (9,)),
]


@pytest.mark.parametrize(("layer", "shape"), LAYERS)
def test_shape_after(layer: Module, shape: tuple[int, ...]) -> None:
    """As a run finds it."""
    model = nn.Sequential(layer).initialize(seed=0)
    assert shape_after(layer, shape) == model(np.zeros((1, *shape), np.float32)).shape[1:]
    assert shape_after(layer, None) is None


def test_embedding_and_what_does_not_fit() -> None:
    """Indices become rows; a convolution of what is no image has no shape."""
    assert shape_after(nn.Embedding(9, 4), (3,)) == (3, 4)
    assert shape_after(nn.MaxPool2d(2), (3,)) is None


def test_layouts() -> None:
    """The parts of all ranks make up the whole, each element once."""
    for placement, total in (
        (features(7), 7),
        (features(3, 4), 12),
        (Placement(5, 2, 3), 30),
        (Placement(3, 1, None), 12),
    ):
        for size in (1, 2, 3, 8):
            found = np.zeros(total)
            for rank in range(size):
                region = placement.cut(total, size, rank)
                region.put(found, region.take(np.arange(total) + 1.0))
            assert np.array_equal(found, np.arange(total) + 1)
    assert REPLICATED.is_replicated and not rows(4).is_replicated and rows(4).has_rows
    with pytest.raises(LayoutError, match="cannot be 8 long"):
        features(7).resolve(8)
