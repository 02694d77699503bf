"""Training on a stand-in device: the same numbers as on the host, nothing mixed, gradients staged through the host."""

from typing import Any

import numpy as np
import pytest

from nnmpi import models, nn, optim
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.comm.group import Group
from nnmpi.compose.options import GradientExchange, Numerics
from nnmpi.compose.worker import Worker
from nnmpi.data.loader import Loader
from nnmpi.errors import DeviceError
from nnmpi.tensor import Tensor
from tests.device.library import device_backend, is_device_array
from tests.equivalence.reference import digits


def train(group: Group, backend: Backend, build: Any, **options: Any) -> dict[str, Any]:
    """Return the losses, weights and evaluation of one epoch."""
    dataset = digits()
    model = build(dataset.sample_shape, dataset.classes, **options).initialize(seed=0, dtype="float64", backend=backend)
    worker = Worker(
        model,
        optim.Adam(model.storage),
        group,
        backend=backend,
        exchange=GradientExchange(bucket_bytes=20_000, check=True),
        numerics=Numerics(clip=1.0),
    )
    loader = Loader(dataset, 31, rank=group.rank, world=group.size, microbatches=2, dtype="float64")
    losses = [worker.step(batch).loss for batch in loader.epoch(0)]
    report = worker.evaluate(loader.epoch(0))
    state = worker.state()[1]
    state.scatter(state.to_dict(everywhere=True).__getitem__)
    model.load_state(model.state())
    return {"losses": np.array(losses), "evaluation": np.array([report.loss, report.accuracy]), **model.state()}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("build", "options"),
    [(models.mlp, {"dropout": 0.3}), (models.cnn, {}), (models.resnet, {})],
    ids=["mlp", "cnn", "resnet"],
)
def test_training_on_a_device_is_training_on_the_host(group: Group, build: Any, options: dict[str, Any]) -> None:
    """The same numbers but for the order of some sums; a NumPy array that meets a device array would raise."""
    device = train(group, device_backend(), build, **options)
    host = train(group, numpy_backend(), build, **options)
    different = [name for name in host if not np.allclose(device[name], host[name], rtol=1e-9, atol=1e-11)]
    assert not any(group.gather(different)), different


@pytest.mark.host_only("a host array that a test hands to a model on the device")
def test_model_lives_on_the_device() -> None:
    """Its parameters, gradients and results are device arrays, and a host array given to it is refused."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm(2)).initialize(backend=device_backend())
    result = model(Tensor(device_backend().asarray(np.ones((4, 3), np.float32))))
    result.sum().backward()
    assert is_device_array(result.data)
    assert all(is_device_array(p.data) and is_device_array(p.grad) for p in model.parameters())
    with pytest.raises(DeviceError, match="host's memory"):
        model(Tensor(np.ones((4, 3), np.float32)))
