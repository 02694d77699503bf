"""From what is computed to what is executed: messages, reductions and updates are added by pure passes.

    generated           1F0                                    1B0
    add_transfers       1RECV_ACT0 1F0 1SEND_ACT0              1RECV_GRAD0 1B0 1SEND_GRAD0
    place_reductions    1RECV_ACT0 1F0 1SEND_ACT0              1RECV_GRAD0 1B0 1REDUCE 1SEND_GRAD0 1STEP
    fuse                1RECV_ACT0 1F0 (1SEND_ACT0 1RECV_GRAD0)            1B0 1REDUCE 1SEND_GRAD0 1STEP

A receive stands right before its use, a send right after its result: nothing is kept longer than it must be. Without
`fuse`, 1F1B deadlocks as soon as there are two stages, two microbatches, and sends that wait for their receiver: two
neighbours send to each other.

In schedules that run far ahead (interleaved, zero-bubble) a message is sent long before it is used. A send that blocks
would stall its sender until the late receive: the advantage is lost, or all ranks wait for ever. There `receive_early`
posts each receive when its message is sent.
"""

from itertools import groupby

from nnmpi.schedule.schedule import (
    BACKWARD,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Item,
    Kind,
    Schedule,
    Together,
    send_of,
)
from nnmpi.schedule.simulate import ScheduleRun, even_costs


def lower(schedule: Schedule) -> Schedule:
    """Return a schedule that can be executed, from one that has only computation (and PipeDream's updates)."""
    with_transfers = add_transfers(schedule)
    late = fuse(place_reductions(with_transfers))
    if _is_met(late):
        return late
    return fuse(place_reductions(receive_early(with_transfers)))


def add_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule with a receive before each use and a send after each result that crosses ranks."""
    programs: list[list[Item]] = [[] for _ in range(schedule.ranks)]
    for rank, program in enumerate(programs):
        for one in schedule.instructions(rank):
            before, after = schedule.is_cut(one.stage - 1), schedule.is_cut(one.stage)
            is_forward, is_backward = one.kind is Kind.F, one.kind in (Kind.B, Kind.I)
            if is_forward and before:
                program.append(Kind.RECV_ACT.at(one.stage, one.microbatch))
            if is_backward and after:
                program.append(Kind.RECV_GRAD.at(one.stage, one.microbatch))
            program.append(one)
            if is_forward and after:
                program.append(Kind.SEND_ACT.at(one.stage, one.microbatch))
            if is_backward and before:
                program.append(Kind.SEND_GRAD.at(one.stage, one.microbatch))
    return schedule.having(programs)


def receive_early(schedule: Schedule) -> Schedule:
    """Return the schedule with each receive at the first place at which its message has been sent, in unit time.

        rank 0   |- 0F0 -|- 0F1 -|- 0F2 -|                    0F2 is over while rank 1 does 1F1, so rank 1
        rank 1           |- 1F0 -|-- 1F1 --|^|- 1B0 -|        receives it at ^, though it does 1F2 after 1B0

    Nobody waits for ever then, even where sends wait for their receivers: take messages by the time at which they
    are sent; every rank does its part in them, and its computation between, in the order of this one clock.

    Args:
        schedule: with transfers that are not fused yet. One that cannot be played is returned as it is; `check` says
            why, and what nobody sends.
    """
    run = ScheduleRun(schedule, even_costs(schedule.stages))
    if run.stuck:
        return schedule
    begin_s = {span.instruction: span.begin_s for span in run.spans}
    programs: list[list[Item]] = [[] for _ in range(schedule.ranks)]
    for rank, program in enumerate(programs):
        own = tuple(schedule.instructions(rank))
        receives = [(begin_s.get(send_of(one), 0.0), one) for one in own if one.kind in RECEIVES]
        receives.sort(key=lambda pair: pair[0])
        for one in own:
            if one.kind not in RECEIVES:
                while one.kind not in SENDS and receives and receives[0][0] <= begin_s[one]:
                    program.append(receives.pop(0)[1])
                program.append(one)
    return schedule.having(programs)


def place_reductions(schedule: Schedule) -> Schedule:
    """Return the schedule with a reduction as soon as a stage's gradients are final, and the update at the end.

    Where the generator has updates of its own (one per microbatch), each gets a reduction before it.
    """
    programs: list[list[Item]] = [[] for _ in range(schedule.ranks)]
    for rank, program in enumerate(programs):
        own = tuple(schedule.instructions(rank))
        last = {one.stage: one for one in own if one.kind in BACKWARD}
        updates = not any(one.kind is Kind.STEP for one in own)
        for one in own:
            if one.kind is Kind.STEP:
                program.append(Kind.REDUCE.at(one.stage, one.microbatch))
            program.append(one)
            if updates and last.get(one.stage) is one:
                program.append(Kind.REDUCE.at(one.stage))
        program += [Kind.STEP.at(stage) for stage in sorted(last)] * updates
    return schedule.having(programs)


def fuse(schedule: Schedule) -> Schedule:
    """Return the schedule with neighbouring transfers posted together: there is nothing to do between them."""
    programs: list[list[Item]] = [[] for _ in range(schedule.ranks)]
    for rank, program in enumerate(programs):
        for transfers, run in groupby(schedule.instructions(rank), lambda one: one.kind in TRANSFERS):
            own = tuple(run)
            program += [Together(own)] if transfers and len(own) > 1 else own
    return schedule.having(programs)


def _is_met(schedule: Schedule) -> bool:
    """Whether, in unit time, it does not matter that sends wait for their receivers.

    It does not if all ranks are through as early as when no send waits: receives need not be posted earlier then. The
    times are sums and maxima of whole numbers, which floats hold exactly, so they may be compared by ==.
    """
    eager, held = (ScheduleRun(schedule, even_costs(schedule.stages), each) for each in (False, True))
    return not held.stuck and max(p.clock_s for p in held.ranks) == max(p.clock_s for p in eager.ranks)
