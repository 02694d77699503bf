"""Barriers by flags and by collectives: nobody passes early, several are told apart, and waiting
has an end.
"""

import numpy as np
import pytest

from tests.comm.memory import shared_memory

ORDERED = pytest.mark.parametrize("ordered", [True, False], ids=["flags", "collectives"])


@pytest.mark.mpi
@ORDERED
def test_nobody_passes_before_all_have_come(group, ordered):
    memory = shared_memory(group, ordered=ordered)
    marks = memory.common_all([(group.size, np.int64)])[0]
    early = 0
    for turn in range(1, 300):
        marks[group.rank] = turn
        memory.barrier()
        early += int((marks != turn).sum())
        memory.barrier()
    memory.free()
    assert group.gather(early) == [0] * group.size


@pytest.mark.mpi
@ORDERED
def test_barriers_of_other_tags_do_not_count(group, ordered):
    memory = shared_memory(group, ordered=ordered)
    first, second = memory.barrier_of(1), memory.barrier_of(2)
    for barrier in (first, second) if group.rank % 2 else (second, first):
        barrier.start()
    for barrier in (first, second):
        barrier.wait()
    group.barrier()
    if group.rank == 0:
        first.start()
        second.run() if group.size == 1 else second.start()
    else:
        first.start()
    first.wait()
    outcome = group.gather(second.poll() if group.rank == 0 else True)
    if group.rank > 0:
        second.start()
    second.wait()
    memory.free()
    assert outcome == [group.size == 1] + [True] * (group.size - 1)
