"""Every schedule, lowered, is right for every number of stages and microbatches: by `check`, and by the oracle."""

import pytest
from hypothesis import given, settings

from nnmpi.schedule.check import check
from nnmpi.schedule.lower import add_transfers, fuse, place_reductions
from nnmpi.schedule.registry import make
from nnmpi.schedule.simulate import InstructionCosts, simulate
from tests.schedule.every import KINDS, MICROBATCHES, RANKS, lowered, schedules
from tests.schedule.oracle import run


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "virtual"), [kind for kind in KINDS if kind[1] == 1])
def test_one_stage_a_rank(name: str, virtual: int, ranks: int) -> None:
    for microbatches in MICROBATCHES:
        check(lowered(name, ranks, microbatches))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "virtual"), [kind for kind in KINDS if kind[1] > 1])
def test_several_stages_a_rank(name: str, virtual: int, ranks: int) -> None:
    for microbatches in (1, 2, 3, ranks, ranks + 1, 2 * ranks - 1):
        check(lowered(name, ranks, microbatches, virtual))


@settings(max_examples=40)
@given(schedules)
def test_the_oracle_agrees(chosen: tuple[tuple[str, int], tuple[int, int]]) -> None:
    (name, virtual), (ranks, microbatches) = chosen
    schedule = lowered(name, ranks, min(microbatches, 12), virtual)
    check(schedule)
    for rendezvous in (False, True):
        run(schedule, rendezvous)


@settings(max_examples=40)
@given(schedules)
def test_sends_that_wait_cost_little(chosen: tuple[tuple[str, int], tuple[int, int]]) -> None:
    (name, virtual), (ranks, microbatches) = chosen
    schedule = lowered(name, ranks, microbatches, virtual)
    eager, held = (
        simulate(schedule, InstructionCosts.even(schedule.stages, rendezvous=rendezvous)).makespan_s
        for rendezvous in (False, True)
    )
    assert eager <= held <= (1.5 * eager if virtual > 1 else eager)


def test_receives_stand_before_their_use_where_that_costs_nothing() -> None:
    for name in ("naive", "gpipe", "1f1b", "inference", "pipedream"):
        schedule = make(name, 4, 8)
        assert lowered(name, 4, 8) == fuse(place_reductions(add_transfers(schedule)))
