"""The simulated times: every algorithm, message size and number of ranks on a machine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from benchmarks.scaling.models import Model
from nnmpi.comm.algorithms.registry import ALGORITHMS, find_algorithm
from nnmpi.comm.simulate import simulate

NAMES = tuple(ALGORITHMS)
ODD_RANKS = (3, 6, 12, 24, 48, 100, 384, 1000)  # not all jobs have a power of two


@dataclass(frozen=True)
class Point:
    """One simulated all-reduce.

    Attributes:
        machine: the model's name.
        nbytes: bytes of each rank's buffer.
        ranks: how many there are.
        algorithm: its name.
        seconds: until the last rank has the sum.
    """

    machine: str
    nbytes: int
    ranks: int
    algorithm: str
    seconds: float


def rank_counts(most: int) -> list[int]:
    """Return the powers of two from 2 to `most` and some numbers between them, in order."""
    powers = {1 << bit for bit in range(1, most.bit_length())}
    return sorted(ranks for ranks in powers | set(ODD_RANKS) if ranks <= most)


def is_power(ranks: int) -> bool:
    """Return whether a number is a power of two."""
    return ranks & (ranks - 1) == 0


@cache
def seconds(model: Model, algorithm: str, ranks: int, nbytes: int) -> float:
    """Return how long an all-reduce takes on a machine."""
    machine = model.build(ranks)
    return simulate(find_algorithm(algorithm, machine.nodes), ranks, nbytes, machine).seconds


def sweep(model: Model, nbytes: int, counts: Sequence[int]) -> Iterator[Point]:
    """Yield the points of one message size, those of one number of ranks together."""
    for ranks in counts:
        for name in NAMES:
            yield Point(model.name, nbytes, ranks, name, seconds(model, name, ranks, nbytes))
