"""Who is fastest from where on, by ranks and by bytes, in numbers and in words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.scaling.sweep import MachineModel, SimulatedTime, seconds
from nnmpi.units import format_bytes

SMALLEST, LARGEST, RATIO = 8, 2**30, 8  # the sizes between which crossovers are looked for
ELEMENT = 4  # bytes: lengths between whole elements are none
EQUAL = 1 + 1e-9  # times that differ by less do so by rounding
CLOSE = 1.01  # a crossover is found to within one percent


@dataclass(frozen=True)
class Crossover:
    """Where one algorithm overtakes another as messages grow.

    Attributes:
        machine: the model's name.
        ranks: how many there are.
        before: the fastest for shorter messages.
        after: the fastest from here on.
        nbytes: where; the length from which `after` is faster.
    """

    machine: str
    ranks: int
    before: str
    after: str
    nbytes: int


def fastest_by_ranks(points: Sequence[SimulatedTime]) -> dict[int, SimulatedTime]:
    """Return the fastest of each number of ranks; of equals the one that is fastest for more ranks, too."""
    best: dict[int, SimulatedTime] = {}
    after = ""
    for ranks in sorted({point.ranks for point in points}, reverse=True):
        own = [point for point in points if point.ranks == ranks]
        least = min(point.seconds for point in own)
        equals = [point for point in own if point.seconds <= least * EQUAL]
        best[ranks] = next((point for point in equals if point.algorithm == after), equals[0])
        after = best[ranks].algorithm
    return best


def best_by_ranks(points: Sequence[SimulatedTime]) -> list[str]:
    """Say who is fastest for how many ranks: ["tree to 16", "ring from 32 on"]; points of one size."""
    stretches: list[list[SimulatedTime]] = []
    for _, point in sorted(fastest_by_ranks(points).items()):
        if stretches and stretches[-1][-1].algorithm == point.algorithm:
            stretches[-1].append(point)
        else:
            stretches.append([point])
    if len(stretches) == 1:
        return [f"{stretches[0][0].algorithm} for all"]
    words = []
    for stretch in stretches:
        name, first, last = stretch[0].algorithm, stretch[0].ranks, stretch[-1].ranks
        if stretch is stretches[0]:
            words.append(f"{name} to {last}")
        elif stretch is stretches[-1]:
            words.append(f"{name} from {first} on")
        else:
            words.append(f"{name} at {first}" if first == last else f"{name} from {first} to {last}")
    return words


def crossovers(model: MachineModel, ranks: int, names: Sequence[str]) -> tuple[str, list[Crossover]]:
    """Return the fastest of some algorithms for the shortest messages, and where others overtake as messages grow.

    Args:
        model: of the machine.
        ranks: how many.
        names: of the algorithms.
    """

    def fastest(nbytes: int) -> str:
        return min(names, key=lambda name: seconds(model, name, ranks, nbytes))

    sizes = [SMALLEST]
    while sizes[-1] < LARGEST:
        sizes.append(min(sizes[-1] * RATIO, LARGEST))
    winners = [fastest(nbytes) for nbytes in sizes]
    found: list[Crossover] = []
    for (low, before), (high, after) in pairwise(zip(sizes, winners, strict=True)):
        found += _between(model, ranks, fastest, low, before, high, after)
    return winners[0], found


def _between(
    model: MachineModel, ranks: int, fastest: Callable[[int], str], low: int, before: str, high: int, after: str
) -> list[Crossover]:
    """Return the crossovers between two sizes with their winners, also those of a third algorithm in between."""
    if before == after:
        return []
    while high > low + ELEMENT and high > low * CLOSE:
        middle = max(low + ELEMENT, round((low * high) ** 0.5) // ELEMENT * ELEMENT)
        winner = fastest(middle)
        if winner == before:
            low = middle
        elif winner == after:
            high = middle
        else:
            return [
                *_between(model, ranks, fastest, low, before, middle, winner),
                *_between(model, ranks, fastest, middle, winner, high, after),
            ]
    return [Crossover(model.name, ranks, before, after, high)]


def in_words(first: str, found: Sequence[Crossover]) -> str:
    """Say who is fastest for which messages: "tree to 5.3 KB, then ring"."""
    if not found:
        return f"{first} always"
    return ", then ".join(
        [f"{crossover.before} to {format_bytes(crossover.nbytes)}" for crossover in found] + [found[-1].after]
    )
