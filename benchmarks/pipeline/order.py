"""The schedules beside each other in simulation, in unit time: how long, how much of it bubble, how much is kept."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.harness import plots
from nnmpi.schedule.instruction import Kind
from nnmpi.schedule.lower import lower
from nnmpi.schedule.registry import make
from nnmpi.schedule.schedule import Schedule
from nnmpi.schedule.simulate import InstructionCosts, Simulation, simulate_schedule

STAGES = 8
SCHEDULES = {"naive": 1, "gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}  # with the stages of each rank
FORWARD_S = 1.0  # of a rank's layers; backward twice that
_COLOURS: Mapping[Kind, tuple[str, str]] = MappingProxyType(
    {
        Kind.F: ("forward", "#4c78a8"),
        Kind.B: ("backward", "#72b7b2"),
        Kind.I: ("backward to the input", "#54a24b"),
        Kind.W: ("backward to the weights", "#b5cf6b"),
    }
)
_LONGEST = 1.25  # of GPipe's time: what of the naive schedule is shown


def simulated(name: str, microbatches: int, ranks: int = STAGES) -> tuple[Schedule, Simulation]:
    """Return a schedule and its simulation: every rank's layers take the same time, messages none.

    Args:
        name: a key of `SCHEDULES`.
        microbatches: of a step.
        ranks: with as many stages each as `SCHEDULES` says.
    """
    virtual = SCHEDULES[name]
    schedule = lower(make(name, ranks, microbatches, virtual))
    return schedule, simulate_schedule(schedule, InstructionCosts.even(schedule.stages, FORWARD_S / virtual))


def rows(counts: Sequence[int], ranks: int = STAGES) -> list[dict[str, Any]]:
    """Return a row for each schedule and number of microbatches."""
    found = []
    for microbatches in counts:
        for name, virtual in SCHEDULES.items():
            schedule, simulation = simulated(name, microbatches, ranks)
            kept = max(simulation.peak_activations) / virtual  # in those of a rank's layers together
            row = {"name": name, "microbatches": microbatches, "ranks": ranks, "makespan": simulation.makespan_s}
            row |= {"bubble": simulation.bubble, "formula": bubble(name, microbatches, ranks), "kept": kept}
            found.append(row)
    return found


def bubble(name: str, microbatches: int, ranks: int) -> float | None:
    """Return the bubble, a share of the ranks' time, by the papers' formulas; None where they have none.

    That of interleaved stages holds if the ranks divide the microbatches; that of ZB-H1 in the limit of halves that
    take as long as a forward.

    Args:
        name: a key of `SCHEDULES`.
        microbatches: of a step.
        ranks: how many.
    """
    s, m = ranks, microbatches
    if name == "naive":
        return 1 - 1 / s
    if name in ("gpipe", "1f1b"):
        return (s - 1) / (m + s - 1)
    if name == "interleaved" and m % s == 0:
        return (s - 1) / (SCHEDULES[name] * m + s - 1)
    if name == "zero-bubble" and m >= 2 * s - 1:  # (S - 1)(F + I - W) of bubble to 3 M of work
        return (s - 1) / (3 * m + s - 1)
    return None


def is_in_order(found: Sequence[dict[str, Any]]) -> bool:
    """Return whether naive > GPipe >= 1F1B > interleaved and zero-bubble, for every number of microbatches."""
    for microbatches in {row["microbatches"] for row in found}:
        of = {row["name"]: row["bubble"] for row in found if row["microbatches"] == microbatches}
        least = max(of["interleaved"], of["zero-bubble"])
        if not of["naive"] > of["gpipe"] >= of["1f1b"] - 1e-12 or not of["1f1b"] > least:
            return False
    return True


def draw(file: Path, microbatches: int, ranks: int = STAGES) -> None:
    """Draw all schedules above one another on one axis of time: ranks down, forwards and backwards in colour.

    Args:
        file: of the picture.
        microbatches: of a step.
        ranks: with a stage each; with two for "interleaved".
    """
    figure = plots.new_figure(11, 9)
    panels = figure.subplots(len(SCHEDULES), 1, sharex=True)
    shown = _LONGEST * simulated("gpipe", microbatches, ranks)[1].makespan_s
    for name, axes in zip(SCHEDULES, panels, strict=True):
        _, simulation = simulated(name, microbatches, ranks)
        for kind, (label, colour) in _COLOURS.items():
            for rank in range(ranks):
                own = [s for s in simulation.spans if s.rank == rank and s.instruction.kind is kind]
                bars = [(span.begin_s, span.end_s - span.begin_s) for span in own]
                axes.broken_barh(bars, (rank - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3)
            axes.plot([], [], color=colour, linewidth=6, label=label)
        axes.invert_yaxis()
        axes.set_yticks(range(ranks), [str(rank) for rank in range(ranks)], fontsize=7)
        title = f"{name}: {simulation.makespan_s:g} units of time, bubble {100 * simulation.bubble:.1f} %"
        title += f"; the first {shown:.0f} are shown" if simulation.makespan_s > shown else ""
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylabel("rank")
    panels[-1].set_xlim(0, shown)
    panels[-1].set_xlabel(f"time (one forward of a rank's layers is 1); {microbatches} microbatches on {ranks} ranks")
    plots.put_legend_above(figure, panels[0])
    plots.save(figure, file)
