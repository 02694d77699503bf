"""All collectives on MPI and on simulated ranks: each in every way, by steps and by MPI's own,
against its contract.

Every rank computes what every other rank has from a seed, so what is expected needs no
communication. No rank asserts alone: outcomes are gathered first.
"""

import random
import zlib

import numpy as np
import pytest

from nnmpi import NnmpiError
from nnmpi.base.errors import CommError, DtypeError, ShapeError, UsageError
from nnmpi.base.shard import part
from nnmpi.comm import buffers
from nnmpi.comm.algorithms.hierarchical import hierarchical
from nnmpi.comm.algorithms.registry import ALGORITHMS, COLLECTIVES, NATIVE
from nnmpi.comm.algorithms.ring import ring
from nnmpi.comm.algorithms.tree import tree
from nnmpi.comm.buffers import DTYPES, check_buffer
from nnmpi.comm.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    NEIGHBOUR_AVERAGE,
    REDUCE_SCATTER,
)
from nnmpi.comm.execution import Execution
from tests.harness.refusals import told

NATIVES = (ALL_REDUCE.name, REDUCE_SCATTER.name, ALL_GATHER.name, BROADCAST.name)
IN_PLACE = [key for key in COLLECTIVES if key[0] != ALL_TO_ALL.name]
WAYS = [*IN_PLACE, *((operation, NATIVE) for operation in NATIVES)]
EVERY = [NATIVE, *ALGORITHMS]


def values(rank, n, dtype=np.float32):
    """Return n whole numbers, other ones on each rank; sums of 8 ranks still fit into an int8."""
    return np.random.default_rng(100 + rank).integers(0, 9, n).astype(dtype)


def expected(group, operation, n, dtype=np.float32):
    """Return the part of the array that the operation promises on this rank, and what is in it."""
    size, everyones = group.size, [values(rank, n, dtype) for rank in range(group.size)]
    total, local = np.sum(everyones, axis=0, dtype=dtype), part(n, size, group.rank)
    if operation == REDUCE_SCATTER.name:
        return slice(local.start, local.stop), total[local.start : local.stop]
    if operation == BROADCAST.name:
        return slice(None), everyones[0]
    if operation == ALL_GATHER.name:
        chunks = [part(n, size, rank) for rank in range(size)]
        return slice(None), np.concatenate(
            [everyone[c.start : c.stop] for everyone, c in zip(everyones, chunks, strict=True)]
        )
    if operation == NEIGHBOUR_AVERAGE.name and size > 2:
        mixed = (
            everyones[group.rank - 1]
            + everyones[group.rank] * 2
            + everyones[(group.rank + 1) % size]
        )
        return slice(None), mixed.astype(dtype)
    return slice(None), total


def run_each_way(group, pending, array, operation):
    """Run it blocking and polled, again and again."""
    where, target = expected(group, operation, array.size, array.dtype)
    right = []
    for blocking in (True, False, True):
        array[...] = values(group.rank, array.size, array.dtype)
        if blocking:
            pending.run()
        else:
            pending.start()
            while not pending.poll():
                pass
        right.append(bool(np.array_equal(array[where], target)))
    assert group.gather(right) == [[True] * 3] * group.size


EACH_OPERATION_AND_ALGORITHM = pytest.mark.parametrize("operation, algorithm", WAYS)


@pytest.mark.both_worlds
@pytest.mark.parametrize("n", [0, 1, 5, 7919])
@EACH_OPERATION_AND_ALGORITHM
def test_every_collective_keeps_its_contract_again_and_again(group, operation, algorithm, n):
    array = np.empty(n, np.float32)
    run_each_way(group, group.bind(array, algorithm, 3, operation), array, operation)


@pytest.mark.mpi
@EACH_OPERATION_AND_ALGORITHM
def test_long_arrays(group, operation, algorithm):
    array = np.empty(2**18 + 3, np.float32)
    run_each_way(group, group.bind(array, algorithm, 3, operation), array, operation)


@pytest.mark.both_worlds
@pytest.mark.parametrize("max_bytes", [1, 100])
@EACH_OPERATION_AND_ALGORITHM
def test_messages_are_cut(group, operation, algorithm, max_bytes, monkeypatch):
    monkeypatch.setattr(buffers, "MAX_MESSAGE_BYTES", max_bytes)
    array = np.empty(61, np.float32)
    run_each_way(group, group.bind(array, algorithm, 4, operation), array, operation)


@pytest.mark.both_worlds
@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize("algorithm", [NATIVE, "ring"])
def test_every_dtype(group, algorithm, dtype):
    array = values(group.rank, 101, dtype)
    group.all_reduce(array, algorithm)
    outcome = array.dtype == dtype and np.array_equal(
        array, expected(group, ALL_REDUCE.name, 101, dtype)[1]
    )
    assert group.gather(bool(outcome)) == [True] * group.size


@pytest.mark.simulated
def test_methods_of_the_group(group):
    results = []
    for run, operation in (
        (group.reduce_scatter, REDUCE_SCATTER.name),
        (group.all_gather, ALL_GATHER.name),
    ):
        for algorithm in (NATIVE, "ring", "tree"):
            array = values(group.rank, 101)
            run(array, algorithm)
            where, target = expected(group, operation, 101)
            results.append(bool(np.array_equal(array[where], target)))
    assert group.gather(results) == [[True] * 6] * group.size


@pytest.mark.simulated
@pytest.mark.parametrize("algorithm", EVERY)
def test_any_numbers_are_summed_closely_and_alike_on_all_ranks_every_time(group, algorithm):
    every = [
        np.random.default_rng(rank).standard_normal(7919).astype(np.float32)
        for rank in range(group.size)
    ]
    exact = np.sum(every, axis=0, dtype=np.float64)
    bound = group.size * np.finfo(np.float32).eps * np.sum(np.abs(every), axis=0, dtype=np.float64)
    outcomes = []
    for _ in range(3):
        array = every[group.rank].copy()
        group.all_reduce(array, algorithm)
        outcomes.append([bool(np.all(np.abs(array - exact) <= bound)), zlib.crc32(array.tobytes())])
    assert group.gather(outcomes) == [[[True, outcomes[0][1]]] * 3] * group.size


@pytest.mark.both_worlds
@pytest.mark.parametrize("n", [3, 40009])
def test_several_in_flight_move_on_in_any_order(group, n):
    """Each rank starts and polls them in an order of its own; only their tags keep them apart."""
    chance = random.Random(group.rank)
    names = [*ALGORITHMS] * 3
    arrays = [values(group.rank, n + i) for i in range(len(names))]
    bound = [
        group.bind(array, name, tag)
        for tag, (array, name) in enumerate(zip(arrays, names, strict=True))
    ]
    waiting = list(range(len(names)))
    flying = []
    while waiting or flying:
        if waiting and chance.random() < 0.3:
            flying.append(waiting.pop(chance.randrange(len(waiting))))
            bound[flying[-1]].start()
        if flying:
            i = chance.choice(flying)
            if bound[i].poll():
                flying.remove(i)
    wrong = [
        i
        for i, array in enumerate(arrays)
        if (array != expected(group, ALL_REDUCE.name, n + i)[1]).any()
    ]
    assert group.gather(wrong) == [[]] * group.size


@pytest.mark.simulated
@pytest.mark.parametrize("algorithm", EVERY)
def test_a_running_sum_cannot_be_started_again(group, algorithm):
    pending = group.bind(values(group.rank, 50), algorithm, 6)
    pending.start()
    refused = "still running" in told(CommError, pending.start)
    pending.wait()
    # one rank has finished before it can be asked
    outcome = refused or (algorithm != NATIVE and group.size == 1)
    assert group.gather(outcome) == [True] * group.size


@pytest.mark.simulated
@pytest.mark.parametrize("layout", ["one", "each", "uneven", "scattered"])
def test_hierarchical_sums_over_any_nodes(group, layout):
    size = group.size
    nodes = {
        "one": [0] * size,
        "each": list(range(size)),
        "uneven": [0] + [1] * (size - 1),
        "scattered": [rank % 3 for rank in range(size)],
    }[layout]
    array = values(group.rank, 1003)
    Execution(hierarchical(group.rank, size, nodes), array, group.comm, 5).run()
    assert (
        group.gather(bool(np.array_equal(array, expected(group, ALL_REDUCE.name, 1003)[1])))
        == [True] * size
    )


# What is refused.


@pytest.mark.simulated
@pytest.mark.parametrize("call", ["all_reduce", "reduce_scatter", "all_gather"])
def test_arrays_that_differ_are_named_on_all_ranks(group, call):
    last = group.size - 1
    array = np.ones(
        10 if group.rank < last else 11, np.float32 if group.rank < last else np.float64
    )
    result = group.gather(told(CommError, lambda: getattr(group, call)(array)))
    if group.size == 1:
        assert result == [""]
        return
    others = "rank 0 has" if last == 1 else f"ranks 0-{last - 1} have"
    assert all(
        f"{others} 10 elements of float32; rank {last} has 11 elements of float64" in text
        for text in result
    )


@pytest.mark.simulated
def test_the_rank_whose_array_cannot_be_summed_is_named(group):
    array = np.ones(8, np.float32)
    everyones = group.gather(
        told(NnmpiError, lambda: group.all_reduce(array if group.rank else array[::2]))
    )
    assert all("is not contiguous" in result for result in everyones)


@pytest.mark.simulated
def test_what_there_is_not_is_refused_with_the_names(group):
    array = np.ones(4, np.float32)
    for call, words in (
        (lambda: group.all_reduce(array, "rabbit"), "'rabbit'"),
        (lambda: group.bind(array, "ring", 16385), "tag 16385"),
        (
            lambda: group.all_gather(array, "star"),
            "all-gather has no algorithm 'star'; choose one of ring, tree",
        ),
        (lambda: group.bind(array, "ring", 0, "to-nobody"), "no collective 'to-nobody'"),
        (
            lambda: group.bind(array, NATIVE, 0, NEIGHBOUR_AVERAGE.name),
            "no native neighbour-average",
        ),
    ):
        assert words in told(UsageError, call)


@pytest.mark.parametrize(
    "array, kind, words",
    [
        ([1.0], DtypeError, "list"),
        (np.zeros(3, np.float16), DtypeError, "float16"),
        (np.zeros(3, ">f4"), DtypeError, ">f4"),
        (np.array(["a"], object), DtypeError, "object"),
        (np.zeros((2, 3)), ShapeError, r"\(2, 3\)"),
        (np.zeros(6)[::2], ShapeError, "is not contiguous"),
        (np.frombuffer(bytes(8)), ShapeError, "read-only"),
    ],
)
def test_arrays_that_cannot_be_summed_are_refused(array, kind, words):
    with pytest.raises(kind, match=words):
        check_buffer(array)


# Gathering and summing parts of any lengths, and the largest of each element.


def lengths(group):
    """Return a length for each rank: 3, 0, 2, 5, 3, 0 ..."""
    return [(3, 0, 2, 5)[rank % 4] for rank in range(group.size)]


@pytest.mark.both_worlds
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_parts(group, dtype):
    """Each rank's part comes to all, or the sum of all ranks' values for it to its owner; some are
    empty.
    """
    counts = lengths(group)
    parts = group.all_gather_v(np.full(counts[group.rank], group.rank + 1, dtype), counts)
    right = all(
        (part == rank + 1).all() and part.size == counts[rank] for rank, part in enumerate(parts)
    )
    right = right and all(part.dtype == dtype for part in parts)
    numbers = np.arange(sum(counts)).astype(dtype)
    local = group.reduce_scatter_v(numbers * (group.rank + 1), counts)
    start, weight = sum(counts[: group.rank]), sum(range(1, group.size + 1))
    right = right and np.array_equal(local, weight * numbers[start : start + counts[group.rank]])
    for call in (group.all_gather_v, group.reduce_scatter_v):
        with pytest.raises(ShapeError, match="its count is"):
            call(np.zeros(sum(counts) + 99), counts)
        for others in ([*counts, 1], counts[:-1]):
            with pytest.raises(
                ShapeError, match="counts for .* give the length of each rank's part"
            ):
                call(np.zeros(sum(counts)), others)
    assert all(group.gather(bool(right)))


@pytest.mark.simulated
def test_what_runs_is_what_was_proved(group):
    """A function that gives nothing when it is asked again; and one that gives each rank other
    proved steps.
    """
    asked = 0

    def fickle(rank, size):
        nonlocal asked
        asked += 1
        return ring(rank, size) if asked <= size else ()

    def own(rank, size):
        return ring(rank, size) if group.rank == 0 else tree(rank, size)

    where, target = expected(group, ALL_REDUCE.name, 7)
    for _ in range(2):
        array = values(group.rank, 7)
        group.all_reduce(array, fickle)
        assert all(group.gather(bool((array[where] == target).all())))
    result = told(CommError, lambda: group.all_reduce(values(group.rank, 7), own))
    assert all(group.gather(("different steps by own" in result) is (group.size > 1)))
