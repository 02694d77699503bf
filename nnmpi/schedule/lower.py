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

from collections.abc import Iterator

from nnmpi.schedule.engine import ScheduleRun
from nnmpi.schedule.instruction import (
    BACKWARD,
    PAPER_UNITS,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Instruction,
    Item,
    Kind,
    Together,
    message_of,
    parts,
)
from nnmpi.schedule.schedule import Program, Schedule


def lower(schedule: Schedule) -> Schedule:
    """Return a schedule that can be executed, from one that has only computation (and PipeDream's updates)."""
    with_transfers = add_transfers(schedule)
    late = fuse(place_reductions(with_transfers))
    if _is_met(late):
        return late
    return fuse(place_reductions(receive_early(with_transfers)))


def add_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule with a receive before each use and a send after each result that crosses ranks."""
    return schedule.having([tuple(_with_transfers(schedule, rank)) for rank in range(schedule.ranks)])


def receive_early(schedule: Schedule) -> Schedule:
    """Return the schedule with each receive at the first place at which its message has been sent, in unit time.

        rank 0   |- 0F0 -|- 0F1 -|- 0F2 -|                    0F2 is over while rank 1 does 1F1, so rank 1
        rank 1           |- 1F0 -|-- 1F1 --|^|- 1B0 -|        receives it at ^, though it does 1F2 after 1B0

    Nobody waits for ever then, even where sends wait for their receivers: take messages by the time at which they
    are sent; every rank does its part in them, and its computation between, in the order of this one clock.

    Args:
        schedule: with transfers that are not fused yet. One that cannot be played is returned as it is; `check` says
            why.
    """
    run = ScheduleRun(schedule, lambda one: float(PAPER_UNITS.get(one.kind, 0)), rendezvous=False)
    if run.stuck:
        return schedule
    begin_s = {span.instruction: span.begin_s for span in run.spans}
    return schedule.having([_received_early(schedule, rank, begin_s) for rank in range(schedule.ranks)])


def place_reductions(schedule: Schedule) -> Schedule:
    """Return the schedule with a reduction as soon as a stage's gradients are final, and the update at the end.

    Where the generator has updates of its own (one per microbatch), each gets a reduction before it.
    """
    return schedule.having([_with_reductions(schedule, rank) for rank in range(schedule.ranks)])


def fuse(schedule: Schedule) -> Schedule:
    """Return the schedule with neighbouring transfers posted together: there is nothing to do between them."""
    return schedule.having([_fused(program) for program in schedule.programs])


def _is_met(schedule: Schedule) -> bool:
    """Whether, in unit time, it does not matter that sends wait for their receivers.

    It does not if all ranks are through as early as when no send waits: receives need not be posted earlier then. The
    times are sums and maxima of whole numbers, which floats hold exactly, so they may be compared by ==.
    """
    eager, held = (
        ScheduleRun(schedule, lambda one: float(PAPER_UNITS.get(one.kind, 0)), each) for each in (False, True)
    )
    return not held.stuck and max(p.clock_s for p in held.ranks) == max(p.clock_s for p in eager.ranks)


def _with_transfers(schedule: Schedule, rank: int) -> Iterator[Item]:
    """Yield a rank's program with its transfers."""
    for one in schedule.instructions(rank):
        before, after = schedule.is_cut(one.stage - 1), schedule.is_cut(one.stage)
        is_forward, is_backward = one.kind is Kind.F, one.kind in (Kind.B, Kind.I)
        if is_forward and before:
            yield Kind.RECV_ACT.at(one.stage, one.microbatch)
        if is_backward and after:
            yield Kind.RECV_GRAD.at(one.stage, one.microbatch)
        yield one
        if is_forward and after:
            yield Kind.SEND_ACT.at(one.stage, one.microbatch)
        if is_backward and before:
            yield Kind.SEND_GRAD.at(one.stage, one.microbatch)


def _with_reductions(schedule: Schedule, rank: int) -> Program:
    """Return a rank's program with its reductions and updates."""
    program = schedule.programs[rank]
    if any(one.kind is Kind.STEP for one in schedule.instructions(rank)):
        return tuple(new for item in program for new in _reduced_first(item))
    last = {
        item.stage: index
        for index, item in enumerate(program)
        if isinstance(item, Instruction) and item.kind in BACKWARD
    }
    reductions = {index: Kind.REDUCE.at(stage) for stage, index in last.items()}
    reduced = [new for index, item in enumerate(program) for new in (item, reductions.get(index)) if new is not None]
    return (*reduced, *(Kind.STEP.at(stage) for stage in sorted(last)))


def _reduced_first(item: Item) -> tuple[Item, ...]:
    """Return an update with its reduction before it; anything else alone."""
    if isinstance(item, Instruction) and item.kind is Kind.STEP:
        return Kind.REDUCE.at(item.stage, item.microbatch), item
    return (item,)


def _fused(program: Program) -> Program:
    """Return a program with neighbouring transfers together."""
    fused: list[Item] = []
    run: list[Instruction] = []
    for item in (*program, None):
        posted = [one for one in (parts(item) if item is not None else ()) if one.kind in TRANSFERS]
        if posted:
            run += posted
            continue
        if run:
            fused.append(Together(tuple(run)) if len(run) > 1 else run[0])
            run = []
        if item is not None:
            fused.append(item)
    return tuple(fused)


def _received_early(schedule: Schedule, rank: int, begin_s: dict[Instruction, float]) -> Program:
    """Return a rank's program with each receive before the first work that begins after its message was sent."""
    own = tuple(schedule.instructions(rank))
    receives = [(begin_s[message_of(one).send], one) for one in own if one.kind in RECEIVES]
    receives.sort(key=lambda pair: pair[0])
    program: list[Item] = []
    for one in own:
        if one.kind in RECEIVES:
            continue
        while one.kind not in SENDS and receives and receives[0][0] <= begin_s[one]:
            program.append(receives.pop(0)[1])
        program.append(one)
    return tuple(program)
