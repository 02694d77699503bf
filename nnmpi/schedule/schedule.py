"""A schedule: what every rank of a pipeline does in one step, in which order.

Stage s lives on rank s % ranks. With as many stages as ranks each rank has one; with more, virtual ones:

    2 ranks, 4 stages       rank 0: stages 0, 2      rank 1: stages 1, 3      0 -> 1 -> 2 -> 3 goes 0, 1, 0, 1
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, TypeVar

from nnmpi.errors import ScheduleError
from nnmpi.schedule.instruction import BACKWARD, Instruction, Item, Kind, parts

Program: TypeAlias = tuple[Item, ...]
"""What one rank does, in order."""

N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Schedule:
    """All ranks' programs.

    Attributes:
        name: how it was made, such as "1f1b".
        ranks: number of ranks, at least 1.
        stages: number of stages, a multiple of `ranks`.
        microbatches: number of microbatches, at least 1.
        programs: one per rank.

    Raises:
        ScheduleError: for numbers that make no pipeline. Whether the programs are right is told by `check`.
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    programs: tuple[Program, ...]

    def __post_init__(self) -> None:
        """Refuse numbers that make no pipeline."""
        if self.ranks < 1 or self.microbatches < 1 or self.stages < self.ranks or self.stages % self.ranks:
            raise ScheduleError(
                f"{self.stages} stages on {self.ranks} ranks with {self.microbatches} microbatches are no pipeline; "
                "stages are a multiple of ranks, and there is at least 1 of everything"
            )
        if len(self.programs) != self.ranks:
            raise ScheduleError(f"{self.ranks} ranks need as many programs, not {len(self.programs)}")

    @property
    def virtual(self) -> int:
        """The number of stages that each rank has."""
        return self.stages // self.ranks

    @cached_property
    def trains(self) -> bool:
        """Whether anything goes backward."""
        return any(one.kind in BACKWARD for rank in range(self.ranks) for one in self.instructions(rank))

    @cached_property
    def has_halves(self) -> bool:
        """Whether any backward is done in halves."""
        return any(one.kind is Kind.I for rank in range(self.ranks) for one in self.instructions(rank))

    def rank_of(self, stage: int) -> int:
        """Return the rank that a stage lives on."""
        return stage % self.ranks

    def stages_of(self, rank: int) -> range:
        """Return the stages that live on a rank."""
        return range(rank, self.stages, self.ranks)

    def is_cut(self, stage: int) -> bool:
        """Whether `stage` and `stage + 1` both exist and live on different ranks: only then there are messages."""
        return 0 <= stage < self.stages - 1 and self.ranks > 1

    def instructions(self, rank: int) -> Iterator[Instruction]:
        """Yield a rank's instructions in order, those that are posted together one after the other."""
        for item in self.programs[rank]:
            yield from parts(item)

    def having(self, programs: Sequence[Sequence[Item]]) -> "Schedule":
        """Return the same schedule with other programs."""
        return replace(self, programs=tuple(map(tuple, programs)))


def peak_activations(schedule: Schedule, rank: int) -> int:
    """Return how many activations a rank keeps at most: one for each stage and microbatch; see `most_kept`."""
    return most_kept(schedule, rank, dict.fromkeys(schedule.stages_of(rank), 1))


def most_kept(schedule: Schedule, rank: int, kept: Mapping[int, N]) -> N:
    """Return the most that a rank keeps of activations, each from F to the end of B, by what a stage keeps of one.

    Where backwards are halved, an activation is kept until W. Without backwards none is kept after its forward.
    """
    trains = schedule.trains
    now: N = 0
    most: N = 0
    for one in schedule.instructions(rank):
        if one.kind is Kind.F:
            now += kept[one.stage]
            most = max(most, now)
        if one.kind in (Kind.B, Kind.W) or (one.kind is Kind.F and not trains):
            now -= kept[one.stage]
    return most


def staleness(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """Return for each microbatch how often the weights are updated between its forward and its backward.

    It is 0 everywhere unless the stage updates its weights before all microbatches are through (PipeDream).
    """
    steps = 0
    before: dict[int | None, int] = {}
    found: dict[int | None, int] = {}
    for one in schedule.instructions(schedule.rank_of(stage)):
        if one.stage == stage:
            if one.kind is Kind.F:
                before[one.microbatch] = steps
            if one.kind in (Kind.B, Kind.I):
                found[one.microbatch] = steps - before[one.microbatch]
            steps += one.kind is Kind.STEP
    return tuple(found[microbatch] for microbatch in range(schedule.microbatches) if microbatch in found)


def weight_versions(schedule: Schedule, stage: int) -> int:
    """Return how many versions of its weights a stage keeps at most: the newest, and those of waiting backwards."""
    steps, most, trains = 0, 1, schedule.trains
    kept: dict[int | None, int] = {}
    for one in schedule.instructions(schedule.rank_of(stage)):
        if one.stage == stage:
            if one.kind is Kind.F and trains:
                kept[one.microbatch] = steps
            if one.kind in (Kind.B, Kind.W):
                kept.pop(one.microbatch, None)
            steps += one.kind is Kind.STEP
            most = max(most, len({*kept.values(), steps}))
    return most
