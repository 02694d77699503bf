"""First values are drawn one parameter at a time: a rank with a part of a model never holds the whole of it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from nnmpi.nn.container import Sequential
from nnmpi.nn.linear import Linear
from nnmpi.shard import Region
from nnmpi.tensor.parameter import Parameter

WIDTH, LAYERS, RANKS = 128, 12, 8


def _share() -> Sequential:
    """Return a model of which only an eighth of each weight is here."""
    model = Sequential(*(Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for _, module in model.named_modules():
        if isinstance(module, Linear):
            region = Region((WIDTH, WIDTH), 1, 0, WIDTH // RANKS)
            module.weight = Parameter(region.local_shape, module.weight.init, region)
    return model


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_only_one_parameter_is_whole_at_a_time(dtype: str) -> None:
    model = _share()
    tracemalloc.start()
    try:
        model.initialize(seed=3, dtype=dtype)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    whole = WIDTH * WIDTH * np.dtype("float64").itemsize
    assert peak - kept < 4 * whole  # what an initializer needs to draw one, not the twelve of the model
    assert kept < 2 * LAYERS * WIDTH * WIDTH // RANKS * np.dtype(dtype).itemsize + whole // 2


def test_each_is_the_region_of_what_the_whole_would_draw() -> None:
    part = _share().initialize(seed=3, dtype="float64")
    whole = Sequential(*(Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).initialize(seed=3, dtype="float64")
    for (name, mine), (_, other) in zip(part.named_parameters(), whole.named_parameters(), strict=True):
        assert np.array_equal(mine.data, other.data[:, : WIDTH // RANKS]), name
