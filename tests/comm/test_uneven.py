"""Gathering and summing parts of any lengths, the largest of each element, and messages between single ranks."""

from __future__ import annotations

import numpy as np
import pytest

from nnmpi.comm.group import Group
from nnmpi.comm.neighbours import exchange
from nnmpi.comm.uneven import gather_parts, largest, sum_parts
from nnmpi.errors import ShapeError


def lengths(group: Group) -> list[int]:
    """Return a length for each rank: 3, 0, 2, 5, 3, 0 ..."""
    return [(3, 0, 2, 5)[rank % 4] for rank in range(group.size)]


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_parts(group: Group, dtype: str) -> None:
    """Each rank's part comes to all, or the sum of all ranks' values for it to its owner; some are empty."""
    counts = lengths(group)
    parts = gather_parts(group, np.full(counts[group.rank], group.rank + 1, dtype), counts)
    right = all((part == rank + 1).all() and part.size == counts[rank] for rank, part in enumerate(parts))
    right = right and all(part.dtype == dtype for part in parts)
    numbers = np.arange(sum(counts)).astype(dtype)
    own = sum_parts(group, numbers * (group.rank + 1), counts)
    start, weight = sum(counts[: group.rank]), sum(range(1, group.size + 1))
    right = right and np.array_equal(own, weight * numbers[start : start + counts[group.rank]])
    assert all(group.gather(bool(right)))


@pytest.mark.mpi
def test_largest(group: Group) -> None:
    """Element by element, also of infinities."""
    values = np.array([group.rank, -group.rank, -np.inf, np.inf if group.rank == 0 else 0.0])
    largest(group, values)
    assert all(group.gather(values.tolist() == [group.size - 1, 0, -np.inf, np.inf]))


@pytest.mark.mpi
def test_wrong_lengths(group: Group) -> None:
    """They are refused before anything is sent."""
    with pytest.raises(ShapeError, match="are agreed"):
        gather_parts(group, np.zeros(9), lengths(group))
    with pytest.raises(ShapeError, match="are agreed"):
        sum_parts(group, np.zeros(sum(lengths(group)) + 1), lengths(group))


@pytest.mark.mpi
@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_all_neighbours_at_once(group: Group, size: int) -> None:
    """Every rank sends to both neighbours on a ring and to itself; long messages, too, that MPI does not buffer."""
    ring = [(group.rank + step) % group.size for step in (1, -1, 0)]
    sends = [(rank, np.full((2, size), 10.0 * group.rank + number)) for number, rank in enumerate(ring)]
    places = [np.zeros((2, size)) for _ in ring]
    sources = [(group.rank - step) % group.size for step in (1, -1, 0)]
    exchange(group, sends, list(zip(sources, places, strict=True)))
    right = all(
        (place == 10.0 * rank + number).all() for number, (rank, place) in enumerate(zip(sources, places, strict=True))
    )
    assert all(group.gather(bool(right)))


@pytest.mark.mpi
def test_gaps_are_refused(group: Group) -> None:
    """Before anything is sent."""
    with pytest.raises(ShapeError, match="gaps"):
        exchange(group, [(group.rank, np.zeros((4, 4))[:, ::2])], [])
