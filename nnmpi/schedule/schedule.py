"""A schedule: what every rank of a pipeline does in one step, in which order.

Stage s lives on rank s % ranks. With as many stages as ranks each rank has one; with more, virtual ones:

    2 ranks, 4 stages       rank 0: stages 0, 2      rank 1: stages 1, 3      0 -> 1 -> 2 -> 3 goes 0, 1, 0, 1
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from nnmpi.errors import ScheduleError
from nnmpi.schedule.instruction import BACKWARD, Instruction, Item, parts

Program: TypeAlias = tuple[Item, ...]
"""What one rank does, in order."""


@dataclass(frozen=True, slots=True)
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

    @property
    def trains(self) -> bool:
        """Whether anything goes backward."""
        return any(one.kind in BACKWARD for rank in range(self.ranks) for one in self.instructions(rank))

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
