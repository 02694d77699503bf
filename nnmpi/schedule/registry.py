"""The schedules by the names that the command line knows."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from nnmpi.errors import UsageError
from nnmpi.own import ask
from nnmpi.schedule.gpipe import gpipe
from nnmpi.schedule.inference import inference
from nnmpi.schedule.instruction import Instruction
from nnmpi.schedule.interleaved import interleaved
from nnmpi.schedule.naive import naive
from nnmpi.schedule.one_f_one_b import one_f_one_b
from nnmpi.schedule.pipedream import pipedream
from nnmpi.schedule.schedule import Schedule
from nnmpi.schedule.zero_bubble import zero_bubble

INTERLEAVED, INFERENCE = "interleaved", "inference"

_VIRTUAL: Mapping[str, Callable[[int, int, int, int], tuple[Instruction, ...]]] = MappingProxyType(
    {INTERLEAVED: interleaved, INFERENCE: inference}
)  # of several stages per rank: (rank, ranks, microbatches, virtual) -> what the rank computes

_PLAIN: Mapping[str, Callable[[int, int, int], tuple[Instruction, ...]]] = MappingProxyType(
    {
        "naive": naive,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "zero-bubble": zero_bubble,
        "pipedream": pipedream,
    }
)  # of one stage per rank: (rank, ranks, microbatches) -> what the rank computes

SCHEDULES = ("naive", "gpipe", "1f1b", INTERLEAVED, "zero-bubble", INFERENCE, "pipedream")
"""All names."""


Generator: TypeAlias = str | Callable[[int, int, int], Sequence[Instruction]]
"""A schedule: a name, or a function (rank, ranks, microbatches) -> what the rank computes, that a user wrote."""


def name_of(schedule: Generator) -> str:
    """Return the name of a schedule; of a user's own that of the function."""
    return schedule if isinstance(schedule, str) else getattr(schedule, "__name__", type(schedule).__name__)


def make(name: Generator, ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """Return the schedule of this name, computation only; `lower` adds messages, reductions and updates.

    Args:
        name: one of `SCHEDULES`, or a function of one's own, for one stage on each rank.
        ranks: number of ranks.
        microbatches: number of microbatches in a step.
        virtual: stages per rank; only "interleaved" and "inference" can have more than one.

    Raises:
        UsageError: for another name, or numbers that the schedule cannot have.
    """
    if isinstance(name, str) and name not in SCHEDULES:
        raise UsageError(f"there is no schedule {name!r}; the names are {', '.join(SCHEDULES)}")
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("virtual stages per rank", virtual)):
        if number < 1:
            raise UsageError(f"a schedule cannot have {number} {what}; give at least 1")
    if isinstance(name, str) and name in _VIRTUAL:
        programs = tuple(_VIRTUAL[name](rank, ranks, microbatches, virtual) for rank in range(ranks))
    elif virtual > 1:
        raise UsageError(f"{name_of(name)} has one stage on each rank, not {virtual}; for several choose {INTERLEAVED}")
    else:
        plain = _PLAIN[name] if isinstance(name, str) else name
        programs = tuple(ask(plain, Instruction, rank, ranks, microbatches) for rank in range(ranks))
    return Schedule(name_of(name), ranks, ranks * virtual, microbatches, programs)
