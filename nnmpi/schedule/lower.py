"""Lowering: pure passes add messages, reductions and updates to a schedule's computation.

    generated          1F0                                1B0
    add_transfers      1RECV_ACT0 1F0 1SEND_ACT0          1RECV_GRAD0 1B0 1SEND_GRAD0
    place_reductions   1RECV_ACT0 1F0 1SEND_ACT0          1RECV_GRAD0 1B0 1REDUCE 1SEND_GRAD0 1STEP
    fuse               1RECV_ACT0 1F0 (1SEND_ACT0 1RECV_GRAD0)        1B0 1REDUCE 1SEND_GRAD0 1STEP

Two more for ZeRO 2 and 3, whose units are segments of a stage, here 1 and 2 of one rank:

    split_stages       1F0 2F0
                       2B0 1B0
    shard_weights      1GATHER0 2GATHER0 1F0 1FREE0 2F0
                       1GATHER0 2B0 2REDUCE0 2FREE0 1B0 1REDUCE0 1FREE0

A receive comes right before its use, a send right after its result, so no buffer lives longer than
it must. Without `fuse`, 1F1B deadlocks as soon as there are two stages, two microbatches, and
rendezvous sends: two neighbours send to each other.

Schedules that run far ahead (interleaved, zero-bubble) send a message long before its use. A
blocking send would stall its sender until the late receive: the advantage is lost, or all ranks
wait forever. For these `receive_early` posts each receive when its message is sent.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from nnmpi.schedule.schedule import (
    BACKWARD,
    COMPUTE,
    RECEIVES,
    SENDS,
    TRANSFERS,
    USES,
    Fused,
    Home,
    Instruction,
    Instructions,
    Item,
    Kind,
    Program,
    Schedule,
    parts,
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


@dataclass(frozen=True)
class SegmentHome:
    """The rank of each segment, if stages consist of segments.

    Attributes:
        home: the rank of each stage.
        ends: the number of segments up to and with each stage.
    """

    home: Home
    ends: tuple[int, ...]

    def __call__(self, segment: int, ranks: int) -> int:
        return self.home(bisect_right(self.ends, segment), ranks)


def split_stages(schedule: Schedule, counts: Sequence[int]) -> Schedule:
    """Replace each stage by its segments: forward one after the other, backward the other way.

    Args:
        schedule: computation alone.
        counts: the number of segments of each stage.
    """
    ends = tuple(accumulate(counts))
    if ends[-1] == schedule.stages:
        return schedule

    def change(program: Instructions) -> Iterator[Instruction]:
        for op in program:
            segments = range(ends[op.stage] - counts[op.stage], ends[op.stage])
            for segment in segments if op.kind is Kind.F else reversed(segments):
                yield replace(op, stage=segment)

    home = SegmentHome(schedule.home, ends)
    return replace(schedule.map_instructions(change), stages=ends[-1], home=home)


def shard_weights(schedule: Schedule, gathers: bool) -> Schedule:
    """Sum each microbatch's gradients at once (ZeRO 2); gather weights around their use (ZeRO 3).

    The gradients of all segments of a rank pass through the same memory, so each sum comes before
    the next backward. Gathered weights lie in two slots, which a rank's segments use in turns: a
    segment is gathered while the one before it computes, if that is in the other slot.

    Args:
        schedule: executable. Its transfers stay together, before what this adds.
        gathers: whether weights are shared out, too.
    """

    def change(rank: int, program: Program) -> Iterator[Item]:
        slot = {stage: i % 2 for i, stage in enumerate(schedule.stages_of(rank))}
        computed = [op for item in program for op in parts(item) if op.kind in COMPUTE]
        following = dict(zip(computed, [*computed[1:], None], strict=True))
        held: set[int] = set()
        after: list[Instruction] = []
        for item in program:
            if isinstance(item, Fused) or item.kind in TRANSFERS:
                yield item
                continue
            yield from after
            after = []
            if item.kind not in COMPUTE:
                if item.kind is not Kind.REDUCE:
                    yield item
                continue
            then = following[item]
            wanted = [op for op in (item, then) if op is not None and gathers]
            for op in wanted:
                if op.stage not in held and (op is item or slot[op.stage] != slot[item.stage]):
                    held.add(op.stage)
                    yield Kind.GATHER.at(op.stage, op.microbatch)
            yield item
            if item.kind in (Kind.B, Kind.W):
                after.append(Kind.REDUCE.at(item.stage, item.microbatch))
            if gathers and (then is None or then.stage != item.stage):
                held.remove(item.stage)
                after.append(Kind.FREE.at(item.stage, item.microbatch))
        yield from after

    programs = (tuple(change(rank, program)) for rank, program in enumerate(schedule.programs))
    return replace(schedule, programs=tuple(programs))


def offload(schedule: Schedule, rank: int, moved: Collection[int]) -> Schedule:
    """Move what some stages of a rank save to a store, between a forward and its backward.

        F0 OUT0 | F1 DROP0 OUT1 | F2 DROP1 ... | IN0 B2 | B0

    Transfers run beside the instruction that follows them. What is needed again too soon stays.

    Args:
        schedule: executable.
        moved: the stages.
    """
    program = schedule.programs[rank]
    computed = [op for item in program for op in parts(item) if op.kind in COMPUTE]
    forward = {(op.stage, op.microbatch): i for i, op in enumerate(computed) if op.kind is Kind.F}
    ends = {
        i: forward[op.stage, op.microbatch] for i, op in enumerate(computed) if op.kind in _BEGINS
    }
    gone = {end: i for end, i in ends.items() if computed[i].stage in moved and end - i > 2}
    leaves = set(gone.values())

    def change() -> Iterator[Item]:
        number, leaving = -1, list[Instruction]()
        for item in program:
            if isinstance(item, Fused) or item.kind not in COMPUTE:
                yield item
                continue
            number += 1
            if number + 1 in gone:
                following = computed[number + 1]
                yield Kind.IN.at(following.stage, following.microbatch)
            yield item
            yield from leaving
            leaving.clear()
            if number in leaves:
                yield Kind.OUT.at(item.stage, item.microbatch)
                leaving.append(Kind.DROP.at(item.stage, item.microbatch))

    programs = list(schedule.programs)
    programs[rank] = tuple(change())
    return replace(schedule, programs=tuple(programs))


_BEGINS = (Kind.B, Kind.I)  # the kinds that begin a backward


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
