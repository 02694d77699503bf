"""The schedule as a value: what lives where, and numbers that make none."""

import pytest

from nnmpi.errors import ScheduleError, UsageError
from nnmpi.schedule.instruction import Kind
from nnmpi.schedule.registry import SCHEDULES, make
from nnmpi.schedule.schedule import Schedule


def test_stages_live_on_ranks_in_turn() -> None:
    schedule = make("interleaved", 3, 2, 2)
    assert [list(schedule.stages_of(rank)) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [schedule.rank_of(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert schedule.virtual == 2 and schedule.stages == 6
    assert [schedule.is_cut(stage) for stage in range(-1, 6)] == [False, *[True] * 5, False]
    assert not any(make("interleaved", 1, 2, 3).is_cut(stage) for stage in range(-1, 3))


def test_whether_it_trains() -> None:
    assert [name for name in SCHEDULES if not make(name, 2, 2).trains] == ["inference"]


@pytest.mark.parametrize(("ranks", "stages", "microbatches"), [(0, 0, 1), (2, 3, 1), (2, 1, 1), (2, 2, 0)])
def test_numbers_that_make_no_pipeline(ranks: int, stages: int, microbatches: int) -> None:
    with pytest.raises(ScheduleError, match="are no pipeline; stages are a multiple of ranks"):
        Schedule("x", ranks, stages, microbatches, ((),) * ranks)


def test_programs_are_as_many_as_ranks() -> None:
    with pytest.raises(ScheduleError, match="2 ranks need as many programs, not 1"):
        Schedule("x", 2, 2, 1, ((Kind.F.at(0, 0),),))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("2f2b", 2, 2, 1), "no schedule '2f2b'; the names are naive, gpipe, 1f1b, interleaved, zero-bubble"),
        (("1f1b", 0, 2, 1), "cannot have 0 ranks; give at least 1"),
        (("1f1b", 2, -1, 1), "cannot have -1 microbatches"),
        (("interleaved", 2, 2, 0), "cannot have 0 virtual stages per rank"),
        (("gpipe", 2, 2, 2), "gpipe has one stage on each rank, not 2; for several choose interleaved"),
    ],
)
def test_nonsense_is_refused(given: tuple[str, int, int, int], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make(*given)
