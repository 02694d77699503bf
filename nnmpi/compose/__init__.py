"""Model, optimizer and parallel strategies put together: one object with one call per update."""

from nnmpi.compose.arrange import Arrangement, arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.pace import Pace
from nnmpi.compose.relaxed import RelaxedWorker
from nnmpi.compose.report import EvalReport, StepReport
from nnmpi.compose.segment import Progress, SegmentReport
from nnmpi.compose.virtual import VirtualWorker
from nnmpi.compose.worker import Worker

__all__ = [
    "Arrangement",
    "EvalReport",
    "Layout",
    "Pace",
    "Progress",
    "RelaxedWorker",
    "SegmentReport",
    "StepReport",
    "VirtualWorker",
    "Worker",
    "arrange",
]
