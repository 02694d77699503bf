"""The passes of a pipeline, beside the simulation of their schedule."""

from collections import deque
from collections.abc import Sequence
from statistics import median

from nnmpi.comm.mesh import PP
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.executor import Executor
from nnmpi.compose.stats import PassReport, StepReport
from nnmpi.schedule.schedule import COMPUTE, Kind, Schedule
from nnmpi.schedule.simulate import measured_costs, simulate_schedule

# enough for a mean; older passes may be of another load of the machine
PASSES_KEPT = 20


class PipelineForecast:
    """Compares a pipeline's passes with their schedule, simulated with the measured costs.

    Args:
        arrangement: of the stages.
        executor: knows the schedules.

    Attributes:
        passed: reports of passes since the last summary.
    """

    def __init__(self, arrangement: Arrangement, executor: Executor) -> None:
        self._mesh, self._executor = arrangement.mesh, executor
        self._is_stale = arrangement.layout.asynchronous
        self.passed: deque[StepReport] = deque(maxlen=PASSES_KEPT)

    def summary(self) -> list[str]:
        """Return lines about the passes since the last call. Collective over the pipeline."""
        if not self.passed:
            return []
        # without an epoch's short last batch
        full = max(report.samples for report in self.passed)
        passes = [
            report.passed
            for report in self.passed
            if report.passed is not None and report.samples == full
        ]
        lines = [self._compare(self._executor.schedule_for(passes[0].microbatches), passes)]
        old = max((item for report in self.passed for item in report.staleness), default=0)
        self.passed.clear()
        if self._is_stale:
            # only schedules that update within a pass, such as pipedream, use old weights
            stale = self._mesh.pp.gather(old)
            lines.append(f"staleness by rank: at most {', '.join(map(str, stale))} updates")
        return lines

    def _compare(self, schedule: Schedule, reports: Sequence[PassReport]) -> str:
        """Return measured and simulated times of a schedule's passes, as text.

        The time of a pass is the largest of the ranks' medians. The bubble is the share of the
        ranks' time without computation.
        """
        mesh = self._mesh
        group, machine = mesh.pp, mesh.world.machine
        times = [
            [item.kind, item.stage, seconds]
            for report in reports
            for item, seconds in report.samples
        ]
        sent = [[op.kind, op.stage, lengths] for op, lengths in reports[-1].sent]
        totals = [
            median(report.total_s for report in reports),
            median(report.compute_s for report in reports),
        ]
        by_rank = group.gather([times, totals, max(report.peak_live for report in reports), sent])
        samples = [
            (Kind(kind).at(stage), seconds)
            for costs, *_ in by_rank
            for kind, stage, seconds in costs
        ]
        lengths = {
            (kind, stage): tuple(sizes) for *_, sent in by_rank for kind, stage, sizes in sent
        }
        simulation = simulate_schedule(
            schedule,
            measured_costs(schedule.stages, samples),
            machine and machine.parts(mesh.sizes.groups(PP), mesh.world.size)[0],
            lambda send: lengths[send.kind, send.stage],
        )
        measured_s = max(total_s for _, (total_s, _), *_ in by_rank)
        busy_s = sum(compute_s for _, (_, compute_s), *_ in by_rank)
        stage_s = [0.0] * schedule.stages
        for op, seconds in samples:
            if op.kind in COMPUTE:
                stage_s[op.stage] += seconds / len(reports) / schedule.microbatches
        bubble = 1 - busy_s / (measured_s * group.size) if measured_s else 0.0
        return (
            f"pipeline pass {1e3 * measured_s:.2f} ms, simulated {1e3 * simulation.makespan_s:.2f}"
            f" ms{'' if machine else ' without messages, for which there is no fit'}; bubble"
            f" {bubble:.0%}, simulated {simulation.bubble:.0%}; ms per microbatch and stage:"
            f" {', '.join(f'{1e3 * seconds:.2f}' for seconds in stage_s)}; activations kept:"
            f" {', '.join(str(peak) for _, _, peak, _ in by_rank)}"
        )
