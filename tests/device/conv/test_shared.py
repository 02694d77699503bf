"""Networks with convolutions on a device, whole and shared out, in every precision: the host's numbers."""

from typing import Any

import numpy as np
import pytest

from nnmpi import models, nn, optim
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.backend.cudnn import use_convolution
from nnmpi.comm.group import Group
from nnmpi.nn.mode import training
from nnmpi.nn.sharding import Sharding
from nnmpi.ops.loss import cross_entropy
from nnmpi.parallel.tensor import shard
from nnmpi.tensor.tensor import Tensor
from tests.device.conv.cases import cudnn_double, precision
from tests.device.library import device_backend

C, R, H = Sharding.COLUMN, Sharding.ROW, Sharding.ROWS
SHAPE = (7, 6, 2)
TOLERANCES = {"float32": 1e-5, "bf16": 3e-2, "fp16": 1e-2}


def small() -> nn.Sequential:
    """Return a network of few channels and odd sizes."""
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(5, 4, (2, 3), stride=(2, 1), padding=(0, 1)),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.AvgPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def train(model: Any, backend: Backend, mode: str, shape: tuple[int, ...] = SHAPE) -> list[float]:
    """Return the losses of three steps, of which each shows the gradients before it."""
    rng, losses = np.random.default_rng(0), []
    x, y = rng.standard_normal((6, *shape)).astype(np.float32), rng.integers(0, 3, 6)
    optimizer = optim.SGD(model.storage, 0.03)
    for step in range(3):
        with precision(mode), training(seed=0, step=step):
            model.zero_grad()
            loss = cross_entropy(model(Tensor(backend.asarray(x))), Tensor(backend.asarray(y)))
            loss.backward()
        model.storage.finish_gradients()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", TOLERANCES)
@pytest.mark.parametrize("algorithm", ["im2col", "cudnn"])
@pytest.mark.parametrize("build", [models.cnn, models.resnet])
def test_training(build: Any, algorithm: str, mode: str) -> None:
    """Whole networks by both algorithms, beside the host's in float32."""
    shape = (8, 8, 2)

    def run(backend: Backend, mode: str) -> list[float]:
        model = build(shape, 3).initialize(seed=0, dtype="float32", backend=backend)
        return train(model, backend, mode, shape)

    host = run(numpy_backend(), "float32")
    with cudnn_double() as settings, use_convolution(algorithm):
        device = run(device_backend(), mode)
        assert (settings.executed.total() > 0) == (algorithm == "cudnn")
    np.testing.assert_allclose(device, host, rtol=TOLERANCES[mode])


@pytest.mark.mpi
@pytest.mark.parametrize("mode", TOLERANCES)
@pytest.mark.parametrize("table", [{"0": H, "2": H}, {"0": C, "2": R}, {"0": C, "2": C, "7": R}, {"0": R, "2": H}])
def test_shared_out(group: Group, table: dict[str, Sharding], mode: str) -> None:
    """Rows of images, output channels and input channels on several ranks, some of which may have none."""
    whole = small().initialize(seed=1, dtype="float32", backend=numpy_backend())
    host = train(whole, numpy_backend(), "float32")
    problems = []
    for backend in (numpy_backend(), device_backend()):
        model = small()
        shard(model, group, table, sample=SHAPE)
        model.initialize(seed=1, dtype="float32", backend=backend)
        losses = train(model, backend, mode)
        if not np.allclose(losses, host, rtol=TOLERANCES[mode]):
            problems.append((backend.name, losses, host))
    assert not any(group.gather(problems)), problems
