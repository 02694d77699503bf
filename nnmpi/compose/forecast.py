"""A pipeline's step as it was measured, beside what a simulation makes of the measured parts.

    measured    F and B of every stage, medians over the last steps     -->  simulate(schedule)  -->  makespan, bubble
                the whole pass, from the first instruction to the last                                beside each other

The difference is what the simulation leaves out: messages and updates, which it takes as free, ranks that share a core,
and the interpreter's own time between instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from nnmpi.comm.group import Group
from nnmpi.parallel.pipeline import PassReport
from nnmpi.schedule.instruction import Instruction
from nnmpi.schedule.schedule import Schedule
from nnmpi.schedule.simulate import Costs, simulate


@dataclass(frozen=True)
class Forecast:
    """Some passes through a pipeline, measured and simulated.

    Attributes:
        measured_s, simulated_s: a pass, the longest of all ranks' medians, and the simulation's makespan.
        measured_bubble, simulated_bubble: the share of all ranks' time in which they did not compute.
        peak_live: per rank, the most microbatches whose activations it held.
        stage_s: per stage, the seconds of a microbatch forward and backward.
    """

    measured_s: float
    simulated_s: float
    measured_bubble: float
    simulated_bubble: float
    peak_live: tuple[int, ...]
    stage_s: tuple[float, ...]


def forecast(group: Group, schedule: Schedule, reports: Sequence[PassReport]) -> Forecast:
    """Return the comparison for some passes of one schedule, at least one. Collective over the pipeline's ranks."""
    own = [[str(one), seconds] for report in reports for one, seconds in report.samples]
    totals = [median(report.total_s for report in reports), median(report.compute_s for report in reports)]
    told = group.gather([own, totals, max(report.peak_live for report in reports)])
    samples = [(Instruction.parse(text), seconds) for theirs, _, _ in told for text, seconds in theirs]
    costs = Costs.measured(schedule.stages, samples)
    simulation = simulate(schedule, costs)
    measured_s = max(total_s for _, (total_s, _), _ in told)
    busy_s = sum(compute_s for _, (_, compute_s), _ in told)
    stage_s = [0.0] * schedule.stages
    for one, seconds in samples:
        stage_s[one.stage] += seconds / len(reports) / schedule.microbatches
    return Forecast(
        measured_s,
        simulation.makespan_s,
        1 - busy_s / (measured_s * group.size) if measured_s else 0.0,
        simulation.bubble,
        tuple(peak for _, _, peak in told),
        tuple(stage_s),
    )
