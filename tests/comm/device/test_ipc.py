"""Sums through one another's device memory, over a double whose allocations are files that other processes can map."""

from typing import Any

import numpy as np
import pytest

from nnmpi.comm.algorithms.registry import IPC
from nnmpi.comm.device.ipc import Exported, IpcSum, ipc_problem
from nnmpi.comm.gradients import BucketExchange
from nnmpi.comm.group import Group
from nnmpi.errors import DeviceError, UsageError
from tests.device.library import load


def values(rank: int, n: int, dtype: Any = np.float32) -> Any:
    """Return a rank's numbers."""
    return np.random.default_rng(rank).standard_normal(n).astype(dtype)


def in_rank_order(size: int, n: int, dtype: Any = np.float32) -> Any:
    """Return the sum as it is taken: rank by rank."""
    total = values(0, n, dtype)
    for rank in range(1, size):
        total = total + values(rank, n, dtype)
    return total


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [0, 1, 3, 7919, 2**17 + 1])
def test_sums_are_taken_in_rank_order_on_all_ranks(group: Group, n: int, dtype: Any) -> None:
    device = load().asarray(values(group.rank, n, dtype))
    group.all_reduce(device, IPC)
    assert group.gather(device.get().tobytes() == in_rank_order(group.size, n, dtype).tobytes()) == [True] * group.size


@pytest.mark.mpi
@pytest.mark.parametrize("piece_bytes", [4, 1000, 2**20])
def test_a_bound_sum_runs_again_and_again_in_pieces(group: Group, piece_bytes: int) -> None:
    device = load().empty(1003, np.float32)
    bound = IpcSum(device, group, 9, piece_bytes)
    right = []
    for turn in range(3 if piece_bytes > 4 else 1):
        device[...] = load().asarray(values(group.rank, 1003))
        if turn % 2:
            bound.run()
        else:
            bound.start()
            while not bound.poll():
                pass
        right.append(device.get().tobytes() == in_rank_order(group.size, 1003).tobytes())
    bound.free()
    assert all(all(each) for each in group.gather(right))


@pytest.mark.mpi
def test_several_in_flight_are_polled_in_any_order(group: Group) -> None:
    arrays = [load().asarray(values(group.rank, n)) for n in (7, 3001, 100)]
    pending = [group.bind(array, IPC, tag) for tag, array in enumerate(arrays)]
    for each in pending:
        each.start()
    left = pending[::-1] if group.rank % 2 else list(pending)
    while left:
        left = [each for each in left if not each.poll()]
    right = [a.get().tobytes() == in_rank_order(group.size, a.size).tobytes() for a in arrays]
    for each in pending:
        each.free()
    assert group.gather(right) == [[True] * 3] * group.size


@pytest.mark.mpi
def test_nothing_stays_mapped_or_allocated(group: Group) -> None:
    ipc = load().cuda.ipc
    files, opened = len(ipc.FILES), len(ipc.OPENED)
    bound = group.bind(load().ones(1000, np.float32), IPC)
    during = len(ipc.FILES) - files, len(ipc.OPENED) - opened
    bound.free()
    del bound
    after = len(ipc.FILES) - files, len(ipc.OPENED) - opened
    assert group.gather([during, after]) == [[[int(group.size > 1), group.size - 1], [0, 0]]] * group.size


@pytest.mark.mpi
def test_ranks_that_cannot_open_the_others_memory_are_told_so(group: Group) -> None:
    if group.size == 1:
        return
    refused = load().cuda.ipc.REFUSED
    twin = group.duplicate()
    twin._devices = None
    if group.rank == group.size - 1:
        refused.append(True)
    try:
        with pytest.raises(
            DeviceError, match=f"rank {group.size - 1}: cannot open another rank's device memory .*the all-reduce auto"
        ):
            twin.all_reduce(load().ones(3, np.float32), IPC)
        buffer = load().ones(3, np.float32)
        exchange = BucketExchange(group, [buffer], [(0, 0, 3)], IPC)
        exchange.finish()
        reason = exchange.choices[0].reason
        exchange.free()
    finally:
        refused.clear()
    twin.free()
    assert reason.startswith("instead of ipc: CUDA IPC cannot be used: rank")
    assert group.gather(buffer.get().tolist()) == [[group.size] * 3] * group.size


@pytest.mark.mpi
def test_ranks_on_two_nodes_cannot(group: Group) -> None:
    if group.size > 1:
        twin = group.duplicate()
        twin._nodes = [0] * (group.size - 1) + [1]
        assert "the ranks are on 2 nodes" in str(ipc_problem(twin, load()))
        twin.free()


@pytest.mark.mpi
def test_a_rank_without_memory_stops_all(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    xp = load()

    def refuse(size: int) -> Any:
        raise xp.cuda.memory.OutOfMemoryError(size, 0)

    if group.is_root:
        monkeypatch.setattr(xp.cuda, "Memory", refuse)
    named = "" if group.size == 1 else "rank 0: "
    with pytest.raises(DeviceError, match=f"^{named}cannot share device memory .Out of memory allocating 2,097,152"):
        Exported(group, xp, 100)


@pytest.mark.mpi
def test_what_it_cannot_do_is_said(group: Group) -> None:
    with pytest.raises(UsageError, match="CUDA IPC has no broadcast; it has all-reduce"):
        group.bind(load().ones(3, np.float32), IPC, 0, "broadcast")
    with pytest.raises(UsageError, match="'ipc' sums device arrays"):
        group.all_reduce(np.ones(3, np.float32), IPC)
