"""Batches that are copied to the device ahead of the steps."""

import numpy as np
import pytest

from nnmpi.backend.backend import Backend
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Loader
from nnmpi.data.transform import Compose, Flip, Normalize, Shift

ROWS, SIDE = 3000, 16


def images() -> Dataset:
    """Return bytes at random."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (ROWS, SIDE, SIDE, 3), dtype=np.uint8)
    return Dataset("bytes", x, rng.integers(0, 10, ROWS), 10, 1 / 255)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_batches_are_the_hosts_to_the_last_bit(device: Backend, dtype: str) -> None:
    """Converted, scaled and normalized by the device: the same operations, each rounded once."""
    dataset = images()
    loader = Loader(dataset, 700, transform=Compose(Shift(2), Flip(), Normalize.fit(dataset)), dtype=dtype)
    with loader.epoch(0) as host, loader.epoch(0, backend=device) as there:
        for ours, theirs in zip(there, host, strict=True):
            np.testing.assert_array_equal(device.to_host(ours.x), theirs.x)
            np.testing.assert_array_equal(device.to_host(ours.y), theirs.y)
