"""Pipeline schedules as a film for a page: what every rank computes when, and how many activations it keeps.

{"spans": [[rank, "F", stage, microbatch, begin, end], ...],      in milliseconds
 "kept": [[[0.0, 1], [1.0, 2], ...], ...],                        of each rank: from when on it keeps how many
 "makespan": 12.0, "bubble": 0.33, "peaks": [2, 1]}
"""

from collections.abc import Callable, Mapping
from typing import Any

from nnmpi.errors import UsageError
from nnmpi.schedule.check import check
from nnmpi.schedule.instruction import COMPUTE, Kind
from nnmpi.schedule.lower import lower
from nnmpi.schedule.registry import Generator, make
from nnmpi.schedule.schedule import Schedule
from nnmpi.schedule.simulate import InstructionCosts, Simulation, simulate

STAGES, MICROBATCHES = (2, 3, 4, 6, 8), (2, 4, 8, 16)
MOST_RANKS, MOST_MICROBATCHES = 16, 32  # that fit a page
_DIGITS = 6


def film(schedule: Schedule, found: Simulation) -> dict[str, Any]:
    """Return the film of a simulated schedule, as JSON values."""
    spans = [
        [span.rank, str(one.kind), one.stage, one.microbatch, _ms(span.begin_s), _ms(span.end_s)]
        for span in found.spans
        if (one := span.instruction).kind in COMPUTE or (one.kind is Kind.STEP and span.end_s > span.begin_s)
    ]
    return {
        "spans": spans,
        "kept": [_kept(schedule, found, rank) for rank in range(schedule.ranks)],
        "makespan": _ms(found.makespan_s),
        "bubble": round(found.bubble, _DIGITS),
        "peaks": list(found.peak_activations),
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, _DIGITS)


def _kept(schedule: Schedule, found: Simulation, rank: int) -> list[list[float]]:
    """Return from when on a rank keeps how many activations: one more from a forward on, one less after a backward."""
    kept, curve = 0, [[0.0, 0.0]]
    last = (Kind.B, Kind.W) if schedule.trains else (Kind.F,)
    for span in found.spans:
        if span.rank == rank:
            changes = [(span.begin_s, 1)] if span.instruction.kind is Kind.F else []
            changes += [(span.end_s, -1)] if span.instruction.kind in last else []
            for at_s, change in changes:
                kept += change
                curve.append([_ms(at_s), float(kept)])
    return curve


def compare(
    schedules: Mapping[str, tuple[Generator, int]],
    first: str,
    ranks: int,
    microbatches: int,
    costs: Callable[[Schedule], InstructionCosts],
) -> dict[str, Any]:
    """Return what a page needs to show one schedule beside others, for several numbers of ranks and microbatches.

    Args:
        schedules: by name, each with its stages per rank.
        first: the one that is shown first; the next one stands beside it.
        ranks, microbatches: with which the page begins.
        costs: what everything takes in a schedule.

    Raises:
        UsageError: for numbers that do not fit a page.
        ScheduleError: for a schedule that is not right.
    """
    if ranks > MOST_RANKS or microbatches > MOST_MICROBATCHES:
        raise UsageError(
            f"a page draws up to {MOST_RANKS} ranks and {MOST_MICROBATCHES} microbatches, not {ranks} and "
            f"{microbatches}; draw fewer"
        )
    all_ranks, all_microbatches = sorted({*STAGES, ranks}), sorted({*MICROBATCHES, microbatches})
    films: dict[str, dict[str, Any]] = {name: {} for name in schedules}
    for name, (generator, virtual) in schedules.items():
        for size in all_ranks:
            for count in all_microbatches:
                schedule = lower(make(generator, size, count, virtual))
                check(schedule)
                films[name][f"{size},{count}"] = film(schedule, simulate(schedule, costs(schedule)))
    names = list(schedules)
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "all_ranks": all_ranks,
        "all_microbatches": all_microbatches,
        "first": first,
        "second": names[(names.index(first) + 1) % len(names)],
        "films": films,
    }
