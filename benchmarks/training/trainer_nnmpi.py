"""nnmpi's side, through its public names: a loop on one rank; `Worker` or `DataParallel` on several."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl
from numpy.typing import NDArray

import nnmpi
from benchmarks.training.cases import BLOCK, CNN, CROSS_ENTROPY, GPT, LANGUAGE, LSTM, Case
from benchmarks.training.contestants import FUSED, PARALLEL, Contestant
from benchmarks.training.trainer import Trainer
from nnmpi import Tensor, models, nn, ops, optim
from nnmpi.backend import keep_freed_memory
from nnmpi.backend.mkl import installed_mkl
from nnmpi.compose.arrange import arrange
from nnmpi.data.loader import Batch, Cut
from nnmpi.parallel.zero.storage import ShardedStorage


class NnmpiTrainer(Trainer):
    """A rank of nnmpi.

    Args:
        contestant: what it runs.
        rank: not used: MPI knows it.
        folder: where data and first weights are.
    """

    def __init__(self, contestant: Contestant, rank: int, folder: Path) -> None:
        keep_freed_memory()  # as the train command does
        self._group = nnmpi.start() if contestant.ranks > 1 else None
        super().__init__(contestant, 0 if self._group is None else self._group.rank)
        self._stack = ExitStack()
        if contestant.jit:
            self._stack.enter_context(nnmpi.jit())
        self._x, self._y = self.load(folder)
        self._where: Any = None
        model, options = build(self.case), dict[str, Any]()
        if contestant.sharded:
            self._where = arrange(model, self._group, nnmpi.Layout(zero=3))
            model, options = self._where.model, {"storage": self._where.storage}
        self._model = model.initialize(seed=self.case.seed, dtype=contestant.dtype, **options)
        self._optimizer = optim.SGD(self._model.storage, lr=0.01)
        self._step = self._make_step()

    def step(self) -> float:
        """See `Trainer.step`."""
        self._optimizer.lr = self.lr
        return self._step()

    def barrier(self) -> None:
        """See `Trainer.barrier`."""
        if self._group is not None:
            self._group.barrier()

    def arrays(self) -> list[NDArray[np.floating]]:
        """See `Trainer.arrays`."""
        storage = self._model.storage
        if isinstance(storage, ShardedStorage):
            return [storage.parts(span, storage.data).gather() for span in self._spans()]
        return [parameter.data for parameter in self._model.parameters()]

    def restore(self, file: Path) -> None:
        """See `Trainer.restore`."""
        if not self.contestant.sharded:
            super().restore(file)
            return
        with open(file, "rb") as values:
            for span in self._spans():
                shape = span.parameter.declared
                self._model.storage.write(span, np.fromfile(values, np.float32, math.prod(shape)).reshape(shape))

    def _spans(self) -> list[Any]:
        """Return where the parameters lie, in order of definition."""
        places = {id(span.parameter): span for span in self._model.storage.spans}
        return [places[id(parameter)] for parameter in self._model.parameters()]

    def facts(self) -> dict[str, str]:
        """See `Trainer.facts`."""
        pools = [pool for pool in threadpoolctl.threadpool_info() if "numpy" in str(pool.get("filepath", ""))]
        names = [f"{pool['internal_api']} {pool['version']} ({pool.get('architecture', 'unknown')})" for pool in pools]
        mkl = installed_mkl()
        names = names if mkl is None else [f"mkl {mkl.version}", *names]
        found = {"blas": ", ".join(names) or "unknown"}
        if self._group is not None:
            found["mpi"] = self._group.comm.world.library
        return found

    def close(self) -> None:
        """See `Trainer.close`."""
        self._release()
        self._stack.close()

    def _release(self) -> None:
        """Replaced where there is something to release."""

    def _make_step(self) -> Callable[[], float]:
        """Return the call that does one step."""
        if self._group is None:
            return self._loop(lambda loss: loss.backward(), lambda output: mean_loss(self.case, output, self._y))
        if self.contestant.exchange == PARALLEL:
            parallel = nnmpi.DataParallel(self._model, self._group)
            self._release = parallel.release
            targets, size = self.case.targets, self._group.size
            step = self._loop(
                lambda loss: parallel.backward(loss, targets), lambda output: sum_loss(self.case)(output, self._y)
            )
            return lambda: step() * size / targets
        return self._worker(self._group)

    def _loop(self, backward: Callable[[Tensor], Any], measure: Callable[[Tensor], Tensor]) -> Callable[[], float]:
        """Return the usual loop's body as one call."""
        model, optimizer = self._model, self._optimizer

        def step(x: Any, y: Any) -> Tensor:
            model.zero_grad()
            with nn.training():
                loss = measure(model(x))
            backward(loss)
            optimizer.step()
            return loss

        run = nnmpi.compile(step) if self.contestant.compiled else step
        x, y = self._x if self.case.model in LANGUAGE else Tensor(self._x), self._y
        return lambda: run(x, y).item()

    def _worker(self, group: Any) -> Callable[[], float]:
        rows = len(self._x)
        cuts = (Cut(0, rows, self.rank * rows),)
        batch = Batch(self._x, self._y, np.arange(rows), cuts, self.case.batch, 0, 0)
        worker = nnmpi.Worker(
            self._model,
            self._optimizer,
            group,
            loss=sum_loss(self.case),
            exchange=nnmpi.GradientExchange(fused_update=self.contestant.exchange == FUSED),
            arrangement=self._where,
        )
        self._release = worker.release
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


def sum_loss(case: Case) -> Callable[[Tensor, Any], Tensor]:
    """Return (output, labels) -> the sum over the targets of each one's loss."""
    if case.loss == CROSS_ENTROPY:
        return lambda output, y: ops.cross_entropy(output, y, reduction="sum")
    return lambda output, y: ops.mse(output, y, reduction="sum") * (1 / case.elements)


def mean_loss(case: Case, output: Tensor, y: Any) -> Tensor:
    """Return the mean over the targets of each one's loss.

    Args:
        case: says which loss.
        output: (rows, ...) of the model.
        y: labels (rows,), (rows, time) for a language model, or targets like the output.
    """
    if case.loss == CROSS_ENTROPY:
        return ops.cross_entropy(output, y)
    return ops.mse(output, y)


def available() -> tuple[bool, bool]:
    """Return whether nnmpi can compile a step here, and whether it has compiled kernels, which need numba."""
    return hasattr(nnmpi, "compile"), hasattr(nnmpi, "jit") and find_spec("numba") is not None
