"""What the generators promise, for all numbers of stages and microbatches: bubbles, activations,
messages, order.
"""

import pytest
from hypothesis import given, settings

from nnmpi.schedule.check import check
from nnmpi.schedule.schedule import Kind
from nnmpi.schedule.schedules import SCHEDULES, make
from nnmpi.schedule.simulate import even_costs, simulate_schedule
from tests.schedule.every import KINDS, RANKS, lowered, numbers

some = settings(max_examples=20)


def found(name, ranks, microbatches, virtual=1):
    """Simulate with a forward of one second for a rank's stages together."""
    return simulate_schedule(
        lowered(name, ranks, microbatches, virtual), even_costs(ranks * virtual, 1 / virtual)
    )


def few(ranks, m, ahead, behind):
    """Return the first where there are as many microbatches as ranks, or more; else the second."""
    return ahead if m >= ranks else behind


# Of ranks, microbatches and stages a rank: when a step is over.
MAKESPANS = {
    "naive": lambda r, m, v: 3 * r * m,
    "gpipe": lambda r, m, v: 3 * (m + r - 1),
    "1f1b": lambda r, m, v: 3 * (m + r - 1),
    "inference": lambda r, m, v: few(r, m, v * m + r - 1, m + v * r - 1) / v,
    # with few the first microbatch goes there and back, the others follow, and one W is left
    "zero-bubble": lambda r, m, v: few(r, m, 3 * m + r - 1, 2 * r + 2 * m - 1),
    "interleaved": lambda r, m, v: few(r, m, 3 * m * v + 3 * (r - 1), 3 * (m + r * v - 1)) / v,
}
# and how many activations a rank keeps.
PEAKS = {
    "naive": lambda r, m, v, rank: 1,
    "inference": lambda r, m, v, rank: 1,
    "gpipe": lambda r, m, v, rank: m,
    "1f1b": lambda r, m, v, rank: min(r - rank, m),
    "pipedream": lambda r, m, v, rank: min(r - rank, m),
    "zero-bubble": lambda r, m, v, rank: min(r, m),
    "interleaved": lambda r, m, v, rank: min(
        2 * (r - 1 - rank) + (v - 1) * -(-m // max(1, m // r)) + 1, v * m
    ),
}


# Of ranks: the most activations, and between which forwards of a stage all ranks' gaps are.
THERE_AND_BACK = {
    "zb-v": (lambda r: 2 * r, lambda r: (r - 1, r - 1)),
    "v-half": (lambda r: min(r + 2, 2 * r), lambda r: (r - 1, 3 * (r - 1))),
    "v-min": (lambda r: 2 * ((r + 4) // 3), lambda r: (r - 1, 4 * (r - 1))),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_promises_how_many_activations_it_keeps(name):
    assert name in PEAKS or name in THERE_AND_BACK, f"state in PEAKS what {name} keeps"


@pytest.mark.parametrize(
    "name, virtual",
    [(name, v) for name, v in KINDS if name in PEAKS and (name, v) != ("interleaved", 1)],
)
@some
@given(numbers)
def test_bubbles_activations_and_messages(name, virtual, number):
    ranks, microbatches = number
    simulation = found(name, *number, virtual)
    work_s = 3 * microbatches if SCHEDULES[name].trains else microbatches
    if name in MAKESPANS:
        assert simulation.makespan_s == pytest.approx(MAKESPANS[name](*number, virtual))
        assert simulation.bubble == pytest.approx(1 - work_s / simulation.makespan_s)
    assert simulation.peak_activations == tuple(
        PEAKS[name](*number, virtual, rank) for rank in range(ranks)
    )
    ways = 2 if SCHEDULES[name].trains else 1
    assert simulation.messages == (ways * (virtual * ranks - 1) * microbatches if ranks > 1 else 0)


@pytest.mark.parametrize("name", THERE_AND_BACK)
def test_stages_there_and_back_keep_under_the_cap_and_wait_no_longer_than_promised(name):
    """In forwards of a stage; 1F1B keeps 2 r activations on its first rank, and waits for 6 (r - 1)
    of them.
    """
    most, bubble = THERE_AND_BACK[name]
    for ranks in RANKS:
        for microbatches in (ranks, ranks + 1, 3 * ranks + 1):
            schedule = lowered(name, ranks, microbatches, 2)
            simulation = simulate_schedule(schedule, even_costs(2 * ranks))
            least, longest = bubble(ranks)
            assert least <= simulation.makespan_s - 6 * microbatches <= longest, (
                ranks,
                microbatches,
            )
            assert max(simulation.peak_activations) <= most(ranks)
            assert simulation.messages == 2 * (2 * ranks - 2) * microbatches
            assert [schedule.rank_of(stage) for stage in range(2 * ranks)] == [
                *range(ranks),
                *reversed(range(ranks)),
            ]


def test_interleaved_with_one_stage_a_rank_is_1f1b():
    for ranks in RANKS:
        assert make("interleaved", ranks, 5, 1).programs == make("1f1b", ranks, 5).programs


def test_gpipe_goes_back_with_the_last_microbatch_first():
    backwards = [
        instruction.microbatch
        for instruction in make("gpipe", 2, 4).instructions(1)
        if instruction.kind is Kind.B
    ]
    assert backwards == [3, 2, 1, 0]


@pytest.mark.parametrize("microbatches", [8, 16, 32])
def test_order_at_8_stages(microbatches):
    naive, gpipe, one_f_one_b, thin, zero = (
        found(name, 8, microbatches, virtual).makespan_s
        for name, virtual in (
            ("naive", 1),
            ("gpipe", 1),
            ("1f1b", 1),
            ("interleaved", 2),
            ("zero-bubble", 1),
        )
    )
    assert naive > gpipe >= one_f_one_b > max(thin, zero)


# Every schedule, lowered, is right for every number of stages and microbatches: by `check`, and by
# the oracle.


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name, virtual", [kind for kind in KINDS if kind[1] > 1])
def test_several_stages_a_rank(name, virtual, ranks):
    for microbatches in (1, 2, 3, ranks, ranks + 1, 2 * ranks - 1):
        check(lowered(name, ranks, microbatches, virtual))
