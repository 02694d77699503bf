"""Model, optimizer and parallel strategies put together: one object with one call per update."""

from nnmpi.compose.arrange import Arrangement, arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.report import EvalReport, StepReport
from nnmpi.compose.worker import Worker

__all__ = ["Arrangement", "EvalReport", "Layout", "StepReport", "Worker", "arrange"]
