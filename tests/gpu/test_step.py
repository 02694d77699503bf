"""A step's surroundings on the device: batches that are copied ahead, numbers that are read once, recorded steps."""

from typing import Any

import numpy as np
import pytest

import nnmpi
from nnmpi import models, nn, optim
from nnmpi.backend.backend import Backend
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Loader
from nnmpi.data.transform import Compose, Flip, Normalize, Shift
from nnmpi.tensor.tensor import Tensor
from tests.nn.test_compiled import step_of

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


@pytest.mark.parametrize("build", [models.mlp, models.cnn, models.resnet], ids=["mlp", "cnn", "resnet"])
def test_replays_are_the_eager_steps(device: Backend, build: Any) -> None:
    """Bit for bit where products are cuBLAS's; cuDNN may add up a kernel's gradient in any order, each time anew."""
    dataset = images()

    def train(compiled: bool) -> tuple[list[float], dict[str, Any]]:
        model = build((SIDE, SIDE, 3), 10).initialize(seed=0, backend=device)
        update = optim.Adam(model.storage)

        step = step_of(model, update)
        run = nnmpi.compile(step) if compiled else lambda x, y: step(Tensor(x), Tensor(y))
        losses = []
        with Loader(dataset, 64).epoch(0, backend=device) as given:
            for number, batch in enumerate(given):
                with nn.training(seed=0, step=number):
                    losses.append(run(batch.x, batch.y))
                if number == 5:
                    break
        return [loss.item() for loss in losses], model.state()

    (eager, weights), (replayed, same) = train(False), train(True)
    if build is not models.mlp:
        np.testing.assert_allclose(replayed, eager, rtol=1e-4)
        return
    assert replayed == eager
    for name, values in weights.items():
        np.testing.assert_array_equal(same[name], values, err_msg=name)
