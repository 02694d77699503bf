"""The passes through a pipeline since the last line about them, and that line: measured beside simulated."""

from collections import deque

from nnmpi.compose.forecast import forecast
from nnmpi.compose.pipelined import Pipelined
from nnmpi.compose.report import StepReport
from nnmpi.compose.worker import Worker
from nnmpi.parallel.pipeline import PassReport

KEPT = 20


class Passes:
    """Keeps the last passes of the run's usual number of microbatches; without a pipeline it does nothing."""

    def __init__(self, worker: Worker) -> None:
        self._runner = worker.runner if isinstance(worker.runner, Pipelined) else None
        self._kept: deque[PassReport] = deque(maxlen=KEPT)
        self._microbatches = 0
        self._staleness: tuple[int, ...] = ()

    def add(self, report: StepReport) -> None:
        """Keep a step's pass; the short last batch of an epoch is left out."""
        if self._runner is None or report.passed is None:
            return
        microbatches = report.passed.microbatches
        if microbatches > self._microbatches:
            self._microbatches = microbatches
            self._kept.clear()
        if microbatches == self._microbatches:
            self._kept.append(report.passed)
        self._staleness = report.staleness

    def tell(self) -> list[str]:
        """Return what there is to say, and forget the passes. Collective."""
        if self._runner is None or not self._kept:
            return []
        pipeline = self._runner.pipeline
        found = forecast(pipeline.group, pipeline.plan(self._microbatches), list(self._kept))
        stale = pipeline.group.gather(max(self._staleness, default=0)) if self._runner.updates else []
        self._kept.clear()
        stages = ", ".join(f"{1e3 * seconds:.2f}" for seconds in found.stage_s)
        lines = [
            f"pipeline pass {1e3 * found.measured_s:.2f} ms, simulated {1e3 * found.simulated_s:.2f} ms; "
            f"bubble {found.measured_bubble:.0%}, simulated {found.simulated_bubble:.0%}; "
            f"ms per microbatch and stage: {stages}; activations kept: {', '.join(map(str, found.peak_live))}"
        ]
        if stale:
            lines.append(f"staleness by rank: at most {', '.join(map(str, stale))} updates")
        return lines
