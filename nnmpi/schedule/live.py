"""What a stage keeps while microbatches are between their forward and their backward: activations, weights."""

from nnmpi.schedule.instruction import Kind
from nnmpi.schedule.schedule import Schedule


def peak_activations(schedule: Schedule, rank: int) -> int:
    """Return how many activations a rank keeps at most: one for each stage and microbatch from F to the end of B.

    Where backwards are halved, an activation is kept until W. Without backwards none is kept after its forward.
    """
    trains = schedule.trains
    kept = peak = 0
    for one in schedule.instructions(rank):
        if one.kind is Kind.F:
            kept += 1
            peak = max(peak, kept)
        if one.kind in (Kind.B, Kind.W) or (one.kind is Kind.F and not trains):
            kept -= 1
    return peak


def staleness(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """Return for each microbatch how often the weights are updated between its forward and its backward.

    It is 0 everywhere unless the stage updates its weights before all microbatches are through (PipeDream).
    """
    steps = 0
    before: dict[int | None, int] = {}
    found: dict[int | None, int] = {}
    for one in schedule.instructions(schedule.rank_of(stage)):
        if one.stage == stage:
            if one.kind is Kind.F:
                before[one.microbatch] = steps
            if one.kind in (Kind.B, Kind.I):
                found[one.microbatch] = steps - before[one.microbatch]
            steps += one.kind is Kind.STEP
    return tuple(found[microbatch] for microbatch in range(schedule.microbatches) if microbatch in found)


def weight_versions(schedule: Schedule, stage: int) -> int:
    """Return how many versions of its weights a stage keeps at most: the newest, and those of waiting backwards."""
    steps, most, trains = 0, 1, schedule.trains
    kept: dict[int | None, int] = {}
    for one in schedule.instructions(schedule.rank_of(stage)):
        if one.stage == stage:
            if one.kind is Kind.F and trains:
                kept[one.microbatch] = steps
            if one.kind in (Kind.B, Kind.W):
                kept.pop(one.microbatch, None)
            steps += one.kind is Kind.STEP
            most = max(most, len({*kept.values(), steps}))
    return most
