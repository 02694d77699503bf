"""nnmpi's side, through its public names: a loop on one rank; `DataParallel` or `Worker` on
several.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nnmpi
from benchmarks.training.cases import BLOCK, CNN, CROSS_ENTROPY, GPT, LANGUAGE, LSTM, Case
from benchmarks.training.contestants import COMPILED, WORKER, Contestant
from benchmarks.training.member import Trainer
from nnmpi import Tensor, models, nn, ops, optim
from nnmpi.backend.gemm import name_products
from nnmpi.data.loader import Batch
from nnmpi.data.sampler import Cut


class NnmpiTrainer(Trainer):
    """A rank of nnmpi."""

    def __init__(self, contestant: Contestant, rank: int, folder: Path) -> None:
        self._group = nnmpi.start() if contestant.ranks > 1 else None
        super().__init__(contestant, 0 if self._group is None else self._group.rank, folder)
        self._stack = ExitStack()
        if contestant.jit:
            self._stack.enter_context(nnmpi.jit())
        self._x, self._y = self.load()
        self._model = build(self.case).initialize(seed=self.case.seed, dtype=contestant.dtype)
        self._optimizer = optim.SGD(self._model.storage, lr=0.01)
        self._step = self._worker() if contestant.way == WORKER else self._loop()

    def one_step(self) -> float:
        """See `Trainer.one_step`."""
        self._optimizer.lr = self.lr
        return self._step()

    def barrier(self) -> None:
        """See `Trainer.barrier`."""
        if self._group is not None:
            self._group.barrier()

    def arrays(self) -> list[NDArray[np.floating]]:
        """See `Trainer.arrays`."""
        storage = (
            self._model.storage
        )  # a parameter's own view of weights that ranks share is read-only
        return [storage.view(span, storage.data) for span in storage.spans]

    def facts(self) -> dict[str, str]:
        """See `Trainer.facts`."""
        result = {"blas": name_products()}
        return result if self._group is None else {**result, "mpi": self._group.comm.world.library}

    def close(self) -> None:
        """See `Trainer.close`."""
        self._stack.close()

    def _loop(self) -> Callable[[], float]:
        """Return one iteration of the usual training loop as a call."""
        case, group, model, optimizer = self.case, self._group, self._model, self._optimizer
        parallel = None if group is None else nnmpi.DataParallel(model, group)
        if parallel is not None:
            self._stack.callback(parallel.release)

        def step(x: Any, y: Any) -> Tensor:
            model.zero_grad()
            with nn.training():
                loss = (
                    mean_loss(case, model(x), y)
                    if parallel is None
                    else sum_loss(case)(model(x), y)
                )
            if parallel is None:
                loss.backward()
            else:
                parallel.backward(loss, case.targets)
            optimizer.step()
            return loss

        run = nnmpi.compile(step) if self.contestant.way == COMPILED else step
        x, y = self._x if case.model in LANGUAGE else Tensor(self._x), self._y
        factor = 1.0 if group is None else group.size / case.targets
        return lambda: run(x, y).item() * factor

    def _worker(self) -> Callable[[], float]:
        rows = len(self._x)
        batch = Batch(
            self._x,
            self._y,
            np.arange(rows),
            (Cut(0, rows, self.rank * rows),),
            self.case.batch,
            0,
            0,
        )
        worker = nnmpi.Worker(self._model, self._optimizer, self._group, loss=sum_loss(self.case))
        self._stack.callback(worker.release)
        return lambda: worker.step(batch).loss


def build(case: Case) -> nn.Module:
    """Return the case's model."""
    if case.model == CNN:
        return models.cnn(case.sizes[:3], case.classes)
    if case.model == GPT:
        _, features, heads, layers, context, vocabulary = case.sizes
        return models.gpt(vocabulary, context, features, layers, heads)
    if case.model == LSTM:
        _, features, layers, vocabulary = case.sizes
        return models.lstm(vocabulary, features, layers, tied=False)
    if case.model == BLOCK:
        _, features, heads, hidden = case.sizes
        return nn.TransformerBlock(features, heads, hidden)
    modules: list[nn.Module] = []
    for inputs, outputs in zip(case.sizes, case.sizes[1:], strict=False):
        modules += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def first_weights(case: Case) -> list[NDArray[np.float32]]:
    """Return the model's first weights, in nnmpi's order and layout."""
    model = build(case).initialize(seed=case.seed)
    return [np.array(parameter.data) for parameter in model.parameters()]


def sum_loss(case: Case) -> Callable[[Tensor, Any], Tensor]:
    """Return (output, labels) -> the loss summed over the targets."""
    if case.loss == CROSS_ENTROPY:
        return partial(ops.cross_entropy, reduction="sum")
    return lambda output, y, reduction="sum": (
        ops.mse(output, y, reduction="sum") * (1 / case.elements)
    )


def mean_loss(case: Case, output: Tensor, y: Any) -> Tensor:
    """Return the mean loss over the targets."""
    return ops.cross_entropy(output, y) if case.loss == CROSS_ENTROPY else ops.mse(output, y)


def has_jit() -> bool:
    """Return whether numba, and with it nnmpi's compiled kernels, is installed."""
    return find_spec("numba") is not None
