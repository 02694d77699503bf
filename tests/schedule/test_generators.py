"""What the generators promise, for all numbers of stages and microbatches: bubbles, activations, messages, order."""

import pytest
from hypothesis import given, settings

from nnmpi.schedule.check import check
from nnmpi.schedule.schedule import Kind
from nnmpi.schedule.schedules import make
from nnmpi.schedule.simulate import Simulation, even_costs, simulate_schedule
from tests.schedule.every import KINDS, MICROBATCHES, RANKS, lowered, numbers

some = settings(max_examples=20)


def found(name: str, ranks: int, microbatches: int, virtual: int = 1) -> Simulation:
    """Simulate with a forward of one second for a rank's stages together."""
    return simulate_schedule(lowered(name, ranks, microbatches, virtual), even_costs(ranks * virtual, 1 / virtual))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@some
@given(numbers)
def test_bubble_of_gpipe_and_1f1b(name: str, number: tuple[int, int]) -> None:
    ranks, microbatches = number
    simulation = found(name, *number)
    assert simulation.makespan_s == 3 * (microbatches + ranks - 1)
    assert simulation.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@some
@given(numbers)
def test_bubble_of_naive_and_inference(number: tuple[int, int]) -> None:
    ranks, microbatches = number
    assert found("naive", *number).bubble == pytest.approx((ranks - 1) / ranks)
    assert found("inference", *number).bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize("virtual", [2, 3])
@some
@given(numbers)
def test_bubble_of_inference_with_several_stages_a_rank(virtual: int, number: tuple[int, int]) -> None:
    ranks, microbatches = number
    simulation = found("inference", *number, virtual)
    thin = virtual * microbatches + ranks - 1 if microbatches >= ranks else microbatches + virtual * ranks - 1
    assert virtual * simulation.makespan_s == pytest.approx(thin)
    assert simulation.peak_activations == (1,) * ranks


@some
@given(numbers)
def test_bubble_of_zero_bubble(number: tuple[int, int]) -> None:
    ranks, microbatches = number
    makespan_s = found("zero-bubble", *number).makespan_s
    if microbatches >= ranks:
        assert makespan_s == 3 * microbatches + ranks - 1
    else:  # the first microbatch goes there and back, the others follow, and one W is left
        assert makespan_s == 2 * ranks + 2 * microbatches - 1


@pytest.mark.parametrize("virtual", [2, 3])
@some
@given(numbers)
def test_bubble_of_interleaved(virtual: int, number: tuple[int, int]) -> None:
    ranks, microbatches = number
    makespan_s = virtual * found("interleaved", *number, virtual).makespan_s  # in forwards of a thin stage
    if microbatches >= ranks:  # whether or not it is a multiple
        assert makespan_s == pytest.approx(3 * microbatches * virtual + 3 * (ranks - 1))
    else:
        assert makespan_s == pytest.approx(3 * (microbatches + ranks * virtual - 1))


@pytest.mark.parametrize("ranks", RANKS)
def test_activations_that_are_kept(ranks: int) -> None:
    for m in MICROBATCHES:
        assert found("naive", ranks, m).peak_activations == (1,) * ranks
        assert found("inference", ranks, m).peak_activations == (1,) * ranks
        assert found("gpipe", ranks, m).peak_activations == (m,) * ranks
        for name in ("1f1b", "pipedream"):
            assert found(name, ranks, m).peak_activations == tuple(min(ranks - stage, m) for stage in range(ranks))
        assert found("zero-bubble", ranks, m).peak_activations == (min(ranks, m),) * ranks


@some
@given(numbers)
def test_activations_that_interleaved_keeps(number: tuple[int, int]) -> None:
    ranks, microbatches = number
    for virtual in (2, 3):
        most = -(-microbatches // max(1, microbatches // ranks))
        expected = tuple(
            min(2 * (ranks - 1 - rank) + (virtual - 1) * most + 1, virtual * microbatches) for rank in range(ranks)
        )
        assert found("interleaved", ranks, microbatches, virtual).peak_activations == expected


@some
@given(numbers)
def test_messages(number: tuple[int, int]) -> None:
    ranks, m = number
    for name in ("naive", "gpipe", "1f1b", "zero-bubble", "pipedream"):
        assert found(name, ranks, m).messages == 2 * (ranks - 1) * m
    assert found("inference", ranks, m).messages == (ranks - 1) * m
    assert found("interleaved", ranks, m, 2).messages == (2 * (2 * ranks - 1) * m if ranks > 1 else 0)


def test_interleaved_with_one_stage_a_rank_is_1f1b() -> None:
    for ranks in RANKS:
        assert make("interleaved", ranks, 5).programs == make("1f1b", ranks, 5).programs


def test_gpipe_goes_back_with_the_last_microbatch_first() -> None:
    backwards = [one.microbatch for one in make("gpipe", 2, 4).instructions(1) if one.kind is Kind.B]
    assert backwards == [3, 2, 1, 0]


@pytest.mark.parametrize("microbatches", [8, 16, 32])
def test_order_at_8_stages(microbatches: int) -> None:
    naive, gpipe, one_f_one_b, thin, zero = (
        found(name, 8, microbatches, virtual).makespan_s
        for name, virtual in (("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1))
    )
    assert naive > gpipe >= one_f_one_b > max(thin, zero)


# Every schedule, lowered, is right for every number of stages and microbatches: by `check`, and by the oracle.


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "virtual"), [kind for kind in KINDS if kind[1] > 1])
def test_several_stages_a_rank(name: str, virtual: int, ranks: int) -> None:
    for microbatches in (1, 2, 3, ranks, ranks + 1, 2 * ranks - 1):
        check(lowered(name, ranks, microbatches, virtual))
