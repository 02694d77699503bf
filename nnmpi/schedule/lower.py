"""From what is computed to what is executed: messages, reductions and updates are added by pure passes.

    generated       1F0                                    1B0
    add_transfers   1RECV_ACT0 1F0 1SEND_ACT0              1RECV_GRAD0 1B0 1SEND_GRAD0
    + reductions    1RECV_ACT0 1F0 1SEND_ACT0              1RECV_GRAD0 1B0 1REDUCE 1SEND_GRAD0 1STEP
    fuse            1RECV_ACT0 1F0 (1SEND_ACT0 1RECV_GRAD0)            1B0 1REDUCE 1SEND_GRAD0 1STEP
    meet            nothing here: it posts a receive earlier where a send would wait for ever

A receive stands right before its use, a send right after its result. Without `fuse`, 1F1B deadlocks as soon as there
are two stages, two microbatches, and sends that wait for their receiver: two neighbours send to each other.
"""

from collections.abc import Iterator

from nnmpi.schedule.instruction import BACKWARD, SENDS, TRANSFERS, Instruction, Item, Kind, Together, parts
from nnmpi.schedule.message import message_of
from nnmpi.schedule.play import Play
from nnmpi.schedule.schedule import Program, Schedule


def lower(schedule: Schedule) -> Schedule:
    """Return a schedule that can be executed, from one that has only computation (and PipeDream's updates)."""
    return meet(fuse(place_reductions(add_transfers(schedule))))


def add_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule with a receive before each use and a send after each result that crosses ranks."""
    return schedule.having([tuple(_with_transfers(schedule, rank)) for rank in range(schedule.ranks)])


def place_reductions(schedule: Schedule) -> Schedule:
    """Return the schedule with a reduction as soon as a stage's gradients are final, and the update at the end.

    Where the generator has updates of its own (one per microbatch), each gets a reduction before it.
    """
    return schedule.having([_with_reductions(schedule, rank) for rank in range(schedule.ranks)])


def fuse(schedule: Schedule) -> Schedule:
    """Return the schedule with neighbouring transfers posted together: there is nothing to do between them."""
    return schedule.having([_fused(program) for program in schedule.programs])


def meet(schedule: Schedule) -> Schedule:
    """Return the schedule with receives posted earlier, where otherwise all ranks would wait for ever.

    When sends wait for their receivers and nobody can go on, each send that waits has a receiver that is itself
    waiting, in a transfer that stands before the receive: the receive is posted together with that transfer. This
    ends: at every turn at least one message more gets through. A schedule without a waiting send is returned as it
    is; should it be stuck all the same, `check` says so.
    """
    while True:
        play = Play(schedule, lambda one: 0.0, rendezvous=True)
        sends = [one for player in play.stuck for one in play.waiting(player) if one.kind in SENDS]
        met = schedule
        for send in sends:
            receive = message_of(send).receive
            rank = schedule.rank_of(receive.stage)
            met = _hoisted(met, rank, play.players[rank].at, receive)
        if met == schedule:
            return schedule
        schedule = met


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


def _hoisted(schedule: Schedule, rank: int, at: int, receive: Instruction) -> Schedule:
    """Return the schedule with a receive that stands behind item `at` posted together with that item instead."""
    programs = list(schedule.programs)
    program = list(programs[rank])
    found = [index for index in range(at + 1, len(program)) if receive in parts(program[index])]
    if not found:
        return schedule
    rest = tuple(one for one in parts(program[found[0]]) if one != receive)
    program[at] = Together((*parts(program[at]), receive))
    program[found[0] : found[0] + 1] = [] if not rest else [Together(rest) if len(rest) > 1 else rest[0]]
    programs[rank] = tuple(program)
    return schedule.having(programs)
