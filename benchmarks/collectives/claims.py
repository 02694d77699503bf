"""What nnmpi's collectives are to reach against MPI's own and against gloo, read from one interleaved run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from benchmarks.collectives.names import FUSED, GLOO, UPDATE
from nnmpi.comm.algorithms.registry import ALGORITHMS, AUTO, NATIVE, SHARED

K, M = 2**10, 2**20

Times: TypeAlias = Mapping[str, float]
"""The medians of one size in microseconds, by algorithm."""


@dataclass(frozen=True)
class Ratio:
    """How many times faster one is than another, and what it is meant to be.

    Attributes:
        value: above 1 nnmpi is the faster one.
        need: what it should reach at least; None where nothing is promised.
        note: which algorithm it was, where that is not said by the claim.
    """

    value: float
    need: float | None
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether it is reached."""
        return self.need is None or self.value >= self.need


@dataclass(frozen=True)
class Claim:
    """One column of the table.

    Attributes:
        title: who against whom.
        read: (times of one size) -> ratio and note; None where one of them was not measured.
        need: (ranks, MPI's name, bytes) -> what is promised, None for nothing.
    """

    title: str
    read: Callable[[Times], tuple[float, str] | None]
    need: Callable[[int, str, int], float | None]

    def judge(self, times: Times, ranks: int, mpi: str, nbytes: int) -> Ratio | None:
        """Return the ratio at one size, None where it was not measured."""
        found = self.read(times)
        return None if found is None else Ratio(found[0], self.need(ranks, mpi, nbytes), found[1])


def _against(own: str, other: str) -> Callable[[Times], tuple[float, str] | None]:
    return lambda times: (times[other] / times[own], "") if own in times and other in times else None


def _auto(times: Times) -> tuple[float, str] | None:
    """Return the best of all that "auto" can choose from against it."""
    others = {name: times[name] for name in (NATIVE, SHARED, *ALGORITHMS) if name in times}
    if AUTO not in times or not others:
        return None
    best = min(others, key=lambda name: others[name])
    return others[best] / times[AUTO], best


def _slowest(times: Times) -> tuple[float, str] | None:
    """Return gloo against the slowest of those of nnmpi's that one would use for gradients inside a node."""
    own = {name: times[name] for name in (SHARED, AUTO, "ring") if name in times}
    if GLOO not in times or not own:
        return None
    slowest = max(own, key=lambda name: own[name])
    return times[GLOO] / own[slowest], slowest


def _need_shared(ranks: int, mpi: str, nbytes: int) -> float | None:
    if nbytes < 16 * K:
        return None
    if ranks != 2:
        return 1.8 if ranks > 2 else None
    return 2.3 if mpi.startswith("MPICH") and nbytes == 16 * M else 2.5


def _need_ring(ranks: int, mpi: str, nbytes: int) -> float | None:
    if ranks != 2 or nbytes < 64 * K:
        return None
    return 1.7 if nbytes >= 64 * M else 1.0 if nbytes >= M else 0.9


CLAIMS: Sequence[Claim] = (
    Claim("shared against native", _against(SHARED, NATIVE), _need_shared),
    Claim(
        "fused against native+update",
        _against(FUSED, UPDATE),
        lambda ranks, mpi, nbytes: 4.0 if ranks == 2 and nbytes >= 64 * K else None,
    ),
    Claim("ring against native", _against("ring", NATIVE), _need_ring),
    Claim("auto against the best", _auto, lambda ranks, mpi, nbytes: 0.95 if ranks == 2 else None),
    Claim(
        "slowest of shared, ring, auto against gloo",
        _slowest,
        lambda ranks, mpi, nbytes: 3.0 if ranks == 2 and nbytes >= 64 * K else None,
    ),
)


def times_by_size(contents: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Return the medians of one kind of run by size and algorithm.

    The first file that has an algorithm at a size counts, so that ratios are of one interleaved run; of gloo, which is
    slower beside others than alone, the best of all files.
    """
    found: dict[int, dict[str, float]] = {}
    for content in contents:
        times: dict[int, dict[str, float]] = {}
        for row in content["rows"]:
            times.setdefault(row["size"], {})[row["algorithm"]] = row["p50_us"]
        for size, own in times.items():
            kept = found.setdefault(size, {})
            gloo = min((each[GLOO] for each in (kept, own) if GLOO in each), default=None)
            kept |= {name: value for name, value in own.items() if name not in kept}
            if gloo is not None:
                kept[GLOO] = gloo
    return dict(sorted(found.items()))
