"""Gathering and summing parts of any lengths, and the largest of each element."""

from __future__ import annotations

import numpy as np
import pytest

from nnmpi.comm.group import Group
from nnmpi.comm.vector_collectives import all_gather_v, all_reduce_max, reduce_scatter_v
from nnmpi.errors import ShapeError


def lengths(group: Group) -> list[int]:
    """Return a length for each rank: 3, 0, 2, 5, 3, 0 ..."""
    return [(3, 0, 2, 5)[rank % 4] for rank in range(group.size)]


@pytest.mark.both_worlds
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_parts(group: Group, dtype: str) -> None:
    """Each rank's part comes to all, or the sum of all ranks' values for it to its owner; some are empty."""
    counts = lengths(group)
    parts = all_gather_v(group, np.full(counts[group.rank], group.rank + 1, dtype), counts)
    right = all((part == rank + 1).all() and part.size == counts[rank] for rank, part in enumerate(parts))
    right = right and all(part.dtype == dtype for part in parts)
    numbers = np.arange(sum(counts)).astype(dtype)
    own = reduce_scatter_v(group, numbers * (group.rank + 1), counts)
    start, weight = sum(counts[: group.rank]), sum(range(1, group.size + 1))
    right = right and np.array_equal(own, weight * numbers[start : start + counts[group.rank]])
    assert all(group.gather(bool(right)))


@pytest.mark.both_worlds
def test_largest(group: Group) -> None:
    """Element by element, also of infinities."""
    values = np.array([group.rank, -group.rank, -np.inf, np.inf if group.rank == 0 else 0.0])
    all_reduce_max(group, values)
    assert all(group.gather(values.tolist() == [group.size - 1, 0, -np.inf, np.inf]))


@pytest.mark.simulated
def test_wrong_lengths(group: Group) -> None:
    """They are refused before anything is sent."""
    with pytest.raises(ShapeError, match="are agreed"):
        all_gather_v(group, np.zeros(9), lengths(group))
    with pytest.raises(ShapeError, match="are agreed"):
        reduce_scatter_v(group, np.zeros(sum(lengths(group)) + 1), lengths(group))
