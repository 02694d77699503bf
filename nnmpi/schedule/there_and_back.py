"""Schedules with two stages a rank, there and back, by one greedy rule under a cap on what a rank keeps.

    4 ranks, 8 stages       rank 0: 0, 7    rank 1: 1, 6    rank 2: 2, 5    rank 3: 3, 4

F, I and W count as one unit of time each, so that a rank has six units of work on a microbatch. If one microbatch began
every six units, and travelled by a fixed timetable, each F and I would have its moment:

    from stage to stage     F, ranks 0 to 3     F, ranks 3 to 0     I, ranks 0 to 3     I, ranks 3 to 0
    a step takes            1 unit              pace - 1            1                   pace - 1

The pace is 2, 3 or 6, which divide six: so hardly two moments of a rank fall together. A microbatch takes 2 x pace
units for each rank on its way, and so the ranks keep a third, half or all of what 1F1B keeps. The more they may keep,
the less they wait.

The rule: each rank does its F and I in the order of their moments, each as soon as its input is there and, for an F, as
less is kept than the cap; meanwhile it does a W. Of the timetables that get along under the cap, the quickest is taken.
The paces are those of Qi et al., "Pipeline parallelism with controllable memory", 2024, whose W have moments, too: as
fillers they wait for the end, where there is least to do.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from nnmpi.schedule.schedule import Instruction, Kind, there_and_back

_PERIOD = 6  # units of a microbatch on a rank
# pace, and the units of the three turns: 3 where with 1 the moments of some numbers of ranks fall together
_TIMETABLES = ((6, (1, 1, 1)), (3, (3, 1, 1)), (2, (1, 1, 1)), (2, (3, 1, 3)))


@lru_cache(maxsize=64)
def quickest(ranks: int, microbatches: int, most: int) -> Sequence[Sequence[Instruction]]:
    """Return what each rank computes by the quickest timetable under a cap.

    Args:
        most: activations that a rank keeps, of one stage and microbatch each, until their W; from 2 (ranks + 4) / 3 on,
            without remainder, there is one.
    """
    found = [_play(ranks, microbatches, most, *each) for each in _TIMETABLES]
    return min(filter(None, found), key=lambda each: each[0])[1]


def _play(
    ranks: int, microbatches: int, most: int, pace: int, turns: tuple[int, int, int]
) -> tuple[int, Sequence[Sequence[Instruction]]] | None:
    """Return how many units it takes, and what each rank does; None where all wait for room."""
    there, back = [1] * (ranks - 1), [pace - 1] * (ranks - 1)
    moments = accumulate([0, *there, turns[0], *back, turns[1], *there, turns[2], *back])
    forwards = [Kind.F.at(stage) for stage in range(2 * ranks)]
    way = [*forwards, *(Kind.I.at(one.stage) for one in reversed(forwards))]
    todo: list[deque[tuple[int, int]]] = [deque() for _ in range(ranks)]  # (place on the way, microbatch)
    every = ((moment + _PERIOD * m, place, m) for place, moment in enumerate(moments) for m in range(microbatches))
    for _, place, m in sorted(every):
        todo[there_and_back(way[place].stage, ranks)].append((place, m))
    through = [0] * len(way)  # microbatches, by place
    programs: list[list[Instruction]] = [[] for _ in range(ranks)]
    halves: list[deque[Instruction]] = [deque() for _ in range(ranks)]
    kept, units = [0] * ranks, 0
    while any(todo) or any(halves):
        units, before, moves = units + 1, [microbatches, *through], False
        for rank in range(ranks):
            place, m = todo[rank][0] if todo[rank] else (0, microbatches)
            kind, stage = way[place].kind, way[place].stage
            if m < before[place] and (kind is Kind.I or kept[rank] < most):
                todo[rank].popleft()
                through[place] += 1
                programs[rank].append(kind.at(stage, m))
                if kind is Kind.I:
                    halves[rank].append(Kind.W.at(stage, m))
                else:
                    kept[rank] += 1
            elif halves[rank]:
                programs[rank].append(halves[rank].popleft())
                kept[rank] -= 1
            else:
                continue
            moves = True
        if not moves:
            return None
    return units, programs
