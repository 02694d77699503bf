"""Checks that a lowered schedule is right, before any message is sent.

    each unit of work once, on its rank   a forward, a whole backward or both halves, for every
                                          stage and microbatch
    each message has its two ends         and there are no unused messages
    order on each rank                    receive, forward, send; forward, backward; all
                                          backwards, sum, update
    weights that replicas share out       gathered before they are used, freed after their last use
    activations in a store                moved out after the forward, back before the backward
    order on each channel                 messages are received in the order of their sends
    no deadlock                           with rendezvous sends, and so with eager ones, too

The ranks' programs are enough for all checks: programs and messages define the only order, so no
clock is needed.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, NoReturn

from nnmpi.base.errors import ScheduleError
from nnmpi.schedule.schedule import (
    COMPUTE,
    RECEIVES,
    SENDS,
    TRANSFERS,
    WEIGHTS,
    Channel,
    Instruction,
    Kind,
    Schedule,
    other_end,
    parts,
)
from nnmpi.schedule.simulate import RankProgress, ScheduleRun

_AROUND = 3  # items shown on each side of a fault


class Position(NamedTuple):
    """An item of a rank's program."""

    rank: int
    at: int


class Positions:
    """The positions of each instruction in the programs, and the picture of a fault there.

    Args:
        schedule: any programs, right or wrong.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.all: defaultdict[Instruction, list[Position]] = defaultdict(list)
        for rank, program in enumerate(schedule.programs):
            for index, item in enumerate(program):
                for op in parts(item):
                    self.all[op].append(Position(rank, index))

    def __contains__(self, instruction: Instruction) -> bool:
        """Whether an instruction occurs."""
        return instruction in self.all

    def __getitem__(self, instruction: Instruction) -> Position:
        """Return the first position of an instruction that occurs."""
        return self.all[instruction][0]

    def fail(self, sentence: str, marked: Iterable[Position]) -> NoReturn:
        """Raise an error with a sentence, and the programs around the marked positions.

            1B0 stands before 1F0, whose result it needs

            rank 0   0F0 0SEND_ACT0 0RECV_GRAD0 0B0
            rank 1   1RECV_ACT0 >1B0< 1F0 1SEND_GRAD0

        Raises:
            ScheduleError: always.
        """
        raise ScheduleError(
            f"{self.schedule.name}: {sentence}\n\n{self._around(sorted(set(marked)))}"
        )

    def _around(self, marked: list[Position]) -> str:
        """Return a line for each rank with its items near the marked ones."""
        lines = []
        for rank, program in enumerate(self.schedule.programs):
            local = {position.at for position in marked if position.rank == rank}
            near = local or {position.at for position in marked} or {0}
            shown: list[str] = []
            for at, item in enumerate(program):
                if any(abs(at - entry) <= _AROUND for entry in near):
                    shown.append(f">{item}<" if at in local else str(item))
                elif shown[-1:] != ["..."]:
                    shown.append("...")
            lines.append(f"rank {rank:<3} {' '.join(shown)}")
        return "\n".join(lines)


def check(schedule: Schedule, trains: bool = False) -> None:
    """Refuse a wrong lowered schedule.

    Args:
        schedule: any.
        trains: whether it must have backward passes.

    Raises:
        ScheduleError: naming the fault, with the programs around it.
    """
    positions = Positions(schedule)
    if trains and not schedule.trains:
        positions.fail(
            "there are no backward passes, so it would train nothing; give each F its B, or I and"
            " W",
            [],
        )
    _check_work(schedule, positions)
    _check_order(schedule, positions)
    _check_weights(schedule, positions)
    _check_channels(schedule, positions)
    _check_progress(schedule, positions)


# ---- each unit once ----


def _check_work(schedule: Schedule, positions: Positions) -> None:
    """Refuse instructions that are missing, doubled, on a wrong rank, or unused."""
    expected = set(_expected(schedule, positions))
    for op, occurrences in positions.all.items():
        if op not in expected and op.kind not in WEIGHTS:
            size = f"{schedule.stages} stages, {schedule.microbatches} microbatches"
            more = (
                "; B is the whole backward pass: give I, of the inputs, before W, of the weights"
                if op.kind is Kind.W
                else ""
            )
            positions.fail(f"{op} does not belong in a schedule of {size}{more}", occurrences)
        for position in occurrences:
            if position.rank != schedule.rank_of(op.stage):
                owner = f"stage {op.stage} belongs to rank {schedule.rank_of(op.stage)}"
                positions.fail(f"{op} is on rank {position.rank}, but {owner}", [position])
        if len(occurrences) > 1 and op.kind not in WEIGHTS:
            positions.fail(
                f"{op} occurs {len(occurrences)} times; each instruction must occur once",
                occurrences,
            )
    for op in sorted(expected - positions.all.keys(), key=str):
        rank = schedule.rank_of(op.stage)
        if op.kind in TRANSFERS:
            other = other_end(op)
            positions.fail(
                f"{op} is missing on rank {rank}: {other} has no partner",
                positions.all.get(other, []),
            )
        positions.fail(f"{op} is missing on rank {rank}", [])


def _expected(schedule: Schedule, positions: Positions) -> Iterator[Instruction]:
    """Yield all instructions of a complete schedule.

    The schedule may halve backwards, and update per step or per microbatch.
    """
    trains = schedule.trains
    is_async = any(item.kind is Kind.STEP and item.microbatch is not None for item in positions.all)
    for stage in range(schedule.stages):
        for m in range(schedule.microbatches):
            yield Kind.F.at(stage, m)
            if Kind.OUT.at(stage, m) in positions:
                yield from (kind.at(stage, m) for kind in (Kind.OUT, Kind.DROP, Kind.IN))
            if trains:
                is_whole = Kind.B.at(stage, m) in positions
                is_halved = Kind.I.at(stage, m) in positions or Kind.W.at(stage, m) in positions
                kinds = (Kind.I, Kind.W) if is_halved and not is_whole else (Kind.B,)
                yield from (kind.at(stage, m) for kind in kinds)
            if schedule.is_cut(stage):
                sends = [Kind.SEND_ACT.at(stage, m), *[Kind.SEND_GRAD.at(stage + 1, m)] * trains]
                yield from (end for send in sends for end in (send, other_end(send)))
        if trains:
            each, once = range(schedule.microbatches), (None,)
            sums_each = is_async or Kind.REDUCE.at(stage, 0) in positions
            yield from (Kind.REDUCE.at(stage, m) for m in (each if sums_each else once))
            yield from (Kind.STEP.at(stage, m) for m in (each if is_async else once))


# ---- order ----


def _check_order(schedule: Schedule, positions: Positions) -> None:
    """Refuse an instruction before one that it needs."""
    for rank in range(schedule.ranks):
        for instruction in schedule.instructions(rank):
            for needed in _needs(schedule, instruction):
                if needed in positions and positions[needed].at >= positions[instruction].at:
                    positions.fail(
                        f"{instruction} comes before {needed}, which it needs",
                        [positions[instruction], positions[needed]],
                    )


def _needs(schedule: Schedule, instruction: Instruction) -> Iterator[Instruction]:
    """Yield the instructions that must come before one on the same rank, present or not."""
    summed: Iterable[int | None] = (instruction.microbatch,)
    if instruction.microbatch is None:
        summed = (*range(schedule.microbatches), None)
    yield from (kind.at(instruction.stage, m) for kind in _NEEDED[instruction.kind] for m in summed)
    kinds, further = _NEEDED_NEXT.get(instruction.kind, ((), 0))
    if not schedule.is_cut(min(instruction.stage, instruction.stage + further)):
        # the next stage is on this rank, so no message orders them
        yield from (kind.at(instruction.stage + further, instruction.microbatch) for kind in kinds)


_NEEDED: Mapping[Kind, tuple[Kind, ...]] = {
    Kind.F: (Kind.RECV_ACT,),
    Kind.B: (Kind.F, Kind.RECV_GRAD, Kind.IN),
    Kind.I: (Kind.F, Kind.RECV_GRAD, Kind.IN),
    Kind.OUT: (Kind.F,),
    Kind.DROP: (Kind.OUT,),
    Kind.IN: (Kind.DROP,),
    Kind.W: (Kind.I,),
    Kind.SEND_ACT: (Kind.F,),
    Kind.SEND_GRAD: (Kind.B, Kind.I),
    Kind.REDUCE: (Kind.B, Kind.W),
    Kind.STEP: (Kind.REDUCE,),
    **dict.fromkeys(RECEIVES | WEIGHTS, ()),
}
_HALF = (Kind.B, Kind.I), 1
_NEEDED_NEXT = {Kind.F: ((Kind.F,), -1), Kind.B: _HALF, Kind.I: _HALF}


def _check_weights(schedule: Schedule, positions: Positions) -> None:
    """Refuse computing with weights that are not there, weights that stay, and mixed gradients.

    The gradients of all stages of a rank pass through the same memory if replicas share them out.
    """
    ops = [op for op in positions.all if op.microbatch is not None]
    gathers = any(op.kind in WEIGHTS for op in ops)
    sums_each = any(op.kind is Kind.REDUCE for op in ops) and all(
        op.kind != Kind.STEP for op in ops
    )
    for rank, program in enumerate(schedule.programs):
        held: dict[int, Position] = {}
        unsummed: Instruction | None = None
        for at, item in enumerate(program):
            for op in parts(item):
                here, is_held = Position(rank, at), op.stage in held
                if op.kind is Kind.GATHER and is_held:
                    positions.fail(f"{op} gathers weights that are there", [held[op.stage], here])
                if gathers and op.kind in COMPUTE | {Kind.FREE} and not is_held:
                    positions.fail(f"{op} needs weights that are not gathered", [here])
                if op.kind is Kind.GATHER:
                    held[op.stage] = here
                elif op.kind is Kind.FREE:
                    del held[op.stage]
                elif sums_each and op.kind is Kind.REDUCE:
                    unsummed = None
                elif sums_each and op.kind in (Kind.B, Kind.W):
                    if unsummed is not None:
                        positions.fail(
                            f"{op} comes before the gradients of {unsummed} are summed", [here]
                        )
                    unsummed = op
        for stage, where in held.items():
            positions.fail(f"the weights of {stage} are gathered, and never freed", [where])


def _check_channels(schedule: Schedule, positions: Positions) -> None:
    """Refuse messages that are received in another order than they are sent."""
    ends: tuple[dict[Channel, list[Instruction]], ...] = ({}, {})
    for rank in range(schedule.ranks):
        for instruction in schedule.instructions(rank):
            if instruction.kind in TRANSFERS:
                ends[instruction.kind in SENDS].setdefault(
                    schedule.channel_of(instruction), []
                ).append(instruction)
    received, sent = ends
    for channel, sends in sent.items():
        for number, (out, into) in enumerate(zip(sends, received[channel], strict=True)):
            if other_end(out) != into:
                where = f"message {number} from rank {channel[0]} to rank {channel[1]}"
                sentence = (
                    f"{where} is sent by {out}, but received by {into}; both ends need one order"
                )
                positions.fail(sentence, [positions[out], positions[into]])


# ---- deadlock ----


def _check_progress(schedule: Schedule, positions: Positions) -> None:
    """Refuse a circle of ranks that wait for one another."""
    run = ScheduleRun(schedule, {}, rendezvous=True)
    if not run.stuck:
        return
    circle: list[RankProgress] = []
    progress = run.stuck[0]
    while progress not in circle:
        circle.append(progress)
        waiting = run.waiting(progress)[0]
        sender, receiver, _ = schedule.channel_of(waiting)
        progress = run.ranks[receiver if waiting.kind in SENDS else sender]
    circle = circle[circle.index(progress) :]
    waits = [f"rank {item.rank} in {run.waiting(item)[0]}" for item in circle]
    marked = [positions[transfer] for item in circle for transfer in run.waiting(item)[:1]]
    sentence = (
        f"deadlock when sends wait for their receivers: {', '.join(waits)}: each waits for the"
        " next, the last for the first"
    )
    positions.fail(sentence, marked)
