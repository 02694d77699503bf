"""Sharded layers on a stand-in device: exchanges go through the host, and no host array meets a device array."""

from typing import Any

import numpy as np
import pytest

from nnmpi import nn, optim
from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.comm.group import Group
from nnmpi.nn.mode import training
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import Sharding
from nnmpi.parallel.sharded.cross_entropy import best_classes, cross_entropy
from nnmpi.parallel.tensor import shard
from nnmpi.tensor.tensor import Tensor
from tests.device.library import device_backend
from tests.parallel.sharded.compare import images

C, R, H, V = Sharding.COLUMN, Sharding.ROW, Sharding.ROWS, Sharding.VOCAB


def pictures() -> Module:
    """Return a convolutional network with every kind of layer that exchanges something."""
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1),
        nn.BatchNorm(5),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(5, 4, 2),
        nn.LayerNorm(4),
        nn.Dropout(0.3),
        nn.Residual(nn.Conv2d(4, 4, 1)),
        nn.Flatten(),
        nn.Linear(48, 6),
        nn.Linear(6, 5),
    )


def words() -> Module:
    """Return a network on integers."""
    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 5))


def run(
    group: Group, backend: Backend, build: Any, x: Array, table: Any
) -> tuple[list[float], dict[str, Array], Array]:
    """Return the losses of two steps, the weights after them, and the classes found."""
    model = build()
    shard(model, group, table, sample=x.shape[1:], classes_apart=True)
    model.initialize(seed=1, dtype="float64", backend=backend)
    optimizer = optim.SGD(model.storage, lr=0.1)
    labels, losses = backend.asarray(np.arange(len(x)) % 5), []
    for step in range(2):
        model.zero_grad()
        with training(seed=2, step=step):
            logits = model(Tensor(backend.asarray(x)))
            loss = cross_entropy(logits, labels, group, 5, ignore_index=4, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state(), best_classes(logits.data, group, 5)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("build", "table"),
    [
        (pictures, {"0": C, "3": C, "8": R, "9": V}),
        (pictures, {"0": C, "3": R, "6.body": C, "8": C, "9": V}),
        (pictures, {"0": H, "3": H, "8": R, "9": V}),
        (words, {"0": V, "2": V}),
        (words, {"0": C, "2": V}),
    ],
)
def test_on_a_device_as_on_the_host(group: Group, build: Any, table: dict[str, Sharding]) -> None:
    """The same numbers but for the order of some sums."""
    x = images(4, (6, 5, 2), "float64")[0] if build is pictures else np.arange(12).reshape(4, 3) % 9
    device, host = (run(group, backend, build, x, table) for backend in (device_backend(), numpy_backend()))
    problems = [name for name in host[1] if not np.allclose(device[1][name], host[1][name], rtol=1e-9, atol=1e-11)]
    problems += [] if np.allclose(device[0], host[0]) else ["losses"]
    problems += [] if np.array_equal(device[2], host[2]) else ["classes"]
    assert not any(group.gather(problems)), problems
