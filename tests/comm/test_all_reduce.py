"""All-reduce on MPI, by every algorithm, against NumPy's sum.

Every rank computes what every other rank has from a seed, so the expected sum needs no communication. No rank asserts
alone: outcomes are gathered first.
"""

import random
import zlib

import numpy as np
import pytest

from nnmpi.comm.algorithms.registry import ALGORITHMS, NATIVE
from nnmpi.comm.buffers import DTYPES, Buffer, check_buffer
from nnmpi.comm.execution import Execution, NativeExecution, Pending
from nnmpi.comm.group import Group
from nnmpi.errors import CommError, DtypeError, NnmpiError, ShapeError, UsageError
from tests.harness.refusals import told

EVERY = [NATIVE, *ALGORITHMS]
LENGTHS = [0, 1, 2, 5, 7919, 2**20 + 3]


def whole(rank: int, n: int, dtype: object = np.float32) -> Buffer:
    """Return n whole numbers; each rank's are another multiple of the same ones, so that their sums are exact."""
    return ((rank + 1) * np.random.default_rng(n).integers(0, 4, n)).astype(dtype)


def total(size: int, n: int, dtype: object = np.float32) -> Buffer:
    """Return the sum of all ranks' `whole`; for 8 ranks it still fits into an int8."""
    return whole(size * (size + 1) // 2 - 1, n, dtype)


def cut(group: Group, array: Buffer, algorithm: str, max_bytes: int, tag: int = 7) -> Pending:
    """Bind an all-reduce whose messages are at most max_bytes long."""
    if algorithm == NATIVE:
        return NativeExecution(array, group.comm, max_message_bytes=max_bytes)
    return Execution(ALGORITHMS[algorithm](group.rank, group.size), array, group.comm, tag, max_bytes, persistent=True)


@pytest.mark.both_worlds
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("algorithm", [*EVERY, "auto"])
def test_whole_numbers_are_summed_exactly(group: Group, algorithm: str, n: int, dtype: object) -> None:
    array = whole(group.rank, n, dtype)
    group.all_reduce(array, algorithm)
    assert group.gather(np.array_equal(array, total(group.size, n, dtype))) == [True] * group.size


@pytest.mark.simulated
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("algorithm", EVERY)
def test_any_numbers_are_summed_closely_and_alike_on_all_ranks(group: Group, algorithm: str, dtype: type) -> None:
    every = [np.random.default_rng(rank).standard_normal(7919).astype(dtype) for rank in range(group.size)]
    array = every[group.rank].copy()
    group.all_reduce(array, algorithm)
    exact = np.sum(every, axis=0, dtype=np.float64)
    bound = group.size * np.finfo(dtype).eps * np.sum(np.abs(every), axis=0, dtype=np.float64)
    outcome = [bool(np.all(np.abs(array - exact) <= bound)), zlib.crc32(array.tobytes())]
    outcomes = group.gather(outcome)
    assert outcomes == [[True, outcome[1]]] * group.size


@pytest.mark.simulated
@pytest.mark.parametrize("algorithm", EVERY)
def test_the_same_sum_has_the_same_bits_every_time(group: Group, algorithm: str) -> None:
    first = None
    for _ in range(5):
        array = np.random.default_rng(group.rank).standard_normal(30011).astype(np.float32)
        group.all_reduce(array, algorithm)
        first = array if first is None else first
        assert group.gather(bool(np.array_equal(array, first))) == [True] * group.size


@pytest.mark.both_worlds
@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize("algorithm", EVERY)
def test_every_dtype(group: Group, algorithm: str, dtype: np.dtype) -> None:
    array = whole(group.rank, 101, dtype)
    group.all_reduce(array, algorithm)
    outcome = array.dtype == dtype and np.array_equal(array, total(group.size, 101, dtype))
    assert group.gather(bool(outcome)) == [True] * group.size


@pytest.mark.both_worlds
@pytest.mark.parametrize("max_bytes", [1, 16, 100])
@pytest.mark.parametrize("algorithm", EVERY)
def test_long_messages_are_cut(group: Group, algorithm: str, max_bytes: int) -> None:
    array = whole(group.rank, 61)
    bound = cut(group, array, algorithm, max_bytes)
    bound.run()
    outcome = [np.array_equal(array, total(group.size, 61))]
    array[:] = whole(group.rank, 61)
    bound.start()
    while not bound.poll():
        pass
    outcome.append(np.array_equal(array, total(group.size, 61)))
    assert group.gather(outcome) == [[True, True]] * group.size


@pytest.mark.both_worlds
@pytest.mark.parametrize("algorithm", EVERY)
def test_a_bound_sum_runs_again_and_again(group: Group, algorithm: str) -> None:
    array = np.empty(1000, np.float32)
    bound = group.bind(array, algorithm)
    for round_ in range(4):
        array[:] = whole(group.rank, 1000) + round_
        bound.run()
        expected = total(group.size, 1000) + round_ * group.size
        assert group.gather(bool(np.array_equal(array, expected))) == [True] * group.size


@pytest.mark.both_worlds
@pytest.mark.parametrize("n", [3, 40009])
@pytest.mark.parametrize("seed", range(3))
def test_several_in_flight_move_on_in_any_order(group: Group, n: int, seed: int) -> None:
    """Each rank starts and polls them in an order of its own; only their tags keep them apart."""
    chance = random.Random(seed * 100 + group.rank)
    names = [*ALGORITHMS] * 3
    arrays = [whole(group.rank, n + i) for i in range(len(names))]
    bound = [group.bind(array, name, tag) for tag, (array, name) in enumerate(zip(arrays, names, strict=True))]
    waiting = list(range(len(names)))
    flying: list[int] = []
    while waiting or flying:
        if waiting and chance.random() < 0.3:
            flying.append(waiting.pop(chance.randrange(len(waiting))))
            bound[flying[-1]].start()
        if flying:
            i = chance.choice(flying)
            if bound[i].poll():
                flying.remove(i)
    wrong = [i for i, array in enumerate(arrays) if not np.array_equal(array, total(group.size, n + i))]
    assert group.gather(wrong) == [[]] * group.size


@pytest.mark.simulated
def test_those_without_a_tag_are_kept_apart_too(group: Group) -> None:
    arrays = [whole(group.rank, 10 + i) for i in range(12)]
    flying = [group.start_all_reduce(array, EVERY[i % len(EVERY)]) for i, array in enumerate(arrays)]
    between = whole(group.rank, 9)
    group.all_reduce(between, "ring")  # a blocking one meets none of them
    for pending in reversed(flying):
        while not all(one.poll() for one in flying):
            pass
        pending.wait()
    right = [np.array_equal(array, total(group.size, 10 + i)) for i, array in enumerate(arrays)]
    assert group.gather(right + [np.array_equal(between, total(group.size, 9))]) == [[True] * 13] * group.size


@pytest.mark.simulated
@pytest.mark.parametrize("algorithm", EVERY)
def test_a_running_sum_cannot_be_started_again(group: Group, algorithm: str) -> None:
    array = whole(group.rank, 50)
    pending = group.start_all_reduce(array, algorithm)
    refused = False
    try:
        pending.start()
    except CommError as error:
        refused = "still running" in str(error)
    pending.wait()
    outcome = refused or (algorithm != NATIVE and group.size == 1)  # one rank has finished before it can be asked
    assert group.gather(outcome) == [True] * group.size
    assert group.gather(np.array_equal(array, total(group.size, 50))) == [True] * group.size


@pytest.mark.simulated
@pytest.mark.parametrize("algorithm", EVERY)
def test_a_check_names_what_differs_on_all_ranks(group: Group, algorithm: str) -> None:
    last = group.size - 1
    array = np.ones(10 if group.rank < last else 11, np.float32 if group.rank < last else np.float64)
    text = told(CommError, lambda: group.all_reduce(array, algorithm, check=True))
    if group.size == 1:
        assert text == ""
        return
    others = "rank 0 has" if last == 1 else f"ranks 0-{last - 1} have"
    expected = f"{others} 10 elements of float32; rank {last} has 11 elements of float64"
    assert [expected in found for found in group.gather(text)] == [True] * group.size


@pytest.mark.simulated
def test_a_check_names_the_rank_whose_array_cannot_be_summed(group: Group) -> None:
    array = np.ones(8, np.float32)
    kind = "none"
    try:
        group.all_reduce(array if group.rank else array[::2], check=True)
    except NnmpiError as error:
        kind = f"{type(error).__name__}: {error}"
    everyones = group.gather(kind)
    alone = "ShapeError" if group.size == 1 else "CommError"
    assert all(found.startswith(alone) and "has gaps" in found for found in everyones)


@pytest.mark.simulated
def test_a_check_passes_what_fits(group: Group) -> None:
    array = whole(group.rank, 12)
    group.all_reduce(array, "tree", check=True)
    assert group.gather(np.array_equal(array, total(group.size, 12))) == [True] * group.size


@pytest.mark.simulated
def test_unknown_names_and_tags_are_refused(group: Group) -> None:
    with pytest.raises(UsageError, match="'rabbit'"):
        group.all_reduce(np.zeros(3), "rabbit")
    with pytest.raises(UsageError, match="tag 16384 is not one of"):
        group.bind(np.zeros(3), "ring", 16384)


@pytest.mark.parametrize(
    ("array", "kind", "sentence"),
    [
        ([1.0], DtypeError, "NumPy arrays, not list"),
        (np.zeros(3, np.float16), DtypeError, "cannot add float16"),
        (np.zeros(3, bool), DtypeError, "cannot add bool"),
        (np.zeros(3, ">f4"), DtypeError, "cannot add >f4"),
        (np.array(["a"], object), DtypeError, "cannot add object"),
        (np.zeros((2, 3)), ShapeError, r"not shape \(2, 3\); pass array.reshape"),
        (np.zeros(6)[::2], ShapeError, "has gaps"),
        (np.broadcast_to(np.zeros(1), 3), ShapeError, "has gaps"),
        (np.frombuffer(bytes(8)), ShapeError, "read-only"),
    ],
)
def test_arrays_that_cannot_be_summed_are_refused(array: object, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        check_buffer(array)
