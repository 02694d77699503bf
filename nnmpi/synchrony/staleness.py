"""How stale gradients were: updates that the weights had seen between being read and being updated with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


class Staleness:
    """Counts how often each worker's gradients were how stale.

    Args:
        workers: how many there are.

    Attributes:
        histograms: by worker: staleness -> how many gradients.
    """

    def __init__(self, workers: int) -> None:
        self.histograms: list[Counter[int]] = [Counter() for _ in range(workers)]

    def add(self, worker: int, staleness: int) -> None:
        """Count one gradient of a worker."""
        self.histograms[worker][staleness] += 1

    def histogram(self, worker: int | None = None) -> dict[int, int]:
        """Return how many gradients there were of each staleness, in rising order, of a worker or of all."""
        chosen = self.histograms if worker is None else [self.histograms[worker]]
        total = sum(chosen, Counter[int]())
        return {staleness: total[staleness] for staleness in sorted(total)}

    def count(self, worker: int | None = None) -> int:
        """Return the number of gradients of a worker, or of all."""
        return sum(self.histogram(worker).values())

    def mean(self, worker: int | None = None) -> float:
        """Return the mean staleness of a worker's gradients, or of all; 0.0 if there are none."""
        found = self.histogram(worker)
        return sum(staleness * count for staleness, count in found.items()) / max(1, sum(found.values()))

    def largest(self, worker: int | None = None) -> int:
        """Return the largest staleness of a worker's gradients, or of all; 0 if there are none."""
        return max(self.histogram(worker), default=0)

    @classmethod
    def sum(cls, parts: Sequence[Staleness]) -> Staleness:
        """Return the counts of several together, worker by worker; some may have fewer workers."""
        total = cls(max((len(part.histograms) for part in parts), default=0))
        for part in parts:
            for mine, theirs in zip(total.histograms, part.histograms, strict=False):
                mine.update(theirs)
        return total

    def to_json(self) -> dict[str, Any]:
        """Return everything as numbers, lists and dicts; histograms are lists of (staleness, count)."""
        workers = [
            {
                "worker": worker,
                "steps": self.count(worker),
                "mean": self.mean(worker),
                "max": self.largest(worker),
                "histogram": [list(pair) for pair in self.histogram(worker).items()],
            }
            for worker in range(len(self.histograms))
        ]
        pairs = [list(pair) for pair in self.histogram().items()]
        return {"mean": self.mean(), "max": self.largest(), "histogram": pairs, "workers": workers}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Staleness:
        """Return what `to_json` described."""
        result = cls(len(found["workers"]))
        for counts, worker in zip(result.histograms, found["workers"], strict=True):
            counts.update({int(staleness): int(count) for staleness, count in worker["histogram"]})
        return result
