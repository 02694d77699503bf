"""Planted faults: each spoils a right schedule in one place, and is told with the place marked."""

import re
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nnmpi.base.errors import ScheduleError
from nnmpi.schedule.check import check
from nnmpi.schedule.lower import add_transfers, lower, place_reductions
from nnmpi.schedule.schedule import (
    BACKWARD,
    COMPUTE,
    RECEIVES,
    WEIGHTS,
    Fused,
    Instruction,
    Item,
    Kind,
    Schedule,
)
from nnmpi.schedule.schedules import SCHEDULES, example_of, make
from tests.harness.refusals import refuses
from tests.schedule.every import KINDS, in_units, lowered


def spoiled(schedule, spoil):
    programs = [list(program) for program in schedule.programs]
    spoil(programs)
    return replace(schedule, programs=tuple(map(tuple, programs)))


def instruction(text):
    """Return the instruction whose text form this is."""
    stage, kind, microbatch = re.fullmatch(r"(\d+)([A-Z_]+)(\d*)", text).groups()
    return Kind(kind).at(int(stage), int(microbatch) if microbatch else None)


def read(*texts):
    """Return the schedule of two microbatches whose programs are written out, one rank per text."""
    programs = []
    for text in texts:
        items = [
            [instruction(word) for word in result.strip("()").split()]
            for result in _ITEM.findall(text)
        ]
        programs.append([local[0] if len(local) == 1 else Fused(tuple(local)) for local in items])
    return Schedule("by hand", len(texts), len(texts), 2, tuple(map(tuple, programs)))


_ITEM = re.compile(r"\([^)]*\)|\S+")
FIRST = "0F0 0SEND_ACT0 0F1 (0SEND_ACT1 0RECV_GRAD0) 0B0 0RECV_GRAD1 0B1 0REDUCE 0STEP"
LAST = "1RECV_ACT0 1F0 1B0 (1SEND_GRAD0 1RECV_ACT1) 1F1 1B1 1REDUCE 1SEND_GRAD1 1STEP"


def test_the_schedule_by_hand_is_right():
    assert read(FIRST, LAST).programs == lowered("1f1b", 2, 2).programs
    check(read(FIRST, LAST))


@pytest.mark.parametrize(
    "old, new, sentence",
    [
        ("1F1 1B1", "1B1", "1F1 is missing on rank 1"),
        ("1F1 1B1", "1F1", "1B1 is missing on rank 1"),
        ("1F0 ", "1F0 1F0 ", "1F0 occurs 2 times; each instruction must occur once"),
        ("1B1", "1B1 1B0", "1B0 occurs 2 times"),
        (
            "1B1",
            "1B1 1W1",
            "1W1 does not belong in .* 2 microbatches; B is the whole backward pass",
        ),
        ("1B1", "1I1", "1W1 is missing on rank 1"),
        ("1F1 1B1", "1F1 1B1 1F2", "1F2 does not belong"),
        ("1F1 1B1", "1F1 1B1 1SEND_ACT1", "1SEND_ACT1 does not belong"),
        ("1RECV_ACT0 1F0", "1F0", "1RECV_ACT0 is missing on rank 1: 0SEND_ACT0 has no partner"),
        ("1SEND_GRAD1 ", "", "1SEND_GRAD1 is missing on rank 1: 0RECV_GRAD1 has no partner"),
        ("0RECV_GRAD1 ", "", "0RECV_GRAD1 is missing on rank 0: 1SEND_GRAD1 has no partner"),
        ("0B1", "0B1 1STEP", "1STEP is on rank 0, but stage 1 belongs to rank 1"),
        ("1RECV_ACT0 1F0", "1F0 1RECV_ACT0", "1F0 comes before 1RECV_ACT0, which it needs"),
        ("0F0 0SEND_ACT0", "0SEND_ACT0 0F0", "0SEND_ACT0 comes before 0F0"),
        ("1F1 1B1", "1B1 1F1", "1B1 comes before 1F1"),
        ("0RECV_GRAD1 0B1", "0B1 0RECV_GRAD1", "0B1 comes before 0RECV_GRAD1"),
        ("1B1 1REDUCE 1SEND_GRAD1", "1SEND_GRAD1 1B1 1REDUCE", "1SEND_GRAD1 comes before 1B1"),
        ("1B1 1REDUCE", "1REDUCE 1B1", "1REDUCE comes before 1B1"),
        ("0REDUCE 0STEP", "0STEP 0REDUCE", "0STEP comes before 0REDUCE"),
        ("0REDUCE ", "", "0REDUCE is missing on rank 0"),
        (" 0STEP", "", "0STEP is missing on rank 0"),
        (
            "1RECV_ACT0 1F0 1B0 (1SEND_GRAD0 1RECV_ACT1) 1F1 1B1 1REDUCE 1SEND_GRAD1",
            "1RECV_ACT1 1F1 1B1 (1SEND_GRAD1 1RECV_ACT0) 1F0 1B0 1REDUCE 1SEND_GRAD0",
            "message 0 from rank 0 to rank 1 is sent by 0SEND_ACT0, but received by 1RECV_ACT1",
        ),
        # No faults: the other end posts both at once.
        ("(1SEND_GRAD0 1RECV_ACT1)", "1SEND_GRAD0 1RECV_ACT1", None),
        ("(1SEND_GRAD0 1RECV_ACT1)", "1RECV_ACT1 1SEND_GRAD0", None),
        ("(0SEND_ACT1 0RECV_GRAD0)", "0RECV_GRAD0 0SEND_ACT1", None),
    ],
)
def test_by_hand(old, new, sentence):
    assert old in f"{FIRST}\n{LAST}"
    schedule = read(FIRST.replace(old, new), LAST.replace(old, new))
    if sentence is None:
        check(schedule)
        return
    refuses(ScheduleError, sentence, check, schedule)


def test_deadlock_of_sends_that_wait():
    first, last = (text.replace("(", "").replace(")", "") for text in (FIRST, LAST))
    with pytest.raises(ScheduleError) as caught:
        check(read(first, last))
    assert (
        str(caught.value)
        == "by hand: deadlock when sends wait for their receivers: rank 0 in 0SEND_ACT1, rank 1 in"
        " 1SEND_GRAD0: each waits for the next, the last for the first\n\nrank 0   0F0"
        " 0SEND_ACT0 0F1 >0SEND_ACT1< 0RECV_GRAD0 0B0 0RECV_GRAD1 ...\nrank 1   1RECV_ACT0 1F0"
        " 1B0 >1SEND_GRAD0< 1RECV_ACT1 1F1 1B1 ..."
    )


def test_deadlock_of_receives():
    first = "0F0 0F1 0RECV_GRAD0 0SEND_ACT0 0SEND_ACT1 0B0 0RECV_GRAD1 0B1 0REDUCE 0STEP"
    refuses(
        ScheduleError,
        "deadlock .*: rank 0 in 0RECV_GRAD0, rank 1 in",
        lambda: check(read(first, LAST)),
    )


@pytest.mark.parametrize(
    "name, ranks, first, second",
    [
        ("interleaved", 1, Kind.F.at(1, 0), Kind.F.at(0, 0)),
        ("interleaved", 1, Kind.B.at(0, 0), Kind.B.at(1, 0)),
        ("zb-v", 2, Kind.F.at(2, 0), Kind.F.at(1, 0)),  # the turn, where nothing is sent
        ("zb-v", 2, Kind.I.at(1, 0), Kind.I.at(2, 0)),
    ],
)
def test_stages_of_one_rank_follow_one_another(name, ranks, first, second):
    schedule = lowered(name, ranks, 1, 2)
    order = {first: second, second: first}
    swapped = replace(
        schedule,
        programs=tuple(
            tuple(order.get(item, item) for item in local) for local in schedule.programs
        ),
    )
    refuses(ScheduleError, f"{first} comes before {second}, which it needs", check, swapped)


# ---- any fault anywhere ----


chosen = st.tuples(st.sampled_from(KINDS), st.integers(1, 5), st.integers(1, 6))


def _draw(data):
    (name, virtual), ranks, microbatches = data.draw(chosen)
    schedule = lowered(name, ranks, microbatches, virtual)
    rank = data.draw(st.integers(0, ranks - 1))
    return schedule, rank, data.draw(st.integers(0, len(schedule.programs[rank]) - 1))


def _is_refused(schedule):
    try:
        check(schedule)
    except ScheduleError as error:
        assert "\n\nrank 0 " in str(error)
        return True
    return False


@settings(max_examples=100)
@given(st.data())
def test_what_is_dropped_or_doubled_is_noticed(data):
    schedule, rank, at = _draw(data)
    assert _is_refused(spoiled(schedule, lambda programs: programs[rank].__delitem__(at)))
    to = data.draw(st.integers(0, len(schedule.programs[rank])))
    assert _is_refused(
        spoiled(schedule, lambda programs: programs[rank].insert(to, programs[rank][at]))
    )


@settings(max_examples=150)
@given(st.data())
def test_units_are_gathered_summed_and_freed(data):
    """And no instruction of it can be dropped, doubled or exchanged with its neighbour unseen."""
    flushing = [kind for kind in KINDS if not example_of(kind[0]).asynchronous]
    name, virtual = data.draw(st.sampled_from(flushing))
    sizes = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 5)))
    gathers = data.draw(st.booleans())
    schedule = in_units(name, *sizes, virtual, data.draw(st.integers(1, 3)), gathers)
    check(schedule)
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    program = schedule.programs[rank]
    at = data.draw(st.integers(0, len(program) - 1))
    assert _is_refused(spoiled(schedule, lambda programs: programs[rank].__delitem__(at)))
    assert _is_refused(
        spoiled(schedule, lambda programs: programs[rank].insert(at, programs[rank][at]))
    )
    if not gathers or at + 1 == len(program):
        return
    one, other = (
        item.kind if isinstance(item, Instruction) else None for item in program[at : at + 2]
    )
    if {one, other} <= {*COMPUTE, *WEIGHTS} and program[at].stage == program[at + 1].stage:

        def exchange(programs: list[list[Item]]):
            programs[rank][at : at + 2] = reversed(program[at : at + 2])

        # a rank that sends nothing may take its microbatches in any order, any rank the second half
        # of one before or after the first half of another
        first, second = program[at : at + 2]
        halves = {one, other} == {Kind.I, Kind.W} and first.microbatch != second.microbatch
        is_free = {one, other} == {Kind.FREE, Kind.GATHER} or schedule.ranks == 1 and one is other
        assert halves or is_free or _is_refused(spoiled(schedule, exchange))


def test_gradients_are_summed_before_the_next_backward():
    """They pass through the same memory."""
    schedule = in_units("1f1b", 1, 1, 1, 2, gathers=False)
    text = " ".join(map(str, schedule.programs[0]))
    assert "1B0 1REDUCE0 0B0 0REDUCE0" in text
    program = list(schedule.programs[0])
    at = program.index(Kind.REDUCE.at(1, 0))
    program[at : at + 2] = reversed(program[at : at + 2])
    refuses(
        ScheduleError,
        "0B0 comes before the gradients of 1B0 are summed",
        lambda: check(replace(schedule, programs=(tuple(program),))),
    )


@settings(max_examples=100)
@given(st.data())
def test_what_is_misdirected_is_noticed(data):
    """An instruction of another stage or microbatch in its place, or on another rank."""
    schedule, rank, at = _draw(data)
    item = schedule.programs[rank][at]
    old = item.parts[0] if isinstance(item, Fused) else item
    stage = data.draw(st.integers(0, schedule.stages))
    microbatch = (
        old.microbatch
        if old.microbatch is None
        else data.draw(st.integers(0, schedule.microbatches))
    )
    new = Instruction(old.kind, stage, microbatch)
    assume(new != old)
    replaced = Fused((new, *item.parts[1:])) if isinstance(item, Fused) else new
    assert _is_refused(spoiled(schedule, lambda programs: programs[rank].__setitem__(at, replaced)))
    other = data.draw(st.integers(0, schedule.ranks - 1))
    assume(other != rank)
    moved = spoiled(schedule, lambda programs: programs[other].append(programs[rank].pop(at)))
    assert _is_refused(moved)


def test_two_messages_in_the_wrong_order_are_noticed_in_every_schedule():
    for name, virtual in KINDS:
        schedule = place_reductions(add_transfers(make(name, 4, 4, virtual)))

        def swap(programs):
            local = programs[1]
            first, second = [
                i
                for i, item in enumerate(local)
                if isinstance(item, Instruction) and item.kind in RECEIVES
            ][:2]
            local[first], local[second] = local[second], local[first]

        assert _is_refused(spoiled(schedule, swap)), name


def test_a_backward_without_its_reduction_is_noticed_in_every_schedule():
    for name, virtual in KINDS:
        if SCHEDULES[name].trains:
            schedule = lowered(name, 2, 3, virtual)

            def late(programs):
                at = [
                    i
                    for i, program in enumerate(programs[0])
                    if isinstance(program, Instruction) and program.kind in BACKWARD
                ]
                programs[0].append(programs[0].pop(at[-1]))

            assert _is_refused(spoiled(schedule, late)), name


@given(st.data())
def test_no_schedule_of_ones_own_ends_in_a_stack(data):
    """Programs of any instructions are refused in a sentence, or right."""
    number = st.sampled_from([0, 0, 1, 1, 2, -1, None, 0.0, "1"])
    drawn = st.lists(
        st.builds(Instruction, st.sampled_from([*Kind, "F"]), number, number), max_size=3
    )

    def own(rank: int, ranks: int, microbatches: int) -> list[Instruction]:
        return [
            *(kind.at(rank, m) for kind in (Kind.F, Kind.B) for m in range(microbatches)),
            *data.draw(drawn),
        ]

    with suppress(ScheduleError):
        check(lower(make(own, 2, 2)))
