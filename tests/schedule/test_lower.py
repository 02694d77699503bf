"""Lowering, by heart for two stages, and what it promises for all schedules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.base.errors import UsageError
from nnmpi.schedule.lower import (
    add_transfers,
    fuse,
    lower,
    place_reductions,
    shard_weights,
    split_stages,
)
from nnmpi.schedule.schedule import (
    TRANSFERS,
    Instruction,
    Schedule,
    around,
    other_end,
    send_of,
    there_and_back,
)
from nnmpi.schedule.schedules import make


@pytest.mark.parametrize(
    "schedule, rank, text",
    [
        (add_transfers(make("1f1b", 2, 1)), 0, "0F0 0SEND_ACT0 0RECV_GRAD0 0B0"),
        (add_transfers(make("1f1b", 2, 1)), 1, "1RECV_ACT0 1F0 1B0 1SEND_GRAD0"),
        # halved backwards send after the first half
        (add_transfers(make("zero-bubble", 2, 1)), 1, "1RECV_ACT0 1F0 1I0 1SEND_GRAD0 1W0"),
        # reductions follow the last backward of their stage
        (
            place_reductions(make("interleaved", 2, 2, 2)),
            0,
            "2B0 2B1 2REDUCE 0B0 0B1 0REDUCE 0STEP 2STEP",
        ),
        (
            place_reductions(make("pipedream", 2, 2)),
            1,
            "1F0 1B0 1REDUCE0 1STEP0 1F1 1B1 1REDUCE1 1STEP1",
        ),
        (place_reductions(make("inference", 2, 2)), 0, "0F0 0F1"),
        (
            lower(make("1f1b", 2, 2)),
            0,
            "0F1 (0SEND_ACT1 0RECV_GRAD0) 0B0 0RECV_GRAD1 0B1 0REDUCE 0STEP",
        ),
        (
            lower(make("1f1b", 2, 2)),
            1,
            "1F0 1B0 (1SEND_GRAD0 1RECV_ACT1) 1F1 1B1 1REDUCE 1SEND_GRAD1 1STEP",
        ),
        # two segments: the second is gathered while the first computes, and stays for its backward
        (
            shard_weights(lower(split_stages(make("1f1b", 1, 1), (2,))), gathers=True),
            0,
            "0GATHER0 1GATHER0 0F0 0FREE0 1F0 0GATHER0 1B0 1REDUCE0 1FREE0 0B0 0REDUCE0 0FREE0"
            " 0STEP 1STEP",
        ),
        # as the module's docstring shows it
        (
            lower(make("1f1b", 3, 1)),
            1,
            "1RECV_ACT0 1F0 (1SEND_ACT0 1RECV_GRAD0) 1B0 1REDUCE 1SEND_GRAD0 1STEP",
        ),
    ],
)
def test_the_end_of_a_program_by_heart(schedule, rank, text):
    assert " ".join(map(str, schedule.programs[rank])).endswith(text)


def test_fusing_can_be_repeated():
    for name, virtual in (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)):
        lowered = lower(make(name, 4, 6, virtual))
        assert fuse(lowered) == lowered


@given(
    st.builds(
        Instruction, st.sampled_from(sorted(TRANSFERS)), st.integers(1, 99), st.integers(0, 99)
    )
)
def test_both_ends_of_a_message_name_it(one):
    other = other_end(one)
    assert other_end(other) == one and abs(one.stage - other.stage) == 1
    assert send_of(one) == send_of(other) in (one, other)
    for home in (around, there_and_back):
        schedule = Schedule("", 7, 14, 1, (), home)
        assert schedule.channel_of(one) == schedule.channel_of(other)


# The schedule as a value: what lives where, and numbers that make none.


def test_stages_live_on_ranks_in_turn():
    schedule = make("interleaved", 3, 2, 2)
    assert [list(schedule.stages_of(rank)) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [schedule.rank_of(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert schedule.virtual == 2 and schedule.stages == 6
    assert [schedule.is_cut(stage) for stage in range(-1, 6)] == [False, *[True] * 5, False]
    there = Schedule("", 3, 9, 1, (), there_and_back)
    assert [there.stages_of(rank) for rank in range(3)] == [(0, 5, 6), (1, 4, 7), (2, 3, 8)]
    assert [there.is_cut(stage) for stage in range(8)] == [
        stage not in (2, 5) for stage in range(8)
    ]
    assert not any(make("interleaved", 1, 2, 3).is_cut(stage) for stage in range(-1, 3))


@pytest.mark.parametrize(
    "given, sentence",
    [
        (
            ("2f2b", 2, 2, 1),
            "no schedule '2f2b'; choose one of naive, gpipe, 1f1b, interleaved, zero-bubble",
        ),
        (("1f1b", 0, 2, 1), "number of ranks is 0; give a whole number of at least 1"),
        (("1f1b", 2, -1, 1), "number of microbatches is -1; give"),
        (("interleaved", 2, 2, 0), "number of virtual stages per rank is 0"),
        (
            ("gpipe", 2, 2, 2),
            "gpipe has one stage on each rank, not 2; for several choose interleaved",
        ),
    ],
)
def test_nonsense_is_refused(given, sentence):
    with pytest.raises(UsageError, match=sentence):
        make(*given)
