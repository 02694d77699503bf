"""Compiled steps on a device: replayed, they give bit for bit what eager ones give there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nnmpi
from nnmpi import nn, ops, optim
from nnmpi.backend.kernels.lookup import jit
from nnmpi.tensor.tensor import Tensor
from tests.device.library import device_backend, load
from tests.nn.test_compiled import network

SIZES = (5, 5, 3, 5, 1, 3, 5)


def train(compiled: bool, optimizer: Any, dtype: str) -> tuple[list[float], dict[str, Any], Any]:
    """Train some steps on the device and return losses, parameters and buffers."""
    backend = device_backend()
    model = network().initialize(seed=1, dtype=dtype, backend=backend)
    update = optimizer(model.storage, 0.01)

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        loss = ops.cross_entropy(model(x), y)
        loss.backward()
        update.step()
        return loss

    run = nnmpi.compile(step) if compiled else lambda x, y: step(Tensor(x), Tensor(y))
    rng, losses = np.random.default_rng(0), []
    for number, rows in enumerate(SIZES):
        update.lr = 0.01 / (1 + number)
        x, y = rng.standard_normal((rows, 8, 6, 2)).astype(dtype), rng.integers(0, 3, rows)
        with nn.training(seed=3, step=number, first_row=2):
            losses.append(run(backend.asarray(x), backend.asarray(y)))
    return [loss.item() for loss in losses], model.state(), run


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Adam])
def test_training_on_a_device_is_the_same(optimizer: Any, dtype: str) -> None:
    """Losses, weights and running statistics are the eager run's, with batches of several sizes in turn."""
    eager, state, _ = train(False, optimizer, dtype)
    losses, compiled, step = train(True, optimizer, dtype)
    assert losses == eager
    assert state.keys() == compiled.keys()
    for name, values in state.items():
        np.testing.assert_array_equal(compiled[name], values, err_msg=name)
    assert step.recordings == 3


def test_kernels_that_are_switched_off_are_recorded_apart() -> None:
    """As on the host: within `jit(False)` a step is another one."""
    backend = device_backend()
    step = nnmpi.compile(lambda x: ops.softmax(x))
    x = backend.asarray(np.linspace(0, 1, 12, dtype="float32").reshape(3, 4))
    first = step(x)
    with jit(False):
        second = step(x)
    assert step.recordings == 2
    np.testing.assert_allclose(backend.to_host(first.data), backend.to_host(second.data), rtol=1e-6)


def test_a_replay_makes_no_more_calls_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the library and of kernels: results are written where they lie, and none is copied there."""
    cupy = load()
    backend = device_backend()
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).initialize(backend=backend)
    update = optim.Adam(model.storage)

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        loss = ops.cross_entropy(model(x), y)
        loss.backward()
        update.step()
        return loss

    copies = []
    monkeypatch.setattr("nnmpi.backend.recording._copy_result", lambda *args: copies.append(args))
    compiled = nnmpi.compile(step)
    x, y = backend.asarray(np.ones((4, 6), "float32")), backend.asarray(np.zeros(4, "int64"))
    compiled(x, y)
    with cupy._sync.no_synchronize():
        compiled(x, y)
    assert not copies and compiled.calls < 40
