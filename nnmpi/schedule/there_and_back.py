"""Schedules with halved backwards, by one greedy rule under a cap on a rank's saved activations.

    4 ranks, 8 stages       rank 0: 0, 7    rank 1: 1, 6    rank 2: 2, 5    rank 3: 3, 4

F, I and W count as one unit of time each, so a rank has six units of work on a microbatch. If one
microbatch began every six units, and travelled by a fixed timetable, each F and I would have its
moment:

    from stage to stage     F, ranks 0 to 3    F, ranks 3 to 0    I, ranks 0 to 3    I, ranks 3 to 0
    a step takes            1 unit             pace - 1           1                  pace - 1

The pace is 2, 3 or 6, divisors of six, so that few moments of a rank coincide. A microbatch takes
2 x pace units for each rank on its way, so the ranks save a third, half or all of 1F1B's
activations. The more they may save, the less they wait.

With one stage per rank a microbatch is three units of work, F continues at once and I every other
unit: zero bubble, ZB-H1.

The rule: each rank does its F and I in the order of their moments, each as soon as its input has
arrived and, for an F, fewer activations are saved than the cap; meanwhile it does a W. Of the
timetables that finish under the cap, the fastest is used. The paces are those of Qi et al.,
"Pipeline parallelism with controllable memory", 2024. There the W have moments, too; here they fill
gaps, so most of them run near the end, where a rank has the least to do.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, cycle

from nnmpi.schedule.schedule import Instruction, Kind, there_and_back

# By stages per rank: the pace, and the units of the beginning and of each turn. A turn takes 3
# units instead of 1 if otherwise moments coincide for some numbers of ranks.
_TIMETABLES = {
    1: ((3, (0, 1)),),
    2: ((6, (0, 1, 1, 1)), (3, (0, 3, 1, 1)), (2, (0, 1, 1, 1)), (2, (0, 3, 1, 3))),
}


@lru_cache(maxsize=64)
def fastest(
    ranks: int, microbatches: int, most: int, virtual: int = 2
) -> Sequence[Sequence[Instruction]]:
    """Return each rank's computation by the fastest timetable under a cap.

    Args:
        most: the cap: saved activations of a rank, of one stage and microbatch each, until their W.
            A timetable exists from 2 ((ranks + 4) // 3) on; with one stage per rank, from the
            number of ranks on.
        virtual: stages per rank, 1 or 2.
    """
    result = [_run(ranks, microbatches, most, *item) for item in _TIMETABLES[virtual]]
    return min(filter(None, result), key=lambda entry: entry[0])[1]


def _run(
    ranks: int, microbatches: int, most: int, pace: int, turns: Sequence[int]
) -> tuple[int, Sequence[Sequence[Instruction]]] | None:
    """Return the units of time and each rank's program; None if all ranks wait for memory."""
    legs = zip(turns, cycle((1, pace - 1)))
    moments = accumulate(unit for turn, step in legs for unit in (turn, *[step] * (ranks - 1)))
    stages = range(ranks * len(turns) // 2)
    path = [*map(Kind.F.at, stages), *map(Kind.I.at, reversed(stages))]
    # (index of the instruction in `path`, microbatch)
    todo: list[deque[tuple[int, int]]] = [deque() for _ in range(ranks)]
    period = 3 * len(turns) // 2
    every = (
        (moment + period * m, index, m)
        for index, moment in enumerate(moments)
        for m in range(microbatches)
    )
    for _, index, m in sorted(every):
        todo[there_and_back(path[index].stage, ranks)].append((index, m))
    passed = [0] * len(path)  # microbatches that have passed, by index in `path`
    programs: list[list[Instruction]] = [[] for _ in range(ranks)]
    halves: list[deque[Instruction]] = [deque() for _ in range(ranks)]
    saved, units, moves = [0] * ranks, -1, True
    while moves:
        units, before, moves = units + 1, [microbatches, *passed], False
        for rank in range(ranks):
            index, m = todo[rank][0] if todo[rank] else (0, microbatches)
            kind, stage = path[index].kind, path[index].stage
            if m < before[index] and (kind is Kind.I or saved[rank] < most):
                todo[rank].popleft()
                passed[index] += 1
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
