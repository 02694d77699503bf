"""The order and the number of the timed calls."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.collectives.pattern import TILE, Pattern, Range
from benchmarks.collectives.timing import LEAST, WARM_UP, Interrupted, gather, never, nothing, take
from benchmarks.harness.turns import shuffled
from nnmpi.backend.backend import numpy_backend
from nnmpi.comm.collective import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER, Contract
from nnmpi.shard import split
from tests.device.library import device_backend, is_device_array


@dataclass
class Alone:
    """A rank without others."""

    rank: int = 0
    size: int = 1

    def barrier(self) -> None:
        """Go on."""

    def gather_floats(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values[None]


@dataclass
class Counting:
    """A contestant that notes what is done with it."""

    name: str
    log: list[tuple[str, str, int]] = field(default_factory=list)

    def refill(self, call: int) -> None:
        self.log.append((self.name, "refill", call))

    def run(self) -> None:
        self.log.append((self.name, "run", -1))


def test_every_round_has_every_contestant_in_a_changing_order() -> None:
    rounds = [shuffled(range(4), call) for call in range(50)]
    assert all(sorted(each) == [0, 1, 2, 3] for each in rounds)
    assert {each[0] for each in rounds} == {0, 1, 2, 3}
    assert rounds == [shuffled(range(4), call) for call in range(50)]


def test_every_call_is_refilled_and_verified_and_has_stamps() -> None:
    log: list[tuple[str, str, int]] = []
    contestants = [Counting(name, log) for name in "abc"]
    stamps = take(
        contestants, Alone(), 4, 1.0, lambda one, call: log.append((one.name, "verify", call)), lambda seconds: 0
    )
    assert stamps.shape == (3, 2, 4)
    assert (stamps[:, 1] >= stamps[:, 0]).all()
    assert len(log) == 3 * 3 * (WARM_UP + 4)
    for first, second, third in zip(log[::3], log[1::3], log[2::3], strict=True):
        assert (first[0], first[1], second[1], third[1]) == (second[0], "refill", "run", "verify")
        assert first[2] == third[2]
    assert {call for _, what, call in log if what == "verify"} == set(range(WARM_UP + 4))
    assert gather(stamps, Alone()).shape == (1, 3, 2, 4)


def test_a_small_budget_gives_the_least_number_of_rounds() -> None:
    assert take([Counting("a")], Alone(), None, 1e-9, nothing, never).shape == (1, 2, LEAST)


def test_a_signal_ends_it_after_the_round() -> None:
    contestant = Counting("a")
    with pytest.raises(Interrupted) as caught:
        take([contestant], Alone(), 10, 1.0, nothing, lambda seconds: 2 * (len(contestant.log) >= 10))
    assert caught.value.args == (2,)
    assert len(contestant.log) == 10


# What the benchmark fills buffers with shows every mistake of a collective.


CONTRACTS = [ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER]


def filled(contract: Contract, size: int, elements: int, dtype: str, call: int) -> list[NDArray[Any]]:
    """Return what each rank has before a call."""
    arrays = []
    for rank in range(size):
        array = np.full(elements, 55, dtype)
        Pattern(contract, rank, size, elements, dtype, numpy_backend()).fill(array, call)
        arrays.append(array)
    return arrays


def done(contract: Contract, before: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return what each rank has after the collective, the obvious way."""
    chunks = split(before[0].size, len(before))
    total = np.sum(before, axis=0, dtype=before[0].dtype)
    if contract is ALL_REDUCE:
        return [total.copy() for _ in before]
    if contract is BROADCAST:
        return [before[0].copy() for _ in before]
    if contract is ALL_GATHER:
        joined = np.concatenate([before[rank][chunk.start : chunk.stop] for rank, chunk in enumerate(chunks)])
        return [joined.copy() for _ in before]
    after = [np.full_like(array, 99) for array in before]
    for array, chunk in zip(after, chunks, strict=True):
        array[chunk.start : chunk.stop] = total[chunk.start : chunk.stop]
    return after


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("elements", "dtype"), [(1, "float32"), (7, "int8"), (5 * TILE + 11, "float32"), (40, "uint64")]
)
def test_the_right_result_is_right(contract: Contract, size: int, elements: int, dtype: str) -> None:
    for call in range(3):
        after = done(contract, filled(contract, size, elements, dtype, call))
        for rank, array in enumerate(after):
            pattern = Pattern(contract, rank, size, elements, dtype, numpy_backend())
            assert pattern.first_wrong(array, call) is None


@pytest.mark.parametrize("index", [0, 5, TILE - 1, TILE, 3 * TILE + 2])
def test_one_wrong_element_is_found_and_named(index: int) -> None:
    (array, _) = done(ALL_REDUCE, filled(ALL_REDUCE, 2, 3 * TILE + 3, "float32", 1))
    right = float(array[index])
    array[index] += 1
    found = Pattern(ALL_REDUCE, 0, 2, array.size, "float32", numpy_backend()).first_wrong(array, 1)
    assert found is not None
    assert (found.index, found.found, found.expected) == (index, right + 1, right)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_the_result_of_the_call_before_is_wrong(contract: Contract) -> None:
    after = done(contract, filled(contract, 3, 100, "float32", 4))
    for rank, array in enumerate(after):
        assert Pattern(contract, rank, 3, 100, "float32", numpy_backend()).first_wrong(array, 5) is not None


def test_a_missing_a_doubled_and_a_misplaced_part_are_wrong() -> None:
    before = filled(ALL_REDUCE, 3, 3 * TILE, "float32", 0)
    pattern = Pattern(ALL_REDUCE, 0, 3, 3 * TILE, "float32", numpy_backend())
    a, b, c = before
    assert pattern.first_wrong(a + b + c, 0) is None
    for wrong in (a, a + b, a + b + b, b + b + b, a + a + c, np.roll(a + b + c, TILE)):
        assert pattern.first_wrong(wrong, 0) is not None


@pytest.mark.parametrize("contract", [ALL_GATHER, BROADCAST], ids=lambda contract: contract.name)
def test_what_has_not_arrived_is_wrong(contract: Contract) -> None:
    for rank, array in enumerate(filled(contract, 3, 100, "float32", 0)):
        found = Pattern(contract, rank, 3, 100, "float32", numpy_backend()).first_wrong(array, 0)
        assert (found is None) == (contract is BROADCAST and rank == 0)


def test_a_device_array_gets_the_same_values() -> None:
    (host,) = filled(ALL_REDUCE, 1, 2 * TILE + 5, "float32", 2)
    device = device_backend().zeros(host.size, "float32")
    assert is_device_array(device)
    Pattern(ALL_REDUCE, 0, 1, host.size, "float32", device_backend()).fill(device, 2)
    assert np.array_equal(device_backend().to_host(device), host)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "float32", "int64"])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 33, 100])
def test_the_sum_of_the_largest_values_fits(dtype: str, size: int) -> None:
    found = Range.fitting(dtype, size)
    largest = size * (found.tile + found.block + found.call + found.weight)
    assert int(np.dtype(dtype).type(largest)) == largest
    assert min(found.tile, found.block, found.call, found.weight) >= (0 if size > 30 else 1)
