"""Collectives to write: a function of (rank, size) that returns that rank's steps.

Each is proved on several numbers of ranks; then its rounds, what a rank sends and with whom it talks are held against
what is asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from nnmpi.comm.algorithms.tree import levels
from nnmpi.comm.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    NEIGHBOUR_AVERAGE,
    REDUCE_SCATTER,
    ROOT,
    Contract,
    Step,
    everyone,
    part,
)
from nnmpi.comm.prove import Proof, prove_steps
from nnmpi.errors import ScheduleError, counted
from nnmpi.exercise.exercise import Exercise, Function, WrongAnswer, call

Limit: TypeAlias = Callable[[int], int]
"""ranks -> how many are enough."""

ANY, POWERS = (1, 2, 3, 4, 5, 8), (1, 2, 4, 8, 16)

REDUCE = Contract(
    "reduce",
    lambda rank, chunk, size: part(rank),
    lambda rank, chunk, size: everyone(size) if rank == ROOT else None,
)
SCATTER = Contract(
    "scatter",
    lambda rank, chunk, size: part(ROOT) if rank == ROOT else None,
    lambda rank, chunk, size: part(ROOT) if chunk == rank else None,
)
GATHER = Contract(
    "gather",
    lambda rank, chunk, size: part(rank) if chunk == rank else None,
    lambda rank, chunk, size: part(chunk) if rank == ROOT else None,
)


@dataclass(frozen=True)
class Wanted:
    """What a collective must do.

    Attributes:
        contract: what every rank has before and after it.
        sizes: the numbers of ranks.
        rounds: how many it may take.
        chunks: how many any one rank may send.
        partners: whether two ranks may talk to one another on so many; None for all.
    """

    contract: Contract
    sizes: tuple[int, ...]
    rounds: Limit
    chunks: Limit
    partners: Callable[[int, int, int], bool] | None = None


def check(wanted: Wanted, function: Function) -> str:
    """Return what a right collective does.

    Raises:
        WrongAnswer: naming the number of ranks, and rank, step and chunk of the fault.
    """
    for size in wanted.sizes:
        steps = [_steps(function, rank, size) for rank in range(size)]
        try:
            proof = prove_steps(steps, wanted.contract)
        except ScheduleError as error:
            raise WrongAnswer(f"on {counted(size, 'rank')}: {error}") from None
        _check_limits(wanted, steps, proof)
    sizes = ", ".join(map(str, wanted.sizes))
    return f"right on {sizes} ranks; on {size} it takes {proof.rounds} rounds and {proof.messages} messages"


def _steps(function: Function, rank: int, size: int) -> tuple[Step, ...]:
    try:
        steps = call(function, rank, size)
    except ScheduleError as error:  # of a step that means nothing
        raise WrongAnswer(f"on {counted(size, 'rank')}, rank {rank}: {error}") from None
    if not isinstance(steps, tuple | list) or not all(isinstance(each, Step) for each in steps):
        raise WrongAnswer(f"on {counted(size, 'rank')}, rank {rank} gives {steps!r}; give a list of Step")
    return tuple(steps)


def _check_limits(wanted: Wanted, steps: Sequence[Sequence[Step]], proof: Proof) -> None:
    """Refuse what is right but not what was asked for."""
    size = len(steps)
    right = f"on {counted(size, 'rank')}: the result is right, but"
    for rank, own in enumerate(steps):
        for at, step in enumerate(own):
            for partner in (step.to, step.from_):
                if partner is not None and wanted.partners and not wanted.partners(rank, partner, size):
                    raise WrongAnswer(f"{right} rank {rank}, step {at} talks to rank {partner}, which it may not")
        sent = sum(len(step.send) for step in own)
        if sent > wanted.chunks(size):
            raise WrongAnswer(f"{right} rank {rank} sends {sent} chunks, and {wanted.chunks(size)} are enough")
    if proof.rounds > wanted.rounds(size):
        raise WrongAnswer(f"{right} it takes {proof.rounds} rounds, and {wanted.rounds(size)} are enough")


def _ring(rank: int, other: int, size: int) -> bool:
    return (rank - other) % size in (1, size - 1)


def _line(rank: int, other: int, size: int) -> bool:
    return abs(rank - other) == 1


def _star(rank: int, other: int, size: int) -> bool:
    return ROOT in (rank, other)


_TABLE: tuple[tuple[str, str, Wanted], ...] = (
    (
        "line-reduce",
        "The sum of all ranks at rank 0, passed along a line.\n\nRank r talks to r - 1 and r + 1 only; all chunks "
        "travel at once, in size - 1 rounds.",
        Wanted(REDUCE, ANY, lambda n: n - 1, lambda n: n, _line),
    ),
    (
        "line-broadcast",
        "Rank 0's buffer to everybody along a line, chunk after chunk.\n\nA rank passes a chunk on while the next one "
        "comes: at most 2 (size - 1) rounds.\nRank r talks to r - 1 and r + 1 only.",
        Wanted(BROADCAST, ANY, lambda n: 2 * (n - 1), lambda n: n, _line),
    ),
    (
        "star-all-reduce",
        "A parameter server: rank 0 adds up what all bring, and sends the sum back.\n\nOnly rank 0 talks to the "
        "others: 2 (size - 1) rounds.",
        Wanted(ALL_REDUCE, ANY, lambda n: 2 * (n - 1), lambda n: n * (n - 1) if n > 2 else n, _star),
    ),
    (
        "ring-reduce-scatter",
        "Around a ring: rank r ends with the sum of chunk r.\n\nRank r talks to its two neighbours only: size - 1 "
        "rounds, and a rank sends size - 1 chunks.",
        Wanted(REDUCE_SCATTER, ANY, lambda n: n - 1, lambda n: n - 1, _ring),
    ),
    (
        "ring-all-gather",
        "Around a ring: rank r's chunk r gets to everybody.\n\nRank r talks to its two neighbours only: size - 1 "
        "rounds, and a rank sends size - 1 chunks.",
        Wanted(ALL_GATHER, ANY, lambda n: n - 1, lambda n: n - 1, _ring),
    ),
    (
        "ring-all-reduce",
        "Everybody gets the sum of all buffers, around a ring.\n\nA reduce-scatter, then an all-gather: 2 (size - 1) "
        "rounds, and a rank sends 2 (size - 1) chunks.",
        Wanted(ALL_REDUCE, ANY, lambda n: 2 * (n - 1), lambda n: 2 * (n - 1), _ring),
    ),
    (
        "tree-broadcast",
        "Rank 0's buffer to everybody along a tree.\n\nIn each round twice as many ranks have it: log2 of size rounds, "
        "rounded up.",
        Wanted(BROADCAST, ANY, levels, lambda n: n * levels(n)),
    ),
    (
        "tree-reduce",
        "The sum of all buffers at rank 0, up a tree.\n\nThe broadcast's picture from the bottom to the top: log2 of "
        "size rounds, rounded up.",
        Wanted(REDUCE, ANY, levels, lambda n: n),
    ),
    (
        "tree-all-reduce",
        "Everybody gets the sum, up a tree and down again.\n\n2 log2 of size rounds, rounded up; all chunks travel at "
        "once.",
        Wanted(ALL_REDUCE, ANY, lambda n: 2 * levels(n), lambda n: n * levels(n) + n),
    ),
    (
        "tree-scatter",
        "Rank r ends with chunk r of rank 0's buffer, along a tree.\n\nlog2 of size rounds, rounded up; rank 0 sends "
        "each chunk once.",
        Wanted(SCATTER, ANY, levels, lambda n: n - 1),
    ),
    (
        "tree-gather",
        "Rank 0 ends with chunk r of each rank r, up a tree.\n\nlog2 of size rounds, rounded up; nobody sends a chunk "
        "twice.",
        Wanted(GATHER, ANY, levels, lambda n: n - 1),
    ),
    (
        "recursive-doubling",
        "Everybody gets the sum in log2 of size rounds; size is a power of two.\n\nIn round k each rank exchanges all "
        "chunks with the rank whose number differs in bit k.",
        Wanted(ALL_REDUCE, POWERS, levels, lambda n: n * levels(n)),
    ),
    (
        "all-gather-doubling",
        "Rank r's chunk r gets to everybody in log2 of size rounds; size is a power of two.\n\nWhat a rank has doubles "
        "in each round: it sends size - 1 chunks in all.",
        Wanted(ALL_GATHER, POWERS, levels, lambda n: n - 1),
    ),
    (
        "reduce-scatter-halving",
        "Rank r ends with the sum of chunk r in log2 of size rounds; size is a power of two.\n\nWhat a rank is "
        "responsible for halves in each round: it sends size - 1 chunks in all.",
        Wanted(REDUCE_SCATTER, POWERS, levels, lambda n: n - 1),
    ),
    (
        "halving-doubling",
        "An all-reduce with few rounds and few bytes; size is a power of two.\n\nHalve, then double: 2 log2 of size "
        "rounds, and a rank sends 2 (size - 1) chunks.",
        Wanted(ALL_REDUCE, POWERS, lambda n: 2 * levels(n), lambda n: 2 * (n - 1)),
    ),
    (
        "bruck-all-gather",
        "Rank r's chunk r gets to everybody; log2 of size rounds for any size, rounded up.\n\nIn round k rank r gets "
        "from rank r + 2^k what that rank has, as far as it is still missing.",
        Wanted(ALL_GATHER, ANY, levels, lambda n: n - 1),
    ),
    (
        "neighbour-average",
        "Gossip: each rank ends with twice its own buffer and once each neighbour's.\n\nThe neighbours are r - 1 and "
        "r + 1 on a ring. With two ranks each ends with the sum of both.",
        Wanted(NEIGHBOUR_AVERAGE, ANY, lambda n: 2, lambda n: 2 * n, _ring),
    ),
)

_FORM = """
The buffer is cut into as many chunks as there are ranks. Return a list of steps, such as
    Step(to=1, send=[0], from_=3, recv=[2], reduce=True)
chunk 0 goes to rank 1, while chunk 2 comes from rank 3 and is added; without reduce it takes the place of the old one.
A step may also only send, or only receive."""

EXERCISES = tuple(
    Exercise(
        name, f"{statement}\n{_FORM}", "rank, size", partial(check, wanted), "from nnmpi.comm.collective import Step"
    )
    for name, statement, wanted in _TABLE
)
