"""Schedules to test, as strategies and ranges: stages 1-8, microbatches 1-16, virtual stages
1-3.
"""

from functools import cache

from hypothesis import strategies as st

from nnmpi.schedule.lower import lower, shard_weights, split_stages
from nnmpi.schedule.schedules import SCHEDULES, make

RANKS, MICROBATCHES, VIRTUAL = range(1, 9), range(1, 17), range(1, 4)
KINDS = [
    (name, virtual)
    for name, row in SCHEDULES.items()
    for virtual in (VIRTUAL if row.any_stages else (row.stages,))
]

numbers = st.tuples(st.sampled_from(RANKS), st.sampled_from(MICROBATCHES))
schedules = st.tuples(st.sampled_from(KINDS), numbers)


@cache
def lowered(name, ranks, microbatches, virtual=1):
    """Return a schedule ready to be executed; it is made once for all tests of a file."""
    return lower(make(name, ranks, microbatches, virtual))


@cache
def in_units(name, ranks, microbatches, virtual, units, gathers):
    """Return a schedule whose stages have this many units, and one more in every second one."""
    schedule = make(name, ranks, microbatches, virtual)
    counts = [units + stage % 2 for stage in range(schedule.stages)]
    return shard_weights(lower(split_stages(schedule, counts)), gathers)
