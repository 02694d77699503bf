"""Optimizers' updates in one pass over arrays of any length; nnmpi/optim explains the letters."""

from typing import Any

from nnmpi.backend.array import Array
from nnmpi.backend.cuda.launch import THREADS, Family, flat_grid


class Updates(Family):
    """Updates of arrays; all arrays are C-contiguous, of one dtype and size."""

    def sgd(self, data: Array, grad: Array, lr: float, decay: float) -> None:
        """data -= lr * (grad + decay * data)."""
        self._update("sgd", (data, grad), float(lr), float(decay))

    def sgd_momentum(
        self, data: Array, grad: Array, momentum: Array, lr: float, keep: float, decay: float, nesterov: bool
    ) -> None:
        """momentum = keep * momentum + g, g = grad + decay * data; data -= lr * momentum, or what Nesterov's takes."""
        numbers = (float(lr), float(keep), float(decay), int(nesterov))
        self._update("sgd_momentum", (data, grad, momentum), *numbers)

    def adam(
        self,
        data: Array,
        grad: Array,
        m: Array,
        v: Array,
        rate: float,
        eps: float,
        beta1: float,
        beta2: float,
        decay: float,
        factor: float,
    ) -> None:
        """m and v move towards g and its square; data = factor * data - rate * m / (sqrt(v) + eps)."""
        numbers = (float(rate), float(eps), 1.0 - beta1, float(beta2), 1.0 - beta2, float(decay), float(factor))
        self._update("adam", (data, grad, m, v), *numbers)

    def _update(self, name: str, arrays: tuple[Array, ...], *numbers: Any) -> None:
        launch, n = self.kernel("updates", name, "T" * len(arrays), *arrays), arrays[0].size
        if n:
            launch(flat_grid(n, arrays[0].dtype.itemsize), (THREADS,), (*arrays, *numbers, n))
