"""The sum through shared memory against NumPy's: any lengths, ranks, nodes, in turns and in
flight.
"""

import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from mpi4py import MPI

import nnmpi.comm.node_sum as node_sum
from nnmpi.base.errors import CommError, DeviceError, ShapeError
from nnmpi.comm.mpi.mpi_world import wrap
from nnmpi.comm.node import SharedMemory
from nnmpi.comm.node_sum import SharedSum, own_slice
from tests.comm.memory import shared_memory
from tests.harness.job import mpirun, run
from tests.harness.refusals import refuses, told, usage_error

LENGTHS = [0, 1, 5, 16, 1003, 100_003]


def values(rank, n, dtype, turn=0):
    """Return n numbers that differ by rank and turn."""
    draws = np.random.default_rng([rank, n, turn])
    return (
        draws.integers(0, 9, n).astype(dtype)
        if np.dtype(dtype).kind in "iu"
        else draws.normal(size=n).astype(dtype)
    )


def added(size, n, dtype, turn=0):
    """Return the sum of all ranks' values, added in rank order."""
    total = values(0, n, dtype, turn)
    for rank in range(1, size):
        total += values(rank, n, dtype, turn)
    return total


def blocks_of_two(group):
    """Return nodes for the ranks: two on each, the last one may be alone."""
    return [rank // 2 for rank in range(group.size)]


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
def test_slices_cover_an_array_once_and_begin_on_cache_lines(n, size, dtype):
    array = np.zeros(n, dtype)
    cuts = [own_slice(array, size, rank) for rank in range(size)]
    for cut in cuts:
        array[cut] += 1
    assert (array == 1).all()
    assert all(cut.start * array.itemsize % 64 == 0 or cut.start == n for cut in cuts)


EACH_ORDERED = pytest.mark.parametrize("ordered", [True, False], ids=["flags", "messages"])


@pytest.mark.mpi
@EACH_ORDERED
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_the_sum_is_that_in_rank_order(group, dtype, ordered, monkeypatch):
    monkeypatch.setattr(node_sum, "CACHED_BYTES", 0)
    monkeypatch.setattr(node_sum, "LEAST_BLOCK_BYTES", 4096)
    memory = shared_memory(group, ordered=ordered)
    right = []
    for n in LENGTHS:
        array = memory.allocate(n, dtype)
        shared_sum = SharedSum(array, memory)
        for turn in range(2):
            array[:] = values(group.rank, n, dtype, turn)
            shared_sum.run()
            right.append(np.array_equal(array, added(group.size, n, dtype, turn)))
    memory.free()
    assert all(map(all, group.gather(right)))


@pytest.mark.mpi
def test_over_several_nodes_all_ranks_have_the_same_bits(group):
    memory = shared_memory(group, nodes=blocks_of_two(group))
    outcomes = []
    for n in LENGTHS:
        array = memory.allocate(n, "float32")
        array[:] = values(group.rank, n, "float32")
        SharedSum(array, memory, tag=3).run()
        outcomes.append(
            [np.allclose(array, added(group.size, n, "float32"), atol=1e-5), array.tobytes().hex()]
        )
    memory.free()
    everyones = group.gather(outcomes)
    assert all(close for outcome in everyones for close, _ in outcome)
    assert all(outcome == everyones[0] for outcome in everyones)


@pytest.mark.mpi
def test_hundreds_in_a_row_never_meet_one_another(group):
    memory, n = SharedMemory(group), 300
    array = memory.allocate(n, "int64")
    sums = [SharedSum(array, memory, tag=5) for _ in range(2)]
    base, wrong = np.arange(n), 0
    for turn in range(800):
        array[:] = base * (group.rank + 1) + turn
        sums[turn % 3 == 0].run()  # the same tag for both, one after the other
        wrong += not np.array_equal(
            array, base * (group.size * (group.size + 1) // 2) + group.size * turn
        )
    memory.free()
    assert group.gather(wrong) == [0] * group.size


@pytest.mark.mpi
@EACH_ORDERED
@pytest.mark.parametrize("nodes", ["one node", "several"])
def test_slices_of_an_array_may_be_in_flight_at_once_in_any_order(group, nodes, ordered):
    several = blocks_of_two(group) if nodes == "several" else None
    memory = shared_memory(group, nodes=several, ordered=ordered)
    array = memory.allocate(1000, "int64")
    cuts = [slice(600, 1000), slice(37, 600), slice(0, 37)]
    sums = [SharedSum(array[cut], memory, tag) for tag, cut in enumerate(cuts)]
    right = []
    for turn in range(12):
        array[:] = values(group.rank, 1000, "int64", turn)
        for i in range(3):
            sums[(i + group.rank) % 3].start()
        under_way = list(sums)
        while under_way:
            under_way = [item for item in under_way if not item.poll()]
        right.append(np.array_equal(array, added(group.size, 1000, "int64", turn)))
    memory.free()
    assert all(map(all, group.gather(right)))


@pytest.mark.mpi
def test_without_its_barrier_the_sum_is_wrong(group, monkeypatch):
    """The planted fault that the tests above must notice."""
    memory = SharedMemory(group)
    array = memory.allocate(300, "int64")
    shared_sum = SharedSum(array, memory)
    monkeypatch.setattr(shared_sum, "_runs", shared_sum._runs[1:2])
    wrong = 0
    for turn in range(400):
        array[:] = values(group.rank, 300, "int64", turn)
        shared_sum.run()
        wrong += not np.array_equal(array, added(group.size, 300, "int64", turn))
    group.barrier()
    memory.free()
    assert (sum(group.gather(wrong)) > 0) == (group.size > 1)


@pytest.mark.mpi
def test_different_arrays_are_refused_on_all_ranks(group):
    memory = SharedMemory(group)
    last = group.rank == group.size - 1
    for odd in (np.zeros(8, "float32"), np.zeros(9, "float64")):
        mine = odd if last and group.size > 1 else np.zeros(8, "float64")
        if group.size > 1:
            refuses(
                CommError,
                "has 8 elements of float64; rank|have 8 elements of float64; rank",
                SharedSum,
                mine,
                memory,
            )
    memory.free()


@pytest.mark.mpi
def test_an_array_that_lies_elsewhere_is_refused_on_all_ranks(group):
    memory = group.memory()
    array = memory.allocate(8, "float32")
    odd = np.zeros(8, "float32") if group.rank == group.size - 1 else array
    text = told(DeviceError, lambda: SharedSum(odd, memory))
    assert all(group.size == 1 or "allocate()" in item for item in group.gather(text))
    refuses(ShapeError, "1-D", SharedSum, np.zeros((2, 3)), memory)


def test_nothing_has_to_be_freed_at_the_end(tmp_path):
    """Windows and arrays are left as they are when the program ends: no word, no crash."""
    program = """
        import numpy as np
        import nnmpi
        from nnmpi.comm.node_sum import SharedSum
        from nnmpi.parallel.fused import FusedUpdate
        group = nnmpi.start()
        memory = group.memory()
        model = nnmpi.nn.Linear(10, 100).initialize()
        fused = FusedUpdate(model.storage, nnmpi.optim.SGD(model.storage, lr=0.1), group)
        whole = SharedSum(memory.allocate(3, "float64"), memory)
        whole.run()
        fused.reduce()
        fused.update()
    """
    file = tmp_path / "program.py"
    file.write_text(dedent(program))
    environ = {"PYTHONPATH": str(Path(__file__).parents[2])}
    ending = run([*mpirun(3), sys.executable, str(file)], tmp_path / "output", 60, environ)
    assert (ending.status, ending.output) == (0, "")


@pytest.mark.mpi
def test_a_closed_twin_leaves_the_arrays(group):
    """What the other has allocated is in use: gone, it would end the process at the next sum."""
    full = group.duplicate()
    array = full.memory().allocate(50, np.float32)
    array[:] = 1
    full.all_reduce(array, "shared")
    twin = full.memory().twin(full)
    twin.allocate(7, "int64")
    twin.close()
    full.all_reduce(array, "shared")
    assert (array == full.size**2).all()
    full.memory().free()
    assert twin.locate(array) is None
    full.comm.free()


@pytest.mark.mpi
def test_it_gives_back_no_communicator_of_the_groups(group):
    """Not even where the group has its own in another object by then: freed twice, it may be
    somebody else's.
    """
    full = group.duplicate()
    memory = full.memory()
    object.__setattr__(full, "comm", wrap(full.comm.mpi))
    memory.free()
    assert full.sum_floats([1.0]) == [full.size]
    full.comm.free()


@pytest.mark.mpi
def test_a_group_makes_a_new_memory_when_its_own_was_freed(group):
    """The old barriers count in pages that are gone: to touch them would end the process."""
    full = group.duplicate()
    for _ in range(3):
        array = full.memory().allocate(50, np.float32)
        array[:] = 1
        full.all_reduce(array, "shared")
        right = bool((array == full.size).all())
        old = full.memory()
        old.free()
        assert all(full.gather(right))
        assert full.memory() is not old
        assert not full.memory().closed
    twin = full.duplicate()
    twin.all_reduce(twin.memory().allocate(5, np.float32), "shared")
    twin.free()
    full.free()
    assert full.comm.mpi == MPI.COMM_NULL


@pytest.mark.mpi
@EACH_ORDERED
@pytest.mark.parametrize("nodes", ["one node", "several"])
def test_it_is_given_back_once_however_often_it_is_asked_for(group, nodes, ordered):
    """Freed twice, a communicator would be an error, or somebody else's; what was closed refuses in
    a sentence.
    """
    full = group.duplicate()
    memory = shared_memory(
        full, nodes=blocks_of_two(full) if nodes == "several" else None, ordered=ordered
    )
    saved = memory.allocate(5, "float64")
    memory.barrier_of(3)
    for give_back in (memory.close, memory.free):
        assert memory.locate(saved) is not None
        give_back()
        give_back()
        for ask in (
            memory.barrier,
            lambda: memory.barrier_of(3),
            lambda: memory.allocate(1, "float32"),
            lambda: memory.common_all([]),
            lambda: memory.twin(full),
        ):
            usage_error("was closed or freed; ask the group", ask)
    assert memory.locate(saved) is None
    assert full.sum_floats([1.0]) == [full.size]
    full.free()
