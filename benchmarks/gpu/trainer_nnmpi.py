"""nnmpi's side, through its public names: the usual loop on one rank, eager and compiled."""

from typing import Any

import numpy as np

import nnmpi
from benchmarks.gpu.cases import FLOAT32, CaseArrays
from benchmarks.gpu.trainer import Arrays, DeviceTrainer
from benchmarks.training.trainer_nnmpi import build, mean_loss
from nnmpi import Tensor, nn, optim
from nnmpi.backend.backend import Backend
from nnmpi.backend.precision import use_precision


class NnmpiDeviceTrainer(DeviceTrainer):
    """nnmpi on a backend.

    Args:
        arrays: the case.
        mode: of `nnmpi.backend.precision`.
        backend: where it computes.
        compiled: whether a step is recorded once and replayed.
        dtype: float64 for a reference, in mode float32.
    """

    def __init__(
        self, arrays: CaseArrays, mode: str, backend: Backend, compiled: bool, dtype: str = FLOAT32
    ) -> None:
        super().__init__(arrays.case, mode)
        self.name = "nnmpi compiled" if compiled else "nnmpi"
        self._backend, self._first = backend, arrays.weights
        backend.release_memory()
        self._model = build(self.case).initialize(seed=self.case.seed, dtype=dtype, backend=backend)
        self._optimizer = optim.SGD(self._model.storage, lr=0.01)
        x, y = arrays.batch(dtype)
        self._x, self._y = backend.asarray(x), backend.asarray(y)
        self._run = nnmpi.compile(self._loop) if compiled else self._loop

    def restore(self) -> None:
        for parameter, values in zip(self._model.parameters(), self._first, strict=True):
            parameter.data[...] = self._backend.asarray(values, dtype=parameter.data.dtype)

    def weights(self) -> Arrays:
        result = [self._backend.to_host(parameter.data) for parameter in self._model.parameters()]
        return [np.array(array, np.float64) for array in result]

    def step(self) -> Any:
        self._optimizer.lr = self.lr
        with use_precision(self.mode):
            return self._run(Tensor(self._x), Tensor(self._y))

    def read(self, loss: Any) -> float:
        return float(loss.item())

    def wait(self) -> None:
        self._backend.synchronize()

    def mark(self) -> Any:
        return self._backend.xp.cuda.get_current_stream().record()

    def between(self, begin: Any, end: Any) -> float:
        return float(self._backend.xp.cuda.get_elapsed_time(begin, end)) / 1e3

    def close(self) -> None:
        backend = self._backend
        super().close()
        backend.release_memory()

    def _loop(self, x: Tensor, y: Tensor) -> Tensor:
        self._model.zero_grad()
        with nn.training():
            loss = mean_loss(self.case, self._model(x), y)
        loss.backward()
        self._optimizer.step()
        return loss
