"""What a run works with, on one rank."""

from dataclasses import dataclass

from nnmpi.comm.group import Group
from nnmpi.compose.worker import Worker
from nnmpi.optim.schedule import Schedule
from nnmpi.train.config import RunConfig
from nnmpi.train.folder import RunFolder
from nnmpi.train.inputs import Inputs
from nnmpi.train.report import Extent


@dataclass(frozen=True)
class Parts:
    """What `session` has built.

    Attributes:
        schedule: the learning rate of a step.
    """

    options: RunConfig
    group: Group
    inputs: Inputs
    worker: Worker
    schedule: Schedule
    extent: Extent
    folder: RunFolder
