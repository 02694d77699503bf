"""What the tests of virtual time share: a small model, some data, and runs of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nnmpi import nn, optim
from nnmpi.backend.array import Array
from nnmpi.backend.record import Backend
from nnmpi.comm.group import Group
from nnmpi.compose.options import Numerics
from nnmpi.compose.trainer import SegmentReport, Throttle
from nnmpi.compose.virtual import VirtualWorker
from nnmpi.compose.worker import Worker
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Loader
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.synchrony.network import LinkSpeed
from nnmpi.synchrony.slowdown import Slowdown
from nnmpi.synchrony.sync import Sync
from tests.worker_options import grouped

ROWS, BATCH = 62, 12  # five batches of 12 rows and one of 2, which is less than there are workers
BATCHES = -(-ROWS // BATCH)
SPEED = LinkSpeed(0.01, 1e-5)
EVERY_MODE = (
    Sync("bsp"),
    Sync("bsp", servers=2),
    Sync("bsp", backup=1),
    Sync("asp"),
    Sync("asp", servers=3, adapt=True),
    Sync("ssp", staleness=1),
    Sync("ssp", staleness=2, servers=2, dedicated=True),
    Sync("local", local_steps=2),
    Sync("gossip"),
    Sync("gossip", neighbours="random"),
)


def dataset(rows: int = ROWS) -> Dataset:
    draw = np.random.default_rng(3)
    x = draw.normal(size=(rows, 6)).astype(np.float32)
    return Dataset("drawn", x, (x[:, :3].argmax(axis=1)).astype(np.int64), 3)


def build(dtype: str = "float64", norm: bool = False, dropout: float = 0.0, backend: Backend | None = None) -> Module:
    body: list[Module] = [nn.Linear(6, 7), *([nn.BatchNorm(7)] if norm else []), nn.ReLU()]
    if dropout:
        body.append(nn.Dropout(dropout))
    return nn.Sequential(*body, nn.Linear(7, 3)).initialize(0, dtype, backend)


def optimizer_of(model: Module, name: str = "sgd") -> Optimizer:
    if name == "adam":
        return optim.Adam(model.storage, lr=0.01, weight_decay=0.01)
    return optim.SGD(model.storage, lr=0.1, momentum=0.9 if name == "momentum" else 0.0)


def make(group: Group, sync: Sync, workers: int = 4, name: str = "sgd", straggler: str = "", **options: Any) -> Any:
    """Return a virtual worker, its steps 1 s long."""
    model = options.pop("model", None) or build()
    throttle = Throttle(1.0, Slowdown.parse(straggler, seed=7))
    return VirtualWorker(
        model, optimizer_of(model, name), group, sync, workers, throttle=throttle, **grouped(**options)
    )


def run(worker: Any, epochs: int = 1, rows: int = ROWS, **options: Any) -> list[SegmentReport]:
    """Train epoch by epoch, each a segment."""
    dtype = worker.model.storage.data[0].dtype
    loader = Loader(dataset(rows), BATCH, dtype=dtype, workers=0)
    count = loader.batches_per_epoch
    rate = worker.optimizer.lr
    return [
        worker.run(loader, epoch, 0, count, epoch * count, lr=lambda step: rate / (1 + step / 10), **options)
        for epoch in range(epochs)
    ]


def serial(group: Group, name: str, epochs: int, model: Module | None = None, clip: float | None = None) -> Module:
    """Return the model that one process has trained."""
    model = build() if model is None else model
    worker = Worker(model, optimizer_of(model, name), group, numerics=Numerics(clip=clip))
    rate = worker.optimizer.lr
    for epoch in range(epochs):
        for batch in Loader(dataset(), BATCH, dtype=model.storage.data[0].dtype, workers=0).epoch(epoch):
            worker.step(batch, lr=rate / (1 + worker.optimizer.steps / 10))
    worker.release()
    return model


def weights(model: Module) -> Array:
    return np.concatenate([np.ravel(array) for array in model.storage.data])


def state(worker: Any) -> Sequence[Array]:
    """Return all that a run has changed."""
    slots = [array for arrays in worker.optimizer.slots().values() for array in arrays]
    buffers = [buffer.data for _, buffer in worker.model.named_buffers()]
    return [weights(worker.model), *slots, *buffers, np.array([worker.now_s, worker.optimizer.steps])]


def same(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(state(one), state(other), strict=True))
