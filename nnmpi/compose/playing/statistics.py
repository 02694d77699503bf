"""Each played worker's own running statistics, while the model that computes for all of them is one."""

from __future__ import annotations

from collections.abc import Sequence

from nnmpi.backend.array import Array
from nnmpi.nn.module import Module


class Statistics:
    """Keeps the model's buffers for every worker.

        begin           model -> everybody
        load, keep      everybody's own, around each gradient
        show            the mean, each worker's weighted by the gradients that it computed -> model

    A model without buffers costs nothing.
    """

    def __init__(self, model: Module, workers: int) -> None:
        self._buffers = [buffer for _, buffer in model.named_buffers()]
        self._own: list[list[Array]] = [[buffer.data.copy() for buffer in self._buffers] for _ in range(workers)]
        self._counts = [0] * workers

    def begin(self) -> None:
        """Give everybody the model's statistics."""
        self._counts = [0] * len(self._counts)
        for own in self._own:
            self._copy(own, [buffer.data for buffer in self._buffers])

    def load(self, worker: int) -> None:
        """Let the model have a worker's."""
        self._copy([buffer.data for buffer in self._buffers], self._own[worker])

    def keep(self, worker: int, rows: int) -> None:
        """Take them back from the model, after a gradient of so many rows; one of none does not count."""
        self._counts[worker] += rows > 0
        self._copy(self._own[worker], [buffer.data for buffer in self._buffers])

    def show(self) -> None:
        """Let the model have the mean; nothing changes where nobody has computed a gradient."""
        total = sum(self._counts)
        if not total:
            return
        for number, buffer in enumerate(self._buffers):
            mean = sum(
                own[number].astype("float64") * (count / total)
                for own, count in zip(self._own, self._counts, strict=True)
            )
            buffer.data[...] = mean

    def _copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target[...] = source
