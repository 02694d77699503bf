"""Recorded steps with convolutions on a device: replays give what eager steps give, by both algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nnmpi
from nnmpi import nn
from nnmpi.backend.cudnn import use_convolution
from nnmpi.tensor.tensor import Tensor
from tests.device.conv.cases import cudnn_double, precision
from tests.device.library import device_backend


def network() -> nn.Sequential:
    """Return a network with every operation of this folder: fused, grouped, with strides, pooled."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=3),
        nn.ReLU(),
        nn.Conv2d(6, 4, 1),
        nn.MaxPool2d(3, 1, 1),
        nn.AvgPool2d(2, 1),
        nn.GlobalAvgPool2d(),
    )


def steps(wrap: Callable[[Any], Any]) -> list[Any]:
    """Return results and gradients of some steps on the device."""
    backend, rng = device_backend(), np.random.default_rng(0)
    model = network().initialize(seed=1, dtype="float32", backend=backend)

    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        y = (model(x) ** 2).sum()
        y.backward()
        return y

    run, found = wrap(step), []
    for _ in range(4):
        y = run(backend.asarray(rng.standard_normal((3, 12, 10, 2)).astype(np.float32)))
        found += [y.item(), *(backend.to_host(each.grad) for each in model.parameters())]
    return found


@pytest.mark.parametrize("mode", ["float32", "bf16"])
@pytest.mark.parametrize("algorithm", ["im2col", "cudnn"])
def test_replayed(algorithm: str, mode: str) -> None:
    """Bit for bit, with new images each time."""
    with cudnn_double() as settings, use_convolution(algorithm), precision(mode):
        eager = steps(lambda step: lambda x: step(Tensor(x)))
        done = settings.executed.total()
        compiled = steps(nnmpi.compile)
        assert settings.executed.total() == 2 * done
        assert (done > 0) == (algorithm == "cudnn")
    for one, other in zip(eager, compiled, strict=True):
        np.testing.assert_array_equal(one, other)
