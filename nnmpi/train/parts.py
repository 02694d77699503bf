"""What a run works with, on one rank."""

from dataclasses import dataclass, field
from typing import TypeAlias

from nnmpi.comm.group import Group
from nnmpi.compose.pace import Pace
from nnmpi.compose.relaxed import RelaxedWorker
from nnmpi.compose.virtual import VirtualWorker
from nnmpi.compose.worker import Worker
from nnmpi.optim.schedule import Schedule
from nnmpi.train.config import RunConfig
from nnmpi.train.folder import RunFolder
from nnmpi.train.inputs import Inputs
from nnmpi.train.report import Extent

AnyWorker: TypeAlias = Worker | RelaxedWorker | VirtualWorker


@dataclass(frozen=True)
class Parts:
    """What `session` has built.

    Attributes:
        schedule: the learning rate of a step.
        pace: how slow ranks are on purpose.
    """

    options: RunConfig
    group: Group
    inputs: Inputs
    worker: AnyWorker
    schedule: Schedule
    extent: Extent
    folder: RunFolder
    pace: Pace = field(default_factory=Pace)
