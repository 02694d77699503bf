"""The other collectives on MPI: each in every way, by steps and by MPI's own, against what its contract says."""

import numpy as np
import pytest

from nnmpi.comm.algorithms.hierarchical import hierarchical
from nnmpi.comm.algorithms.registry import COLLECTIVES, NATIVE, find_collective
from nnmpi.comm.buffers import Buffer
from nnmpi.comm.collective import ALL_GATHER, ALL_REDUCE, BROADCAST, NEIGHBOUR_AVERAGE, REDUCE_SCATTER
from nnmpi.comm.execution import Execution, NativeExecution
from nnmpi.comm.group import Group
from nnmpi.errors import CommError, DtypeError, ShapeError, UsageError
from nnmpi.shard import part
from tests.harness.refusals import told

WAYS = [key for key in COLLECTIVES if key[0] not in (ALL_REDUCE.name, NEIGHBOUR_AVERAGE.name)]


WAYS += [(what, NATIVE) for what in (REDUCE_SCATTER.name, ALL_GATHER.name, BROADCAST.name)]


LENGTHS = [0, 1, 5, 7919, 2**18 + 3]


def values(rank: int, n: int) -> Buffer:
    """Return a rank's whole numbers."""
    return np.random.default_rng(100 + rank).integers(-9, 9, n).astype(np.float32)


def expected(group: Group, operation: str, n: int) -> tuple[slice, Buffer]:
    """Return the part of the array that the operation promises on this rank, and what is in it."""
    own, everyones = part(n, group.size, group.rank), [values(rank, n) for rank in range(group.size)]
    if operation == REDUCE_SCATTER.name:
        return slice(own.start, own.stop), np.sum(everyones, axis=0, dtype=np.float32)[own.start : own.stop]
    if operation == BROADCAST.name:
        return slice(None), everyones[0]
    chunks = [part(n, group.size, rank) for rank in range(group.size)]
    return slice(None), np.concatenate([each[c.start : c.stop] for each, c in zip(everyones, chunks, strict=True)])


@pytest.mark.both_worlds
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize(("operation", "algorithm"), WAYS)
def test_every_collective_keeps_its_contract_again_and_again(
    group: Group, operation: str, algorithm: str, n: int
) -> None:
    where, wanted = expected(group, operation, n)
    array = np.empty(n, np.float32)
    pending = group.bind(array, algorithm, 3, operation)
    right = []
    for blocking in (True, False, True):
        array[...] = values(group.rank, n)
        if blocking:
            pending.run()
        else:
            pending.start()
            while not pending.poll():
                pass
        right.append(bool(np.array_equal(array[where], wanted)))
    pending.free()
    assert group.gather(right) == [[True] * 3] * group.size


@pytest.mark.simulated
@pytest.mark.parametrize(("operation", "algorithm"), WAYS)
def test_messages_are_cut(group: Group, operation: str, algorithm: str) -> None:
    where, wanted = expected(group, operation, 7919)
    array = values(group.rank, 7919)
    if algorithm == NATIVE:
        NativeExecution(array, group.comm, operation, max_message_bytes=1000).run()
    else:
        steps = find_collective(operation, algorithm)(group.rank, group.size)
        Execution(steps, array, group.comm, 4, max_message_bytes=1000).run()
    assert group.gather(bool(np.array_equal(array[where], wanted))) == [True] * group.size


@pytest.mark.simulated
def test_methods_of_the_group(group: Group) -> None:
    n = 101
    results = []
    for run, operation in ((group.reduce_scatter, REDUCE_SCATTER.name), (group.all_gather, ALL_GATHER.name)):
        for algorithm in (NATIVE, "ring", "tree"):
            array = values(group.rank, n)
            run(array, algorithm)
            where, wanted = expected(group, operation, n)
            results.append(bool(np.array_equal(array[where], wanted)))
    assert group.gather(results) == [[True] * 6] * group.size


@pytest.mark.both_worlds
def test_neighbours_are_averaged(group: Group) -> None:
    size, array = group.size, values(group.rank, 50)
    before = [values(rank, 50) for rank in range(size)]
    group.average_neighbours(array)
    left, right = before[(group.rank - 1) % size], before[(group.rank + 1) % size]
    wanted = before[0] if size == 1 else sum(before) / 2 if size == 2 else (left + 2 * before[group.rank] + right) / 4
    assert group.gather(bool(np.array_equal(array, wanted))) == [True] * size


@pytest.mark.simulated
def test_gossip_keeps_the_mean_and_brings_the_ranks_together(group: Group) -> None:
    array = np.array([float(group.rank)])
    for _ in range(40):
        group.average_neighbours(array)
    mean = (group.size - 1) / 2
    left = group.size * np.cos(np.pi / group.size) ** 80
    assert all(abs(value - mean) <= max(left, 1e-12) for value in group.gather(float(array[0])))
    assert group.sum_floats([float(array[0])])[0] == pytest.approx(mean * group.size)


@pytest.mark.simulated
@pytest.mark.parametrize("layout", ["one", "each", "uneven", "scattered"])
def test_hierarchical_sums_over_any_nodes(group: Group, layout: str) -> None:
    size = group.size
    nodes = {
        "one": [0] * size,
        "each": list(range(size)),
        "uneven": [0] + [1] * (size - 1),
        "scattered": [rank % 3 for rank in range(size)],
    }[layout]
    array = values(group.rank, 1003)
    Execution(hierarchical(group.rank, size, nodes), array, group.comm, 5).run()
    total = np.sum([values(rank, 1003) for rank in range(size)], axis=0, dtype=np.float32)
    assert group.gather(bool(np.array_equal(array, total))) == [True] * size


@pytest.mark.mpi
def test_all_ranks_here_are_on_one_node(group: Group) -> None:
    assert group.nodes() == [0] * group.size


@pytest.mark.simulated
def test_a_persistent_execution_refuses_a_second_start(group: Group) -> None:
    pending = group.bind(np.ones(1000, np.float32), "ring", 6)
    pending.start()
    refused = told(CommError, pending.start) != ""
    pending.wait()
    assert group.gather(refused) == [group.size > 1] * group.size


@pytest.mark.simulated
def test_what_there_is_not_is_refused_with_the_names(group: Group) -> None:
    array = np.ones(4, np.float32)
    with pytest.raises(UsageError, match="no all-gather by 'ps'; the names are ring, tree"):
        group.all_gather(array, "ps")
    with pytest.raises(UsageError, match="no collective 'all-to-all'; there are all-reduce"):
        group.bind(array, "ring", 0, "all-to-all")
    with pytest.raises(UsageError, match="no neighbour-average of its own"):
        group.bind(array, NATIVE, 0, NEIGHBOUR_AVERAGE.name)
    with pytest.raises(DtypeError, match="int32"):
        group.average_neighbours(np.ones(4, np.int32))


@pytest.mark.simulated
@pytest.mark.parametrize("call", ["reduce_scatter", "all_gather", "average_neighbours"])
def test_arrays_that_differ_are_refused_on_all_ranks(group: Group, call: str) -> None:
    said = told(CommError, lambda: getattr(group, call)(np.ones(1000 + group.rank, np.float32)))
    everyone = group.gather(said)
    if group.size > 1:
        assert all("rank 0 has 1000 elements of float32" in each and "rank 1 has 1001" in each for each in everyone)
    else:
        assert everyone == [""]


# Gathering and summing parts of any lengths, and the largest of each element.


def lengths(group: Group) -> list[int]:
    """Return a length for each rank: 3, 0, 2, 5, 3, 0 ..."""
    return [(3, 0, 2, 5)[rank % 4] for rank in range(group.size)]


@pytest.mark.both_worlds
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_parts(group: Group, dtype: str) -> None:
    """Each rank's part comes to all, or the sum of all ranks' values for it to its owner; some are empty."""
    counts = lengths(group)
    parts = group.all_gather_v(np.full(counts[group.rank], group.rank + 1, dtype), counts)
    right = all((part == rank + 1).all() and part.size == counts[rank] for rank, part in enumerate(parts))
    right = right and all(part.dtype == dtype for part in parts)
    numbers = np.arange(sum(counts)).astype(dtype)
    own = group.reduce_scatter_v(numbers * (group.rank + 1), counts)
    start, weight = sum(counts[: group.rank]), sum(range(1, group.size + 1))
    right = right and np.array_equal(own, weight * numbers[start : start + counts[group.rank]])
    assert all(group.gather(bool(right)))


@pytest.mark.both_worlds
def test_largest(group: Group) -> None:
    """Element by element, also of infinities."""
    values = np.array([group.rank, -group.rank, -np.inf, np.inf if group.rank == 0 else 0.0])
    group.all_reduce_max(values)
    assert all(group.gather(values.tolist() == [group.size - 1, 0, -np.inf, np.inf]))


@pytest.mark.simulated
def test_wrong_lengths(group: Group) -> None:
    """They are refused before anything is sent."""
    with pytest.raises(ShapeError, match="are agreed"):
        group.all_gather_v(np.zeros(9), lengths(group))
    with pytest.raises(ShapeError, match="are agreed"):
        group.reduce_scatter_v(np.zeros(sum(lengths(group)) + 1), lengths(group))
