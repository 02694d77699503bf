"""nnmpi's side, through its public names: the usual loop on one rank, eager and compiled."""

from typing import Any

import nnmpi
from benchmarks.gpu.cases import Case
from benchmarks.gpu.trainer import LR, DeviceTrainer
from benchmarks.training import models
from nnmpi import Tensor, nn, ops, optim
from nnmpi.backend.backend import Backend


class NnmpiDeviceTrainer(DeviceTrainer):
    """nnmpi on a backend.

    Args:
        case: the model and its batch.
        mode: of `nnmpi.backend.precision`.
        backend: where it computes.
        compiled: whether `nnmpi.compile` runs the step.
    """

    def __init__(self, case: Case, mode: str, backend: Backend, compiled: bool) -> None:
        backend.release_memory()
        self._mode, self._backend, self._before = mode, backend, backend.memory().pool_bytes
        self._model = case.make(models.our_library())
        for parameter in self._model.parameters():
            parameter.init = nn.Constant(0.0)  # 124M numbers would be drawn for each contestant
        self._model.initialize(seed=0, backend=backend)
        values = case.first.parameters()
        for parameter, value in zip(self._model.parameters(), values, strict=True):
            parameter.data[...] = backend.asarray(value.data)
        self._optimizer = optim.AdamW(self._model.storage, lr=LR)
        self._batch = [Tensor(backend.asarray(array)) for array in case.data]
        self._run = nnmpi.compile(self._loop) if compiled else self._loop

    def step(self) -> Any:
        with nnmpi.use_precision(self._mode), nn.training(step=self._optimizer.steps):
            return self._run(*self._batch)

    def read(self, loss: Any) -> float:
        return float(loss.item())

    def wait(self) -> None:
        self._backend.synchronize()

    def peak_bytes(self) -> int:
        """Return the growth of CuPy's pool, which keeps all that it once had."""
        return self._backend.memory().pool_bytes - self._before

    def close(self) -> None:
        backend = self._backend
        super().close()
        backend.release_memory()

    def _loop(self, x: Tensor, y: Tensor) -> Tensor:
        self._model.zero_grad()
        loss = ops.cross_entropy(self._model(x), y)
        loss.backward()
        self._optimizer.step()
        return loss
