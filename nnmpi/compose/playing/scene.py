"""What a segment in virtual time is played with: one model, and how long everything takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nnmpi.compose.gradient import Gradient, LocalGradient
from nnmpi.compose.pace import Pace
from nnmpi.compose.playing.statistics import Statistics
from nnmpi.compose.segment import Progress
from nnmpi.data.loader import Batch, Parts
from nnmpi.errors import DivergenceError
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.synchrony.network import LinkSpeed
from nnmpi.synchrony.sync import Sync


@dataclass(frozen=True)
class Segment:
    """What is to be played.

    Attributes:
        parts: of the training data.
        batches: their numbers.
        step: the number of the first one in the whole run.
        lr: the learning rate of a step.
        bsp: whether the workers stay in step.
        progress, asked: see `VirtualWorker.run`.
        observe: called with the virtual time after every update, with the present weights in the model; or None.
        begin_s: the virtual time.
    """

    parts: Parts
    batches: range
    step: int
    lr: Callable[[int], float]
    bsp: bool
    progress: Callable[[Progress], None]
    asked: Callable[[], int]
    observe: Callable[[float], None] | None
    begin_s: float

    def number(self, batch: int) -> int:
        """Return the number of a batch in the whole run."""
        return self.step + batch - self.batches.start


@dataclass(frozen=True)
class Scene:
    """The model and the workers who share it.

    Attributes:
        steps: the gradients that each worker has computed in the whole run.
        taken: through servers, the samples that they were of.
        speed: of every link.
    """

    model: Module
    optimizer: Optimizer
    sync: Sync
    workers: int
    gradient: LocalGradient
    pace: Pace
    speed: LinkSpeed
    statistics: Statistics
    seed: int
    steps: list[int]
    taken: list[int]

    @property
    def nbytes(self) -> int:
        """The bytes of the weights, and of a gradient."""
        return sum(int(array.nbytes) for array in self.model.storage.data)

    def compute(self, worker: int, batch: Batch, number: int) -> Gradient:
        """Compute a worker's next gradient, with the weights that are in the model; seconds are virtual ones.

        Args:
            number: of the batch in the whole run.

        Raises:
            DivergenceError: when it is not finite.
        """
        self.statistics.load(worker)
        gradient = self.gradient.run(batch, number)
        self.statistics.keep(worker, gradient.rows)
        self.check(gradient, batch, number, f"worker {worker}")
        return replace(gradient, compute_s=self.take_step(worker))

    def check(self, gradient: Gradient, batch: Batch, number: int, who: str) -> None:
        """Raise DivergenceError for a gradient that is not finite."""
        if not gradient.is_finite:
            raise DivergenceError(self.gradient.explain(gradient, batch, number, who))

    def take_step(self, worker: int) -> float:
        """Count one more step of a worker, and return the virtual seconds that it takes."""
        rank = self.sync.worker_ranks(self.sync.ranks_of(self.workers))[worker]
        seconds = self.pace.due_s(0.0, rank, self.steps[worker])
        self.steps[worker] += 1
        return seconds
