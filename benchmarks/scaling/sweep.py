"""The machines that are simulated, and the simulated times of every algorithm, size and number of ranks on them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from nnmpi.comm.algorithms.registry import ALGORITHMS, find_algorithm
from nnmpi.comm.machine import Curve, Link, Machine, blocks
from nnmpi.comm.simulate import price

NAMES = tuple(ALGORITHMS)
ODD_RANKS = (3, 6, 12, 24, 48, 100, 384, 1000)  # not all jobs have a power of two

RANKS_PER_NODE = 8
INSIDE = Link.line(0.5e-6, 1 / 10e9)  # through memory: 0.5 us, 10 GB/s for each pair of ranks
ACROSS = Link.line(2e-6, 1 / 12.5e9)  # 100 Gbit/s for all of a node's ranks together
ADDING = Curve.line(0.0, 1 / 50e9)  # 50 GB/s in cache


@dataclass(frozen=True)
class MachineModel:
    """A machine of any number of ranks.

    Attributes:
        name: a word.
        description: its numbers in words.
        build: number of ranks -> the machine.
    """

    name: str
    description: str
    build: Callable[[int], Machine]


def flat(alpha_s: float, beta_s: float, gamma_s: float) -> MachineModel:
    """Return the textbooks' machine: every rank has a link of its own to every other.

    Args:
        alpha_s: seconds of latency of each message.
        beta_s: seconds for each byte of a message.
        gamma_s: seconds for each byte that is added.
    """
    return MachineModel(
        "flat",
        f"flat: alpha {1e6 * alpha_s:g} us, beta {1e9 * beta_s:g} ns/byte, gamma {1e9 * gamma_s:g} ns/byte, "
        "a link for every rank",
        lambda ranks: Machine.uniform(alpha_s, beta_s, gamma_s),
    )


def cluster() -> MachineModel:
    """Return nodes of 8 ranks that share one link."""
    return MachineModel(
        "cluster",
        f"cluster: nodes of {RANKS_PER_NODE} ranks, inside 0.5 us and 10 GB/s, between nodes 2 us and 12.5 GB/s for "
        "all ranks of a node together, adding 50 GB/s",
        lambda ranks: Machine(INSIDE, ACROSS, blocks(ranks, RANKS_PER_NODE), ADDING),
    )


@dataclass(frozen=True)
class SimulatedTime:
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


@cache
def seconds(model: MachineModel, algorithm: str, ranks: int, nbytes: int) -> float:
    """Return how long an all-reduce takes on a machine.

    Args:
        model: of the machine.
        algorithm: its name.
        ranks: how many.
        nbytes: of each rank's buffer.
    """
    machine = model.build(ranks)
    return price(find_algorithm(algorithm, machine.nodes), ranks, nbytes, machine)


def sweep(model: MachineModel, nbytes: int, counts: Sequence[int]) -> Iterator[SimulatedTime]:
    """Yield the points of one message size, those of one number of ranks together.

    Args:
        model: of the machine.
        nbytes: of each rank's buffer.
        counts: numbers of ranks.
    """
    for ranks in counts:
        for name in NAMES:
            yield SimulatedTime(model.name, nbytes, ranks, name, seconds(model, name, ranks, nbytes))
