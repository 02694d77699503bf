"""Training with gradients on a device, however they travel: the numbers of the host."""

from typing import Any

import numpy as np
import pytest

from nnmpi import models, optim
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.comm.algorithms.registry import ALGORITHMS, IPC, NATIVE, NCCL, SHARED
from nnmpi.comm.group import Group
from nnmpi.compose.worker import Worker
from nnmpi.data.loader import Loader
from tests.device.library import device_backend, load
from tests.equivalence.reference import digits
from tests.worker_options import grouped


def train(group: Group, backend: Backend, allreduce: str, overlap: bool, bucket_bytes: int = 9_000) -> Any:
    """Return the losses of some steps and the weights after them, and the algorithms of the buckets."""
    dataset = digits()
    model = models.mlp(dataset.sample_shape, dataset.classes).initialize(seed=0, dtype="float64", backend=backend)
    options: dict[str, Any] = {"overlap": overlap, "bucket_bytes": bucket_bytes, "check": True}
    worker = Worker(
        model, optim.SGD(model.storage, 0.1), group, backend=backend, **grouped(allreduce=allreduce, **options)
    )
    loader = Loader(dataset, 256, rank=group.rank, world=group.size, microbatches=2, dtype="float64")
    losses = [worker.step(batch).loss for batch in loader.epoch(0)]
    names = {choice.algorithm for choice in worker.parallel.exchange.choices}
    worker.release()
    return {"losses": np.array(losses), **model.state()}, names


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("allreduce", [NATIVE, SHARED, *ALGORITHMS, IPC, NCCL])
def test_gradients_on_a_device_give_the_hosts_numbers(group: Group, allreduce: str, overlap: bool) -> None:
    settings = load().cuda.runtime.settings()
    before = settings.devices, settings.current
    if allreduce == NCCL:  # a card for each rank
        settings.devices = group.size
    try:
        backend = device_backend(group.rank if allreduce == NCCL else 0)
        device, names = train(group, backend, allreduce, overlap)
    finally:
        settings.devices, settings.current = before
    host, _ = train(group, numpy_backend(), NATIVE, overlap=False)
    different = [name for name in host if not np.allclose(device[name], host[name], rtol=1e-9, atol=1e-11)]
    assert not any(group.gather(different)), different
    assert group.gather(sorted(names)) == [[allreduce]] * group.size


@pytest.mark.mpi
def test_the_header_says_how_device_arrays_go(group: Group) -> None:
    assert group.devices().describe().startswith("staged through page-locked host memory (MPI is not")
