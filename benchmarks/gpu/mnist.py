"""Ten epochs of MNIST's CNN at batch 64 with Adam, as a user writes them: nnmpi's loader beside PyTorch's DataLoader.

Both sides read uint8 images in host memory, and end each epoch by waiting for the device. An epoch is timed by the
host's clock, from asking for its first batch on; evaluation is outside. The first epoch is timed but not counted among
the quartiles' epochs: kernels are compiled in it. The total is of all of them.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import nnmpi
from benchmarks.harness.turns import summary
from nnmpi import Tensor, data, models, nn, ops, optim
from nnmpi.backend.backend import Backend
from nnmpi.data.dataset import Dataset
from nnmpi.data.loader import Loader
from nnmpi.data.upload import batches
from nnmpi.errors import NnmpiError

EPOCHS, BATCH, LR = 10, 64, 1e-3
EVALUATION_BATCH = 1000
SHAPE, CLASSES = (28, 28, 1), 10
ROWS = (60_000, 10_000)
REAL, MADE_UP = "MNIST", "made up, in MNIST's shape"


@dataclass(frozen=True)
class MnistTask:
    """The data, and how many epochs of them are trained.

    Attributes:
        what: MNIST, or that it is made up.
    """

    train: Dataset
    test: Dataset
    what: str
    epochs: int = EPOCHS


def train_nnmpi(task: MnistTask, backend: Backend, compiled: bool) -> dict[str, Any]:
    """Return nnmpi's row.

    Args:
        task: data and epochs.
        backend: of the device.
        compiled: whether a step is recorded once and replayed.
    """
    model = models.cnn(SHAPE, CLASSES).initialize(seed=0, backend=backend)
    optimizer = optim.Adam(model.storage, lr=LR)
    loader = Loader(task.train, BATCH, seed=0, workers=_workers())

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        with nn.training():
            loss = ops.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = nnmpi.compile(step) if compiled else step

    def epoch(number: int) -> None:
        with batches(loader, number, backend) as uploads:
            for batch in uploads:
                run(Tensor(batch.x), Tensor(batch.y))
        backend.synchronize()

    def accuracy() -> float:
        right = 0
        for batch in batches(Loader(task.test, EVALUATION_BATCH, shuffle=False), 0, backend):
            with nnmpi.no_grad():
                places = model(Tensor(batch.x)).data.argmax(axis=1)
            right += int((places == backend.asarray(batch.y)).sum())
        return right / len(task.test)

    return _row("nnmpi compiled" if compiled else "nnmpi", task, epoch, accuracy)


def train_torch(task: MnistTask, device: str, workers: int) -> dict[str, Any]:
    """Return PyTorch's row: eager, TensorDataset, DataLoader, pinned memory, channels_last.

    Args:
        task: data and epochs.
        device: "cuda", or "cpu" for tests.
        workers: processes of the DataLoader; 0 for none.
    """
    import torch

    from benchmarks.accuracy.mnist_torch import cnn, tensors

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = cnn().to(device=device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*tensors(task.train)),
        BATCH,
        shuffle=True,
        num_workers=workers,
        pin_memory=device == "cuda",
        persistent_workers=workers > 0,
    )

    def epoch(number: int) -> None:
        model.train()
        for x, y in loader:
            x = x.to(device, non_blocking=True, memory_format=torch.channels_last)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y.to(device, non_blocking=True))
            loss.backward()
            optimizer.step()
        getattr(torch, device).synchronize()

    def accuracy() -> float:
        model.eval()
        images, labels = tensors(task.test)
        with torch.no_grad():
            found = torch.cat([model(part.to(device)).argmax(1).cpu() for part in images.split(EVALUATION_BATCH)])
        return float((found == labels).double().mean())

    return _row(f"torch, DataLoader with {workers} workers", task, epoch, accuracy)


def _row(name: str, task: MnistTask, epoch: Callable[[int], None], accuracy: Callable[[], float]) -> dict[str, Any]:
    seconds = []
    for number in range(task.epochs):
        begin = time.perf_counter()
        epoch(number)
        seconds.append(time.perf_counter() - begin)
    counted = seconds[1:] or seconds
    return {
        "name": name,
        "epochs": task.epochs,
        "rows": len(task.train),
        "batch": BATCH,
        "data": task.what,
        "epochs_s": seconds,
        "total_s": float(np.sum(seconds)),
        **summary("epoch", counted),
        "accuracy": accuracy(),
    }


def _workers() -> int:
    """Return how many threads prepare nnmpi's batches."""
    return 2 if len(os.sched_getaffinity(0)) > 2 else 1


def total_ratio(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return how many times as fast nnmpi's fastest way is over all epochs as PyTorch's; None without both."""
    best = {
        side: min((row for row in rows if row["name"].startswith(side)), key=lambda row: row["total_s"], default=None)
        for side in ("nnmpi", "torch")
    }
    mine, other = best["nnmpi"], best["torch"]
    if mine is None or other is None:
        return None
    return {"nnmpi": mine["name"], "torch": other["name"], "total": other["total_s"] / mine["total_s"]}


def load(folder: Path | None, rows: tuple[int, int] = ROWS) -> tuple[Dataset, Dataset, str]:
    """Return the parts for training and for testing, and what they are: MNIST where its files are, else made up.

    Args:
        folder: with MNIST's four files, or with a folder mnist in it.
        rows: of each part, at most.
    """
    try:
        train, test = data.load("mnist", folder)
    except NnmpiError:
        return made_up(rows[0], 0), made_up(rows[1], 1), MADE_UP
    return train.take(np.arange(min(rows[0], len(train)))), test.take(np.arange(min(rows[1], len(test)))), REAL


def made_up(rows: int, seed: int) -> Dataset:
    """Return images of one bright bar each, whose place tells the class, with noise."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, CLASSES, rows)
    x = draw.integers(0, 64, (rows, *SHAPE), np.uint8)
    for label in range(CLASSES):
        x[labels == label, 4 + 2 * label : 6 + 2 * label, 4:24] |= 192
    return Dataset("mnist", x, labels, CLASSES, scale=1 / 255)
