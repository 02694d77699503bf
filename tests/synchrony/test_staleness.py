"""Counts of stale gradients."""

import json

import pytest

from nnmpi.errors import UsageError
from nnmpi.synchrony.staleness import Staleness


def counted(*rows: tuple[int, int], workers: int = 2) -> Staleness:
    """Return counts of (worker, staleness)."""
    found = Staleness(workers)
    for worker, staleness in rows:
        found.add(worker, staleness)
    return found


def test_counts_by_worker_and_together() -> None:
    """Histogram in rising order, mean, largest."""
    found = counted((0, 3), (0, 0), (1, 3), (0, 0))
    assert (found.histogram(), found.histogram(0), found.histogram(1)) == ({0: 2, 3: 2}, {0: 2, 3: 1}, {3: 1})
    assert list(found.histogram()) == [0, 3]
    assert (found.count(), found.count(0), found.count(1)) == (4, 3, 1)
    assert (found.mean(), found.mean(0), found.mean(1)) == (1.5, 1.0, 3.0)
    assert (found.largest(), found.largest(0), found.largest(1)) == (3, 3, 3)


def test_nothing_counted() -> None:
    """Numbers all the same."""
    found = Staleness(1)
    assert (found.histogram(), found.count(), found.mean(), found.largest(0)) == ({}, 0, 0.0, 0)


def test_counts_are_added() -> None:
    """Those of as many workers; the other's stay as they are."""
    found, other = counted((0, 3)), counted((0, 3), (1, 1))
    found.merge(other)
    assert (found.histogram(0), found.histogram(1)) == ({3: 2}, {1: 1})
    assert other.histogram() == {1: 1, 3: 1}
    with pytest.raises(UsageError, match="counts of 3 workers cannot be added to those of 2"):
        found.merge(Staleness(3))


def test_they_go_through_json() -> None:
    """And come back with all they had."""
    found = counted((0, 10), (0, 2), (1, 2))
    text = json.dumps(found.to_json())
    assert json.loads(text) == {
        "mean": 14 / 3,
        "max": 10,
        "histogram": [[2, 2], [10, 1]],
        "workers": [
            {"worker": 0, "steps": 2, "mean": 6.0, "max": 10, "histogram": [[2, 1], [10, 1]]},
            {"worker": 1, "steps": 1, "mean": 2.0, "max": 2, "histogram": [[2, 1]]},
        ],
    }
    assert Staleness.from_json(json.loads(text)).histograms == found.histograms
