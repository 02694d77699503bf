"""Device arrays between ranks: every collective, however they travel, gives what it gives with host
arrays.
"""

import numpy as np
import pytest

from nnmpi import NnmpiError
from nnmpi.backend.precision import bfloat16
from nnmpi.base.errors import CommError
from nnmpi.base.shard import part
from nnmpi.comm import buffers
from nnmpi.comm.algorithms.registry import ALGORITHMS, AUTO, COLLECTIVES, NATIVE
from nnmpi.comm.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    NEIGHBOUR_AVERAGE,
    REDUCE_SCATTER,
)
from tests.harness.refusals import refuses, usage_error

SUMS = [(ALL_REDUCE.name, name) for name in (NATIVE, AUTO, *ALGORITHMS)]
OTHERS = [
    key
    for key in COLLECTIVES
    if key[0] not in (ALL_REDUCE.name, ALL_TO_ALL.name, NEIGHBOUR_AVERAGE.name)
]
OTHERS += [(name, NATIVE) for name in (REDUCE_SCATTER.name, ALL_GATHER.name, BROADCAST.name)]


@pytest.mark.mpi
@pytest.mark.parametrize("n", [0, 1, 7919])
@pytest.mark.parametrize("operation, algorithm", SUMS + OTHERS)
@pytest.mark.parametrize("kind", ["float32", "int64", "float16", "bfloat16"])
def test_collectives_keep_their_contracts(group, device, operation, algorithm, n, kind):
    """Whole numbers, which every order of adding sums exactly; blocking, polled and waited for."""
    dtype = bfloat16() if kind == "bfloat16" else np.dtype(kind)
    full = [
        np.random.default_rng(rank).integers(-9, 9, n).astype(dtype) for rank in range(group.size)
    ]
    total = np.sum([item.astype(np.float64) for item in full], axis=0).astype(dtype)
    parts = [
        slice(local.start, local.stop)
        for local in (part(n, group.size, rank) for rank in range(group.size))
    ]
    where = parts[group.rank] if operation == REDUCE_SCATTER.name else slice(None)
    expected = {
        ALL_REDUCE.name: total,
        REDUCE_SCATTER.name: total[where],
        BROADCAST.name: full[0],
        ALL_GATHER.name: np.concatenate(
            [item[local] for item, local in zip(full, parts, strict=True)]
        ),
    }[operation]
    array = device.xp.empty(n, dtype)
    bound, right = group.bind(array, algorithm, 5, operation), []
    for turn in range(3):
        array[...] = device.asarray(full[group.rank])
        if turn == 0:
            bound.run()
        else:
            bound.start()
        while turn == 1 and not bound.poll():
            pass
        if turn == 2:
            bound.wait()
        right.append(device.to_host(array[where]).tobytes() == expected.tobytes())
    assert group.gather(right) == [[True] * 3] * group.size


@pytest.mark.mpi
def test_the_user_says_whether_mpi_takes_device_arrays(group, device, monkeypatch):
    try:
        for word in ("1", "yes"):
            monkeypatch.setenv("NNMPI_CUDA_AWARE", word)
            buffers.cuda_aware.cache_clear()
            if word == "1":
                assert group.choose(device.xp.zeros(3)).algorithm == NATIVE
            else:
                usage_error("NNMPI_CUDA_AWARE", lambda: group.choose(device.xp.zeros(3)))
    finally:
        monkeypatch.undo()
        buffers.cuda_aware.cache_clear()


def test_arrays_without_axes_come_to_the_host(device):
    assert buffers.to_host(device.asarray(np.array(3.0))).shape == ()


@pytest.mark.mpi
@pytest.mark.parametrize("root", [0, -1])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_any_rank_broadcasts_any_shape(group, device, shape, root):
    array = device.xp.full(shape, group.rank + 1, dtype=np.float32)
    group.broadcast(array, root % group.size)
    assert (
        group.gather(bool((device.to_host(array) == root % group.size + 1).all()))
        == [True] * group.size
    )


@pytest.mark.mpi
def test_what_cannot_be_summed_is_refused(group, device):
    xp = device.xp
    for array in (xp.zeros(3, bool), xp.zeros((2, 2)), xp.zeros(6)[::2]):
        with pytest.raises(NnmpiError):
            group.all_reduce(array)
    if group.size > 1:
        refuses(CommError, "differ", lambda: group.all_reduce(xp.zeros(3 + group.rank)))
    twice = group.bind(xp.zeros(3), "ring")
    twice.start()
    refuses(CommError, "still running", twice.start)
    twice.wait()


@pytest.mark.mpi
def test_ranks_share_the_card(group, device):
    """Each has a part of the memory that is free, and can use it."""
    limit = device.memory().limit_bytes
    device.divide_memory(group.size)
    try:
        everyones = group.gather(device.memory().limit_bytes or 0)
        assert group.size == 1 or limit or (min(everyones) > 0 and sum(everyones) < 2**48)
        assert float(device.xp.ones(1 << 20, dtype=np.float32).sum()) == 1 << 20
    finally:
        if not limit:
            device.xp.get_default_memory_pool().set_limit(size=0)
