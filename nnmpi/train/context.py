"""What a run works with on one rank, once everything is built: the loops, the header and the trace read it."""

from dataclasses import dataclass, field
from typing import TypeAlias

from nnmpi.backend.record import Backend
from nnmpi.comm.group import Group
from nnmpi.compose.asynchronous import AsynchronousWorker
from nnmpi.compose.segment import Throttle
from nnmpi.compose.virtual import VirtualWorker
from nnmpi.compose.worker import Worker
from nnmpi.optim.schedule import Schedule
from nnmpi.train.config import Config
from nnmpi.train.folder import RunFolder
from nnmpi.train.inputs import Inputs
from nnmpi.train.run_state import RunState

AnyWorker: TypeAlias = Worker | AsynchronousWorker | VirtualWorker


@dataclass(frozen=True)
class Extent:
    """How long a run is.

    Attributes:
        epochs, steps: passes over the training data, and updates; the run ends with whichever comes first.
        train_batches, test_batches: batches of one pass over the training data, and over the test data.
    """

    epochs: int
    steps: int
    train_batches: int
    test_batches: int

    def passes(self, state: RunState) -> float:
        """Return the passes over the training data so far, with the fraction of the present one."""
        return state.epoch + state.batch / self.train_batches


@dataclass(frozen=True)
class RunContext:
    """What `build.set_up` has made of the options. Nothing here changes during the run but the worker's weights.

    Attributes:
        config: every option.
        group: all ranks of the run.
        backend: where this rank computes.
        inputs: the data sets, and the loaders of this rank's part of every batch.
        worker: what does the steps, with the model and its optimizer.
        schedule: the learning rate as a function of the step.
        extent: how long the run is.
        folder: where it writes.
        throttle: how slow ranks are on purpose, where all ranks do every step together; other workers know it.
    """

    config: Config
    group: Group
    backend: Backend
    inputs: Inputs
    worker: AnyWorker
    schedule: Schedule
    extent: Extent
    folder: RunFolder
    throttle: Throttle = field(default_factory=Throttle)
