"""Shared windows and the arrays in them: what lies where, who sees it, and what is refused."""

import resource
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nnmpi.base.errors import DeviceError, ShapeError
from nnmpi.comm.mpi import mpi_world
from nnmpi.comm.node import SharedMemory
from nnmpi.comm.world import PAGE_BYTES
from tests.comm.memory import shared_memory
from tests.harness.refusals import refuses


@pytest.mark.both_worlds
def test_every_rank_sees_what_the_others_write_into_their_arrays(group):
    memory = SharedMemory(group)
    local = memory.allocate(1000 + group.rank, np.float32)
    zeros = (
        bool((local == 0).all())
        and local.size == 1000 + group.rank
        and local.ctypes.data % PAGE_BYTES == 0
    )
    local[:] = memory.rank
    memory.barrier()
    seen = [
        bool((part == rank).all()) and part.size == 500
        for rank, part in enumerate(memory.parts(local[100:600]))
    ]
    memory.barrier()
    right = (
        zeros
        and seen == [True] * memory.size
        and memory.locate(local[1:]) == (0, 4)
        and memory.locate(local.copy()) is None
    )
    memory.free()
    assert all(group.gather(right))


@pytest.mark.both_worlds
def test_one_array_can_be_given_back_and_others_stay(group):
    memory = SharedMemory(group)
    first, second = memory.allocate(5, "float32"), memory.allocate(7, "float32")
    memory.drop([first])
    third = memory.allocate(9, "float64")
    second[:], third[:] = memory.rank, -memory.rank
    memory.barrier()
    right = [bool((part == rank).all()) for rank, part in enumerate(memory.parts(second))]
    right += [bool((part == -rank).all()) for rank, part in enumerate(memory.parts(third))]
    memory.barrier()
    memory.free()
    assert all(map(all, group.gather(right)))


@pytest.mark.both_worlds
def test_a_common_array_stands_once_per_node(group):
    nodes = [rank * 2 // group.size for rank in range(group.size)]
    memory = shared_memory(group, nodes=nodes)
    array = memory.common_all([(group.size, np.int64)])[0]
    array[group.rank] = group.rank + 1
    memory.barrier()
    expected = [rank + 1 if nodes[rank] == nodes[group.rank] else 0 for rank in range(group.size)]
    right = array.tolist() == expected
    memory.free()
    assert all(group.gather(right))


@pytest.mark.mpi
def test_all_ranks_refuse_when_one_of_their_nodes_has_no_room(group, monkeypatch):
    memory = shared_memory(group, nodes=range(group.size))
    if group.rank == group.size - 1:
        monkeypatch.setattr(mpi_world, "free_bytes", lambda need: 2**20)
    refuses(DeviceError, "has only 1048576 free", lambda: memory.allocate(2**20, np.float32))
    array = memory.allocate(8, np.float32)  # what is small enough still fits
    right = array.tolist() == [0.0] * 8
    memory.free()
    assert all(group.gather(right))


@pytest.mark.mpi
def test_all_ranks_refuse_when_one_of_them_cannot_map_it(group):
    """The others would wait in Open MPI for ever."""
    memory, before = SharedMemory(group), resource.getrlimit(resource.RLIMIT_AS)
    mapped = PAGE_BYTES * int(Path("/proc/self/statm").read_text().split()[0])
    if group.rank == group.size - 1:
        resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**24, before[1]))
    refuses(DeviceError, "has only 0 free", lambda: memory.allocate(2**25, np.uint8))
    resource.setrlimit(resource.RLIMIT_AS, before)
    memory.free()


@pytest.mark.mpi
def test_what_mpi_refuses_is_one_sentence(group, monkeypatch):
    memory = SharedMemory(group)

    def refuse(*_, **__):
        raise mpi_world.MPI.Exception(mpi_world.MPI.ERR_NO_MEM)

    monkeypatch.setattr(mpi_world.MPI, "Win", SimpleNamespace(Allocate_shared=refuse))
    with pytest.raises(DeviceError, match="MPI cannot share 8192 bytes among the ranks of a node"):
        memory.common_all([(8, np.float32)]) if memory.rank else memory.allocate(8, np.float32)
    monkeypatch.undo()
    memory.free()


def test_wrong_use_is_refused(group):
    memory = SharedMemory(group)
    refuses(
        ShapeError,
        "the array of 3 elements was not allocated in shared memory",
        memory.parts,
        np.zeros(3),
    )
    memory.free()
