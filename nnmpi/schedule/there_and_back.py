"""Schedules with halved backwards, by one greedy rule under a cap on what a rank keeps.

    4 ranks, 8 stages       rank 0: 0, 7    rank 1: 1, 6    rank 2: 2, 5    rank 3: 3, 4

F, I and W count as one unit of time each, so that a rank has six units of work on a microbatch. If
one microbatch began every six units, and travelled by a fixed timetable, each F and I would have
its moment:

    from stage to stage     F, ranks 0 to 3    F, ranks 3 to 0    I, ranks 0 to 3    I, ranks 3 to 0
    a step takes            1 unit             pace - 1           1                  pace - 1

The pace is 2, 3 or 6, which divide six: so hardly two moments of a rank fall together. A microbatch
takes 2 x pace units for each rank on its way, and so the ranks keep a third, half or all of what
1F1B keeps. The more they may keep, the less they wait.

With one stage a rank a microbatch is three units of work, F continues at once and I every other
unit: zero bubble, ZB-H1.

The rule: each rank does its F and I in the order of their moments, each as soon as its input is
there and, for an F, as less is kept than the cap; meanwhile it does a W. Of the timetables that get
along under the cap, the fastest is taken. The paces are those of Qi et al., "Pipeline parallelism
with controllable memory", 2024, whose W have moments, too: as fillers they wait for the end, where
there is least to do.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, cycle

from nnmpi.schedule.schedule import Instruction, Kind, there_and_back

# By stages a rank: pace, and the units of the beginning and of each turn: 3 where with 1 the
# moments of some numbers of ranks fall together.
_TIMETABLES = {
    1: ((3, (0, 1)),),
    2: ((6, (0, 1, 1, 1)), (3, (0, 3, 1, 1)), (2, (0, 1, 1, 1)), (2, (0, 3, 1, 3))),
}


@lru_cache(maxsize=64)
def quickest(
    ranks: int, microbatches: int, most: int, virtual: int = 2
) -> Sequence[Sequence[Instruction]]:
    """Return what each rank computes by the fastest timetable under a cap.

    Args:
        most: activations that a rank keeps, of one stage and microbatch each, until their W; from 2
            (ranks + 4) / 3 on, without remainder, there is one; with one stage a rank, from the
            number of ranks on.
        virtual: stages a rank, 1 or 2.
    """
    result = [_play(ranks, microbatches, most, *item) for item in _TIMETABLES[virtual]]
    return min(filter(None, result), key=lambda entry: entry[0])[1]


def _play(
    ranks: int, microbatches: int, most: int, pace: int, turns: Sequence[int]
) -> tuple[int, Sequence[Sequence[Instruction]]] | None:
    """Return how many units it takes, and what each rank does; None where all wait for room."""
    legs = zip(turns, cycle((1, pace - 1)))
    moments = accumulate(unit for turn, step in legs for unit in (turn, *[step] * (ranks - 1)))
    stages = range(ranks * len(turns) // 2)
    way = [*map(Kind.F.at, stages), *map(Kind.I.at, reversed(stages))]
    # (place on the way, microbatch)
    todo: list[deque[tuple[int, int]]] = [deque() for _ in range(ranks)]
    period = 3 * len(turns) // 2
    every = (
        (moment + period * m, place, m)
        for place, moment in enumerate(moments)
        for m in range(microbatches)
    )
    for _, place, m in sorted(every):
        todo[there_and_back(way[place].stage, ranks)].append((place, m))
    through = [0] * len(way)  # microbatches, by place
    programs: list[list[Instruction]] = [[] for _ in range(ranks)]
    halves: list[deque[Instruction]] = [deque() for _ in range(ranks)]
    saved, units, moves = [0] * ranks, -1, True
    while moves:
        units, before, moves = units + 1, [microbatches, *through], False
        for rank in range(ranks):
            place, m = todo[rank][0] if todo[rank] else (0, microbatches)
            kind, stage = way[place].kind, way[place].stage
            if m < before[place] and (kind is Kind.I or saved[rank] < most):
                todo[rank].popleft()
                through[place] += 1
                programs[rank].append(kind.at(stage, m))
                if kind is Kind.I:
                    halves[rank].append(Kind.W.at(stage, m))
                else:
                    saved[rank] += 1
            elif halves[rank]:
                programs[rank].append(halves[rank].popleft())
                saved[rank] -= 1
            else:
                continue
            moves = True
    return None if any(todo) else (units, programs)
