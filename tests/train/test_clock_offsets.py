"""Offsets of clocks: the estimate from planted answers, and on MPI with planted clocks."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.comm.group import Group
from nnmpi.train.trace import Answer, estimate, offsets

seconds = st.floats(0, 1)


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(st.floats(0, 1e5), seconds, seconds), min_size=1, max_size=9))
def test_an_estimate_is_within_half_the_shortest_round_trip(
    offset_s: float, trips: list[tuple[float, float, float]]
) -> None:
    """Whatever the way there and the way back take."""
    answers = [Answer(at, at + there + offset_s, at + there + back) for at, there, back in trips]
    shortest = min(answer.came_s - answer.sent_s for answer in answers)
    assert abs(estimate(answers) - offset_s) <= shortest + 1e-9
    if abs(offset_s) > 1:
        assert abs(estimate(answers) - offset_s) <= shortest / 2 + 1e-9


def test_the_shortest_round_trip_counts() -> None:
    assert estimate([Answer(0.0, 109.0, 10.0), Answer(20.0, 121.0, 22.0), Answer(30.0, 130.0, 39.0)]) == 100.0


def test_what_cannot_be_told_from_none_is_none() -> None:
    assert estimate([Answer(5.0, 5.1, 6.0)]) == 0.0
    assert estimate([Answer(5.0, 6.5, 6.0)]) == 1.0
    assert estimate([Answer(5.0, 4.0, 6.0)]) == -1.5


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
