"""The schedules beside each other in simulation, in unit time: how long, how much of it bubble, how much is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnmpi.schedule.lower import lower
from nnmpi.schedule.registry import make
from nnmpi.schedule.schedule import Schedule
from nnmpi.schedule.simulate import Costs, Simulation, simulate

STAGES = 8
SCHEDULES = {"naive": 1, "gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}  # with the stages of each rank
FORWARD_S = 1.0  # of a rank's layers; backward twice that


def play(name: str, microbatches: int, ranks: int = STAGES) -> tuple[Schedule, Simulation]:
    """Return a schedule and its run: every rank's layers take the same time, messages none."""
    virtual = SCHEDULES[name]
    schedule = lower(make(name, ranks, microbatches, virtual))
    return schedule, simulate(schedule, Costs.even(schedule.stages, FORWARD_S / virtual))


def rows(counts: Sequence[int], ranks: int = STAGES) -> list[dict[str, Any]]:
    """Return a row for each schedule and number of microbatches."""
    found = []
    for microbatches in counts:
        for name, virtual in SCHEDULES.items():
            schedule, simulation = play(name, microbatches, ranks)
            kept = max(simulation.peak_activations) / virtual  # in those of a rank's layers together
            row = {"name": name, "microbatches": microbatches, "ranks": ranks, "makespan": simulation.makespan_s}
            row |= {"bubble": simulation.bubble, "formula": bubble(name, microbatches, ranks), "kept": kept}
            found.append(row)
    return found


def bubble(name: str, microbatches: int, ranks: int) -> float | None:
    """Return the bubble by the papers' formulas; None where there is none.

    Where interleaved stages are concerned it holds if the ranks divide the microbatches; ZB-H1 has it in the limit of
    halves that take as long as a forward.
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
