"""Collectives as values: each rank's steps, and a contract. No MPI and no arrays here.

A collective over `size` ranks cuts the buffer into chunks (`shard.split`), numbered 0..size-1 if
its contract has no other number. Each rank has a tuple of steps, done in order. In a step the rank
sends some of its chunks to one rank and receives chunks from one rank, both at once. The step is
over when both transfers are; then the next one begins.

    Step(to=1, send=(0,), from_=3, recv=(3,), reduce=True)

        chunk 0 ----> rank 1
        chunk 3 <---- rank 3, added to this rank's chunk 3

The same tuple is executed (`comm.execution`), proved (`comm.prove`), priced and simulated
(`comm.duration`) and drawn. An algorithm that sent messages itself would need a
second text for each of these, and the picture or the proof could differ from the run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import index
from typing import Any, TypeAlias

from nnmpi.base.custom import call_user, name_of
from nnmpi.base.errors import ScheduleError
from nnmpi.base.wings import Drawn

Chunks: TypeAlias = tuple[int, ...] | range
"""Chunk numbers in the order of travel; a range for runs of thousands."""


@dataclass(frozen=True, slots=True)
class Step:
    """One exchange of a rank with at most two others.

    Attributes:
        to: the receiver of the chunks `send`; None when nothing is sent.
        send: chunk numbers, in the order of travel.
        from_: the sender of the chunks `recv`; None when nothing is received.
        recv: chunk numbers, in the order of travel.
        reduce: True adds the arriving chunks to this rank's; False replaces them.

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
        """Refuse a malformed step; take NumPy's integers and arrays as Python's."""
        for name, partner, given in (
            ("send", self.to, self.send),
            ("recv", self.from_, self.recv),
        ):
            try:
                _ = None if partner is None else index(partner)
                chunks = given if isinstance(given, range) else tuple(map(index, given))
            except TypeError:
                raise ScheduleError(
                    f"{name} has {partner!r} and {given!r}; give one rank, and a list of chunks"
                ) from None
            object.__setattr__(self, name, chunks)
            if (partner is None) != (not chunks):
                raise ScheduleError(
                    f"a step needs a partner and chunks together, but {name} has {partner} and"
                    f" {chunks}"
                )
            if not isinstance(chunks, range) and len(set(chunks)) != len(chunks):
                raise ScheduleError(
                    f"a step names a chunk twice in {name}={chunks}; each chunk may travel once"
                    " per step"
                )


Steps: TypeAlias = tuple[Step, ...]
"""The steps of one rank, in order."""

Algorithm: TypeAlias = Callable[[int, int], Steps]
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


# The contract of a collective: the contributions in each chunk of each rank, before and after.
#
# With three ranks, a row per rank and a column per chunk; 012 is the sum of the contributions of
# ranks 0, 1 and 2, and . is a chunk that the contract leaves open:
#
#                    before                after
#     all-reduce     0   0   0             012 012 012           every rank has the sum
#                    1   1   1             012 012 012
#                    2   2   2             012 012 012
#
#     reduce-scatter 0   0   0             012 .   .             rank r has the sum of chunk r
#                    1   1   1             .   012 .
#                    2   2   2             .   .   012
#
#     all-gather     0   .   .             0   1   2             every rank has rank r's chunk r
#                    .   1   .             0   1   2
#                    .   .   2             0   1   2
#
#     broadcast      0   0   0             0   0   0             every rank has rank 0's chunks
#                    .   .   .             0   0   0
#                    .   .   .             0   0   0
#
#     all-to-all     0 0 0 . . . . . .     0 . . 1 . . 2 . .     rank r has chunk (s, r) of each
#                    . . . 1 1 1 . . .     . 0 . . 1 . . 2 .     rank s; its number is s N + r
#                    . . . . . . 2 2 2     . . 0 . . 1 . . 2
#
# The contributions to a chunk ("parts" below) are one integer: its hexadecimal digit r counts those
# of rank r. Adding two chunks is adding two integers, and a contribution counted twice shows as a
# digit 2, which a set of ranks could not show.

DIGIT_BITS = 4
ROOT = 0  # the rank whose values a broadcast spreads

Parts: TypeAlias = Callable[[int, int, int], int | None]
"""(rank, chunk, size) -> the parts in that chunk on that rank; None where the chunk is open."""


@dataclass(frozen=True, slots=True)
class Contract:
    """What a collective promises.

    Attributes:
        name: its name in MPI and the literature.
        begins: the parts before; None for an empty chunk.
        ends: the parts afterwards; None for a chunk that may hold anything.
        most: the most contributions of one rank to a chunk.
        chunks: N ranks -> number of chunks.
        parts: N ranks -> how many chunks make up one rank's buffer.
    """

    name: str
    begins: Parts
    ends: Parts
    most: int = 1
    chunks: Callable[[int], int] = int
    parts: Callable[[int], int] = int


CollectiveCost: TypeAlias = tuple[float, float, float]
"""(latencies, buffers sent, buffers added) on the critical path."""


@dataclass(frozen=True, slots=True)
class Collective(Drawn):
    """A named algorithm with its contract: `collective(rank, size)` returns a rank's steps.

    What stands behind the phases is for the package's own, in `algorithms.registry`.

    Attributes:
        name: such as "ring".
        contract: what it promises.
        phases: algorithms, run one after the other.
        help: what it is, in a few words, for the help of options.
        automatic: the nodes of the ranks -> whether `auto` may take it there; None for never.
        formula: N ranks -> its cost in the literature on equal links, of messages of which all are
            long and equal; None for numbers of ranks for which there is none.
        in_mpi: whether libraries of MPI have it, so that the price of MPI's own collective is that
            of the fastest of these.
        takes_nodes: whether the phases take the node of each rank as `nodes`.
    """

    name: str
    contract: Contract
    phases: tuple[Algorithm, ...]
    help: str = field(default="", compare=False)
    automatic: Callable[[Sequence[int]], bool] | None = field(default=None, compare=False)
    formula: Callable[[int], CollectiveCost | None] | None = field(default=None, compare=False)
    in_mpi: bool = field(default=False, compare=False)
    takes_nodes: bool = field(default=False, compare=False)

    def __call__(self, rank: int, size: int) -> Steps:
        """Return the steps of this rank; none for a single one.

        Raises:
            ScheduleError: for a user's function that fails or returns no steps.
        """
        return tuple(step for phase in self.phases for step in call_user(phase, Step, rank, size))

    def on(self, nodes: Sequence[int]) -> "Collective":
        """Return the algorithm for ranks on these nodes: itself, unless it takes nodes."""
        if not self.takes_nodes:
            return self
        phases: tuple[Any, ...] = self.phases
        return replace(self, phases=tuple(partial(item, nodes=tuple(nodes)) for item in phases))


def as_collective(
    algorithm: Collective | Algorithm, contract: Contract | None = None
) -> Collective:
    """Return an algorithm as a collective with its name.

    Args:
        algorithm: a collective, or a bare function of (rank, size) that returns that rank's steps.
        contract: the contract of a bare function; an all-reduce by default.
    """
    if isinstance(algorithm, Collective):
        return algorithm
    return Collective(name_of(algorithm), contract or ALL_REDUCE, (algorithm,))


def parts_of(rank: int, times: int = 1) -> int:
    """Return the parts with `times` contributions of this rank alone."""
    return times << DIGIT_BITS * rank


@cache
def all_parts(size: int) -> int:
    """Return the parts with one contribution of each rank."""
    return sum(parts_of(rank) for rank in range(size))


def count(parts: int, rank: int) -> int:
    """Return the number of this rank's contributions."""
    return parts >> DIGIT_BITS * rank & (1 << DIGIT_BITS) - 1


def _neighbours(rank: int, size: int) -> int:
    if size <= 2:  # both neighbours are the other rank: a plain average
        return all_parts(size)
    return parts_of((rank - 1) % size) + parts_of(rank, 2) + parts_of((rank + 1) % size)


def local_part(rank: int, chunk: int, size: int) -> int:
    """Return the rank's own contribution, the start of every chunk of a reduction."""
    return parts_of(rank)


ALL_REDUCE = Contract("all-reduce", local_part, lambda rank, chunk, size: all_parts(size))
REDUCE_SCATTER = Contract(
    "reduce-scatter",
    local_part,
    lambda rank, chunk, size: all_parts(size) if chunk == rank else None,
)
ALL_GATHER = Contract(
    "all-gather",
    lambda rank, chunk, size: parts_of(rank) if chunk == rank else None,
    lambda rank, chunk, size: parts_of(chunk),
)
BROADCAST = Contract(
    "broadcast",
    lambda rank, chunk, size: parts_of(ROOT) if rank == ROOT else None,
    lambda rank, chunk, size: parts_of(ROOT),
)
ALL_TO_ALL = Contract(
    "all-to-all",
    lambda rank, chunk, size: parts_of(rank) if chunk // size == rank else None,
    lambda rank, chunk, size: parts_of(chunk // size) if chunk % size == rank else None,
    chunks=lambda size: size * size,
)
NEIGHBOUR_AVERAGE = Contract(
    "neighbour-average", local_part, lambda rank, chunk, size: _neighbours(rank, size), most=2
)
