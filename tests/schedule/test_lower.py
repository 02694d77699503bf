"""Lowering, by heart for two stages, and what it promises for all schedules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.errors import ScheduleError, UsageError
from nnmpi.schedule.instruction import TRANSFERS, Instruction, Kind, Together, message_of
from nnmpi.schedule.lower import add_transfers, fuse, lower, place_reductions
from nnmpi.schedule.registry import make
from nnmpi.schedule.schedule import Schedule


def words(program: object) -> str:
    return " ".join(map(str, program))  # type: ignore[call-overload]


def test_add_transfers_puts_receives_before_and_sends_after() -> None:
    first, last = add_transfers(make("1f1b", 2, 1)).programs
    assert words(first) == "0F0 0SEND_ACT0 0RECV_GRAD0 0B0"
    assert words(last) == "1RECV_ACT0 1F0 1B0 1SEND_GRAD0"


def test_halved_backwards_send_after_the_first_half() -> None:
    assert words(add_transfers(make("zero-bubble", 2, 1)).programs[1]) == "1RECV_ACT0 1F0 1I0 1SEND_GRAD0 1W0"


def test_reductions_follow_the_last_backward_of_their_stage() -> None:
    reduced = place_reductions(make("interleaved", 2, 2, 2)).programs[0]
    assert words(reduced).endswith("2B0 2B1 2REDUCE 0B0 0B1 0REDUCE 0STEP 2STEP")
    assert words(place_reductions(make("pipedream", 2, 2)).programs[1]) == (
        "1F0 1B0 1REDUCE0 1STEP0 1F1 1B1 1REDUCE1 1STEP1"
    )
    assert place_reductions(make("inference", 2, 2)) == make("inference", 2, 2)


def test_lowered_1f1b_by_heart() -> None:
    first, last = lower(make("1f1b", 2, 2)).programs
    assert words(first) == "0F0 0SEND_ACT0 0F1 (0SEND_ACT1 0RECV_GRAD0) 0B0 0RECV_GRAD1 0B1 0REDUCE 0STEP"
    assert words(last) == ("1RECV_ACT0 1F0 1B0 (1SEND_GRAD0 1RECV_ACT1) 1F1 1B1 1REDUCE 1SEND_GRAD1 1STEP")


def test_the_picture_in_the_docstring_is_what_the_passes_do() -> None:
    # Microbatch 0 on stage 1 of three, as the module's docstring shows it.
    schedule = make("1f1b", 3, 1)
    assert words(add_transfers(schedule).programs[1]) == "1RECV_ACT0 1F0 1SEND_ACT0 1RECV_GRAD0 1B0 1SEND_GRAD0"
    assert words(lower(schedule).programs[1]) == (
        "1RECV_ACT0 1F0 (1SEND_ACT0 1RECV_GRAD0) 1B0 1REDUCE 1SEND_GRAD0 1STEP"
    )


def test_fusing_can_be_repeated() -> None:
    for name, virtual in (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)):
        lowered = lower(make(name, 4, 6, virtual))
        assert fuse(lowered) == lowered


# Instructions as text and back, in order, and as the two ends of messages.


instructions = st.builds(
    Instruction, st.sampled_from(Kind), st.integers(0, 999), st.none() | st.integers(min_value=0, max_value=999)
)


@given(instructions)
def test_the_text_form_is_read_back(one: Instruction) -> None:
    assert Instruction.parse(str(one)) == one


@pytest.mark.parametrize("text", ["", "F0", "2", "2X0", "2f0", "2F0 ", "-1F0", "2F-1", "2F0B0", "²F0"])
def test_what_is_no_instruction_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is no instruction; write stage, kind, microbatch like 2F0"):
        Instruction.parse(text)


def test_only_transfers_are_posted_together() -> None:
    with pytest.raises(ScheduleError, match="only transfers are posted together, but 0F0 is none"):
        Together((Kind.SEND_ACT.at(0, 0), Kind.F.at(0, 0)))
    with pytest.raises(ScheduleError, match="there is none"):
        Together(())


@given(instructions.filter(lambda one: one.kind in TRANSFERS))
def test_both_ends_of_a_message_name_it(one: Instruction) -> None:
    message = message_of(one)
    assert one in (message.send, message.receive)
    assert message_of(message.send) == message_of(message.receive) == message
    assert abs(message.sender - message.receiver) == 1


# The schedule as a value: what lives where, and numbers that make none.


def test_stages_live_on_ranks_in_turn() -> None:
    schedule = make("interleaved", 3, 2, 2)
    assert [list(schedule.stages_of(rank)) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [schedule.rank_of(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert schedule.virtual == 2 and schedule.stages == 6
    assert [schedule.is_cut(stage) for stage in range(-1, 6)] == [False, *[True] * 5, False]
    assert not any(make("interleaved", 1, 2, 3).is_cut(stage) for stage in range(-1, 3))


@pytest.mark.parametrize(("ranks", "stages", "microbatches"), [(0, 0, 1), (2, 3, 1), (2, 1, 1), (2, 2, 0)])
def test_numbers_that_make_no_pipeline(ranks: int, stages: int, microbatches: int) -> None:
    with pytest.raises(ScheduleError, match="are no pipeline; stages are a multiple of ranks"):
        Schedule("x", ranks, stages, microbatches, ((),) * ranks)


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
