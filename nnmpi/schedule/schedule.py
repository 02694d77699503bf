"""A schedule as a value: the instructions of every rank of a pipeline in one step, in order.

    2F0             stage 2, forward of microbatch 0
    3RECV_GRAD1     stage 3 gets the gradient of its output of microbatch 1
    0REDUCE         stage 0, gradients of the whole step

An instruction names its stage; the stage's rank executes it. The rank of each stage is a part of
the schedule: `home`. With as many stages as ranks each rank has one; with more, virtual ones:

                                         rank 0        rank 1        ranks of stages 0, 1, 2, 3
    2 ranks, 4 stages, around            stages 0, 2   stages 1, 3   0, 1, 0, 1
    2 ranks, 4 stages, there and back    stages 0, 3   stages 1, 2   0, 1, 1, 0

At the turn, from 1 to 2, nothing is sent: both stages are on rank 1. A stage may consist of
segments, which are stages themselves, all on its rank (see `lower.split_stages`).

A message between two stages has two transfers as its ends:

    stage 1 on rank 1                                                 stage 2 on rank 2
    1SEND_ACT0      ----  activation of microbatch 0  --->            2RECV_ACT0
    1RECV_GRAD0     <---  gradient of microbatch 0  -----             2SEND_GRAD0

Messages of one kind from one rank to another arrive in the order in which they were sent: they are
a channel.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import NamedTuple, TypeAlias

from nnmpi.base.wings import Drawn


class Kind(StrEnum):
    """The kinds of instructions, for stage s and microbatch m.

    F           the forward of s on m; in the last stage with the loss
    B           the whole backward of s on m: gradients of its input and of its weights
    I           the first half of B: the gradient of the input, for which the previous stage waits;
                papers that halve backwards call it B
    W           the second half of B: the gradients of the weights, for which no stage waits
    SEND_ACT    send the output of s to s+1
    RECV_ACT    get the input of s from s-1
    SEND_GRAD   send the gradient of the input of s to s-1
    RECV_GRAD   get the gradient of the output of s from s+1
    GATHER      start to gather the weights of s, which replicas share out (ZeRO 3)
    FREE        the memory of the gathered weights of s is free again
    OUT         start to move what s has saved for its backward on m to a store
    DROP        wait for that; its memory is free then
    IN          start to move it back
    REDUCE      the gradients of s are final: start their sum over the replicas, without waiting
    STEP        wait for that sum, and update the weights of s

    REDUCE and STEP have no microbatch if they are for all microbatches together. GATHER and FREE
    name the microbatch that is computed next, and last.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the zero-bubble paper's name
    W = "W"
    SEND_ACT = "SEND_ACT"
    RECV_ACT = "RECV_ACT"
    SEND_GRAD = "SEND_GRAD"
    RECV_GRAD = "RECV_GRAD"
    GATHER = "GATHER"
    FREE = "FREE"
    OUT = "OUT"
    DROP = "DROP"
    IN = "IN"
    REDUCE = "REDUCE"
    STEP = "STEP"

    def at(self, stage: int, microbatch: int | None = None) -> "Instruction":
        """Return the instruction of this kind: `Kind.F.at(2, 0)` is "2F0"."""
        return Instruction(self, stage, microbatch)


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
BACKWARD = frozenset({Kind.B, Kind.I, Kind.W})
USES: Mapping[Kind, Kind] = {Kind.F: Kind.RECV_ACT, Kind.B: Kind.RECV_GRAD, Kind.I: Kind.RECV_GRAD}
"""By kind of computation, the receive whose message it uses."""
SENDS = frozenset({Kind.SEND_ACT, Kind.SEND_GRAD})
RECEIVES = frozenset({Kind.RECV_ACT, Kind.RECV_GRAD})
TRANSFERS = SENDS | RECEIVES
WEIGHTS = frozenset({Kind.GATHER, Kind.FREE})
"""The kinds that may recur for one stage and microbatch: for its forward and its backward."""


@dataclass(frozen=True, order=True, slots=True)
class Instruction:
    """One instruction of a program.

    Attributes:
        kind: its kind.
        stage: its stage; stage 0 gets the data.
        microbatch: its microbatch; None for REDUCE and STEP of all microbatches together.
    """

    kind: Kind
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        """Return the text form, such as "2F0"."""
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


Instructions: TypeAlias = tuple[Instruction, ...]
"""A program without fused transfers."""


@dataclass(frozen=True, slots=True)
class Fused:
    """Transfers that are posted and awaited together."""

    parts: Instructions

    def __str__(self) -> str:
        """Return the text form, such as "(0SEND_ACT1 0RECV_GRAD0)"."""
        return f"({' '.join(map(str, self.parts))})"


Item: TypeAlias = Instruction | Fused
"""An element of a program."""

Program: TypeAlias = tuple[Item, ...]
"""The instructions of one rank, in order."""


def parts(item: Item) -> Instructions:
    """Return the instructions of an item: itself, or the transfers that are posted together."""
    return item.parts if isinstance(item, Fused) else (item,)


# ---- messages ----

Channel: TypeAlias = tuple[int, int, Kind]
"""(sending rank, receiving rank, SEND_ACT or SEND_GRAD)."""

_OTHER_END: Mapping[Kind, tuple[Kind, int]] = {
    Kind.SEND_ACT: (Kind.RECV_ACT, 1),
    Kind.RECV_ACT: (Kind.SEND_ACT, -1),
    Kind.SEND_GRAD: (Kind.RECV_GRAD, -1),
    Kind.RECV_GRAD: (Kind.SEND_GRAD, 1),
}  # by transfer: its partner's kind, and that one's stage relative to it


def other_end(transfer: Instruction) -> Instruction:
    """Return the receive of a send, the send of a receive."""
    kind, further = _OTHER_END[transfer.kind]
    return Instruction(kind, transfer.stage + further, transfer.microbatch)


def send_of(transfer: Instruction) -> Instruction:
    """Return the send of a transfer's message, which names the message."""
    return transfer if transfer.kind in SENDS else other_end(transfer)


# ---- the rank of a stage ----

Home: TypeAlias = Callable[[int, int], int]
"""(stage, ranks) -> the stage's rank."""


def around(stage: int, ranks: int) -> int:
    """Return the rank of a stage in round-robin order: 0 1 2 0 1 2."""
    return stage % ranks


def there_and_back(stage: int, ranks: int) -> int:
    """Return the rank of a stage in V order: 0 1 2 2 1 0."""
    turns, position = divmod(stage, ranks)
    return ranks - 1 - position if turns % 2 else position


def stages_of(rank: int, ranks: int, stages: int, home: Home) -> tuple[int, ...]:
    """Return a rank's stages, of this many altogether."""
    return tuple(stage for stage in range(stages) if home(stage, ranks) == rank)


# ---- all ranks ----


@dataclass(frozen=True)
class Schedule(Drawn):
    """All ranks' programs.

    Attributes:
        name: of its generator, such as "1f1b".
        ranks: number of ranks, at least 1.
        stages: number of stages, a multiple of `ranks`.
        microbatches: number of microbatches, at least 1.
        programs: one per rank. `check` refuses wrong ones.
        home: the rank of each stage.
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    programs: tuple[Program, ...]
    home: Home = around

    @property
    def virtual(self) -> int:
        """The number of stages that each rank has."""
        return self.stages // self.ranks

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its instructions."""
        return frozenset(
            instruction.kind
            for rank in range(self.ranks)
            for instruction in self.instructions(rank)
        )

    @property
    def trains(self) -> bool:
        """Whether there are backward passes."""
        return not self.kinds.isdisjoint(BACKWARD)

    @property
    def asynchronous(self) -> bool:
        """Whether stages update after every microbatch, without a flush."""
        items = chain.from_iterable(map(self.instructions, range(self.ranks)))
        return any(item.kind is Kind.STEP and item.microbatch is not None for item in items)

    def rank_of(self, stage: int) -> int:
        """Return the rank of a stage."""
        return self.home(stage, self.ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank."""
        return stages_of(rank, self.ranks, self.stages, self.home)

    def channel_of(self, transfer: Instruction) -> Channel:
        """Return the channel of a transfer's message."""
        kind, further = _OTHER_END[transfer.kind]
        here, there = self.rank_of(transfer.stage), self.rank_of(transfer.stage + further)
        return (here, there, transfer.kind) if transfer.kind in SENDS else (there, here, kind)

    def is_cut(self, stage: int) -> bool:
        """Whether stages `stage` and `stage + 1` exist, on different ranks."""
        return 0 <= stage < self.stages - 1 and self.rank_of(stage) != self.rank_of(stage + 1)

    def instructions(self, rank: int) -> Iterator[Instruction]:
        """Yield a rank's instructions in order, with fused transfers one after another."""
        for item in self.programs[rank]:
            yield from parts(item)

    def map_instructions(self, change: Callable[[Instructions], Iterable[Item]]) -> "Schedule":
        """Return the schedule with each rank's instructions replaced by `change(instructions)`."""
        programs = (change(tuple(self.instructions(rank))) for rank in range(self.ranks))
        return replace(self, programs=tuple(map(tuple, programs)))


class StageMemory(NamedTuple):
    """What a microbatch takes of a stage's memory.

    Attributes:
        saved: from the forward to the end of the backward.
        waiting: from the forward to the backward; less than `saved` for a stage that is recomputed.
        staying: what of it stays in memory while the rest is moved to a store.
        work: what the stage takes besides while it computes.
        deferred: how much more it has between a backward's halves.
        finishing: what the second half takes besides.
    """

    saved: float = 0
    waiting: float = 0
    staying: float = 0
    work: float = 0
    deferred: float = 0
    finishing: float = 0


_NOTHING = StageMemory()


def peak_activations(schedule: Schedule, rank: int) -> int:
    """Return a rank's peak number of saved activations, one per stage and microbatch."""
    return int(
        peak_saved(schedule, rank, dict.fromkeys(schedule.stages_of(rank), StageMemory(1, 1)))
    )


def peak_saved(schedule: Schedule, rank: int, stages: Mapping[int, StageMemory]) -> float:
    """Return the peak of what a rank's stages take of its memory.

    With halved backwards, an activation is saved until W. Without backwards none is saved after its
    forward.
    """
    trains = schedule.trains
    now: float = 0
    most: float = 0
    for instruction in schedule.instructions(rank):
        kind, stage = instruction.kind, stages.get(instruction.stage, _NOTHING)
        if kind is Kind.F:
            now += stage.waiting
        elif kind in (Kind.B, Kind.I):
            now += stage.saved - stage.waiting
        elif kind in (Kind.DROP, Kind.IN):
            gone = stage.saved - stage.staying
            now += gone if kind is Kind.IN else -gone
        extra = stage.work if kind in COMPUTE else 0
        most = max(most, now + (stage.finishing if kind is Kind.W else extra))
        if kind in (Kind.I, Kind.W):
            now += stage.deferred if kind is Kind.I else -stage.deferred
        if kind in (Kind.B, Kind.W) or (kind is Kind.F and not trains):
            now -= stage.saved if trains else stage.waiting
    return most
