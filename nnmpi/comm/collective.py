"""A collective as a value: what every rank has before and after it, and the steps that lead there.

The contract says for each rank and chunk which ranks' parts are in it. With three ranks, a row per rank and a column
per chunk (. is what nobody asks for):

                   before            after
    all-reduce     0   0   0         012 012 012        everybody has the sum of all parts
                   1   1   1         012 012 012
                   2   2   2         012 012 012

    reduce-scatter 0   0   0         012 .   .          rank r has the sum of chunk r
                   1   1   1         .   012 .
                   2   2   2         .   .   012

    all-gather     0   .   .         0   1   2          rank r's chunk r is with everybody
                   .   1   .         0   1   2
                   .   .   2         0   1   2

    broadcast      0   0   0         0   0   0          everybody has what rank 0 had
                   .   .   .         0   0   0
                   .   .   .         0   0   0

Who has contributed to a chunk is one integer: its hexadecimal digit r counts rank r's contributions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from nnmpi.comm.steps import Algorithm, Step
from nnmpi.custom import ask

DIGIT_BITS = 4
ROOT = 0  # the rank whose values a broadcast spreads

Parts: TypeAlias = Callable[[int, int, int], int | None]
"""(rank, chunk, size) -> the parts in that chunk on that rank; None where nobody asks."""


@dataclass(frozen=True, slots=True)
class Contract:
    """What a collective promises.

    Attributes:
        name: as MPI and the literature call it.
        begins: the parts before; None for a chunk that holds nothing yet.
        ends: the parts afterwards; None for a chunk that may hold anything.
        most: how often one rank's part may be in a chunk.
    """

    name: str
    begins: Parts
    ends: Parts
    most: int = 1


Formula: TypeAlias = Callable[..., float]
"""(N, M, alpha, beta, gamma=0) -> seconds: ranks, bytes of the whole buffer, seconds a message, a byte sent, added."""


@dataclass(frozen=True, slots=True)
class Collective:
    """An algorithm by name with its contract: `collective(rank, size)` returns that rank's steps, phase after phase.

    Attributes:
        name: such as "ring".
        contract: what it promises.
        phases: parts that all ranks go through, one after the other.
        seconds: its closed form on links that are all alike, for buffers that N divides; None where there is none.
    """

    name: str
    contract: Contract
    phases: tuple[Algorithm, ...]
    seconds: Formula | None = None

    def __call__(self, rank: int, size: int) -> tuple[Step, ...]:
        """Return the steps of this rank; none for a single one.

        Raises:
            ScheduleError: for a user's function that fails, or gives something else.
        """
        return tuple(step for phase in self.phases for step in ask(phase, Step, rank, size))


def as_collective(algorithm: Collective | Algorithm, contract: Contract | None = None) -> Collective:
    """Return an algorithm as a collective with its name.

    Args:
        algorithm: a collective, or a bare function of (rank, size) that returns that rank's steps.
        contract: what such a function promises; an all-reduce by default.
    """
    if isinstance(algorithm, Collective):
        return algorithm
    name = getattr(algorithm, "__name__", type(algorithm).__name__)
    return Collective(name, contract or ALL_REDUCE, (algorithm,))


def part(rank: int, times: int = 1) -> int:
    """Return the parts that hold this rank's, so many times, and no other's."""
    return times << DIGIT_BITS * rank


def everyone(size: int) -> int:
    """Return the parts that hold each rank's once."""
    return sum(part(rank) for rank in range(size))


def count(parts: int, rank: int) -> int:
    """Return how often this rank's part is in."""
    return parts >> DIGIT_BITS * rank & (1 << DIGIT_BITS) - 1


def _neighbours(rank: int, size: int) -> int:
    """Return one part of each neighbour on the ring and two of its own; with two ranks, one of each."""
    if size <= 2:
        return everyone(size)
    return part((rank - 1) % size) + part(rank, 2) + part((rank + 1) % size)


ALL_REDUCE = Contract("all-reduce", lambda rank, chunk, size: part(rank), lambda rank, chunk, size: everyone(size))
REDUCE_SCATTER = Contract(
    "reduce-scatter",
    lambda rank, chunk, size: part(rank),
    lambda rank, chunk, size: everyone(size) if chunk == rank else None,
)
ALL_GATHER = Contract(
    "all-gather",
    lambda rank, chunk, size: part(rank) if chunk == rank else None,
    lambda rank, chunk, size: part(chunk),
)
BROADCAST = Contract(
    "broadcast",
    lambda rank, chunk, size: part(ROOT) if rank == ROOT else None,
    lambda rank, chunk, size: part(ROOT),
)
NEIGHBOUR_AVERAGE = Contract(
    "neighbour-average",
    lambda rank, chunk, size: part(rank),
    lambda rank, chunk, size: _neighbours(rank, size),
    most=2,
)
