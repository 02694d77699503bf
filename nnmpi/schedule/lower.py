"""Lowering: pure passes add messages, reductions and updates to a schedule's computation.

    generated          1F0                                1B0
    add_transfers      1RECV_ACT0 1F0 1SEND_ACT0          1RECV_GRAD0 1B0 1SEND_GRAD0
    place_reductions   1RECV_ACT0 1F0 1SEND_ACT0          1RECV_GRAD0 1B0 1REDUCE 1SEND_GRAD0 1STEP
    fuse               1RECV_ACT0 1F0 (1SEND_ACT0 1RECV_GRAD0)        1B0 1REDUCE 1SEND_GRAD0 1STEP

A receive comes right before its use, a send right after its result, so no buffer lives longer than
it must. Without `fuse`, 1F1B deadlocks as soon as there are two stages, two microbatches, and
rendezvous sends: two neighbours send to each other.

Schedules that run far ahead (interleaved, zero-bubble) send a message long before its use. A
blocking send would stall its sender until the late receive: the advantage is lost, or all ranks
wait forever. For these `receive_early` posts each receive when its message is sent.
"""

from collections.abc import Iterator
from itertools import groupby

from nnmpi.schedule.schedule import (
    BACKWARD,
    RECEIVES,
    SENDS,
    TRANSFERS,
    USES,
    Fused,
    Instruction,
    Instructions,
    Item,
    Kind,
    Schedule,
    send_of,
)
from nnmpi.schedule.simulate import ScheduleRun, even_costs


def lower(schedule: Schedule) -> Schedule:
    """Return an executable schedule from computation alone (with updates in PipeDream)."""
    with_transfers = add_transfers(schedule)
    late = fuse(place_reductions(with_transfers))
    if _suits_rendezvous(late):
        return late
    return fuse(place_reductions(receive_early(with_transfers)))


def add_transfers(schedule: Schedule) -> Schedule:
    """Add a receive before each use and a send after each result that crosses ranks."""

    def change(program: Instructions) -> Iterator[Instruction]:
        for op in program:
            receive = USES.get(op.kind)
            send = Kind.SEND_ACT if op.kind is Kind.F else Kind.SEND_GRAD
            before, after = schedule.is_cut(op.stage - 1), schedule.is_cut(op.stage)
            if op.kind is not Kind.F:
                before, after = after, before
            if receive and before:
                yield receive.at(op.stage, op.microbatch)
            yield op
            if receive and after:
                yield send.at(op.stage, op.microbatch)

    return schedule.map_instructions(change)


def receive_early(schedule: Schedule) -> Schedule:
    """Move each receive to the first position after its message was sent, in unit time.

        rank 0   |- 0F0 -|- 0F1 -|- 0F2 -|
        rank 1           |- 1F0 -|-- 1F1 --|^|- 1B0 -|

    0F2 ends while rank 1 does 1F1. So rank 1 posts its receive at ^, though it does 1F2 after 1B0.

    No rank waits forever then, even with rendezvous sends. Proof: order all messages by their send
    time on this one clock. Every rank reaches its transfers, and the computation between them, in
    this order.

    Args:
        schedule: with transfers that are not fused yet. One that deadlocks is returned unchanged;
            `check` names the fault, and messages without a send.
    """
    run = ScheduleRun(schedule, even_costs(schedule.stages))
    if run.stuck:
        return schedule
    begin_s = {span.instruction: span.begin_s for span in run.spans}

    def change(program: Instructions) -> Iterator[Instruction]:
        receives = [(begin_s.get(send_of(op), 0.0), op) for op in program if op.kind in RECEIVES]
        receives.sort(key=lambda pair: pair[0])
        for op in program:
            if op.kind not in RECEIVES:
                while op.kind not in SENDS and receives and receives[0][0] <= begin_s[op]:
                    yield receives.pop(0)[1]
                yield op

    return schedule.map_instructions(change)


def place_reductions(schedule: Schedule) -> Schedule:
    """Add a reduction when a stage's gradients are final, and the update at the end.

    If the generator has updates of its own (one per microbatch), each gets a reduction before it.
    """

    def change(program: Instructions) -> Iterator[Instruction]:
        last = {op.stage: op for op in program if op.kind in BACKWARD}
        updates = not any(op.kind is Kind.STEP for op in program)
        for op in program:
            if op.kind is Kind.STEP:
                yield Kind.REDUCE.at(op.stage, op.microbatch)
            yield op
            if updates and last.get(op.stage) is op:
                yield Kind.REDUCE.at(op.stage)
        yield from [Kind.STEP.at(stage) for stage in sorted(last)] * updates

    return schedule.map_instructions(change)


def fuse(schedule: Schedule) -> Schedule:
    """Post adjacent transfers together, as nothing happens between them."""

    def change(program: Instructions) -> Iterator[Item]:
        for transfers, run in groupby(program, lambda item: item.kind in TRANSFERS):
            items = tuple(run)
            yield from [Fused(items)] if transfers and len(items) > 1 else items

    return schedule.map_instructions(change)


def _suits_rendezvous(schedule: Schedule) -> bool:
    """Whether, in unit time, rendezvous sends take no longer than eager ones.

    Then receives need not be posted earlier. The times are sums and maxima of integers, which
    floats represent exactly, so they may be compared by ==.
    """
    eager, rendezvous = (
        ScheduleRun(schedule, even_costs(schedule.stages), item) for item in (False, True)
    )
    return not rendezvous.stuck and max(p.clock_s for p in rendezvous.ranks) == max(
        p.clock_s for p in eager.ranks
    )
