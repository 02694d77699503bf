"""What one rank does in a collective, as values: no MPI and no arrays here.

A collective over `size` ranks cuts the buffer into `size` chunks (`shard.split`), numbered
0..size-1. One rank's part of it is a tuple of steps, done in order. In a step the rank sends some
of its chunks to one rank and receives chunks from one rank, both at once; the step is over when
both have happened, and the next one begins.

    Step(to=1, send=(0,), from_=3, recv=(3,), reduce=True)

        chunk 0 ----> rank 1
        chunk 3 <---- rank 3, added to what this rank has in chunk 3

The same tuple is executed (`comm.execution`), proved (`comm.prove`), priced and simulated
(`comm.duration`) and drawn (`comm.render`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import TypeAlias

from nnmpi.custom import ask, name_of
from nnmpi.errors import ScheduleError, UsageError
from nnmpi.pages.page import preformat

Chunks: TypeAlias = tuple[int, ...] | range
"""Chunk numbers in the order in which they travel; a range where there are thousands of
neighbours.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One exchange of a rank with at most two others.

    Attributes:
        to: the rank that gets the chunks `send`; None when nothing is sent.
        send: chunk numbers, in the order in which they travel.
        from_: the rank whose chunks `recv` arrive; None when nothing is received.
        recv: chunk numbers, in the order in which they travel.
        reduce: whether what arrives is added to the chunks (True) or replaces them (False).

    Raises:
        ScheduleError: for a partner without chunks, chunks without a partner, or a chunk named
            twice.
    """

    to: int | None = None
    send: Chunks = ()
    from_: int | None = None
    recv: Chunks = ()
    reduce: bool = False

    def __post_init__(self) -> None:
        """Refuse a step that means nothing."""
        for name, partner, chunks in (
            ("send", self.to, self.send),
            ("recv", self.from_, self.recv),
        ):
            try:
                _ = (
                    None if partner is None else index(partner),
                    isinstance(chunks, range) or [*map(index, chunks)],
                )
            except TypeError:
                raise ScheduleError(
                    f"{name} has {partner!r} and {chunks!r}; ranks and chunks are whole numbers"
                ) from None
            if (partner is None) != (not chunks):
                raise ScheduleError(
                    f"a step needs a partner and chunks together, but {name} has {partner} and"
                    f" {chunks}"
                )
            if isinstance(chunks, list):
                object.__setattr__(self, name, tuple(chunks))
            if not isinstance(chunks, range) and len(set(chunks)) != len(chunks):
                raise ScheduleError(
                    f"a step names a chunk twice in {name}={chunks}; every chunk may travel once a"
                    " step"
                )


Algorithm: TypeAlias = Callable[[int, int], tuple[Step, ...]]
"""`algorithm(rank, size)` returns that rank's steps; a pure function, with no steps at size 1."""


def runs(chunks: Chunks) -> tuple[range, ...]:
    """Join neighbouring chunk numbers into ranges, each contiguous in the buffer: one message.

    runs((3, 0, 1))  ->  (range(3, 4), range(0, 2))
    """
    if isinstance(chunks, range) and chunks.step == 1:
        return (chunks,) if chunks else ()
    joined: list[range] = []
    for chunk in chunks:
        if joined and joined[-1].stop == chunk:
            joined[-1] = range(joined[-1].start, chunk + 1)
        else:
            joined.append(range(chunk, chunk + 1))
    return tuple(joined)


# A collective as a value: what every rank has before and after it, and the steps that lead there.
#
# The contract says for each rank and chunk which ranks' parts are in it. With three ranks, a row
# per rank and a column per chunk (. is what nobody asks for):
#
#                    before            after
#     all-reduce     0   0   0         012 012 012        everybody has the sum of all parts
#                    1   1   1         012 012 012
#                    2   2   2         012 012 012
#
#     reduce-scatter 0   0   0         012 .   .          rank r has the sum of chunk r
#                    1   1   1         .   012 .
#                    2   2   2         .   .   012
#
#     all-gather     0   .   .         0   1   2          rank r's chunk r is with everybody
#                    .   1   .         0   1   2
#                    .   .   2         0   1   2
#
#     broadcast      0   0   0         0   0   0          everybody has what rank 0 had
#                    .   .   .         0   0   0
#                    .   .   .         0   0   0
#
#     all-to-all     0 0 0 . . . . . .     0 . . 1 . . 2 . .     rank s's chunk (s, r), number s N + r, is with rank r
#                    . . . 1 1 1 . . .     . 0 . . 1 . . 2 .
#                    . . . . . . 2 2 2     . . 0 . . 1 . . 2
#
# Who has contributed to a chunk is one integer: its hexadecimal digit r counts rank r's
# contributions.

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
        most: how many times one rank's part may be in a chunk.
        chunks: N ranks -> how many chunks there are; N make up one rank's buffer.
    """

    name: str
    begins: Parts
    ends: Parts
    most: int = 1
    chunks: Callable[[int], int] = int


Cost: TypeAlias = Callable[[int], tuple[float, float, float]]
"""N ranks -> what the last one waits for: latencies, and how many times the whole buffer's bytes
are sent, and are added.
"""


def _refuse_closed_form(N: int) -> tuple[float, float, float]:
    raise UsageError("this collective has no closed form; simulate it")


@dataclass(frozen=True, slots=True)
class Collective:
    """A named algorithm with its contract: `collective(rank, size)` returns a rank's steps.

    Attributes:
        name: such as "ring".
        contract: what it promises.
        phases: parts that all ranks go through, one after the other.
        cost: its closed form on links that are all alike, for buffers that N divides.
    """

    name: str
    contract: Contract
    phases: tuple[Algorithm, ...]
    cost: Cost = _refuse_closed_form

    def _repr_html_(self) -> str:  # a notebook draws it
        from nnmpi.comm.render import DRAWN_IN_NOTEBOOKS, render

        return preformat(render(self, DRAWN_IN_NOTEBOOKS))

    def __call__(self, rank: int, size: int) -> tuple[Step, ...]:
        """Return the steps of this rank; none for a single one.

        Raises:
            ScheduleError: for a user's function that fails, or gives something else.
        """
        return tuple(step for phase in self.phases for step in ask(phase, Step, rank, size))

    def sent(self, size: int) -> list[float]:
        """Return how many buffers' worth each rank sends."""
        return [sum(len(step.send) for step in self(rank, size)) / size for rank in range(size)]

    def seconds(self, N: int, M: float, alpha: float, beta: float, gamma: float = 0.0) -> float:
        """Return the closed form's seconds for N ranks, M bytes, and prices per message and byte.

        Raises:
            UsageError: where there is none.
        """
        latencies, sent, added = self.cost(N)
        return latencies * alpha + sent * M * beta + added * M * gamma


def as_collective(
    algorithm: Collective | Algorithm, contract: Contract | None = None
) -> Collective:
    """Return an algorithm as a collective with its name.

    Args:
        algorithm: a collective, or a bare function of (rank, size) that returns that rank's steps.
        contract: what such a function promises; an all-reduce by default.
    """
    if isinstance(algorithm, Collective):
        return algorithm
    return Collective(name_of(algorithm), contract or ALL_REDUCE, (algorithm,))


def part(rank: int, times: int = 1) -> int:
    """Return the parts that hold this rank's, so many times, and no other's."""
    return times << DIGIT_BITS * rank


def everyone(size: int) -> int:
    """Return the parts that hold each rank's once."""
    return sum(part(rank) for rank in range(size))


def count(parts: int, rank: int) -> int:
    """Return how many times this rank's part is in."""
    return parts >> DIGIT_BITS * rank & (1 << DIGIT_BITS) - 1


def _neighbours(rank: int, size: int) -> int:
    """Return one part of each neighbour on the ring and two of its own; with two ranks, one of
    each.
    """
    if size <= 2:
        return everyone(size)
    return part((rank - 1) % size) + part(rank, 2) + part((rank + 1) % size)


def own_part(rank: int, chunk: int, size: int) -> int:
    """Return the rank's own part: it has one in every chunk."""
    return part(rank)


ALL_REDUCE = Contract("all-reduce", own_part, lambda rank, chunk, size: everyone(size))
REDUCE_SCATTER = Contract(
    "reduce-scatter", own_part, lambda rank, chunk, size: everyone(size) if chunk == rank else None
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
ALL_TO_ALL = Contract(
    "all-to-all",
    lambda rank, chunk, size: part(rank) if chunk // size == rank else None,
    lambda rank, chunk, size: part(chunk // size) if chunk % size == rank else None,
    chunks=lambda size: size * size,
)
NEIGHBOUR_AVERAGE = Contract(
    "neighbour-average", own_part, lambda rank, chunk, size: _neighbours(rank, size), most=2
)
