"""Where each instruction stands in the programs, and how a fault there is shown."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

from nnmpi.errors import ScheduleError
from nnmpi.schedule.instruction import Instruction, parts
from nnmpi.schedule.schedule import Schedule

_AROUND = 3  # items shown on each side of the place of a fault


class Place(NamedTuple):
    """An item of a rank's program."""

    rank: int
    at: int


class Places:
    """All places of a schedule.

    Args:
        schedule: any programs, right or wrong.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.all: defaultdict[Instruction, list[Place]] = defaultdict(list)
        for rank, program in enumerate(schedule.programs):
            for index, item in enumerate(program):
                for one in parts(item):
                    self.all[one].append(Place(rank, index))

    def __contains__(self, one: Instruction) -> bool:
        """Whether an instruction stands anywhere."""
        return one in self.all

    def __getitem__(self, one: Instruction) -> Place:
        """Return the first place of an instruction that stands somewhere."""
        return self.all[one][0]

    def fail(self, sentence: str, marked: Iterable[Place]) -> NoReturn:
        """Raise the fault with its sentence, and the programs around the marked places.

            1B0 stands before 1F0, whose result it needs

            rank 0   0F0 0SEND_ACT0 0RECV_GRAD0 0B0
            rank 1   1RECV_ACT0 >1B0< 1F0 1SEND_GRAD0

        Raises:
            ScheduleError: always.
        """
        raise ScheduleError(f"{self.schedule.name}: {sentence}\n\n{self._around(sorted(set(marked)))}")

    def _around(self, marked: list[Place]) -> str:
        """Return a line for each rank, around its marked places; around where the others are if it has none."""
        lines = []
        for rank, program in enumerate(self.schedule.programs):
            own = {place.at for place in marked if place.rank == rank}
            near = own or {place.at for place in marked} or {0}
            shown: list[str] = []
            for at, item in enumerate(program):
                if any(abs(at - each) <= _AROUND for each in near):
                    shown.append(f">{item}<" if at in own else str(item))
                elif shown[-1:] != ["..."]:
                    shown.append("...")
            lines.append(f"rank {rank:<3} {' '.join(shown)}")
        return "\n".join(lines)
