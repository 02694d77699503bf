"""Lowering, by heart for two stages, and what it promises for all schedules."""

from nnmpi.schedule.lower import add_transfers, fuse, lower, place_reductions
from nnmpi.schedule.registry import make


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


def test_one_rank_sends_nothing() -> None:
    assert words(lower(make("interleaved", 1, 1, 2)).programs[0]) == (
        "0F0 2F0 2B0 2REDUCE 0B0 0REDUCE 0STEP 2STEP".replace("2", "1")
    )


def test_fusing_can_be_repeated() -> None:
    for name, virtual in (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)):
        lowered = lower(make(name, 4, 6, virtual))
        assert fuse(lowered) == lowered
