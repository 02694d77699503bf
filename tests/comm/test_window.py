"""Shared windows and the arrays in them: what lies where, who sees it, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nnmpi.comm.group import Group
from nnmpi.comm.mpi import mpi_world
from nnmpi.comm.mpi.mpi_world import ENDLESS, MARGIN_BYTES, check_room, find_folder, free_bytes, window_bytes
from nnmpi.comm.node import SharedMemory
from nnmpi.comm.world import PAGE_BYTES
from nnmpi.errors import DeviceError, ShapeError, UsageError


def test_a_part_takes_whole_pages_and_one_for_its_alignment() -> None:
    assert [window_bytes(n) // PAGE_BYTES for n in (0, 1, PAGE_BYTES, PAGE_BYTES + 1)] == [1, 2, 2, 3]


def test_a_folder_without_room_is_refused_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = MARGIN_BYTES + 3000
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=1))
    assert free_bytes(tmp_path) == free
    check_room(tmp_path, 3000, free)
    with pytest.raises(DeviceError, match=f"share 3001 bytes, and MPI needs .* has only {free} free; enlarge it"):
        check_room(tmp_path, 3001, free)
    assert free_bytes(tmp_path / "not there") == free_bytes(None) == ENDLESS


def test_the_file_of_an_address_is_found() -> None:
    assert find_folder(0) is None
    code = "import mmap, sys, numpy; from nnmpi.comm.mpi.mpi_world import find_folder\n"
    code += "with open(sys.argv[1], 'r+b') as file: memory = numpy.frombuffer(mmap.mmap(file.fileno(), 0), 'u1')\n"
    code += "print(find_folder(memory.ctypes.data))"
    found = subprocess.run([sys.executable, "-c", code, __file__], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(Path(__file__).parent)


@pytest.mark.both_worlds
def test_every_rank_sees_what_the_others_write_into_their_arrays(group: Group) -> None:
    memory = SharedMemory(group)
    own = memory.allocate(1000 + group.rank, np.float32)
    zeros = bool((own == 0).all()) and own.size == 1000 + group.rank and own.ctypes.data % PAGE_BYTES == 0
    own[:] = memory.rank
    memory.barrier()
    seen = [bool((part == rank).all()) and part.size == 500 for rank, part in enumerate(memory.parts(own[100:600]))]
    memory.barrier()
    right = zeros and seen == [True] * memory.size and memory.holds(own[1:]) and not memory.holds(own.copy())
    memory.free()
    assert all(group.gather(right))


@pytest.mark.both_worlds
def test_one_array_can_be_given_back_and_others_stay(group: Group) -> None:
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
def test_a_common_array_stands_once_per_node(group: Group) -> None:
    nodes = [rank * 2 // group.size for rank in range(group.size)]
    memory = SharedMemory(group, nodes=nodes)
    array = memory.common_all([(group.size, np.int64)])[0]
    array[group.rank] = group.rank + 1
    memory.barrier()
    expected = [rank + 1 if nodes[rank] == nodes[group.rank] else 0 for rank in range(group.size)]
    right = array.tolist() == expected
    memory.free()
    assert all(group.gather(right))


@pytest.mark.mpi
def test_all_ranks_refuse_when_one_of_their_nodes_has_no_room(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory(group, nodes=range(group.size))
    if group.rank == group.size - 1:
        monkeypatch.setattr(mpi_world, "free_bytes", lambda _: 2**20)
    with pytest.raises(DeviceError, match="has only 1048576 free"):
        memory.allocate(2**20, np.float32)
    array = memory.allocate(8, np.float32)  # what is small enough still fits
    right = array.tolist() == [0.0] * 8
    memory.free()
    assert all(group.gather(right))


@pytest.mark.mpi
def test_what_mpi_refuses_is_one_sentence(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory(group)

    def refuse(*_: object, **__: object) -> None:
        raise mpi_world.MPI.Exception(mpi_world.MPI.ERR_NO_MEM)

    monkeypatch.setattr(mpi_world.MPI, "Win", SimpleNamespace(Allocate_shared=refuse))
    with pytest.raises(DeviceError, match="MPI cannot share 8192 bytes among the ranks of a node"):
        memory.common_all([(8, np.float32)]) if memory.rank else memory.allocate(8, np.float32)
    monkeypatch.undo()
    memory.free()


def test_wrong_use_is_refused(group: Group) -> None:
    with pytest.raises(UsageError, match="nodes are given for"):
        SharedMemory(group, nodes=[0] * (group.size + 1))
    memory = SharedMemory(group)
    with pytest.raises(ShapeError, match="the array of 3 elements was not allocated in shared memory"):
        memory.parts(np.zeros(3))
    memory.free()
