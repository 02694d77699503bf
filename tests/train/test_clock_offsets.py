"""Offsets of clocks, planted ones and none."""

import time

import pytest

from nnmpi.comm.group import Group
from nnmpi.train.trace import offsets


@pytest.mark.both_worlds
def test_planted_offsets_are_found(group: Group) -> None:
    """Within what a busy machine allows; the clocks are ahead by 100 s a rank, and so behind for the last one."""
    planted = [100.0 * rank for rank in range(group.size)]
    planted[-1] = -70.0 if group.size > 1 else 0.0
    found = offsets(group, lambda: time.perf_counter() + planted[group.rank])
    assert all(group.gather(found[0] == 0.0 and len(found) == group.size))
    assert all(group.gather(all(abs(own - right) < 1 for own, right in zip(found, planted, strict=True))))
    assert group.gather(found) == [found] * group.size


@pytest.mark.both_worlds
def test_ranks_with_one_clock_have_no_offset(group: Group) -> None:
    """Time on one machine passes for all processes alike."""
    if len(set(group.nodes())) == 1:
        assert group.gather(offsets(group)) == [[0.0] * group.size] * group.size
